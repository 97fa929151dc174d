"""A chat request's sampling fields become the engine's parameters."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from lazydecode.engine.protocol import SamplingParams
from lazydecode.server.protocol import ChatCompletionRequest

_SAME_NAME: Final = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
)
_OTHERS: Final = (
    "max_tokens",
    "max_completion_tokens",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
)
_read: Final = operator.attrgetter(*_SAME_NAME, *_OTHERS)
_NONE_GIVEN: Final = (None,) * (len(_SAME_NAME) + len(_OTHERS))


def build_sampling(request: ChatCompletionRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """Return the parameters: what the request says, over what the model recommends.

    Raises:
        ValidationError: If a value is out of range.
    """
    if _read(request) == _NONE_GIVEN:  # as most requests that are rendered only
        return _recommended(tuple(defaults.items()))
    fields: dict[str, Any] = dict(defaults)
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.stop_token_ids:
        fields["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.logit_bias:
        fields["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    if request.logprobs:
        fields["logprobs"] = request.top_logprobs or 0
    return SamplingParams(max_tokens=request.answer_tokens, **fields)


@lru_cache(maxsize=16)
def _recommended(defaults: tuple[tuple[str, float], ...]) -> SamplingParams:
    return SamplingParams(**dict(defaults))  # type: ignore[arg-type]  # names that it has
