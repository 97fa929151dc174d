"""What a request says of sampling, over what the model recommends."""

from typing import Any

import pytest

from lazydecode.engine.protocol import SamplingParams
from lazydecode.server.protocol import decode_request
from lazydecode.server.sampling import build_sampling

RECOMMENDED = {"temperature": 0.6, "top_k": 20}


def sampling_of(fields: str) -> SamplingParams:
    request = decode_request(
        b'{"messages":[{"role":"user","content":"a"}]' + fields.encode() + b"}"
    )
    return build_sampling(request, RECOMMENDED)


def test_a_request_that_says_nothing_gets_what_the_model_recommends() -> None:
    assert sampling_of("") == SamplingParams(temperature=0.6, top_k=20)
    assert sampling_of(',"logprobs":false') == SamplingParams(temperature=0.6, top_k=20)
    request = decode_request(b'{"messages":[{"role":"user","content":"a"}]}')
    assert build_sampling(request, {}) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ('"min_tokens":3', "min_tokens", 3),
        ('"temperature":0', "temperature", 0),
        ('"top_p":0.5', "top_p", 0.5),
        ('"top_k":-1', "top_k", -1),
        ('"min_p":0.25', "min_p", 0.25),
        ('"repetition_penalty":1.5', "repetition_penalty", 1.5),
        ('"presence_penalty":-2', "presence_penalty", -2),
        ('"frequency_penalty":2', "frequency_penalty", 2),
        ('"seed":7', "seed", 7),
        ('"ignore_eos":true', "ignore_eos", True),
        ('"max_tokens":5', "max_tokens", 5),
        ('"max_tokens":5,"max_completion_tokens":4', "max_tokens", 4),
        ('"max_completion_tokens":4', "max_tokens", 4),
        ('"stop_token_ids":[1,2]', "stop_token_ids", (1, 2)),
        ('"logit_bias":{"3":-1}', "logit_bias", {3: -1.0}),
        ('"logprobs":true', "logprobs", 0),
        ('"logprobs":true,"top_logprobs":2', "logprobs", 2),
    ],
)
def test_each_field_alone_is_heeded(field: str, name: str, value: Any) -> None:
    fields: dict[str, Any] = {**RECOMMENDED, name: value}
    assert sampling_of(f",{field}") == SamplingParams(**fields)
