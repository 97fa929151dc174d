"""How much of each item an answer of the render route holds."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from lazydecode.engine.wire import decode_item
from tests.builders import make_png, make_wav
from tests.builders_video import make_mp4
from tests.server.harness import Server, data_url, image, request, text, video

CLIP = video(data_url(make_mp4(7, 4), "video/mp4"))


def features(server: Server, *parts: dict[str, Any], payload: str) -> Any:
    response = server.render(request(*parts, text(), mm_payload=payload))
    assert response.status_code == 200, response.text[:300]
    return response.json()["features"]


def picture(height: int) -> dict[str, Any]:
    return image(data_url(make_png((91, height)), "image/png"))


def test_metadata_come_from_headers_and_are_those_of_the_tensors(render_server: Server) -> None:
    parts = (picture(301), CLIP, picture(303))
    before = render_server.decodes(), render_server.decodes("video")
    unseen = features(render_server, *parts, payload="metadata")
    assert (render_server.decodes(), render_server.decodes("video")) == before
    assert unseen["kwargs_data"] is None
    assert {m: len(entries) for m, entries in unseen["mm_metadata"].items()} == {
        "image": 2,
        "video": 1,
    }
    whole = features(render_server, *parts, payload="tensors")
    known = features(render_server, *parts, payload="metadata")
    for name in ("mm_metadata", "mm_hashes", "mm_placeholders"):
        assert unseen[name] == whole[name] == known[name]


def test_no_payload_has_the_grids_as_numbers(render_server: Server) -> None:
    parts = (picture(321), CLIP)
    unseen = features(render_server, *parts, payload="none")
    assert (unseen["kwargs_data"], unseen["mm_metadata"]) == (None, None)
    whole = features(render_server, *parts, payload="tensors")
    known = features(render_server, *parts, payload="none")
    assert unseen["mm_grids"] == known["mm_grids"]
    for modality, entries in whole["mm_metadata"].items():
        tensors = [decode_item(base64.b64decode(entry)) for entry in entries]
        assert unseen["mm_grids"][modality] == [
            {name: elem.data.tolist() for name, elem in item.items()} for item in tensors
        ]
    t, h, w = unseen["mm_grids"]["image"][0]["image_grid_thw"]
    assert t * h * w == 4 * unseen["mm_placeholders"]["image"][0]["length"]


def test_known_tensors_that_need_no_cast_are_answered_without_a_thread(
    render_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = features(render_server, picture(331), payload="tensors")
    quick = render_server.context.renderer.executor.quick
    submit, jobs = quick.submit, list[str]()

    def spy(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        jobs.append(fn.__qualname__)
        return submit(fn, *args, **kwargs)

    monkeypatch.setattr(quick, "submit", spy)
    assert features(render_server, picture(331), payload="tensors") == before
    assert [name for name in jobs if "render_answer" in name] == []


def test_an_answer_in_message_pack(render_server: Server) -> None:
    body = request(picture(331), CLIP, text())
    whole = render_server.render(body).json()
    response = render_server.render(body, headers={"accept": "application/msgpack"})
    assert response.headers["content-type"] == "application/msgpack"
    packed = msgspec.msgpack.decode(response.content)
    assert packed["token_ids"] == whole["token_ids"]
    for name in ("kwargs_data", "mm_metadata"):
        for modality, entries in whole["features"][name].items():
            assert [
                msgspec.msgpack.encode(item) for item in packed["features"][name][modality]
            ] == [base64.b64decode(entry) for entry in entries]
    refused = render_server.render({"messages": []}, headers={"accept": "application/msgpack"})
    assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")


def test_metadata_of_known_and_unseen_items_come_together(render_server: Server) -> None:
    features(render_server, picture(311), payload="tensors")
    parts = (picture(311), picture(313))
    mixed = features(render_server, *parts, payload="metadata")
    assert mixed["mm_metadata"] == features(render_server, *parts, payload="tensors")["mm_metadata"]
    assert None not in mixed["mm_metadata"]["image"]


def test_metadata_of_sound(audio_render_server: Server) -> None:
    url = data_url(make_wav(seconds=1.25), "audio/wav")
    part = {"type": "audio_url", "audio_url": {"url": url}}
    unseen = features(audio_render_server, part, payload="metadata")
    whole = features(audio_render_server, part, payload="tensors")
    assert unseen["mm_metadata"] == whole["mm_metadata"]
