"""Limits and defaults of sampling: what is refused, and in whose terms."""

from __future__ import annotations

import math
import pickle

import msgspec
import pytest

from lazydecode.engine.null import NullEngine
from lazydecode.engine.protocol import (
    Engine,
    EngineInfo,
    EngineRequest,
    SamplingParams,
    recommended_sampling,
    resolve_max_tokens,
)
from lazydecode.errors import InvalidRequestError, ValidationError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {10**30: 1.0}),
        ("seed", 2**63),
        ("max_tokens", 10**30),
        ("min_tokens", 10**30),
        ("top_k", 10**30),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (5, 10**30)),
        ("n", 2),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=f"^{name} must be ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert caught.value.status == 400


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, min_p=1.0, seed=-(2**63), logprobs=20)
    SamplingParams(max_tokens=1, min_tokens=0, presence_penalty=-2.0, frequency_penalty=2.0)


def test_the_largest_integers_survive_the_wire() -> None:
    largest = 2**63 - 1
    sampling = SamplingParams(
        max_tokens=largest,
        min_tokens=largest,
        top_k=largest,
        seed=largest,
        stop_token_ids=(largest,),
        logit_bias={largest: 1.0},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling


def test_sampling_survives_the_wire() -> None:
    sampling = SamplingParams(temperature=0.5, logit_bias={3: -1.5}, stop_token_ids=(1, 2), seed=4)
    encoded = msgspec.msgpack.encode(sampling)
    assert msgspec.msgpack.decode(encoded, type=SamplingParams) == sampling
    assert pickle.loads(pickle.dumps(sampling)) == sampling


def test_max_tokens_is_what_the_context_leaves() -> None:
    assert resolve_max_tokens(60, SamplingParams(), 100) == 40
    assert resolve_max_tokens(60, SamplingParams(max_tokens=40), 100) == 40
    assert resolve_max_tokens(60, SamplingParams(max_tokens=7), 100) == 7
    assert resolve_max_tokens(60, SamplingParams(max_tokens=7), None) == 7


def test_prompts_that_fill_the_context_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValidationError, match="the prompt has 100 tokens"):
        resolve_max_tokens(100, SamplingParams(), 100)
    with pytest.raises(ValidationError, match="tokens, which leaves 40") as caught:
        resolve_max_tokens(60, SamplingParams(max_tokens=41), 100)
    assert caught.value.parameter == "max_tokens"


def test_recommended_sampling_takes_what_the_model_states() -> None:
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 3}
    assert recommended_sampling(stated) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    greedy = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05}
    assert recommended_sampling(greedy) == {"temperature": 0.0, "repetition_penalty": 1.05}
    assert recommended_sampling({"do_sample": None, "top_k": None}) == {}


async def test_the_null_engine_refuses_and_never_dies() -> None:
    engine = NullEngine(EngineInfo(model="m", max_model_len=5))
    assert isinstance(engine, Engine)
    await engine.start()
    assert engine.is_alive
    assert engine.pid is None
    with pytest.raises(InvalidRequestError, match="renders requests and does not generate"):
        engine.submit(EngineRequest("a", [1]))
    with pytest.raises(ValueError, match="is not running"):
        engine.stream("a")
    engine.abort("a")
    engine.clear_cache()
    engine.invalidate_cache(["a"])
    assert await engine.cache_snapshot_async() == []
    await engine.close()
