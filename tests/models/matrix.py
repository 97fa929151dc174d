"""Check every family that tiny models are built of, and write the page about models.

python -m tests.models.matrix --write docs/reference/models.md           # all, in workers
python -m tests.models.matrix --write docs/reference/models.md gemma3    # one line of it anew
python -m tests.models.matrix --quick gemma3 internvl                    # few sizes, only print
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.models.matrix_page import is_good, is_served, page

_FAMILIES_PER_WORKER = 12
"""A fresh process then: what the library keeps of models adds up."""


def check(family: str, folder: str, thorough: bool) -> dict[str, Any]:
    """Check one family in this process; never raises.

    Args:
        family: Its name.
        folder: Where tiny models are kept.
        thorough: Whether to try all sizes and mixes.
    """
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
            build(family, path)
        result = check_family(family, str(path), thorough=thorough).as_json()
        no_weights = get_family(family).no_weights
        if no_weights:
            result["generates"] = dict.fromkeys(result["modalities"], f"no weights: {no_weights}")
        elif result["mode"] == "either_or":
            result["generates"] = dict.fromkeys(result["modalities"], "it embeds")
        elif is_served(result):
            result["generates"] = check_generation(path)
    except Exception as exc:
        # The page has a line for it, with the reason; the run goes on.
        result = {"family": family, "problems": [f"{type(exc).__name__}: {exc}"[:300]]}
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def run(
    families: Sequence[str], folder: str, *, workers: int, thorough: bool
) -> Iterator[dict[str, Any]]:
    """Check families in worker processes; yield each result as it comes."""
    context = multiprocessing.get_context("spawn")
    # New processes by new pools: a pool whose workers end after so many tasks does not always
    # start the next ones (https://github.com/python/cpython/issues/115634).
    step = _FAMILIES_PER_WORKER * workers
    for start in range(0, len(families), step):
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            group = families[start : start + step]
            jobs = [pool.submit(check, family, folder, thorough) for family in group]
            for job in as_completed(jobs):
                yield job.result()


def write(results: Mapping[str, dict[str, Any]], to: Path) -> None:
    """Write the page, and the results beside it."""
    ordered = [results[name] for name in sorted(results)]
    to.parent.mkdir(parents=True, exist_ok=True)
    to.with_suffix(".json").write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    to.write_text(page(ordered), encoding="utf-8")


def main() -> int:
    """Run the command; the exit status is 1 if something that is claimed does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="*", help="families by name; none given: all")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="page to write; results as JSON beside it"
    )
    parser.add_argument("--models", type=Path, help="folder of tiny models, kept")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--quick", action="store_true", help="only a few sizes and mixes")
    options = parser.parse_args()
    from lazydecode.tiny_models import FAMILIES

    families = options.families or sorted(FAMILIES)
    known: dict[str, dict[str, Any]] = {}
    if options.write is not None and options.write.with_suffix(".json").exists():
        before = json.loads(options.write.with_suffix(".json").read_text(encoding="utf-8"))
        known = {r["family"]: r for r in before if r["family"] in FAMILIES}
    all_good = True
    with tempfile.TemporaryDirectory() as temporary:
        results = run(
            families,
            str(options.models or temporary),
            workers=options.workers,
            thorough=not options.quick,
        )
        for number, result in enumerate(results, 1):
            all_good &= is_good(result)
            verdict = "ok" if is_good(result) else "; ".join(result["problems"])[:160]
            sys.stdout.write(
                f"[{number:2}/{len(families)}] {result['family']:24} {result['seconds']:6.1f} s  "
                f"{verdict or 'not all is equal'}\n"
            )
            sys.stdout.flush()
            known[result["family"]] = result
            if options.write is not None:
                write(known, options.write)  # each time: a run that is stopped is not lost
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
