"""The goals, each beside its floor, the eager way, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from lazydecode.bench.tables import Grid, ms, times
from lazydecode.bench.trend import MAX_SLOPE

_MIN_BYTES: Final = 100_000
_FIXED_MS: Final = 0.15


@dataclass(frozen=True, slots=True)
class Goal:
    """One measured goal."""

    number: int
    name: str
    goal: str
    floor: str
    eager: str
    ours: str
    ratio: str
    reached: bool

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        verdict = "yes" if self.reached else "no"
        name = f"{self.number}. {self.name}"
        return (name, self.goal, self.floor, self.eager, self.ours, self.ratio, verdict)


def goals_grid(
    frontend: dict[str, Any] | None,
    serve: dict[str, Any] | None,
    endurance: dict[str, Any] | None = None,
) -> Grid:
    """Return the table of all goals that the records speak about."""
    found = [
        *(_frontend_goals(frontend) if frontend else ()),
        *_serve_goals(serve or {}),
        *(_endurance_goals(endurance) if endurance else ()),
    ]
    head = ("goal", "wanted", "floor", "eager", "here", "here / floor", "reached")
    return Grid("What was to be reached", head, [goal.cells() for goal in _sorted(found)])


def _sorted(goals: list[Goal]) -> list[Goal]:
    return sorted(goals, key=lambda goal: goal.number)


def _frontend_goals(record: dict[str, Any]) -> Iterator[Goal]:
    for row in record.get("items", []):
        cpu = {name: timing["cpu_ms"] for name, timing in row["timings"].items()}
        if row["bytes"] > _MIN_BYTES:
            wanted = 1.15 * cpu["digest"] + _FIXED_MS
            yield Goal(
                1,
                f"a hit, {row['name']}",
                f"≤ {ms(wanted)} ms",
                ms(cpu["digest"]),
                ms(cpu["eager_hit"]),
                ms(cpu["ref_hit"]),
                times(cpu["ref_hit"] / cpu["digest"]),
                cpu["ref_hit"] <= wanted,
            )
        if "model" in row:
            timings = row["model"]["timings"]
            floor = timings["decoder"]["cpu_ms"] + timings["processor"]["cpu_ms"]
            ratio = row["model"]["miss_over_floor"]
            yield Goal(
                4,
                f"a miss, {row['name']}",
                "≤ 1.10 x floor",
                ms(floor),
                ms(timings["eager_miss"]["cpu_ms"]),
                ms(timings["miss"]["cpu_ms"]),
                times(ratio),
                ratio <= 1.10,
            )
    if "sizes" in record.get("sources", ()):  # not in records of before there were several
        yield from _connector_goals(record["sources"])
    yield from _memory_goals(record)
    yield from _growth_goals(record.get("growth", {}))


def _connector_goals(connector: dict[str, Any]) -> Iterator[Goal]:
    """Media that came before: a data: URL is decoded and digested once, a file not even read."""
    loop, look = connector["loop"]["cpu_ms"], connector["look"]["cpu_ms"]
    files = []
    for row in connector["sizes"]:
        cpu = {name: timing["cpu_ms"] for name, timing in row["timings"].items()}
        # Whoever waits for the floors needs no event loop.
        wanted = 1.15 * cpu["data_floor"] + _FIXED_MS + loop
        yield Goal(
            1,
            f"a data: URL, {row['megabytes']:g} MB",
            f"one base64 decode, one hash: ≤ {ms(wanted)} ms",
            ms(cpu["data_floor"]),
            "-",
            ms(cpu["data_url"]),
            times(cpu["data_url"] / cpu["data_floor"]),
            cpu["data_url"] <= wanted,
        )
        files.append((row["megabytes"], cpu["file_url"]))
        yield Goal(
            1,
            f"an unchanged file:, {row['megabytes']:g} MB",
            f"no read, no hash: ≤ {ms(look + _FIXED_MS)} ms",
            ms(look),
            "-",
            ms(cpu["file_url"]),
            times(cpu["file_url"] / look),
            cpu["file_url"] <= look + _FIXED_MS,
        )
    if len(files) > 1:
        (small, least), (large, most) = files[0], files[-1]
        yield Goal(
            1,
            f"an unchanged file:, {large:g} MB against {small:g} MB",
            "constant time",
            ms(least),
            "-",
            ms(most),
            times(most / least),
            most <= 1.15 * least,
        )


def _memory_goals(record: dict[str, Any]) -> Iterator[Goal]:
    rows = {(row["side"], row["hits"]): row for row in record.get("memory", [])}
    ours, eager = rows.get(("ref", 100)), rows.get(("eager", 100))
    if ours and eager:
        yield Goal(
            9,
            "100 retained hits of 1024²",
            "≤ 0.3 MB",
            "0",
            f"{eager['growth_mb']:.0f} MB",
            f"{ours['growth_mb']:.2f} MB",
            "-",
            ours["growth_mb"] <= 0.3,
        )


def _endurance_goals(record: dict[str, Any]) -> Iterator[Goal]:
    settings, crowd, soak = record["settings"], record["crowd"], record["soak"]
    budget_mb = sum(settings["budgets_mb"].values())
    yield Goal(
        9,
        f"{settings['requests']} requests of {settings['images']} images at once",
        f"≤ {budget_mb} MB (budgets and cache), none refused",
        "-",
        "-",
        f"{crowd['growth_mb']:.0f} MB, {sum(crowd['errors'].values())} refused",
        "-",
        crowd["growth_mb"] <= budget_mb and not crowd["errors"],
    )
    trend = soak.get("trend")
    seen = "too short a run to say"
    if trend is not None:
        low, high = trend["range"]
        seen = f"{trend['slope_mb_per_1000']:+.2f} ({low:+.2f} to {high:+.2f}) in the second half"
    yield Goal(
        9,
        f"{soak['seconds'] / 60:.0f} minutes of mixed requests ({soak['requests']:,})",
        f"no slope (≤ {MAX_SLOPE:g} MB per 1,000 requests)",
        "0",
        "-",
        seen,
        "-",
        trend is not None and trend["verdict"] == "flat",
    )


def _growth_goals(growth: dict[str, Any]) -> Iterator[Goal]:
    for rows, name, what, count in (
        (growth.get("items"), "cost per item, 1 to {} items", "us_per_item", "items"),
        (growth.get("lookups"), "lookups, {} entries", "us_per_lookup", "entries"),
    ):
        if rows:
            ratio = rows[-1][what] / rows[0][what]
            yield Goal(
                10,
                name.format(f"{rows[-1][count]:,}"),
                "within 10 %",
                f"{rows[0][what]:.2f} µs",
                "-",
                f"{rows[-1][what]:.2f} µs",
                times(ratio),
                ratio <= 1.10,
            )
    if growth.get("prompt"):
        last = growth["prompt"][-1]
        yield Goal(
            10,
            f"a prompt of {last['tokens']:,} tokens",
            "< 20 ms",
            "-",
            "-",
            f"{ms(last['ms'])} ms",
            "-",
            last["ms"] < 20 * last["tokens"] / 100_000,
        )


def _serve_goals(record: dict[str, Any]) -> Iterator[Goal]:
    scenarios = {row["name"]: row for row in record.get("scenarios", [])}
    for name in ("hot-720p", "headers-720p", "hot-4k", "unseen-4x720p-none"):
        if name in scenarios:
            costs = {row["side"]: row for row in record.get("costs", ()) if row["name"] == name}
            limit = 5.0 if name.startswith("unseen") else 2.0
            yield from _cpu_goal(scenarios[name], costs, limit=limit)
    if "storm" in scenarios:
        run = scenarios["storm"]["runs"][0]
        if "decodes" in run:
            yield Goal(
                6,
                f"{run['requests']} requests, one unseen item",
                "1 decode",
                "1",
                f"{run['requests']} decodes",
                f"{run['decodes']:.0f} decodes",
                times(run["decodes"]),
                run["decodes"] == 1 and not run["errors"],
            )
    if "heavy" in scenarios:
        runs = {run["side"]: run for run in scenarios["heavy"]["runs"]}
        lag = runs["ours"].get("loop_lag_p99_ms_at_most")
        if lag is not None:
            eager = runs.get("eager", {}).get("health_ms", {}).get("p99")
            idle = runs["ours"].get("idle_loop_lag_p99_ms")
            yield Goal(
                8,
                "lag of the loop, p99, 32 heavy misses",
                "≤ 5 ms",
                "-" if idle is None else f"{ms(idle)} (a loop that does nothing)",
                "-" if eager is None else f"{ms(eager)} ms (/health)",
                f"≤ {ms(lag)} ms",
                "-",
                lag <= 5.0,
            )
    scaling = record.get("scaling")
    if scaling and scaling["cores"] > 1 and scaling["ours"]["speedup"]:
        eager = scaling.get("eager", {}).get("speedup")
        bare = scaling.get("floor", {}).get("speedup")
        speedup = scaling["ours"]["speedup"]
        yield Goal(
            5,
            f"misses on {scaling['cores']} cores against 1",
            "≥ 1.8x, in quiet turns",
            times(bare),
            times(eager),
            f"{times(speedup)}, median {times(scaling['ours']['median_speedup'])}",
            times(speedup / bare if bare else None),
            speedup >= 1.8,
        )


def _cpu_goal(
    scenario: dict[str, Any], costs: dict[str, dict[str, Any]], *, limit: float
) -> Iterator[Goal]:
    """CPU of a request; beyond one base64 decode and one digest, if its media are known.

    So much a hit may cost (`_connector_goals`), whatever it does instead.
    """
    ours, identify = costs.get("ours"), scenario["identify_floor_ms"]
    if ours is None:
        return
    floor = costs["floor"]["p10_ms"]
    unseen = scenario["name"].startswith("unseen")
    # Other rounds are about who else had the machine's caches.
    cpu = ours["p10_ms"]
    beyond = cpu if unseen else cpu - identify
    yield Goal(
        3 if unseen else 2,
        f"a request, {scenario['name']}",
        f"≤ {limit:g} ms of CPU{'' if unseen else ' beyond one decode, one hash'}, in quiet rounds",
        ms(floor),
        ms(costs.get("eager", {}).get("p10_ms")),
        f"{ms(cpu)}{'' if unseen else f' ({ms(beyond)} beyond)'}, median {ms(ours['cpu_ms'])}",
        times(cpu / floor),
        beyond <= limit,
    )
