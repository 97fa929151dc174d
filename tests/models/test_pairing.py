"""A video with its sound: ids and tensors of the class's own run over the whole request."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.errors import InvalidRequestError
from lazydecode.inputs import MultiModalInput
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.joining import join_items
from lazydecode.models.pairing import split_option
from lazydecode.models.pixels import finish_pixels
from lazydecode.processing.inputs import ProcessorInputs
from tests.builders import make_wav, tone
from tests.builders_video import make_video
from tests.models.conftest import LoadFrontend
from tests.models.reference import Reference

FAMILIES = ("qwen2_5_omni", "qwen3_omni_moe")
# All sounds are whole hops of the feature extractors: of a sound with a rest, a class counts one
# frame more beside a longer one than alone.
VIDEOS = (
    make_video(19, 10, (96, 64), audio=True),
    make_video(51, 10, (64, 96), audio=True),
)
SPEECH = make_wav(tone(rate=16000, seconds=1.3), rate=16000)
# Parts of a message; a number is a video, "s" a sound of its own, anything else text.
PROMPTS: dict[str, tuple[Any, ...]] = {
    "one video": (0,),
    "text around": ("look ", 1, " what is it?"),
    "two videos": (0, "and", 1),
    "sounds around": ("s", "a ", 1, "s", 0, " b"),
    "the same video twice": (0, "s", 0),
}
KNOWN = ("total_num_frames", "fps", "width", "height", "duration", "frames_indices")


@pytest.fixture(scope="module")
def reference(tiny_model: Callable[..., Path]) -> Callable[[str], Reference]:
    return functools.cache(lambda family: Reference(str(tiny_model(family, weights=False))))


class Request:
    """One prompt, as our front end and as the class take it."""

    def __init__(self, model: ModelFrontend, parts: Sequence[Any]) -> None:
        self.model = model
        self.parts = parts
        content: list[dict[str, str]] = []
        self.media: dict[str, list[bytes]] = {"video": [], "audio": []}
        self.pairs: list[tuple[int, int]] = []
        self.sources: list[int | None] = []
        """Per audio item the number of the video that it came out of."""
        for part in parts:
            if isinstance(part, int):
                content.append({"type": "video"})
                self.pairs.append((len(self.media["video"]), len(self.media["audio"])))
                self.sources.append(len(self.media["video"]))
                self.media["video"].append(VIDEOS[part])
                self.media["audio"].append(VIDEOS[part])
            elif part == "s":
                content.append({"type": "audio"})
                self.sources.append(None)
                self.media["audio"].append(SPEECH)
            else:
                content.append({"type": "text", "text": part})
        self.messages = [{"role": "user", "content": content}]

    def inputs(self, cache: Any = None) -> ProcessorInputs:
        media = {
            m: [self.model.info.get_media_io(m).load_bytes_ref(data) for data in group]
            for m, group in self.media.items()
        }
        return ProcessorInputs(
            self.model.render_chat(self.messages).text,
            self.model.info.parse_mm_data(media),
            cache=cache,
            processor_fingerprint=self.model.fingerprint,
            sound_pairs=self.pairs,
        )

    def apply(self, cache: Any = None) -> MultiModalInput:
        assert self.model.mm_processor is not None
        return self.model.mm_processor.apply(self.inputs(cache))

    def theirs(self, reference: Reference) -> dict[str, Any]:
        items = self.inputs().mm_data_items
        videos, sounds = items["video"].get_all(), items["audio"].get_all()
        return dict(
            reference.processor(
                text=[reference.text(self.messages)],
                videos=[frames for frames, _ in videos],
                video_metadata=[{k: metadata[k] for k in KNOWN} for _, metadata in videos],
                do_sample_frames=False,
                audio=sounds,
                sampling_rate=reference.rate,
                load_audio_from_video=True,
                audio_from_video_indices=self.sources,
                return_tensors="pt",
            )
        )


def joined(model: ModelFrontend, rendered: MultiModalInput, modality: str) -> dict[str, Any]:
    """The batch tensors that the engine makes of a modality's items."""
    items = [item for item in rendered["mm_kwargs"][modality] if item is not None]
    return join_items([finish_pixels(item, model.pixel_plan) for item in items])


@pytest.mark.parametrize(
    ("family", "prompt"),
    # The older class takes 0.2 s for any sound, as it pads to five minutes.
    [*(("qwen3_omni_moe", prompt) for prompt in PROMPTS), ("qwen2_5_omni", "sounds around")],
)
def test_ids_and_tensors_are_the_classs_own(
    frontend: LoadFrontend, reference: Callable[[str], Reference], family: str, prompt: str
) -> None:
    request = Request(frontend(family), PROMPTS[prompt])
    theirs = request.theirs(reference(family))
    ours = request.apply()
    assert ours["prompt_token_ids"] == theirs["input_ids"][0].tolist()
    video = joined(request.model, ours, "video")
    for name, value in video.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name
    audio = joined(request.model, ours, "audio")
    assert torch.equal(audio["feature_attention_mask"], theirs["feature_attention_mask"])
    # The last frame of a shorter sound sees the batch's padding; alone it sees none.
    last = int(theirs["feature_attention_mask"].sum(-1).min()) - 1
    assert torch.equal(audio["input_features"][..., :last], theirs["input_features"][..., :last])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_embedding_has_its_place(frontend: LoadFrontend, family: str) -> None:
    request = Request(frontend(family), PROMPTS["sounds around"])
    ours = request.apply()
    ids = torch.tensor(ours["prompt_token_ids"])
    assert request.model.mm_processor is not None
    for modality, embeds in request.model.mm_processor.family.expander.embed_ids.items():
        if modality not in ours["mm_placeholders"]:
            continue
        covered = torch.zeros(len(ids), dtype=torch.bool)
        starts = []
        for place in ours["mm_placeholders"][modality]:
            span = slice(place.offset, place.offset + place.length)
            mask = True if place.is_embed is None else torch.from_numpy(place.is_embed)
            assert not covered[span].any()
            covered[span] = mask
            starts.append(place.offset)
        assert starts == sorted(starts)
        assert torch.equal(covered, torch.isin(ids, torch.tensor(sorted(embeds))))


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_are_enough(frontend: LoadFrontend, family: str) -> None:
    request = Request(frontend(family), PROMPTS["sounds around"])
    inputs = request.inputs()
    assert request.model.mm_processor is not None
    rendering = request.model.mm_processor.render_from_headers(inputs)
    full = request.apply()
    assert rendering is not None
    assert not any(ref.is_decoded for m in inputs.mm_data_items.values() for ref in m.data)
    assert rendering.token_ids == full["prompt_token_ids"]
    assert rendering.placeholders == full["mm_placeholders"]


def test_hits_and_misses_mix_in_any_way(frontend: LoadFrontend) -> None:
    model = frontend("qwen3_omni_moe")
    request = Request(model, PROMPTS["sounds around"])
    expected = request.apply()
    warm = ((0,), (1,), ("s",), (0, 1), (0, "s"))
    for parts in itertools.chain(warm, [PROMPTS["sounds around"]]):
        cache = MultiModalProcessorOnlyCache(capacity_bytes=2**28)
        Request(model, parts).apply(cache)
        mixed = request.apply(cache)
        assert mixed["prompt_token_ids"] == expected["prompt_token_ids"]
        assert mixed["mm_placeholders"] == expected["mm_placeholders"]
        for modality in ("video", "audio"):
            tensors = joined(model, mixed, modality)
            for name, value in joined(model, expected, modality).items():
                assert torch.equal(tensors[name], value), (parts, name)


def test_a_family_without_pairs_says_so(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_5_vl")
    assert model.mm_processor is not None
    with pytest.raises(InvalidRequestError, match="takes no video with its sound"):
        model.mm_processor.family.build_prompt("x", {"video": [], "audio": []}, pairs=[(0, 0)])


def test_the_option_is_taken_out_of_an_items_options() -> None:
    assert split_option({}) == ({}, None)
    assert split_option({"use_audio_in_video": True, "fps": 2}) == ({"fps": 2}, True)
    assert split_option({"load_audio_from_video": False}) == ({}, False)
    scoped = {"videos_kwargs": {"use_audio_in_video": True, "fps": 2}}
    assert split_option(scoped) == ({"videos_kwargs": {"fps": 2}}, True)
    assert scoped["videos_kwargs"] == {"use_audio_in_video": True, "fps": 2}
    assert split_option({"videos_kwargs": {"use_audio_in_video": True}}) == ({}, True)
    for wrong in (1, "true", None):
        with pytest.raises(InvalidRequestError, match="true or false"):
            split_option({"use_audio_in_video": wrong})
