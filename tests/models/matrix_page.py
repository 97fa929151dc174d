"""The page about models, from the results of the matrix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NOT_SERVED: Mapping[str, str] = {
    "whisper": "encoder and decoder: audio has no place in the prompt. The routes for recordings "
    "serve it, with code of its own",
}
"""Families that the chat routes refuse media for, and why."""

_HEAD = """\
# Models

<!-- Written by python -m tests.models.matrix --write docs/reference/models.md -->

Every family that `lazydecode make-model` builds, compared with its own Hugging Face processor on
whole requests: mixed prompts, several turns, the same item twice, items of different sizes, hits
and misses mixed, encoded items in two phases, several threads, and items of up to 12 sizes from
their headers alone (28 by 28 pixels to 4K; 0.2 to 65 seconds). Transformers {version}.

"""

_LEGEND = """\

- *How*: `generic`, or `record` where `models/registry.py` has an entry for the family; `learnt`:
  the class puts constant ids around every prompt, found when the model is loaded; `whole`: the
  prompt's ids come from one run of the class over stand-ins of the items' sizes; `one or the
  other`: a request is one text or one item, and the class writes what is around it.
- *Prompts*: whole requests whose token ids came out equal, of those tried.
- *Hit, miss, mixed*: mixes of cached and new items that gave the bits of a fresh run.
- *Tensors*: `=` equal to the class's own batch bit by bit, apart from padding; named ones differ
  from it beyond that, and ours are those of the item alone.
- *Header-only*: `meta`, `blank` or `silence` is what the class is run on instead of the item;
  sizes that came out equal, of those tried. `no: content`: the prompt depends on the pixels.
- *Two-phase*: encoded items in two phases give what decoded ones give in one call, and a hit
  decodes nothing. *Re-entrant*: several threads may be inside the class; `locked`: one at a time.
- *Cached*: `no` where the same item gives other tensors each time; the remark says why.
- *Raw*: pixels cross to the engine as uint8 and are finished there bit by bit.
- *Generates*: the embedded engine's greedy tokens are those of the library's own `generate` on
  the output of its own processor; `alone`: only without items of other modalities in the prompt.
  A number leads to the remark.
- *Items*: per prompt.
"""


def is_served(result: Mapping[str, Any]) -> bool:
    """Whether the model takes media at all."""
    return bool(result.get("modalities"))


def is_good(result: Mapping[str, Any]) -> bool:
    """Whether everything that is claimed about a family holds."""
    if result["family"] in NOT_SERVED:
        return not is_served(result)
    return (
        is_served(result)
        and not result["problems"]
        and result["prompts_equal"] == result["prompts_tried"] > 0
        and result["orders_equal"] == result["orders_tried"] > 0
        and result["two_phase"]
        and result["threads_equal"]
        and result["text_is_text"]
    )


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page, in Markdown."""
    import transformers

    good = [r for r in results if is_served(r) and is_good(r)]
    plain = [r for r in good if not r["has_record"]]
    how = Counter("whole" if r["mode"] == "whole_request" else r["mode"] for r in plain)
    learnt = sum(1 for r in plain if r["edit"])
    lines = [
        f"{len(good)} of {len(results)} families are served and equal to their own processor, "
        f"{len(plain)} of them without a word about them in our code: {how['expand']} by "
        f"expanding their placeholders ({learnt} of these with ids that were learnt when the "
        f"model was loaded), {how['whole']} by runs of the class over stand-ins.",
        "",
        *_quick_note(good),
        "| Family | Modality | How | Prompts | Hit, miss, mixed | Tensors | Header-only "
        "| Two-phase | Re-entrant | Cached | Raw | Generates | Items |",
        "| --- " * 13 + "|",
    ]
    remarks: dict[str, int] = {}
    for result in good:
        lines += _rows(result, remarks)
    lines += ["", "## Remarks", ""]
    lines += [f"{number}. {text}" for text, number in remarks.items()]
    lines += ["", "## Not served by the chat routes", ""]
    for result in results:
        if result not in good:
            why = NOT_SERVED.get(result["family"], "; ".join(result["problems"]))
            lines.append(f"- {result['family']}: {why}")
    version = ".".join(transformers.__version__.split(".")[:2])
    return _HEAD.format(version=version) + "\n".join(lines) + "\n" + "\n## Columns\n" + _LEGEND


def _quick_note(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how many families were last checked with the few sizes and mixes of a test run."""
    quick = sum(1 for result in results if not result.get("thorough", True))
    if not quick:
        return []
    return [
        f"{quick} of them were last checked in the quick form, with the sizes and mixes of a "
        "test run; the numbers in the columns are what was tried.",
        "",
    ]


def _rows(result: Mapping[str, Any], remarks: dict[str, int]) -> Iterator[str]:
    how = ["record" if result["has_record"] else "generic"]
    if result["edit"]:
        how.append("learnt")
    if result["mode"] == "whole_request":
        how.append("whole")
    if result["mode"] == "either_or":
        how.append("one or the other")
    for modality, line in result["modalities"].items():
        headers = f"{line['header_way']} {line['headers_exact']}/{line['headers_tried']}"
        generates = result.get("generates", {}).get(modality, "not tried")
        cells = (
            result["family"],
            modality,
            ", ".join(how),
            f"{result['prompts_equal']}/{result['prompts_tried']}",
            f"{result['orders_equal']}/{result['orders_tried']}",
            ", ".join(line["batch_differs"]) or "=",
            "no: content" if line["header_way"] == "content" else headers,
            "yes" if result["two_phase"] else "no",
            "yes" if result["reentrant"] else "locked",
            _numbered(
                "no", f"not cached: {why}" if (why := line["why_random"]) else "yes", remarks
            ),
            "yes" if line["raw_pixels"] else "no",
            _numbered("alone" if generates.startswith("alone") else "no", generates, remarks),
            str(line["max_items"] or "any"),
        )
        yield "| " + " | ".join(cells) + " |"


def _numbered(word: str, text: str, remarks: dict[str, int]) -> str:
    """Return `yes` as it is, and a word with the number of a remark for any other text."""
    if text == "yes":
        return text
    return f"{word} [{remarks.setdefault(_plain(text), len(remarks) + 1)}]"


def _plain(text: str) -> str:
    """A remark in one line that Markdown leaves as it is."""
    return re.sub(r"([<>|*_\[\]])", r"\\\1", " ".join(text.split()))
