"""Which token is chosen: each parameter on scores where the answer is known."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from lazydecode.engine.generation import Generation
from lazydecode.engine.protocol import EngineInfo, EngineRequest, SamplingParams
from lazydecode.engine.sampling import TokenChooser

INFO = EngineInfo(model="m", vocab_size=50, eos_token_ids=(3,))
PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.1])
SCORES = PROBABILITIES.log()


def generation(prompt: list[int] | None = None, **sampling: object) -> Generation:
    request = EngineRequest("r", prompt or [40], sampling=SamplingParams(**sampling))
    return Generation(request, [], INFO)


def choose(scores: torch.Tensor, *generations: Generation) -> list[int]:
    chooser = TokenChooser(generations, scores.shape[-1], scores.device)
    rows = scores.expand(len(generations), -1).clone()
    return [token for token, _ in chooser.choose(rows)]


def draws(count: int = 2000, **sampling: object) -> Counter[int]:
    """Tokens of as many requests as `count`, each with its own seed."""
    generations = [generation(seed=seed, **sampling) for seed in range(count)]
    return Counter(choose(SCORES, *generations))


def test_temperature_zero_takes_the_most_likely() -> None:
    assert choose(SCORES, generation(temperature=0.0), generation(temperature=0.0)) == [0, 0]


def test_draws_follow_the_distribution() -> None:
    counts = draws()
    for token, probability in enumerate(PROBABILITIES.tolist()):
        # Four standard deviations of a binomial; the seeds are fixed, so this never flickers.
        spread = 4 * math.sqrt(2000 * probability * (1 - probability))
        assert abs(counts[token] - 2000 * probability) < spread


def test_temperature_sharpens_and_flattens() -> None:
    cold, warm = draws(temperature=0.25), draws(temperature=4.0)
    assert cold[0] / 2000 == pytest.approx(0.5**4 / float((PROBABILITIES**4).sum()), abs=0.04)
    flat = PROBABILITIES**0.25
    assert warm[3] / 2000 == pytest.approx(float(flat[3] / flat.sum()), abs=0.04)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {0}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"min_p": 0.4}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0}),
        ({"top_k": 3, "min_p": 0.25}, {0, 1, 2}),
        ({"top_p": 0.8, "min_p": 0.35}, {0, 1}),
    ],
)
def test_filters_keep_exactly_their_tokens(sampling: dict[str, float], kept: set[int]) -> None:
    assert set(draws(600, **sampling)) == kept


def test_logit_bias_forbids_and_forces() -> None:
    assert choose(SCORES, generation(temperature=0.0, logit_bias={0: -100.0})) == [1]
    assert choose(SCORES, generation(temperature=0.0, logit_bias={3: 100.0})) == [3]
    assert set(draws(300, logit_bias={0: -100.0, 1: -100.0})) == {2, 3}


def test_stop_tokens_are_out_of_reach_before_min_tokens() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, 9.0])
    held = generation(temperature=0.0, min_tokens=1)
    assert choose(scores, held) == [2]
    held.emit(2)
    assert choose(scores, held) == [3]


def test_repetition_penalty_counts_prompt_and_output_as_transformers_does() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    scores = torch.tensor([[2.0, -1.0, 1.5, 0.5]])
    ids = [0, 1, 1]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), scores.clone())
    one = generation(ids[:2], temperature=0.0, repetition_penalty=1.7, logprobs=0)
    one.emit(1)
    assert choose(scores[0], one) == [int(theirs.argmax())] == [2]


def test_presence_and_frequency_count_the_output_alone() -> None:
    scores = torch.tensor([1.0, 0.9, 0.0, 0.0])
    one = generation([0, 0, 0], temperature=0.0, presence_penalty=0.2)
    assert choose(scores, one) == [0]
    one.emit(0)
    assert choose(scores, one) == [1]
    often = generation([5], temperature=0.0, frequency_penalty=0.06)
    chooser = TokenChooser([often], 4, scores.device)
    seen = []
    for _ in range(5):
        token = chooser.choose(scores.clone().unsqueeze(0))[0][0]
        often.emit(token)
        seen.append(token)
    # 1.0, 0.9 and 0.06 less for each earlier choice: the other takes over when it leads.
    assert seen == [0, 0, 1, 0, 1]


def test_token_ids_beyond_the_scores_are_no_obstacle() -> None:
    one = generation([49, 1], temperature=0.0, repetition_penalty=2.0, stop_token_ids=(48,))
    assert choose(torch.tensor([0.1, 0.5, 0.4, 0.0]), one) == [2]


def test_logprobs_come_before_temperature_and_penalties() -> None:
    one = generation(temperature=2.0, logit_bias={0: -100.0}, seed=1, logprobs=2)
    chooser = TokenChooser([one], 4, SCORES.device)
    token, described = chooser.choose(SCORES.clone().unsqueeze(0))[0]
    assert described is not None
    assert described.token_id == token != 0
    assert described.logprob == pytest.approx(float(SCORES[token]), abs=1e-6)
    assert [t for t, _ in described.top] == [0, 1]
    chosen_alone = TokenChooser([generation(temperature=0.0, logprobs=0)], 4, SCORES.device)
    assert chosen_alone.choose(SCORES.clone().unsqueeze(0))[0][1].top == []  # type: ignore[union-attr]


def test_a_seed_gives_the_same_token_in_any_company() -> None:
    alone = choose(SCORES, generation(seed=4))
    beside = choose(SCORES, generation(temperature=0.0), generation(seed=4), generation(seed=9))
    assert beside[1] == alone[0]


def test_done_rows_are_left_alone() -> None:
    done, alive = generation(seed=1), generation(temperature=0.0)
    done.aborted = True
    assert choose(SCORES, done, alive)[1] == 0


def test_scores_that_are_no_numbers_are_a_failure_of_the_model() -> None:
    with pytest.raises(RuntimeError, match="not finite"):
        choose(torch.tensor([float("nan"), 1.0]), generation(seed=1))


def test_the_last_token_is_within_reach_of_rounding() -> None:
    class AlmostOne(Generation):
        def uniform(self) -> float:
            return 1.0 - 2.0**-53

    request = EngineRequest("r", [40], sampling=SamplingParams(top_k=2))
    one = AlmostOne(request, [], INFO)
    assert choose(SCORES, one) == [1]
