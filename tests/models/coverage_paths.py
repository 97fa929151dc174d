"""The ways of a family's items: hits and misses, two phases, threads, headers alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.errors import InvalidRequestError
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.item import shape_of
from tests.models.coverage_compare import equal, inputs_for, process, same_result
from tests.models.coverage_items import encoded, items_of, message_of, odd, sized

if TYPE_CHECKING:
    from tests.models.coverage import FamilyReport


def check_orders(
    report: FamilyReport, frontend: ModelFrontend, rate: int, *, thorough: bool
) -> None:
    """Every mix of hits and misses, in every order, gives the bits of a fresh run."""
    modality = frontend.modalities[0]
    count = 1 if frontend.max_items[modality] == 1 else 2
    order = [modality] * count + list(frontend.modalities[1:])
    items = items_of(order, rate)
    messages = [message_of(frontend, order)]
    fresh = process(frontend, messages, items)
    places = [(m, i) for m, group in items.items() for i in range(len(group))]
    mixes = list(itertools.product((False, True), repeat=len(places)))
    chance = random.Random(report.family)
    if not thorough:
        mixes = [mixes[-1], chance.choice(mixes[1:-1] or mixes[:1])]
    for warm in mixes:
        cache = MultiModalProcessorOnlyCache(capacity_bytes=1 << 30)
        known = [place for place, is_warm in zip(places, warm, strict=True) if is_warm]
        for m, i in chance.sample(known, len(known)):
            process(frontend, [message_of(frontend, [m])], {m: [items[m][i]]}, cache)
        result = process(frontend, messages, items, cache)
        report.orders_tried += 1
        if same_result(fresh, result):
            report.orders_equal += 1
        else:
            report.problems.append(f"hits at {known} change the result")


def check_phases(report: FamilyReport, frontend: ModelFrontend, rate: int) -> None:
    """Encoded items in two phases give what decoded ones give at once; a hit decodes nothing."""
    processor = frontend.mm_processor
    assert processor is not None
    messages = [message_of(frontend, frontend.modalities)]
    refs = encoded(frontend, rate)
    cache = MultiModalProcessorOnlyCache(capacity_bytes=1 << 30)
    results = []
    for num_decodes in (len(frontend.modalities), len(frontend.random())):
        inputs = inputs_for(frontend, messages, refs, cache)
        sketched = processor.render_from_headers(inputs)
        with processor.apply_phase1(inputs) as state:
            if len(state.decodes) != num_decodes:
                report.problems.append(f"{len(state.decodes)} decodes instead of {num_decodes}")
            state.wait_items()
            processor.apply_process(state)
            result = processor.apply_phase2(state)
        results.append(result)
        if sketched is not None and (sketched.token_ids, sketched.placeholders) != (
            result["prompt_token_ids"],
            result["mm_placeholders"],
        ):
            report.problems.append("the prompt from the headers of encoded items differs")
    decoded = {m: [ref.fork().decode() for ref in group] for m, group in refs.items()}
    whole = process(frontend, messages, decoded)
    report.two_phase = processor.supports_two_phase_apply and all(
        same_result(whole, result) for result in results
    )
    if not report.two_phase:
        report.problems.append("two phases give another result than one call")


def check_threads(report: FamilyReport, frontend: ModelFrontend, rate: int) -> None:
    """Requests that run at the same time give the bits of requests that run alone."""
    requests = [
        ([message_of(frontend, [m])], {m: [item]})
        for m in frontend.modalities
        for item in items_of([m] * 2, rate)[m]
    ]
    alone = [process(frontend, *request) for request in requests]
    with ThreadPoolExecutor(3) as pool:
        beside = list(pool.map(lambda request: process(frontend, *request), requests))
    report.threads_equal = all(map(same_result, alone, beside))
    if not report.threads_equal:
        report.problems.append("requests that run at the same time change each other")


def check_headers(
    report: FamilyReport, frontend: ModelFrontend, modality: str, rate: int, *, thorough: bool
) -> None:
    """What follows from a size alone equals what the item itself gives."""
    assert frontend.mm_processor is not None
    family = frontend.mm_processor.family
    line = report.modalities[modality]
    if line.header_way == "content":
        return
    for item in sized(modality, rate, family=report.family, thorough=thorough):
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
            equal(elem.data, full.kwargs[name].data) for name, elem in sketch.metadata.items()
        )
        if same_text and same_ids and same_small:
            line.headers_exact += 1
        else:
            report.problems.append(f"{modality} {shape_of(modality, item)}: header-only differs")


def check_odd(
    report: FamilyReport, frontend: ModelFrontend, modality: str, rate: int, *, thorough: bool
) -> None:
    """An odd item is processed or refused in our words, and the same from its header."""
    assert frontend.mm_processor is not None
    family = frontend.mm_processor.family
    for item in odd(modality, rate, family=report.family, thorough=thorough):
        shape = shape_of(modality, item)
        ways: list[tuple[Callable[..., Any], Any]] = [(family.process, item)]
        if report.modalities[modality].header_way != "content":
            ways.append((family.sketch, shape))
        texts = []
        for way, of in ways:
            try:
                text = way(modality, of).text
                texts.append((text.replacement, text.token_ids))
            except InvalidRequestError:
                texts.append(None)
        if any(text != texts[0] for text in texts):
            report.problems.append(f"{modality} {shape[:3]}: header-only differs: {texts}")
