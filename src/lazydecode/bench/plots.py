"""Records as pictures: what an item costs, and how servers answer under load.

Needs matplotlib, of the extra `bench`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_FORMATS: Final = ("svg", "png")
_SIDES: Final = {"ours": "#1f6f8b", "eager": "#d9822b"}
_BARS: Final[Mapping[str, tuple[str, str]]] = {
    "digest": ("sha256 (floor)", "#b8c4cc"),
    "ref_hit": ("hit", "#1f6f8b"),
    "decoder": ("decoder (floor)", "#8d99a6"),
    "ref_miss": ("miss", "#7fb7c9"),
    "eager_hit": ("eager hit", "#d9822b"),
}
"""Timing of an item -> its name in the picture, and its colour."""


def write_plots(record: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures of a record as SVG and PNG into `folder`; return the SVGs.

    The same record gives the same SVG, byte for byte.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    style = {"svg.hashsalt": "lazydecode", "svg.fonttype": "none", "font.size": 9.0}
    written = []
    with mpl.rc_context(style):
        for name, figure in _figures(record):
            for kind in _FORMATS:
                path = folder / f"{name}.{kind}"
                metadata = {"Date": None} if kind == "svg" else {}
                figure.savefig(path, bbox_inches="tight", dpi=130, metadata=metadata)
            written.append(folder / f"{name}.{_FORMATS[0]}")
    return written


def _figures(record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if record["kind"] == "frontend":
        if record.get("items"):
            yield "items", _items(record["items"])
    elif record["scenarios"]:
        yield "load", _load(record["scenarios"])


def _items(items: list[dict[str, Any]]) -> Any:
    """CPU per item, on a logarithmic axis: hits beside the floor and beside eager decoding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.9 + 0.75 * len(items)))
    axes = figure.subplots()
    height = 0.8 / len(_BARS)
    for number, (timing, (label, colour)) in enumerate(_BARS.items()):
        at = [row + (number - (len(_BARS) - 1) / 2) * height for row in range(len(items))]
        values = [item["timings"].get(timing, {}).get("cpu_ms") for item in items]
        axes.barh(at, [value or 0 for value in values], height, label=label, color=colour)
        for place, value in zip(at, values, strict=True):
            if value:
                axes.text(value * 1.06, place, f"{value:.3g}", va="center", fontsize=7)
    axes.set_yticks(range(len(items)), [item["name"] for item in items])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("CPU per item, ms (logarithmic)")
    _finish(axes, axis="x")
    return figure


def _load(scenarios: list[dict[str, Any]]) -> Any:
    """Median and 95th percentile of the answer's time, per scenario and concurrency."""
    from matplotlib.figure import Figure

    columns = 3
    rows = -(-len(scenarios) // columns)
    figure = Figure(figsize=(9, 2.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, scenario in zip(grid.flat, scenarios, strict=False):
        for side, runs in _by_side(scenario["runs"]):
            levels = [run["concurrency"] for run in runs]
            for name, line in (("p50", "-"), ("p95", "--")):
                values = [run["latency_ms"].get(name) for run in runs]
                colour = _SIDES.get(side, "#555555")
                axes.plot(levels, values, line, marker="o", ms=3, color=colour,
                          label=f"{side}, {name}")  # fmt: skip
        axes.set_title(scenario["name"], fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("requests at a time")
        axes.set_ylabel("ms")
        _finish(axes, axis="y", has_legend=axes is grid[0, 0])
    for axes in grid.flat[len(scenarios) :]:
        axes.set_visible(False)
    return figure


def _by_side(runs: Iterable[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    sides: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        # A run whose requests all failed has no times to show.
        if run["latency_ms"].get("p50") is not None:
            sides.setdefault(run["side"], []).append(run)
    for side, found in sides.items():
        yield side, sorted(found, key=lambda run: int(run["concurrency"]))


def _finish(axes: Any, *, axis: str, has_legend: bool = True) -> None:
    axes.grid(axis=axis, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if has_legend:
        axes.legend(fontsize=7, frameon=False)
