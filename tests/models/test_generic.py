"""The generic processor on real media: headers, tokens in, refusals, text that stays text."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.errors import InvalidRequestError, LazyDecodeError, TooManyItemsError
from lazydecode.media.base import MediaRef
from lazydecode.models.expansion import _SLOT_END, _SLOT_START, ItemText, PromptExpander
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.generic import GenericMultiModalProcessor
from lazydecode.models.proof import Proof
from lazydecode.models.template import RenderedPrompt
from lazydecode.models.tokenization import CollapsedText
from lazydecode.processing.inputs import ProcessorInputs
from tests.builders import make_jpeg, make_png, make_wav, noise, tone
from tests.builders_video import make_mp4
from tests.models.conftest import LoadFrontend
from tests.models.reference import picture

IMAGE: dict[str, str] = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def user(*parts: dict[str, str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def refs(model: ModelFrontend, **media: list[bytes]) -> dict[str, list[MediaRef[Any]]]:
    return {
        m: [model.info.get_media_io(m).load_bytes_ref(data) for data in group]
        for m, group in media.items()
    }


def inputs(model: ModelFrontend, prompt: Any, media: Any, **more: Any) -> ProcessorInputs:
    if isinstance(prompt, RenderedPrompt):
        prompt = prompt.text
    return ProcessorInputs(
        prompt,
        model.info.parse_mm_data(media),
        processor_fingerprint=model.fingerprint,
        **more,
    )


def processor(model: ModelFrontend) -> GenericMultiModalProcessor:
    assert model.mm_processor is not None
    return model.mm_processor


# -- headers


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision", "smolvlm"])
def test_headers_give_what_decoding_gives(frontend: LoadFrontend, family: str) -> None:
    model = frontend(family)
    media: dict[str, list[bytes]] = {"image": [make_jpeg((200, 130)), make_png((90, 300))]}
    parts = [IMAGE, text(" and "), IMAGE]
    if "video" in model.modalities:
        media["video"] = [make_mp4(24, 12, (112, 112))]
        parts.append({"type": "video"})
    prompt = model.render_chat(user(*parts, text(" compare")))
    media_refs = refs(model, **media)
    rendering = processor(model).render_from_headers(inputs(model, prompt, media_refs))
    assert rendering is not None
    assert not any(ref.is_decoded for group in media_refs.values() for ref in group)
    full = processor(model).apply(inputs(model, prompt, media_refs))
    assert rendering.token_ids == full["prompt_token_ids"]
    assert rendering.placeholders == full["mm_placeholders"]
    for modality, group in rendering.metadata.items():
        for small, item in zip(group, full["mm_kwargs"][modality], strict=True):
            assert item is not None
            for name, elem in small.items():
                assert torch.equal(elem.data, item[name].data)  # type: ignore[arg-type]


def test_audio_headers_give_what_decoding_gives(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_audio")
    sounds = [
        make_wav(tone(rate=44100, seconds=1.3), rate=44100),
        make_wav(tone(rate=16000, seconds=0.7), rate=16000),
    ]
    prompt = model.render_chat(user({"type": "audio"}, text("x"), {"type": "audio"}))
    media = refs(model, audio=sounds)
    rendering = processor(model).render_from_headers(inputs(model, prompt, media))
    assert rendering is not None
    assert not any(ref.is_decoded for ref in media["audio"])
    full = processor(model).apply(inputs(model, prompt, media))
    assert rendering.token_ids == full["prompt_token_ids"]


def test_a_count_that_follows_from_content_needs_the_content(frontend: LoadFrontend) -> None:
    model = frontend("video_llama_3")
    prompt = model.render_chat(user({"type": "video"}))
    media = refs(model, video=[make_mp4(12, 12, (112, 112))])
    assert processor(model).render_from_headers(inputs(model, prompt, media)) is None


def test_a_file_without_a_header_needs_the_content(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_vl")
    prompt = model.render_chat(user(IMAGE))
    media = refs(model, image=[b"no picture"])
    assert processor(model).render_from_headers(inputs(model, prompt, media)) is None


def test_a_size_is_sketched_once(frontend: LoadFrontend) -> None:
    family = processor(frontend("qwen2_vl")).family
    first = family.sketch("image", (77, 99))
    assert family.sketch("image", (77, 99)) is first
    other = family.sketch("image", (77, 99), {"max_pixels": 3200})
    assert other is not None and other is not first


# -- prompts


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "pixtral", "minicpmv4_6", "idefics2"])
def test_user_text_that_spells_a_placeholder_stays_text(
    frontend: LoadFrontend, family: str
) -> None:
    """Neither counted as an item nor as a control token, wherever it stands."""
    model = frontend(family)
    token = processor(model).family.facts.modalities["image"].placeholder
    spelled = f"before {token} after"
    prompt = model.render_chat(
        [
            {"role": "user", "content": [text(spelled), IMAGE, text(spelled)]},
            {"role": "assistant", "content": [text(spelled)]},
            {"role": "user", "content": [text("next")]},
        ]
    )
    result = processor(model).apply(inputs(model, prompt, {"image": [picture(60, 90)]}))
    clean = model.render_chat(
        [
            {"role": "user", "content": [text("before after"), IMAGE, text("before after")]},
            {"role": "assistant", "content": [text("before after")]},
            {"role": "user", "content": [text("next")]},
        ]
    )
    expected = processor(model).apply(inputs(model, clean, {"image": [picture(60, 90)]}))
    added = model.prompt_tokenizer.added_ids
    ours = [i for i in result["prompt_token_ids"] if i in added]
    assert ours == [i for i in expected["prompt_token_ids"] if i in added]
    (place,) = result["mm_placeholders"]["image"]
    (wanted,) = expected["mm_placeholders"]["image"]
    assert (place.length, place.num_embeds) == (wanted.length, wanted.num_embeds)
    decoded = model.decode(result["prompt_token_ids"], skip_special_tokens=False)
    assert decoded.count(spelled) == 3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "molmo2"])
def test_token_ids_with_placeholders_work_like_text(frontend: LoadFrontend, family: str) -> None:
    model = frontend(family)
    prompt = model.render_chat(user(text("see "), IMAGE, text("\nand "), IMAGE, text("!")))
    media = {"image": [picture(60, 90), picture(300, 120)]}
    by_text = processor(model).apply(inputs(model, prompt, media))
    tokens = processor(model).family.encode_text(prompt.text)
    by_tokens = processor(model).apply(inputs(model, tokens, media))
    assert by_tokens["prompt_token_ids"] == by_text["prompt_token_ids"]
    assert by_tokens["mm_placeholders"] == by_text["mm_placeholders"]


@pytest.mark.parametrize(("written", "given"), [(1, 2), (2, 1), (0, 1)])
def test_a_prompt_needs_one_placeholder_per_item(
    frontend: LoadFrontend, written: int, given: int
) -> None:
    model = frontend("qwen2_vl")
    prompt = model.render_chat(user(*[IMAGE] * written, text("x")))
    media = {"image": [picture(60, 60)] * given}
    with pytest.raises(InvalidRequestError, match="placeholder"):
        processor(model).apply(inputs(model, prompt, media))
    with pytest.raises(InvalidRequestError, match="placeholder"):
        tokens = model.tokenize_prompt(prompt)
        processor(model).apply(inputs(model, tokens, media))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_placeholders_are_found_as_the_class_finds_them(
    frontend: LoadFrontend, family: str
) -> None:
    expander = processor(frontend(family)).family.expander
    token = expander.placeholders["image"]
    shape = ItemText("image", CollapsedText(token))
    for wanted, spelled in ((1, f"a {token} b"), (2, f"{token}{token}\n"), (0, "a"), (2, token)):
        items = {"image": [shape] * wanted}
        filled = expander._fill_slots(spelled, items)
        pieces, order = expander._cut(spelled, items)
        slots = [f"{_SLOT_START}{m}:{index}{_SLOT_END}" for m, index in order]
        assert "".join(map("".join, zip(pieces, [*slots, ""], strict=True))) == filled
    for find in (expander._fill_slots, expander._cut):
        with pytest.raises(InvalidRequestError, match="more media placeholders than"):
            find(token * 3, {"image": [shape]})


@pytest.mark.parametrize("items", [{}, {"image": 1}])
def test_no_text_passes_for_the_place_of_an_item(
    frontend: LoadFrontend, items: dict[str, int]
) -> None:
    """Of a class with a search of its own, places are marked in the text."""
    own = processor(frontend("qwen2_vl")).family.expander
    expander = PromptExpander(
        own.processor,
        own.tokenizer,
        placeholders=own.placeholders,
        embed_ids=own.embed_ids,
        uses_class_search=False,
    )
    placeholder = own.placeholders["image"]
    text = f"\U000f0002image:7\U000f0003 {placeholder * len(items)} \U000f0002audio:0\U000f0003"
    texts = {m: [ItemText(m, CollapsedText(placeholder))] * n for m, n in items.items()}
    expanded = expander.expand(text, texts, add_special_tokens=False)
    assert expanded.token_ids == own.tokenizer.hf_tokenizer.encode(text)


def test_wrappers_are_not_part_of_a_range_and_gaps_are_masked(frontend: LoadFrontend) -> None:
    model = frontend("pixtral")
    prompt = model.render_chat(user(IMAGE))
    result = processor(model).apply(inputs(model, prompt, {"image": [picture(64, 48)]}))
    (place,) = result["mm_placeholders"]["image"]
    ids = result["prompt_token_ids"][place.offset : place.offset + place.length]
    tokens = [model.tokenizer.convert_ids_to_tokens(i) for i in ids]
    assert tokens[0] == tokens[-1] == "[IMG]"
    assert place.is_embed is not None
    assert [t == "[IMG]" for t in tokens] == place.is_embed.tolist()
    assert set(tokens) == {"[IMG]", "[IMG_BREAK]"}


# -- refusals


def test_an_item_that_the_processor_refuses_is_a_client_error_with_its_index(
    frontend: LoadFrontend,
) -> None:
    model = frontend("qwen2_vl")
    prompt = model.render_chat(user(IMAGE, IMAGE))
    media = refs(model, image=[make_png((40, 40)), make_png((402, 2))])
    with pytest.raises(LazyDecodeError) as caught:
        processor(model).apply(inputs(model, prompt, media))
    assert caught.value.status == 400
    assert (caught.value.modality, caught.value.index) == ("image", 1)
    assert "aspect ratio must be smaller than 200" in str(caught.value)
    with pytest.raises(InvalidRequestError, match="aspect ratio") as from_header:
        processor(model).render_from_headers(inputs(model, prompt, media))
    assert (from_header.value.modality, from_header.value.index) == ("image", 1)


def test_a_modality_that_the_family_lacks_is_named(frontend: LoadFrontend) -> None:
    model = frontend("llava")
    with pytest.raises(InvalidRequestError, match="takes no audio"):
        processor(model).family.process("audio", None)


def test_more_items_than_the_family_takes_are_refused(frontend: LoadFrontend) -> None:
    model = frontend("glmasr")
    assert model.max_items == {"audio": 1}
    clip = (tone(seconds=0.3).astype("float32"), 16000)
    with pytest.raises(TooManyItemsError, match="at most 1"):
        model.info.parse_mm_data({"audio": [clip, clip]})


@pytest.mark.parametrize(
    ("width", "message"),
    [(8, "hidden size 8; the model's is 64"), (64, "need their image_grid_thw")],
)
def test_embeddings_that_the_model_cannot_place_are_refused(
    frontend: LoadFrontend, width: int, message: str
) -> None:
    model = frontend("qwen2_vl")
    prompt = model.render_chat(user(IMAGE))
    with pytest.raises(ValueError, match=message):
        processor(model).apply(inputs(model, prompt, {"image": [torch.zeros(4, width)]}))


# -- identity and threads


def test_a_random_processor_is_never_answered_from_the_cache(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_vl")
    family = processor(model).family
    shaky = GenericMultiModalProcessor(model.info, _with_proof(family, random={"image": "chance"}))
    cache = MultiModalProcessorOnlyCache(capacity_bytes=1 << 26)
    prompt = model.render_chat(user(IMAGE))
    media = {"image": [picture(60, 60)]}
    first = shaky.apply(inputs(model, prompt, media, cache=cache))
    second = shaky.apply(inputs(model, prompt, media, cache=cache))
    assert first["mm_hashes"] != second["mm_hashes"]
    steady = [processor(model).apply(inputs(model, prompt, media, cache=cache)) for _ in "ab"]
    assert steady[0]["mm_hashes"] == steady[1]["mm_hashes"]


def _with_proof(family: Any, **changes: Any) -> Any:
    proof: Proof = dataclasses.replace(family.proof, **changes)
    copy = object.__new__(type(family))
    copy.__dict__.update(family.__dict__)
    copy.proof = proof
    return copy


@pytest.mark.parametrize("family", ["qwen2_vl", "hyperclovax_vision_v2", "gemma3n"])
def test_many_threads_get_the_same_results(frontend: LoadFrontend, family: str) -> None:
    model = frontend(family)
    prompt = model.render_chat(user(IMAGE, text(" what?")))
    images = [noise((60 + 20 * n, 90), seed=n) for n in range(4)]

    def run(number: int) -> Any:
        result = processor(model).apply(inputs(model, prompt, {"image": [images[number % 4]]}))
        return result["prompt_token_ids"], result["mm_kwargs"]["image"][0]

    alone = [run(n) for n in range(4)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(run, range(24)))
    for number, (ids, item) in enumerate(together):
        expected_ids, expected = alone[number % 4]
        assert ids == expected_ids
        assert all(torch.equal(item[n].data, expected[n].data) for n in expected)
