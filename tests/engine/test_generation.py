"""One request's bookkeeping: when it ends, what it reports, what its random numbers depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazydecode.engine.generation import Generation
from lazydecode.engine.protocol import EngineInfo, EngineRequest, SamplingParams
from lazydecode.errors import ValidationError

INFO = EngineInfo(model="m", max_model_len=20, vocab_size=100, eos_token_ids=(9,))


def generation(prompt: list[int], *, resumed: int = 0, **sampling: object) -> Generation:
    request = EngineRequest(
        "r", prompt, sampling=SamplingParams(**sampling), num_resumed_tokens=resumed
    )
    return Generation(request, [], INFO)


def test_ends_at_the_models_end_token_and_names_it() -> None:
    one = generation([1, 2])
    one.emit(5)
    one.emit(9)
    output = one.take_output()
    assert output is not None
    assert (output.new_token_ids, output.finish_reason, output.stop_token_id) == ([5, 9], "stop", 9)
    assert one.is_done


def test_ends_at_a_stop_token_of_the_request() -> None:
    one = generation([1, 2], stop_token_ids=(7,), ignore_eos=True)
    one.emit(9)
    assert not one.is_done
    one.emit(7)
    assert one.finish_reason == "stop"


def test_ends_at_max_tokens_and_at_the_end_of_the_context() -> None:
    one = generation([1, 2], max_tokens=1)
    one.emit(5)
    assert one.finish_reason == "length"
    two = generation([1] * 18)
    two.emit(5)
    assert not two.is_done
    two.emit(5)
    assert two.finish_reason == "length"


def test_reports_only_what_is_new() -> None:
    one = generation([1, 2])
    assert one.take_output() is None
    one.emit(5)
    one.emit(6)
    output = one.take_output()
    assert output is not None
    assert (output.new_token_ids, output.finish_reason, output.logprobs) == ([5, 6], None, None)
    assert one.take_output() is None
    one.aborted = True
    output = one.take_output()
    assert output is not None
    assert (output.new_token_ids, output.finish_reason) == ([], "abort")


def test_stop_tokens_are_held_back_until_min_tokens() -> None:
    one = generation([1, 2], min_tokens=2)
    assert one.must_not_stop
    one.emit(5)
    assert one.must_not_stop
    one.emit(5)
    assert not one.must_not_stop


def test_a_resumed_request_goes_on_where_it_was() -> None:
    whole = generation([1, 2], seed=3, max_tokens=6)
    numbers = []
    for token in (4, 5, 6):
        numbers.append(whole.uniform())
        whole.emit(token)
    resumed = generation([1, 2, 4, 5], resumed=2, seed=3, max_tokens=6)
    assert resumed.num_prompt_tokens == 2
    assert resumed.output_token_ids == [4, 5]
    assert resumed.uniform() == numbers[2]
    for token in (6, 7, 8, 10):
        assert not resumed.is_done
        resumed.emit(token)
    assert resumed.finish_reason == "length"
    assert resumed.num_output_tokens == 6


def test_a_resumed_request_that_had_everything_ends_at_once() -> None:
    one = generation([1, 2, 4, 5], resumed=2, max_tokens=2)
    output = one.take_output()
    assert output is not None
    assert (output.new_token_ids, output.finish_reason) == ([], "length")


def test_random_numbers_follow_seed_and_position_alone() -> None:
    first, second = generation([1], seed=5), generation([2, 3], seed=5)
    assert first.uniform() == second.uniform() == first.uniform()
    assert 0.0 <= first.uniform() < 1.0
    assert generation([1], seed=6).uniform() != first.uniform()
    first.emit(1)
    assert first.uniform() != second.uniform()
    unseeded = {generation([1]).uniform() for _ in range(8)}
    assert len(unseeded) == 8


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([], "the prompt is empty"),
        ([1, 100], "there is no token id 100; the model knows 0 to 99"),
        ([-1, 5], "token id -1"),
        ([1] * 20, "the prompt has 20 tokens"),
    ],
)
def test_prompts_that_the_model_cannot_take_are_refused(prompt: list[int], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        generation(prompt)


def test_logit_bias_names_known_tokens() -> None:
    with pytest.raises(ValidationError, match="logit_bias: there is no token id 100") as caught:
        generation([1], logit_bias={100: 1.0})
    assert caught.value.parameter == "logit_bias"


def test_a_model_without_limits_takes_any_prompt() -> None:
    info = replace_info(max_model_len=None, vocab_size=None)
    request = EngineRequest("r", [10**6] * 50, sampling=SamplingParams(max_tokens=2))
    assert Generation(request, [], info).max_tokens == 2
    assert Generation(replace(request, sampling=SamplingParams()), [], info).max_tokens > 10**6


def replace_info(**changes: object) -> EngineInfo:
    return EngineInfo(**{"model": "m", "eos_token_ids": (9,), **changes})
