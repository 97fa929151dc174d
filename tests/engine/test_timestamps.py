"""The rules of times between words, against those of Transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from lazydecode.engine.generation import Generation
from lazydecode.engine.protocol import EngineInfo, EngineRequest, SamplingParams, TimestampRule
from lazydecode.engine.sampling import TokenChooser
from lazydecode.engine.timestamps import apply_timestamp_rule

END, FIRST, SIZE = 20, 30, 60
PROMPT = [21, 22, 23]


@pytest.mark.parametrize("max_initial", [None, 5])
@pytest.mark.parametrize("louder", [0.0, 3.0, -3.0])
def test_the_same_tokens_are_left_as_in_transformers(
    max_initial: int | None, louder: float
) -> None:
    config = GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id = FIRST - 1
    config.max_initial_timestamp_index = max_initial
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    draw = torch.Generator().manual_seed(7)
    for _ in range(20):
        output: list[int] = []
        for _ in range(30):
            scores = torch.randn(SIZE, generator=draw)
            scores[FIRST:] += louder
            expected = theirs(torch.tensor([PROMPT + output]), scores[None])[0]
            ours = scores.clone()
            apply_timestamp_rule(ours, output, TimestampRule(FIRST, max_initial), END)
            assert torch.equal(ours, expected), output
            token = int(torch.multinomial(ours.softmax(-1), 1, generator=draw))
            if token == END:
                break
            output.append(token)


def test_a_request_with_the_rule_begins_with_a_time() -> None:
    info = EngineInfo(model="m", vocab_size=SIZE, eos_token_ids=(END,))
    scores = torch.zeros(1, SIZE)
    scores[0, 5] = 9.0
    for rule, expected in ((None, 5), (TimestampRule(FIRST, 3), FIRST)):
        sampling = SamplingParams(temperature=0.0, timestamps=rule)
        generation = Generation(EngineRequest("r", PROMPT, sampling=sampling), [], info)
        chooser = TokenChooser([generation], SIZE, scores.device)
        assert chooser.choose(scores.clone())[0][0] == expected
