"""Check every family that tiny models are built of, and write the page about models.

python -m tests.models.matrix --write docs/reference/models.md           # all, in workers
python -m tests.models.matrix --write docs/reference/models.md gemma3    # one line of it anew
python -m tests.models.matrix gemma3 internvl                            # only print
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.models.matrix_page import is_good, is_served, page

_FAMILIES_PER_WORKER = 12
"""A fresh process then: what the library keeps of models adds up."""


def check(family: str, folder: str, generate: bool) -> dict[str, Any]:
    """Check one family in this process; never raises."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    from lazydecode.tiny_models import build, get_family
    from tests.models.coverage import check_family
    from tests.models.coverage_generation import check_generation

    start = time.perf_counter()
    result: dict[str, Any]
    try:
        path = Path(folder) / family
        if not path.exists():
            build(family, path, weights=generate)
        result = check_family(family, str(path)).as_json()
        no_weights = get_family(family).no_weights
        if no_weights:
            result["generates"] = dict.fromkeys(result["modalities"], f"no weights: {no_weights}")
        elif generate and is_served(result):
            result["generates"] = check_generation(path)
    except Exception as exc:
        # The page has a line for it, with the reason; the run goes on.
        result = {"family": family, "problems": [f"{type(exc).__name__}: {exc}"[:300]]}
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def run(families: list[str], folder: str, *, workers: int, generate: bool) -> list[dict[str, Any]]:
    """Check families in worker processes; print a line as each ends."""
    results: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, max_tasks_per_child=_FAMILIES_PER_WORKER
    ) as pool:
        jobs = [pool.submit(check, family, folder, generate) for family in families]
        for number, job in enumerate(as_completed(jobs), 1):
            result = job.result()
            results.append(result)
            verdict = "ok" if is_good(result) else "; ".join(result["problems"])[:160]
            sys.stdout.write(
                f"[{number:2}/{len(families)}] {result['family']:24} {result['seconds']:6.1f} s  "
                f"{verdict or 'not all is equal'}\n"
            )
            sys.stdout.flush()
    return results


def main() -> int:
    """Run the command; the exit status is 1 if a family that should be served is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="*", help="families by name; none given: all")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="page to write; results as JSON beside it"
    )
    parser.add_argument("--models", type=Path, help="folder of tiny models, kept")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--no-generate", action="store_true", help="leave the engine out")
    options = parser.parse_args()
    from lazydecode.tiny_models import FAMILIES

    known: dict[str, dict[str, Any]] = {}
    kept = None if options.write is None else options.write.with_suffix(".json")
    if kept is not None and kept.exists() and options.families:
        known = {r["family"]: r for r in json.loads(kept.read_text(encoding="utf-8"))}
    with tempfile.TemporaryDirectory() as temporary:
        results = run(
            options.families or sorted(FAMILIES),
            str(options.models or temporary),
            workers=options.workers,
            generate=not options.no_generate,
        )
    for result in results:
        before = known.get(result["family"], {})
        if options.no_generate and "generates" in before:
            result.setdefault("generates", before["generates"])
        known[result["family"]] = result
    if kept is not None:
        ordered = [known[name] for name in sorted(known)]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        options.write.write_text(page(ordered), encoding="utf-8")
    return 0 if all(is_good(r) for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
