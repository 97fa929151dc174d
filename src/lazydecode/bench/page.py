"""The page on performance, written from records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from lazydecode.bench.goals import goals_grid
from lazydecode.bench.tables import Grid, grids

_INTRO: Final = """# Performance

This page is written from the records in `benchmarks/results/` by `benchmarks/write_page.py`;
`make bench` measures and writes it again.

How to read it: numbers are milliseconds of CPU unless they say otherwise, medians of rounds in
which all contestants take turns, on one machine that also did other things. Ratios within one
run mean something; absolute times do not, and neither does a comparison across runs.

Goals for whole requests are stated in ms and hold for a quiet machine: *in quiet rounds* is the
tenth percentile of the rounds, and the median stands beside it. Their floor is what receiving and
identifying the request costs a server that does nothing else. *In quiet turns* is the same for
rates: the ninetieth percentile of them.

- **floor** is what cannot be avoided: one SHA-256 pass over the encoded bytes, one bare call of
  the decoder, one bare call of the model's processor.
- **eager** is today's practice with the same libraries: decode at fetch, identify by the decoded
  content, then look up.
- **here** is this library: identify by the encoded bytes, look up, decode what is missing.
"""
_FIGURES: Final = {
    "frontend": [("items", "CPU per item: floors, hit, miss and eager hit")],
    "serve": [("load", "Time to the answer by requests at a time")],
}
"""Kind of record -> its pictures, as `plots` names them, and what they show."""
_AFTER: Final = """
## Run it

```
make bench                                      # short form, under five minutes
lazydecode bench frontend --model MODEL         # every row
lazydecode bench serve MODEL --with-eager       # servers under load
lazydecode bench serve --url http://host:port   # any server with the same render route
```

Names of rows, what the eager baseline does, and how to add a claim: `benchmarks/README.md`.
"""


def write_page(
    frontend: dict[str, Any] | None,
    serve: dict[str, Any] | None,
    notes: str = "",
    *,
    endurance: dict[str, Any] | None = None,
) -> str:
    """Return the page as Markdown.

    Args:
        frontend: Record of `bench frontend`.
        serve: Record of `bench serve`.
        notes: Markdown to add: what was tried, and what did not help.
        endurance: Record of `benchmarks/endurance.py`.
    """
    records = [record for record in (frontend, serve) if record is not None]
    known = [*records, *([] if endurance is None else [endurance])]
    parts = [_INTRO, *map(_provenance, known)]
    parts += _sections([goals_grid(frontend, serve, endurance)])
    for record in records:
        parts += [f"![{text}](figures/{name}.svg)\n" for name, text in _FIGURES[record["kind"]]]
        parts += _sections(grids(record))
    if endurance is not None:
        parts += _sections(grids(endurance))
    if notes.strip():
        parts.append(notes.strip() + "\n")
    parts.append(_AFTER.lstrip())
    return "\n".join(parts)


def _sections(tables: Iterable[Grid]) -> list[str]:
    return [f"## {grid.title}\n\n{grid.to_markdown()}\n" for grid in tables if grid.rows]


def _provenance(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"`bench {record['kind']}`: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, load {machine['load_before']} before and "
        f"{machine.get('load_after', '-')} after; {record['started']}, commit "
        f"`{record['commit']}`; {shown}.\n"
    )
