"""Write docs/performance.md from the records in results/."""

from __future__ import annotations

from pathlib import Path

from lazydecode.bench.page import write_page
from lazydecode.bench.plots import write_plots
from lazydecode.bench.record import read_record

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "performance.md"
FIGURES = PAGE.parent / "figures"


def main() -> None:
    """Write the page from what there is."""
    paths = [RESULTS / f"{kind}.json" for kind in ("frontend", "serve", "endurance")]
    frontend, serve, endurance = (read_record(path) if path.exists() else None for path in paths)
    for record in (frontend, serve):
        if record is not None:
            write_plots(record, FIGURES)
    notes = HERE / "notes.md"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(
        write_page(frontend, serve, notes.read_text("utf-8"), endurance=endurance), "utf-8"
    )
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
