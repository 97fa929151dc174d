"""Families that take one text or one item: each against their own processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.joining import join_items
from lazydecode.models.pixels import finish_pixels
from tests.models.coverage_compare import equal, process
from tests.models.coverage_items import items_of, message_of
from tests.models.reference import Reference

if TYPE_CHECKING:
    from tests.models.coverage import FamilyReport

TEXTS = ("What is it?", "", "a cat in\n\na hat", " ".join(f"word {n}" for n in range(90)))
"""The last is longer than the fixed length that some classes cut to."""


def check_either_or(report: FamilyReport, frontend: ModelFrontend, reference: Reference) -> None:
    """A text and an item, each alone, give the class's own ids and tensors."""
    for text in TEXTS:
        theirs = [int(i) for i in _run(reference, text=[text])["input_ids"][0]]
        _compare_ids(report, f"text of {len(text)}", _text_ids(frontend, text), theirs)
    for modality in frontend.modalities:
        for number, item in enumerate(items_of([modality] * 3, reference.rate)[modality]):
            _check_item(report, frontend, reference, f"{modality} {number}", modality, item)
        _check_batch(report, frontend, reference, modality)
    spelled = " ".join([t for t in frontend.tokenizer.all_special_tokens if t.strip()][:6])
    # The class itself pads a text, and ends a query, with control tokens.
    plain, marked = (_text_ids(frontend, f"so {words} there") for words in ("", spelled))
    if frontend.prompt_tokenizer.added_ids & (set(marked) - set(plain) - _unknown(frontend)):
        report.text_is_text = False
        report.problems.append("a spelled control token is not text")


def _unknown(frontend: ModelFrontend) -> set[int]:
    """The id of what a tokenizer has no token for."""
    unknown = frontend.tokenizer.unk_token_id
    return set() if unknown is None else {int(unknown)}


def _text_ids(frontend: ModelFrontend, text: str) -> list[int]:
    return frontend.tokenize_prompt(frontend.render_chat([{"role": "user", "content": text}]))


def _run(reference: Reference, **arguments: Any) -> Mapping[str, Any]:
    if "audio" in arguments:
        arguments["sampling_rate"] = reference.rate
    return dict(reference.processor(return_tensors="pt", **arguments))


def _given(modality: str, items: Sequence[Any]) -> dict[str, Any]:
    return {"images" if modality == "image" else modality: list(items)}


def _check_item(
    report: FamilyReport,
    frontend: ModelFrontend,
    reference: Reference,
    name: str,
    modality: str,
    item: Any,
) -> None:
    theirs = _run(reference, **_given(modality, [item]))
    ours = process(frontend, [message_of(frontend, [modality])], {modality: [item]})
    their_ids = theirs["input_ids"][0].tolist() if "input_ids" in theirs else []
    _compare_ids(report, name, ours["prompt_token_ids"], their_ids)
    (place,) = ours["mm_placeholders"][modality]
    if (place.length == 0) != (not their_ids) or place.offset + place.length > len(their_ids):
        report.problems.append(f"{name}: its range is not in the prompt")
    _compare_tensors(report, frontend, name, modality, ours["mm_kwargs"][modality], theirs)


def _check_batch(
    report: FamilyReport, frontend: ModelFrontend, reference: Reference, modality: str
) -> None:
    """Items of requests apart join to the class's own batch."""
    items = items_of([modality] * 3, reference.rate)[modality]
    group = [
        process(frontend, [message_of(frontend, [modality])], {modality: [item]})["mm_kwargs"][
            modality
        ][0]
        for item in items
    ]
    theirs = _run(reference, **_given(modality, items))
    _compare_tensors(report, frontend, f"batch of {modality}", modality, group, theirs)


def _compare_ids(
    report: FamilyReport, name: str, ours: Sequence[int], theirs: Sequence[int]
) -> None:
    report.prompts_tried += 1
    if list(ours) == list(theirs):
        report.prompts_equal += 1
    else:
        report.problems.append(f"{name}: ids differ")


def _compare_tensors(
    report: FamilyReport,
    frontend: ModelFrontend,
    name: str,
    modality: str,
    group: Sequence[Any],
    theirs: Mapping[str, Any],
) -> None:
    assert frontend.findings is not None
    differs = frontend.findings.facts.modalities[modality].rules.differs
    joined = join_items([finish_pixels(item, frontend.pixel_plan) for item in group])
    line = report.modalities[modality]
    of_text = {"input_ids", "attention_mask", "token_type_ids", "labels"}
    for tensor in joined.keys() | (theirs.keys() - of_text):
        if tensor in differs and len(group) > 1:
            line.batch_differs = sorted({*line.batch_differs, tensor})
        elif not equal(joined.get(tensor), torch.as_tensor(theirs.get(tensor))):
            line.tensors_equal = False
            report.problems.append(f"{name}: tensor {tensor} differs")
