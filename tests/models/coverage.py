"""Everything that is claimed about a family, checked against its own processor.

`check_family` is run by the tests and by the script that writes the table of models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.config import Settings
from lazydecode.errors import InvalidRequestError
from lazydecode.models.item import shape_of
from lazydecode.models.joining import join_items
from lazydecode.models.loading import ModelFrontend, load_model_frontend
from lazydecode.models.pixels import finish_pixels
from lazydecode.models.registry import has_record
from lazydecode.processing.inputs import ProcessorInputs
from tests.models.reference import Reference, clip, picture, sound

IMAGE_SIZES = (
    (28, 28), (56, 56), (100, 75), (224, 224), (336, 252), (50, 1500),
    (1500, 50), (640, 480), (777, 1333), (1024, 768), (1920, 1080), (3840, 2160),
)  # fmt: skip
VIDEO_SHAPES = (
    (4, 112, 112), (8, 168, 112), (5, 112, 224), (16, 224, 168), (2, 336, 252), (12, 448, 252),
)  # fmt: skip
AUDIO_SECONDS = (0.2, 0.5, 1.0, 3.3, 10.0, 29.99, 31.0, 65.0)


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


@dataclass
class FamilyReport:
    """What holds for one family."""

    family: str
    processor: str
    mode: str
    has_record: bool
    reentrant: bool
    cacheable: bool
    edit: str = ""
    prompts_equal: int = 0
    prompts_tried: int = 0
    text_is_text: bool = True
    """Whether control tokens and placeholders that a conversation spells stay text."""
    orders_equal: int = 0
    """Orders of hits and misses that gave the same bits."""
    orders_tried: int = 0
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
        thorough: All sizes of the table; otherwise a few small ones.
    """
    frontend = load_model_frontend(folder, Settings())
    findings = frontend.findings
    report = FamilyReport(
        family=family,
        processor=type(frontend.processor).__name__,
        mode=findings.proof.mode if findings else "unproven",
        has_record=has_record(frontend.processor),
        reentrant=frontend.mm_processor is None or frontend.mm_processor.reentrant,
        cacheable=frontend.is_cacheable,
        edit=_describe_edit(frontend) if findings else "",
    )
    if findings is None or frontend.mm_processor is None:
        refused = findings.facts.refused.values() if findings else ()
        report.problems.append("; ".join(refused) or "it has no chat template of its own")
        return report
    reference = Reference(folder)
    for modality in frontend.modalities:
        report.modalities[modality] = ModalityReport(
            header_way=findings.proof.headers[modality],
            raw_pixels=modality in frontend.mm_processor.family.raw_modalities,
            max_items=frontend.max_items[modality],
        )
    for name, messages, items in conversations(frontend, reference.rate):
        _check_prompt(report, frontend, reference, name, messages, items)
    _check_text_only(report, frontend, reference)
    _check_spelled(report, frontend, reference.rate)
    _check_orders(report, frontend, reference.rate)
    for modality in frontend.modalities:
        _check_headers(report, frontend, modality, reference.rate, thorough=thorough)
    return report


# -- prompts and tensors


Conversation = tuple[str, list[dict[str, Any]], dict[str, list[Any]]]


def conversations(frontend: ModelFrontend, rate: int) -> Iterator[Conversation]:
    """Yield (name, messages, items): mixed, several turns, twice the same, different sizes."""
    modalities = list(frontend.modalities)
    several = [m for m in modalities if frontend.max_items[m] is None]
    order = [*modalities, *several[:1]]
    yield "mixed", [_user(order)], _items(order, rate)
    if several:
        first = several[0]
        turns = [
            {"role": "user", "content": [{"type": first}, _text("What is it?")]},
            {"role": "assistant", "content": [_text("A thing.")]},
            {"role": "user", "content": [_text("And this\n"), {"type": first}]},
        ]
        yield "turns", turns, _items([first, first], rate)
        twice = _items([first], rate)[first] * 2
        yield "twice", [_user([first, first], between="")], {first: twice}
    for modality in several:
        yield f"sizes-{modality}", [_user([modality] * 3)], _items([modality] * 3, rate)
    for modality in modalities:
        yield f"one-{modality}", [_user([modality])], _items([modality], rate)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _user(order: Sequence[str], between: str = " part {n}:\n") -> dict[str, Any]:
    content: list[dict[str, str]] = []
    for number, modality in enumerate(order):
        if between:
            content.append(_text(between.format(n=number)))
        content.append({"type": modality})
    return {"role": "user", "content": [*content, _text("What now?")]}


def _items(order: Sequence[str], rate: int, *, same_size: bool = False) -> dict[str, list[Any]]:
    """One item per entry; sizes differ within a modality unless asked otherwise."""
    sizes = ((300, 200), (112, 140), (420, 90))
    shapes = ((4, 112, 112), (6, 168, 112), (4, 112, 168))
    seconds = (1.3, 0.6, 2.1)
    items: dict[str, list[Any]] = {}
    for modality in order:
        group = items.setdefault(modality, [])
        number = 0 if same_size else len(group)
        seed = len(group)
        if modality == "image":
            group.append(picture(*sizes[number], seed=seed))
        elif modality == "video":
            group.append(clip(*shapes[number]))
        else:
            group.append(sound(seconds[number], rate, seed=seed))
    return items


def process(
    frontend: ModelFrontend,
    messages: Sequence[Mapping[str, Any]],
    items: Mapping[str, Sequence[Any]],
    cache: MultiModalProcessorOnlyCache | None = None,
) -> Any:
    """Run a request through our processor."""
    assert frontend.mm_processor is not None
    rendered = frontend.render_chat(messages)
    inputs = ProcessorInputs(
        rendered.text,
        frontend.info.parse_mm_data({m: list(group) for m, group in items.items()}),
        cache=cache,
        processor_fingerprint=frontend.fingerprint,
    )
    return frontend.mm_processor.apply(inputs)


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
        items = _items(order, reference.rate, same_size=True)
    try:
        theirs = reference(text, items)
    except Exception:
        # Some classes stack videos (and a few images), so all must have one size.
        order = [m for m, group in items.items() for _ in group]
        items = _items(order, reference.rate, same_size=True)
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
            if not _equal(value, batch.get(tensor)):
                report.modalities[modality].tensors_equal = False
                report.problems.append(f"{name}: {modality} tensor {tensor} differs")


def _names(group: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for item in group for name in item}


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(
            _equal(a, b) for a, b in zip(ours, theirs, strict=True)
        )
    if isinstance(ours, torch.Tensor) and isinstance(theirs, list):
        return bool(torch.equal(ours, torch.tensor(theirs, dtype=ours.dtype)))
    return bool(ours == theirs)


# -- text


def _check_text_only(report: FamilyReport, frontend: ModelFrontend, reference: Reference) -> None:
    """A prompt without media gets the ids that the class gives, where it takes one."""
    messages = [
        {"role": "user", "content": [_text("Tell me more.\n\nPlease!")]},
        {"role": "assistant", "content": [_text("More of what?")]},
        {"role": "user", "content": [_text("Of it.")]},
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
            {"role": "user", "content": [_text(text), {"type": modality}, _text(text)]},
            {"role": "assistant", "content": [_text(text)]},
            {"role": "user", "content": [_text(text)]},
        ]
        results.append(process(frontend, messages, _items([modality], rate)))
    added = frontend.prompt_tokenizer.added_ids
    plain, marked = ([i for i in r["prompt_token_ids"] if i in added] for r in results)
    lengths = [[p.length for p in r["mm_placeholders"][modality]] for r in results]
    decoded = frontend.decode(results[1]["prompt_token_ids"], skip_special_tokens=False)
    if plain != marked or lengths[0] != lengths[1] or spelled not in decoded:
        report.text_is_text = False
        report.problems.append("a spelled control token is not text")


# -- hits and misses


def _check_orders(report: FamilyReport, frontend: ModelFrontend, rate: int) -> None:
    """Every mix of hits and misses, in every order, gives the bits of a fresh run."""
    modality = frontend.modalities[0]
    count = 1 if frontend.max_items[modality] == 1 else 2
    order = [modality] * count + list(frontend.modalities[1:])
    items = _items(order, rate)
    messages = [_user(order)]
    fresh = process(frontend, messages, items)
    places = [(m, i) for m, group in items.items() for i in range(len(group))]
    for warm in itertools.product((False, True), repeat=len(places)):
        cache = MultiModalProcessorOnlyCache(capacity_bytes=1 << 30)
        known = [place for place, is_warm in zip(places, warm, strict=True) if is_warm]
        for m, i in reversed(known):
            process(frontend, [_user([m])], {m: [items[m][i]]}, cache)
        result = process(frontend, messages, items, cache)
        report.orders_tried += 1
        if _same_result(fresh, result):
            report.orders_equal += 1
        else:
            report.problems.append(f"hits at {known} change the result")


def _same_result(a: Any, b: Any) -> bool:
    if a["prompt_token_ids"] != b["prompt_token_ids"]:
        return False
    if a["mm_placeholders"] != b["mm_placeholders"]:
        return False
    return all(
        x.keys() == y.keys() and all(_equal(x[n].data, y[n].data) for n in x)
        for m in a["mm_kwargs"]
        for x, y in zip(a["mm_kwargs"][m], b["mm_kwargs"][m], strict=True)
    )


# -- headers


def _check_headers(
    report: FamilyReport, frontend: ModelFrontend, modality: str, rate: int, *, thorough: bool
) -> None:
    """What follows from a size alone equals what the item itself gives."""
    assert frontend.mm_processor is not None
    family = frontend.mm_processor.family
    line = report.modalities[modality]
    if line.header_way == "content":
        return
    for item in _sized(modality, rate, thorough=thorough):
        try:
            full = family.process(modality, item)
        except InvalidRequestError as exc:
            sketch_error = ""
            try:
                family.sketch(modality, shape_of(modality, item))
            except InvalidRequestError as again:
                sketch_error = again.message
            if not sketch_error:
                report.problems.append(f"{modality}: only the item is refused: {exc}")
            continue
        sketch = family.sketch(modality, shape_of(modality, item))
        assert sketch is not None
        line.headers_tried += 1
        same_text = sketch.text.replacement == full.text.replacement
        same_ids = sketch.text.token_ids == full.text.token_ids
        same_small = all(
            _equal(elem.data, full.kwargs[name].data) for name, elem in sketch.metadata.items()
        )
        if same_text and same_ids and same_small:
            line.headers_exact += 1
        else:
            report.problems.append(f"{modality} {shape_of(modality, item)}: header-only differs")


def _sized(modality: str, rate: int, *, thorough: bool) -> Iterator[Any]:
    if modality == "image":
        for size in IMAGE_SIZES if thorough else IMAGE_SIZES[2:6]:
            yield picture(*size)
    elif modality == "video":
        for shape in VIDEO_SHAPES if thorough else VIDEO_SHAPES[:2]:
            yield clip(*shape)
    else:
        for seconds in AUDIO_SECONDS if thorough else AUDIO_SECONDS[:3]:
            yield sound(seconds, rate)


def _describe_edit(frontend: ModelFrontend) -> str:
    assert frontend.findings is not None
    edit = frontend.findings.proof.edit
    parts = []
    if edit.prefix:
        parts.append(f"{frontend.decode(edit.prefix, skip_special_tokens=False)!r} before")
    if edit.suffix:
        parts.append(f"{frontend.decode(edit.suffix, skip_special_tokens=False)!r} after")
    return ", ".join(parts)
