"""A chat request's sampling fields become the engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lazydecode.engine.protocol import SamplingParams
from lazydecode.server.protocol import ChatCompletionRequest

_SAME_NAME = (
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


def build_sampling(request: ChatCompletionRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """Return the parameters: what the request says, over what the model recommends.

    Raises:
        ValidationError: If a value is out of range.
    """
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
