"""Records as tables on a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Grid:
    """One table, as text."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def to_rich(self) -> Table:
        """For a terminal."""
        table = Table(title=escape(self.title), title_justify="left")
        for number, name in enumerate(self.head):
            table.add_column(escape(name), justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def to_markdown(self) -> str:
        """For a page."""
        lines = [
            "| " + " | ".join(self.head) + " |",
            "| --- |" + " ---: |" * (len(self.head) - 1),
            *("| " + " | ".join(row) + " |" for row in self.rows),
        ]
        return "\n".join(lines)


def show(record: dict[str, Any], console: Console) -> None:
    """Print a record."""
    machine = record["machine"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before; "
        f"commit {record['commit']}. CPU milliseconds, medians; ratios hold within this run.",
        highlight=False,
    )
    for grid in grids(record):
        console.print(grid.to_rich())


def grids(record: dict[str, Any]) -> Iterator[Grid]:
    """The tables of a record."""
    of_kind = {"frontend": _frontend, "serve": _serve, "endurance": _endurance}
    yield from of_kind[record["kind"]](record)


def ms(value: float | None) -> str:
    """Milliseconds with three figures."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def times(value: float | None) -> str:
    """A ratio."""
    return "-" if value is None else f"{value:.2f}x"


def _cpu(timings: dict[str, Any], name: str) -> str:
    return ms(timings[name]["cpu_ms"]) if name in timings else "-"


def _cells(timings: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_cpu(timings, name) for name in names)


# -- front end


def _frontend(record: dict[str, Any]) -> Iterator[Grid]:
    items = record.get("items", [])
    names = ("digest", "decoder", "eager_hit", "eager_miss", "ref_hit", "ref_miss")
    if items:
        yield Grid(
            "One item: floors, eager, and by reference",
            ("item", "MB", "sha256", "decoder", "eager hit", "eager miss", "ref hit", "ref miss",
             "hit speedup", "miss speedup", "hit / sha256"),
            [
                (
                    row["name"],
                    f"{row['bytes'] / 1e6:.2f}",
                    *_cells(row["timings"], names),
                    *(times(row["ratios"][r])
                      for r in ("hit_speedup", "miss_speedup", "hit_over_digest")),
                )
                for row in items
            ],
        )  # fmt: skip
        rates = list(items[0]["blended_ms"])
        yield Grid(
            "Blended cost, eager / by reference",
            ("item", *(f"{float(rate):.0%} hits" for rate in rates)),
            [
                (
                    row["name"],
                    *(
                        f"{ms(row['blended_ms'][r]['eager'])} / {ms(row['blended_ms'][r]['ref'])}"
                        for r in rates
                    ),
                )
                for row in items
            ],
        )
    yield from _frontend_model([row for row in items if "model" in row])
    yield from _frontend_rest(record)


def _frontend_model(items: list[dict[str, Any]]) -> Iterator[Grid]:
    names = (
        "decoder", "processor", "eager_hit", "eager_miss", "hit", "miss", "headers_only",
    )  # fmt: skip
    if items:
        yield Grid(
            "With the model's processor and the prompt",
            ("item", "decoder", "processor", "eager hit", "eager miss", "hit", "miss",
             "headers only", "miss / (decoder + processor)"),
            [
                (
                    row["name"],
                    *_cells(row["model"]["timings"], names),
                    times(row["model"]["miss_over_floor"]),
                )
                for row in items
            ],
        )  # fmt: skip


def _frontend_rest(record: dict[str, Any]) -> Iterator[Grid]:
    connector = record.get("sources", {})
    if "sizes" in connector:
        yield Grid(
            "The connector, asked for known media",
            ("MB", "floor: base64 + sha256", "data:", "read + sha256", "file:, unchanged"),
            [
                (
                    f"{row['megabytes']:g}",
                    *_cells(row["timings"], ("data_floor", "data_url", "file_floor", "file_url")),
                )
                for row in connector["sizes"]
            ]
            + [
                ("an empty task", "-", "-", "-", _cpu(connector, "loop")),
                ("a look at a file by a thread", "-", "-", "-", _cpu(connector, "look")),
            ],
        )
    if "parallel" in record:
        parallel = record["parallel"]
        yield Grid(
            f"{parallel['images']} images of 2048², wall time",
            ("how", "ms"),
            [(name, ms(t["wall_ms"])) for name, t in parallel["timings"].items()],
        )
    if "hashing" in record:
        yield Grid(
            "Hash throughput, MB/s of CPU",
            ("MB", "sha256", "identify"),
            [
                (
                    f"{row['megabytes']:g}",
                    f"{row['digest_mb_per_s']:.0f}",
                    f"{row['identify_mb_per_s']:.0f}",
                )
                for row in record["hashing"]
            ],
        )
    if "memory" in record:
        yield Grid(
            "Memory of retained hits, beyond the payloads",
            ("side", "hits", "MB", "KB per hit"),
            [
                (
                    row["side"],
                    f"{row['hits']:,}",
                    f"{row['growth_mb']:.1f}",
                    f"{row['growth_kb_per_hit']:.2f}",
                )
                for row in record["memory"]
            ],
        )
    yield from _growth(record.get("growth", {}))


def _growth(growth: dict[str, Any]) -> Iterator[Grid]:
    if "items" in growth:
        yield Grid(
            "Items per request",
            ("items", "µs per item"),
            [(str(row["items"]), f"{row['us_per_item']:.1f}") for row in growth["items"]],
        )
    if "lookups" in growth:
        yield Grid(
            "Entries of the cache",
            ("entries", "µs per lookup"),
            [(f"{row['entries']:,}", f"{row['us_per_lookup']:.2f}") for row in growth["lookups"]],
        )
    if growth.get("prompt"):
        yield Grid(
            "Length of the prompt, rendered from headers",
            ("tokens", "items", "ms"),
            [(f"{r['tokens']:,}", str(r["items"]), ms(r["ms"])) for r in growth["prompt"]],
        )


# -- server


def _serve(record: dict[str, Any]) -> Iterator[Grid]:
    head = ("scenario", "side", "at a time", "requests/s", "mean", "p50", "p95", "p99",
            "CPU ms", "peak MB", "lag p99 ≤", "health p99", "errors")  # fmt: skip
    rows = []
    for scenario in record["scenarios"]:
        for run in scenario["runs"]:
            latency, lag = run["latency_ms"], run.get("loop_lag_p99_ms_at_most")
            rows.append(
                (
                    scenario["name"],
                    run["side"],
                    str(run["concurrency"]),
                    f"{run['requests_per_s']:.1f}",
                    *(ms(latency.get(name)) for name in ("mean", "p50", "p95", "p99")),
                    ms(run.get("cpu_ms_per_request")),
                    f"{run['peak_rss_mb']:.0f}" if "peak_rss_mb" in run else "-",
                    ms(lag),
                    ms(run["health_ms"].get("p99")),
                    ", ".join(f"{n} {what}" for what, n in run["errors"].items()) or "-",
                )
            )
    yield Grid("Under load (ms)", head, rows)
    if record.get("costs"):
        yield Grid(
            "One request after the other, CPU ms of the server",
            ("scenario", "server", "requests", "p10", "median", "p90"),
            [
                (
                    row["name"],
                    row["side"],
                    str(row["requests"]),
                    *(ms(row[name]) for name in ("p10_ms", "cpu_ms", "p90_ms")),
                )
                for row in record["costs"]
            ],
        )
    scaling = record.get("scaling")
    if scaling:
        yield Grid(
            "Unseen images, requests per second by cores of the server",
            ("side", "1 core", f"{scaling['cores']} cores", "speedup", "client's CPU ms each"),
            [
                (
                    side,
                    *(f"{rate:.1f}" for rate in found["requests_per_s"].values()),
                    times(found["speedup"]),
                    ms(found.get("client_cpu_ms")),
                )
                for side, found in scaling.items()
                if side != "cores"
            ],
        )


# -- memory over time


def _endurance(record: dict[str, Any]) -> Iterator[Grid]:
    looks = record["soak"].get("looks")
    if not looks:
        return
    requests = looks["requests"]
    at = [round(part * (len(requests) - 1) / 4) for part in range(5)]
    series = {
        "anonymous, all processes": looks["mb"]["anonymous"],
        **{f"anonymous, {name}": sizes for name, sizes in looks["anonymous_mb"].items()},
        "shared memory": looks["mb"]["shared"],
        "files": looks["mb"]["file"],
        "sum of RSS": looks["mb"]["rss"],
    }
    yield Grid(
        "Memory over time (MB)",
        ("after requests", *(f"{requests[number]:,}" for number in at)),
        [
            (name, *("-" if sizes[n] is None else f"{sizes[n]:.1f}" for n in at))
            for name, sizes in series.items()
        ],
    )
