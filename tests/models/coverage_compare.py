"""One request through our processor, and whether two results are the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.models.frontend import ModelFrontend
from lazydecode.processing.inputs import ProcessorInputs


def inputs_for(
    frontend: ModelFrontend,
    messages: Sequence[Mapping[str, Any]],
    items: Mapping[str, Sequence[Any]],
    cache: MultiModalProcessorOnlyCache | None = None,
) -> ProcessorInputs:
    """What our processor takes for a request."""
    return ProcessorInputs(
        frontend.render_chat(messages).prompt,
        frontend.info.parse_mm_data({m: list(group) for m, group in items.items()}),
        cache=cache,
        processor_fingerprint=frontend.fingerprint,
    )


def process(
    frontend: ModelFrontend,
    messages: Sequence[Mapping[str, Any]],
    items: Mapping[str, Sequence[Any]],
    cache: MultiModalProcessorOnlyCache | None = None,
) -> Any:
    """Run a request through our processor."""
    assert frontend.mm_processor is not None
    return frontend.mm_processor.apply(inputs_for(frontend, messages, items, cache))


def equal(ours: Any, theirs: Any) -> bool:
    """Whether two tensors, or lists of them, are the same bits."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(
            equal(a, b) for a, b in zip(ours, theirs, strict=True)
        )
    if isinstance(ours, torch.Tensor) and isinstance(theirs, list):
        return bool(torch.equal(ours, torch.tensor(theirs, dtype=ours.dtype)))
    return bool(ours == theirs)


def same_result(a: Any, b: Any) -> bool:
    """Whether two results have the same ids, ranges and tensors."""
    if a["prompt_token_ids"] != b["prompt_token_ids"]:
        return False
    if a["mm_placeholders"] != b["mm_placeholders"]:
        return False
    return all(
        x.keys() == y.keys() and all(equal(x[n].data, y[n].data) for n in x)
        for m in a["mm_kwargs"]
        for x, y in zip(a["mm_kwargs"][m], b["mm_kwargs"][m], strict=True)
    )
