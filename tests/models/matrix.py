"""Check every family that tiny models are built of, and write the table of models.

python -m tests.models.matrix --out docs/models.json            # all, in worker processes
python -m tests.models.matrix gemma3 internvl                   # by name, printed
python -m tests.models.matrix --table docs/models.json docs/models.md
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

NOT_GENERIC = {
    "clip": "takes text or images, never both: an embedding model",
    "siglip": "takes text or images, never both: an embedding model",
    "siglip2": "takes text or images, never both: an embedding model",
    "colpali": "takes text or images, never both: a retriever",
    "colqwen2": "takes text or images, never both: a retriever",
    "whisper": "encoder and decoder: audio has no place in the prompt",
    "voxtral": "mistral-common writes the prompt",
    "fuyu": "cuts its own tokenization apart at a sentencepiece underscore",
}
"""Families that the generic processor refuses, and why."""


def check(family: str, folder: str) -> dict[str, Any]:
    """Check one family in this process; never raises."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    from lazydecode.tiny_models import build
    from tests.models.coverage import check_family

    start = time.perf_counter()
    try:
        path = Path(folder) / family
        if not path.exists():
            build(family, path, weights=False)
        result = check_family(family, str(path)).as_json()
    except Exception as exc:
        # The table has a line for it, with the reason; the run goes on.
        result = {"family": family, "problems": [f"{type(exc).__name__}: {exc}"[:300]]}
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def is_good(result: dict[str, Any]) -> bool:
    """Whether everything that is claimed about a family holds."""
    return (
        not result["problems"]
        and result["prompts_equal"] == result["prompts_tried"] > 0
        and result["orders_equal"] == result["orders_tried"] > 0
    )


def table(results: list[dict[str, Any]]) -> str:
    """Return the page."""
    good = [r for r in results if is_good(r)]
    plain = [r for r in good if not r["has_record"]]
    lines = [
        "# Models",
        "",
        "Written by `python -m tests.models.matrix` from a run over every family that "
        "`lazydecode make-model` builds. Each is compared with its own Hugging Face processor on "
        "whole requests: mixed prompts, several turns, the same item twice, different sizes, hits "
        "and misses in every order.",
        "",
        f"{len(good)} of {len(results)} families are served, {len(plain)} of them without a word "
        "about them in our code.",
        "",
        "| family | modality | how | ids equal | hits, misses | tensors | header-only | raw pixels "
        "| items |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in sorted(good, key=lambda r: r["family"]):
        lines += _rows(result)
    refused = [r for r in results if not is_good(r)]
    lines += ["", "## Not served by the generic processor", ""]
    for result in sorted(refused, key=lambda r: r["family"]):
        why = NOT_GENERIC.get(result["family"], "; ".join(result["problems"]))
        lines.append(f"* {result['family']}: {why}")
    lines += [
        "",
        "*How*: `generic`, or `record` where `models/registry.py` has an entry; `learnt`: the "
        "class puts constant ids around every prompt, found at load; `whole`: the prompt's ids "
        "come from one run of the class over stand-ins of the items' sizes. *Tensors*: `=` equal "
        "to the class's own batch bit by bit; named ones differ from it beyond zero padding in a "
        "batch, and ours are those of the item alone. *Header-only*: `meta`, `blank` or `silence` "
        "says how the class is asked; sizes that came out equal of those tried. *Raw pixels*: "
        "uint8 patches, finished bit by bit. *Items*: per prompt.",
        "",
    ]
    return "\n".join(lines)


def _rows(result: dict[str, Any]) -> list[str]:
    how = ["record" if result["has_record"] else "generic"]
    if result["edit"]:
        how.append("learnt")
    if result["mode"] == "whole_request":
        how.append("whole")
    if not result["reentrant"]:
        how.append("one thread")
    if not result["cacheable"]:
        how.append("not cached: random")
    rows = []
    for modality, line in result["modalities"].items():
        headers = f"{line['header_way']} {line['headers_exact']}/{line['headers_tried']}"
        rows.append(
            f"| {result['family']} | {modality} | {', '.join(how)} "
            f"| {result['prompts_equal']}/{result['prompts_tried']} "
            f"| {result['orders_equal']}/{result['orders_tried']} "
            f"| {', '.join(line['batch_differs']) or '='} "
            f"| {'no: content' if line['header_way'] == 'content' else headers} "
            f"| {'yes' if line['raw_pixels'] else 'no'} "
            f"| {line['max_items'] or 'any'} |"
        )
    return rows


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="*", help="families by name; none given: all")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--models", type=Path, help="folder of tiny models, kept")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument(
        "--table", nargs=2, type=Path, metavar=("JSON", "MD"), help="only write the page"
    )
    options = parser.parse_args()
    if options.table:
        source, page = options.table
        page.write_text(table(json.loads(source.read_text())), encoding="utf-8")
        return 0
    from lazydecode.tiny_models import FAMILIES

    families = options.families or sorted(FAMILIES)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(options.models or temporary)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
            jobs = [pool.submit(check, family, folder) for family in families]
            for job in as_completed(jobs):
                result = job.result()
                results.append(result)
                verdict = "ok" if is_good(result) else "; ".join(result["problems"])[:160]
                sys.stdout.write(f"{result['family']:24} {result['seconds']:6.1f} s  {verdict}\n")
                sys.stdout.flush()
    results.sort(key=lambda r: r["family"])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    wrong = [r for r in results if not is_good(r) and r["family"] not in NOT_GENERIC]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
