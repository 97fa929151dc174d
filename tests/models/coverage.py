"""Everything that is claimed about a family, checked against its own processor.

`check_family` is run by the tests and by the script that writes the table of models.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lazydecode.config import Settings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.joining import join_items
from lazydecode.models.loading import load_model_frontend
from lazydecode.models.pixels import finish_pixels
from lazydecode.models.registry import has_record
from tests.models.coverage_compare import equal, process
from tests.models.coverage_either_or import check_either_or
from tests.models.coverage_items import conversations, is_either_or, items_of, text_part
from tests.models.coverage_paths import (
    check_headers,
    check_odd,
    check_orders,
    check_phases,
    check_threads,
)
from tests.models.reference import Reference

WRONG_BATCHES = {"SmolVLMProcessor"}
"""Classes that write the longest video's frames into every video's text: only videos of one
length can be compared with them."""


@dataclass
class ModalityReport:
    """One line of the table: what holds for one modality of one family."""

    tensors_equal: bool = True
    """Item by item, bit by bit, and joined to the class's own batch."""
    batch_differs: list[str] = field(default_factory=list)
    """Tensors whose batch the class makes different from its items alone; ours is the item's."""
    header_way: str = "content"
    headers_exact: int = 0
    headers_tried: int = 0
    raw_pixels: bool = False
    max_items: int | None = None
    why_random: str = ""
    """Why the same item gives other tensors each time, so that no cache keeps it."""


@dataclass
class FamilyReport:
    """What holds for one family."""

    family: str
    processor: str
    mode: str
    has_record: bool
    reentrant: bool
    """Whether several threads may be inside the class."""
    thorough: bool = True
    """Whether all sizes and mixes were tried."""
    edit: str = ""
    prompts_equal: int = 0
    prompts_tried: int = 0
    text_is_text: bool = True
    """Whether control tokens and placeholders that a conversation spells stay text."""
    orders_equal: int = 0
    """Orders of hits and misses that gave the same bits."""
    orders_tried: int = 0
    two_phase: bool = False
    """Whether encoded items in two phases give what decoded ones give at once, and a hit decodes
    nothing."""
    threads_equal: bool = False
    """Whether requests that run at the same time give the bits of requests that run alone."""
    modalities: dict[str, ModalityReport] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def check_family(family: str, folder: str, *, thorough: bool = True) -> FamilyReport:
    """Compare a loaded model with its own processor.

    Args:
        family: Its name in the table.
        folder: The model.
        thorough: All sizes of the table and every mix of hits and misses; otherwise a few.
    """
    frontend = load_model_frontend(folder, Settings())
    findings = frontend.findings
    report = FamilyReport(
        family=family,
        processor=type(frontend.processor).__name__,
        mode=findings.proof.mode if findings else "unproven",
        has_record=has_record(frontend.processor),
        reentrant=frontend.mm_processor is None or frontend.mm_processor.reentrant,
        thorough=thorough,
        edit=_describe_edit(frontend) if findings else "",
    )
    if findings is None or frontend.mm_processor is None:
        refused = findings.facts.refused.values() if findings else ()
        report.problems.append("; ".join(refused) or "it has no chat template of its own")
        return report
    reference = Reference.of(folder)
    for modality in frontend.modalities:
        report.modalities[modality] = ModalityReport(
            header_way=findings.proof.headers[modality],
            raw_pixels=modality in frontend.mm_processor.family.raw_modalities,
            max_items=frontend.max_items[modality],
            why_random=frontend.random().get(modality, ""),
        )
    if is_either_or(frontend):
        check_either_or(report, frontend, reference)
    else:
        for name, messages, items in conversations(frontend, reference.rate):
            _check_prompt(report, frontend, reference, name, messages, items)
        _check_text_only(report, frontend, reference)
        _check_spelled(report, frontend, reference.rate)
    check_orders(report, frontend, reference.rate, thorough=thorough)
    check_phases(report, frontend, reference.rate)
    check_threads(report, frontend, reference.rate)
    for modality in frontend.modalities:
        check_headers(report, frontend, modality, reference.rate, thorough=thorough)
        check_odd(report, frontend, modality, reference.rate, thorough=thorough)
    return report


# -- prompts and tensors


def _check_prompt(
    report: FamilyReport,
    frontend: ModelFrontend,
    reference: Reference,
    name: str,
    messages: list[dict[str, Any]],
    items: dict[str, list[Any]],
) -> None:
    text = reference.text(messages)
    if type(frontend.processor).__name__ in WRONG_BATCHES:
        order = [m for m, group in items.items() for _ in group]
        items = items_of(order, reference.rate, same_size=True)
    try:
        theirs = reference(text, items)
    except Exception:
        # Some classes stack videos (and a few images), so all must have one size.
        order = [m for m, group in items.items() for _ in group]
        items = items_of(order, reference.rate, same_size=True)
        theirs = reference(text, items)
    report.prompts_tried += 1
    ours = process(frontend, messages, items)
    their_ids = [int(i) for i in theirs["input_ids"][0]]
    if ours["prompt_token_ids"] == their_ids:
        report.prompts_equal += 1
    else:
        report.problems.append(f"{name}: ids differ")
    _check_ranges(report, name, ours, items)
    _check_tensors(report, frontend, reference, name, ours, items, theirs)


def _check_ranges(
    report: FamilyReport, name: str, ours: Any, items: Mapping[str, Sequence[Any]]
) -> None:
    ids = ours["prompt_token_ids"]
    spans = []
    for modality, ranges in ours["mm_placeholders"].items():
        if len(ranges) != len(items[modality]):
            report.problems.append(f"{name}: {len(ranges)} {modality} ranges")
        for place in ranges:
            spans.append((place.offset, place.offset + place.length))
            if place.num_embeds == 0 or place.offset + place.length > len(ids):
                report.problems.append(f"{name}: a range without embeddings")
    spans.sort()
    if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
        report.problems.append(f"{name}: ranges overlap")


def _check_tensors(
    report: FamilyReport,
    frontend: ModelFrontend,
    reference: Reference,
    name: str,
    ours: Any,
    items: Mapping[str, Sequence[Any]],
    theirs: Mapping[str, Any],
) -> None:
    """Compare the join of our items with the class's batch, per tensor."""
    assert frontend.findings is not None
    finished = {
        m: [finish_pixels(item, frontend.pixel_plan) for item in group]
        for m, group in ours["mm_kwargs"].items()
    }
    batch = reference.tensors(theirs)
    shared = {n for m in finished for n in _names(finished[m])}
    for modality, group in finished.items():
        rules = frontend.findings.facts.modalities[modality].rules
        joined = join_items(group)
        for tensor, value in joined.items():
            others = [m for m in finished if m != modality and tensor in _names(finished[m])]
            if others or tensor not in shared:
                continue  # two modalities feed one tensor; "one-..." compares each alone
            if tensor in rules.differs:
                differs = report.modalities[modality].batch_differs
                if tensor not in differs:
                    differs.append(tensor)
                if len(items[modality]) > 1:
                    continue
            if not equal(value, batch.get(tensor)):
                report.modalities[modality].tensors_equal = False
                report.problems.append(f"{name}: {modality} tensor {tensor} differs")


def _names(group: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for item in group for name in item}


# -- text


def _check_text_only(report: FamilyReport, frontend: ModelFrontend, reference: Reference) -> None:
    """A prompt without media gets the ids that the class gives, where it takes one."""
    messages = [
        {"role": "user", "content": [text_part("Tell me more.\n\nPlease!")]},
        {"role": "assistant", "content": [text_part("More of what?")]},
        {"role": "user", "content": [text_part("Of it.")]},
    ]
    try:
        theirs = reference.ids(reference.text(messages), {})
    except Exception:
        return  # some classes want an image with every text
    report.prompts_tried += 1
    if frontend.tokenize_prompt(frontend.render_chat(messages)) == theirs:
        report.prompts_equal += 1
    else:
        report.problems.append("text only: ids differ")


def _check_spelled(report: FamilyReport, frontend: ModelFrontend, rate: int) -> None:
    """Spelled tokens add no control token and no item, in any role and place."""
    assert frontend.findings is not None
    facts = frontend.findings.facts.modalities
    modality = frontend.modalities[0]
    special = [t for t in frontend.tokenizer.all_special_tokens if t.strip()]
    spelled = " ".join([f.placeholder for f in facts.values()] + special[:6])
    results = []
    for text in ("plain words", f"plain {spelled} words"):
        messages = [
            {"role": "user", "content": [text_part(text), {"type": modality}, text_part(text)]},
            {"role": "assistant", "content": [text_part(text)]},
            {"role": "user", "content": [text_part(text)]},
        ]
        results.append(process(frontend, messages, items_of([modality], rate)))
    added = frontend.prompt_tokenizer.added_ids
    plain, marked = ([i for i in r["prompt_token_ids"] if i in added] for r in results)
    lengths = [[p.length for p in r["mm_placeholders"][modality]] for r in results]
    decoded = frontend.decode(results[1]["prompt_token_ids"], skip_special_tokens=False)
    if plain != marked or lengths[0] != lengths[1] or spelled not in decoded:
        report.text_is_text = False
        report.problems.append("a spelled control token is not text")


def _describe_edit(frontend: ModelFrontend) -> str:
    assert frontend.findings is not None
    edit = frontend.findings.proof.edit
    parts = []
    if edit.prefix:
        parts.append(f"{frontend.decode(edit.prefix, skip_special_tokens=False)!r} before")
    if edit.suffix:
        parts.append(f"{frontend.decode(edit.suffix, skip_special_tokens=False)!r} after")
    return ", ".join(parts)
