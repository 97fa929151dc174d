"""Which requests with sound share a batch, and that none is changed by another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lazydecode.engine.generation import Generation, PlacedItem
from lazydecode.engine.protocol import EngineRequest, SamplingParams
from lazydecode.engine.transformers import TransformersRunner
from lazydecode.inputs import (
    BatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PaddedField,
    PlaceholderRange,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_decoders_beside_encoders_share_a_batch_if_their_prompts_are_of_one_length(
    tiny_model: Callable[..., Path],
) -> None:
    runner = TransformersRunner(model=str(tiny_model("whisper")), dtype="float32")
    noise = torch.Generator().manual_seed(2)

    def request(number: int) -> Generation:
        elem = MultiModalFieldElem(sounds[number], BatchedField())
        item = PlacedItem(
            "audio", MultiModalKwargsItem({"input_features": elem}), PlaceholderRange(0, 0)
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=8)
        return Generation(
            EngineRequest(f"r{number}", prompts[number], sampling=sampling), [item], runner.info
        )

    sounds = [torch.randn(80, 3000, generator=noise) for _ in range(3)]
    prompts = [[642, 643, 648], [642, 643], [642, 644, 648]]
    alone = []
    for number in range(3):
        generation = request(number)
        for _ in runner.generate([generation]):
            pass
        alone.append(generation.output_token_ids)
    groups = runner.group([request(number) for number in range(3)])
    assert sorted(sorted(g.request_id for g in group) for group in groups) == [["r0", "r2"], ["r1"]]
    for group in groups:
        for _ in runner.generate(group):
            pass
        for generation in group:
            assert generation.output_token_ids == alone[int(generation.request_id[1:])]


def test_what_cannot_be_stacked_is_not_tried_twice(tiny_model: Callable[..., Path]) -> None:
    runner = TransformersRunner(model=str(tiny_model("qwen3_asr")), dtype="float32")
    frames = (200, 400)

    def request(number: int) -> Generation:
        fields = {
            "input_features": torch.zeros(128, frames[number]),
            "input_features_mask": torch.ones(frames[number], dtype=torch.long),
        }
        item = MultiModalKwargsItem(
            {name: MultiModalFieldElem(value, BatchedField()) for name, value in fields.items()}
        )
        tokens = frames[number] // 100 * 13
        audio_id = runner._model.config.audio_token_id
        request = EngineRequest(f"r{number}", [5, *[audio_id] * tokens, 6], sampling=GREEDY)
        place = PlaceholderRange(1, tokens)
        return Generation(request, [PlacedItem("audio", item, place)], runner.info)

    (together,) = runner.group([request(0), request(1)])
    with pytest.raises(AttributeError, match="shape"):
        next(iter(runner.generate(together)))
    assert [len(group) for group in runner.group([request(0), request(1), request(0)])] == [2, 1]


def test_a_short_recording_is_not_padded_to_a_long_one(tiny_model: Callable[..., Path]) -> None:
    pytest.importorskip("torchaudio")
    runner = TransformersRunner(model=str(tiny_model("granite_speech")), dtype="float32")

    def request(number: int, frames: int) -> Generation:
        elem = MultiModalFieldElem(torch.zeros(1, frames, 160), PaddedField(0))
        item = MultiModalKwargsItem({"input_features": elem})
        made = EngineRequest(f"r{number}", [5, 6], sampling=GREEDY)
        return Generation(made, [PlacedItem("audio", item, PlaceholderRange(0, 1))], runner.info)

    groups = runner.group([request(0, 100), request(1, 175), request(2, 100)])
    assert sorted([g.request_id for g in group] for group in groups) == [["r0", "r2"], ["r1"]]
