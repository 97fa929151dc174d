"""Embeddings in the place of media, through the server: the same answers, and clear refusals."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from lazydecode.engine.loading import load_model
from lazydecode.engine.wire import decode_item
from tests.builders import encode_image, make_wav, noise, tone
from tests.builders_video import make_mp4
from tests.models.reference import Reference
from tests.origin import Origin
from tests.server.harness import Server, data_url, image, request, text, video

GRID = np.array([1, 4, 6])
"""Of an item of six tokens."""
HIDDEN = 64
DTYPE = torch.bfloat16
"""Of the tiny models: floats are handed out and computed with in it."""


def npy(array: Any) -> str:
    if isinstance(array, torch.Tensor) and array.is_floating_point():
        array = array.float()  # numpy has no bfloat16
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array))
    return base64.b64encode(buffer.getvalue()).decode()


def torch_file(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def embeds(modality: str, value: Any, **fields: Any) -> dict[str, Any]:
    kind = f"{modality}_embeds"
    return {"type": kind, kind: value, **fields}


def values(tokens: int = 6, hidden: int = HIDDEN) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(tokens).standard_normal((tokens, hidden)).astype(np.float32)


def picture(array: Any = None, grid: Any = GRID, **more: Any) -> dict[str, Any]:
    array = values() if array is None else array
    return embeds("image", {"image_embeds": npy(array), "image_grid_thw": npy(grid), **more})


def answer(server: Server, *parts: dict[str, Any]) -> str:
    body = request(*parts, max_tokens=8, temperature=0, ignore_eos=True)
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def vision(tiny_model: Callable[..., Path]) -> tuple[Any, Reference]:
    path = str(tiny_model("qwen2_5_vl"))
    model = load_model(path, device="cpu", dtype="auto", trust_remote_code=False)
    return model, Reference(path)


def test_a_pictures_own_embeddings_answer_as_the_picture(
    chat_server: Server, vision: tuple[Any, Reference]
) -> None:
    model, reference = vision
    pictures = [noise((90, 60), seed=1), noise((56, 140), seed=2)]
    processed = reference.processor.image_processor(pictures, return_tensors="pt")
    with torch.inference_mode():
        features = model.model.get_image_features(**processed).pooler_output
    grids = processed["image_grid_thw"]
    urls = [data_url(encode_image(one, "PNG"), "image/png") for one in pictures]
    expected = answer(chat_server, text("a"), image(urls[0]), text("b"), image(urls[1]))
    by_name = [
        embeds("image", {"image_embeds": npy(one), "image_grid_thw": npy(grid)})
        for one, grid in zip(features, grids, strict=True)
    ]
    assert answer(chat_server, text("a"), by_name[0], text("b"), by_name[1]) == expected
    # In one file, of two other kinds.
    tensors = {"image_embeds": features[0].clone(), "image_grid_thw": grids[0].clone()}
    as_torch = embeds("image", torch_file(tensors))
    arrays = {"image_embeds": features[1].float().numpy(), "image_grid_thw": grids[1:].numpy()}
    file = base64.b64encode(safetensors.numpy.save(arrays)).decode()
    as_safetensors = embeds("image", f"data:application/octet-stream;base64,{file}")
    assert answer(chat_server, text("a"), as_torch, text("b"), as_safetensors) == expected
    # A file of one tensor is that tensor, whatever it is called there.
    alone = {"x": features[1].float().numpy()}
    file = base64.b64encode(safetensors.numpy.save(alone)).decode()
    url = f"data:application/octet-stream;base64,{file}"
    named = embeds("image", {"image_embeds": url, "image_grid_thw": npy(grids[1])})
    assert answer(chat_server, text("a"), as_torch, text("b"), named) == expected
    other = embeds("image", {"image_embeds": npy(-features[0]), "image_grid_thw": npy(grids[0])})
    assert answer(chat_server, text("a"), other, text("b"), by_name[1]) != expected


def test_a_videos_own_embeddings_answer_as_the_video_beside_a_picture(
    chat_server: Server, vision: tuple[Any, Reference]
) -> None:
    model, _ = vision
    clip = data_url(make_mp4(frames=8), "video/mp4")
    rendered = chat_server.render(request(video(clip))).json()["features"]["kwargs_data"]
    (entry,) = rendered["video"]
    item = decode_item(base64.b64decode(entry))
    frontend = chat_server.context.renderer.frontend
    from lazydecode.models.pixels import finish_pixels

    tensors: dict[str, Any] = finish_pixels(item, frontend.pixel_plan).get_data()
    grid = tensors["video_grid_thw"]
    with torch.inference_mode():
        (features,) = model.model.get_video_features(
            tensors["pixel_values_videos"], grid[None]
        ).pooler_output
    seconds = torch.as_tensor(tensors["second_per_grid_ts"])
    part = embeds(
        "video",
        {
            "video_embeds": npy(features),
            "video_grid_thw": npy(grid),
            "second_per_grid_ts": npy(seconds.reshape(1)),
        },
    )
    still = image(data_url(encode_image(noise((60, 60)), "PNG"), "image/png"))
    assert answer(chat_server, still, part) == answer(chat_server, still, video(clip))


def test_a_sounds_own_embeddings_answer_as_the_sound(
    audio_server: Server, tiny_model: Callable[..., Path]
) -> None:
    path = str(tiny_model("qwen2_audio"))
    model = load_model(path, device="cpu", dtype="auto", trust_remote_code=False)
    sound = make_wav(tone(rate=16000, seconds=1.1), rate=16000)
    part = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"},
    }
    rendered = audio_server.render(request(part, text("x"))).json()
    item = decode_item(base64.b64decode(rendered["features"]["kwargs_data"]["audio"][0]))
    found: list[torch.Tensor] = []
    projector = dict(model.named_modules())["model.multi_modal_projector"]
    projector.register_forward_hook(lambda *args: found.append(args[-1]))
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([rendered["token_ids"]]),
            attention_mask=torch.ones(1, len(rendered["token_ids"]), dtype=torch.long),
            **{name: value[None] for name, value in item.get_data().items()},
        )
    (place,) = rendered["features"]["mm_placeholders"]["audio"]
    features = found[0][0, : place["length"]]
    given = embeds("audio", npy(features))
    assert answer(audio_server, given, text("x")) == answer(audio_server, part, text("x"))


def test_the_render_route_hands_embeddings_out(chat_server: Server) -> None:
    array = values()
    for payload in ({}, {"mm_payload": "none"}):
        answered = chat_server.render(request(text("a"), picture(array), **payload)).json()
        (place,) = answered["features"]["mm_placeholders"]["image"]
        assert place["length"] == len(array)
        span = answered["token_ids"][place["offset"] : place["offset"] + place["length"]]
        assert len(set(span)) == 1
        if not payload:
            (entry,) = answered["features"]["kwargs_data"]["image"]
            item: dict[str, Any] = decode_item(base64.b64decode(entry)).get_data()
            assert sorted(item) == ["image_embeds", "image_grid_thw"]
            assert torch.equal(item["image_embeds"], torch.from_numpy(array).to(DTYPE))
            assert item["image_grid_thw"].tolist() == GRID.tolist()


def test_embeddings_are_known_by_their_bytes_and_change_no_cache(
    chat_server: Server, shared_origin: Origin
) -> None:
    def hashes(*parts: dict[str, Any]) -> list[str]:
        answered = chat_server.render(request(*parts)).json()
        return list(answered["features"]["mm_hashes"]["image"])

    cache = chat_server.context.renderer.render_cache
    assert cache is not None
    before = cache.snapshot()
    one, other = values(), values() + 1
    both = hashes(picture(one), picture(other))
    assert both[0] != both[1]
    assert hashes(picture(one)) == both[:1]
    # The same numbers from a file of another kind, fetched.
    body = safetensors.numpy.save({"image_embeds": one, "image_grid_thw": GRID})
    url = shared_origin.serve("/one.safetensors", body)
    assert hashes(embeds("image", url)) == both[:1]
    assert cache.snapshot() == before


def refused(server: Server, *parts: dict[str, Any], index: int = 0) -> str:
    response = server.render(request(*parts))
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert error["index"] == index
    kinds = {part["type"].split("_")[0] for part in parts}
    assert error["modality"] in kinds
    return str(error["message"])


ONE = torch.ones(6, HIDDEN)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (picture(values(6, 63)), "hidden size 63"),
        (picture(values(5)), "stands for 6 tokens"),
        (picture(values()[0]), "shape"),
        (picture(np.zeros((0, HIDDEN), np.float32)), "shape"),
        (picture(np.ones((6, HIDDEN), np.int64)), "floating-point"),
        (picture(np.full((6, HIDDEN), np.nan, np.float32)), "not finite"),
        (picture(grid=[1, 4]), "3 whole numbers"),
        (picture(grid=[1.0, 4.0, 6.0]), "3 whole numbers"),
        (picture(grid=[1, 3, 8]), "multiples of 2"),
        (picture(grid=[0, 4, 6]), "cannot be"),
        (picture(grid=[-1, -4, 6]), "cannot be"),
        (picture(grid=[2**40, 4, 6]), "cannot be"),
        (picture(more=npy([1])), "not known: ['more']"),
        (embeds("image", npy(values())), "missing: ['image_grid_thw']"),
        (embeds("image", {"image_embeds": npy(values())}), "missing: ['image_grid_thw']"),
        (embeds("image", {"image_embeds": 5}), "must be a string"),
        (
            embeds("image", {"image_embeds": torch_file({"a": ONE, "b": ONE.clone()})}),
            "2 tensors, not one",
        ),
        (embeds("image", {}), "empty"),
        (embeds("image", None), "missing"),
        (embeds("image", 7), "must be a string"),
        (embeds("image", "!!"), "base64"),
        (embeds("image", base64.b64encode(b"no array").decode()), "not recognised"),
        (embeds("image", torch_file({"x": print})), "print"),
        (embeds("image", "file:///etc/passwd"), "local files"),
        ({**picture(), "uuid": "x"}, "no cache"),
        (embeds("audio", npy(values())), "audio"),
    ],
)
def test_wrong_embeddings_are_refused(
    chat_server: Server, part: dict[str, Any], reason: str
) -> None:
    assert reason in refused(chat_server, part)


def test_a_refusal_names_the_item_that_the_client_can_count(chat_server: Server) -> None:
    assert "hidden size 3" in refused(chat_server, picture(), picture(values(6, 3)), index=1)
    still = image(data_url(encode_image(noise((60, 60)), "PNG"), "image/png"))
    assert "cannot have both" in refused(chat_server, still, picture(), index=1)


def test_a_huge_declared_size_is_refused_before_it_is_made(chat_server: Server) -> None:
    header = b'{"x":{"dtype":"F32","shape":[1099511627776,64],"data_offsets":[0,4]}}'
    data = struct.pack("<Q", len(header)) + header + bytes(4)
    part = embeds("image", base64.b64encode(data).decode())
    assert "does not fit 4 bytes" in refused(chat_server, part)


def test_items_of_one_request_come_with_the_same_tensors(chat_server: Server) -> None:
    def clip(**more: Any) -> dict[str, Any]:
        arrays = {"video_embeds": npy(values()), "video_grid_thw": npy(GRID), **more}
        return embeds("video", arrays)

    timed = clip(second_per_grid_ts=npy([0.5]))
    assert "the same tensors" in refused(chat_server, timed, clip(), index=1)


def test_a_server_that_does_not_take_them_says_so(render_server: Server) -> None:
    assert "does not take embeddings" in refused(render_server, picture())
