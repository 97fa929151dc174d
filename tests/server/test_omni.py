"""Videos with their sound through the server: one fetch, one payload, two items, one text."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import make_jpeg, make_wav
from tests.builders_video import make_video
from tests.origin import Origin
from tests.server.harness import Server, data_url, request, text, video

WITH_SOUND: dict[str, Any] = {"mm_processor_kwargs": {"use_audio_in_video": True}}
SPEECH = {
    "type": "input_audio",
    "input_audio": {"data": base64.b64encode(make_wav()).decode(), "format": "wav"},
}


def clip(*, audio: bool = True) -> bytes:
    """A video that no cache holds."""
    return make_video(12, 10, audio=audio) + _free_box()


def _free_box() -> bytes:
    content = uuid.uuid4().bytes
    return (8 + len(content)).to_bytes(4, "big") + b"free" + content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media").resolve()


@pytest.fixture(scope="module")
def server(
    tiny_model: Callable[..., Path], shared_origin: Origin, folder: Path
) -> Iterator[Server]:
    with Server(
        tiny_model("qwen3_omni_moe", weights=False),
        engine="none",
        allowed_private_networks=(shared_origin.netloc,),
        allowed_local_media_path=folder,
        max_audio_clip_filesize_mb=1.0,
        media_fetch_max_retries=1,
    ) as started:
        yield started


def url_of(kind: str, data: bytes, origin: Origin, folder: Path) -> str:
    name = f"{uuid.uuid4().hex}.mp4"
    if kind == "http":
        return origin.serve(f"/{name}", data)
    if kind == "file":
        (folder / name).write_bytes(data)
        return (folder / name).as_uri()
    return data_url(data, "video/mp4")


def rendered(server: Server, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = server.render(request(*parts, **{**WITH_SOUND, **fields}))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def failed(server: Server, *parts: dict[str, Any], **fields: Any) -> tuple[int, dict[str, Any]]:
    answer = server.render(request(*parts, **{**WITH_SOUND, **fields}))
    return answer.status_code, dict(answer.json()["error"])


@pytest.mark.parametrize("kind", ["http", "file", "data"])
def test_a_video_and_its_sound_are_decoded_once_each(
    server: Server, shared_origin: Origin, folder: Path, kind: str
) -> None:
    url = url_of(kind, clip(), shared_origin, folder)
    before = server.decodes("video"), server.decodes("audio")
    first = rendered(server, text("What?"), video(url))
    assert {m: len(h) for m, h in first["features"]["mm_hashes"].items()} == {
        "video": 1,
        "audio": 1,
    }
    again = rendered(server, text("What?"), video(url))
    assert again == first | {"request_id": again.get("request_id", first.get("request_id"))}
    after = server.decodes("video"), server.decodes("audio")
    assert after == (before[0] + 1, before[1] + 1)
    if kind == "http":
        assert shared_origin.hits(url.removeprefix(shared_origin.url(""))) == 2  # one per request


def test_the_order_of_parts_does_not_matter_to_the_numbers(server: Server) -> None:
    one, two = data_url(clip(), "video/mp4"), data_url(clip(), "video/mp4")
    full = rendered(server, SPEECH, video(one), text("and"), SPEECH, video(two))
    assert {m: len(p) for m, p in full["features"]["mm_placeholders"].items()} == {
        "audio": 4,
        "video": 2,
    }
    starts = [place["offset"] for place in full["features"]["mm_placeholders"]["audio"]]
    assert starts == sorted(starts)


def test_unseen_media_need_no_decoder_without_tensors(server: Server) -> None:
    url = data_url(clip(), "video/mp4")
    before = server.decodes("video"), server.decodes("audio")
    headers = rendered(server, video(url), SPEECH, mm_payload="none")
    assert (server.decodes("video"), server.decodes("audio")) == before
    full = rendered(server, video(url), SPEECH)
    assert headers["token_ids"] == full["token_ids"]
    assert headers["features"]["mm_placeholders"] == full["features"]["mm_placeholders"]
    assert headers["features"]["mm_hashes"] == full["features"]["mm_hashes"]


def test_a_video_is_the_same_item_with_and_without_its_sound(server: Server) -> None:
    url = data_url(clip(), "video/mp4")
    silent = rendered(server, video(url), mm_processor_kwargs={"use_audio_in_video": False})
    assert "audio" not in silent["features"]["mm_hashes"]
    before = server.decodes("video")
    both = rendered(server, video(url))
    assert server.decodes("video") == before
    assert both["features"]["mm_hashes"]["video"] == silent["features"]["mm_hashes"]["video"]
    assert len(both["token_ids"]) > len(silent["token_ids"])


def test_a_uuid_stands_for_both(server: Server) -> None:
    name = uuid.uuid4().hex
    first = rendered(server, video(data_url(clip(), "video/mp4"), uuid=name))
    before = server.decodes("video"), server.decodes("audio")
    alone = {"type": "video_url", "video_url": None, "uuid": name}
    again = rendered(server, alone)
    assert (server.decodes("video"), server.decodes("audio")) == before
    assert again["token_ids"] == first["token_ids"]
    assert again["features"]["mm_hashes"] == first["features"]["mm_hashes"]


@pytest.mark.parametrize("payload", ["none", "full"])
def test_a_video_without_sound_is_named(server: Server, payload: str) -> None:
    good, silent = data_url(clip(), "video/mp4"), data_url(clip(audio=False), "video/mp4")
    fields = {"mm_payload": "none"} if payload == "none" else {}
    status, error = failed(server, SPEECH, video(good), video(silent), **fields)
    assert (status, error["modality"], error["index"]) == (422, "video", 1)
    assert error["message"] == (
        "Failed to decode the sound of the video at index 1: the file has no audio track"
    )


def test_a_corrupt_sound_of_its_own_keeps_the_clients_number(server: Server) -> None:
    broken = {"type": "input_audio", "input_audio": {"data": "bm8gc291bmQ=", "format": "wav"}}
    url = data_url(clip(), "video/mp4")
    status, error = failed(server, video(url), SPEECH, video(url), broken)
    assert (status, error["modality"], error["index"]) == (422, "audio", 1)


def test_a_list_of_pictures_has_no_sound(server: Server) -> None:
    frames = ",".join(base64.b64encode(make_jpeg()).decode() for _ in range(3))
    status, error = failed(server, video(f"data:video/jpeg;base64,{frames}"))
    assert (status, error["modality"], error["index"]) == (422, "video", 0)
    assert "no audio track" in error["message"]


@pytest.mark.parametrize("kind", ["http", "file", "data"])
def test_the_stricter_cap_holds(
    server: Server, shared_origin: Origin, folder: Path, kind: str
) -> None:
    large = clip() + (1 << 20).to_bytes(4, "big") + b"free" + bytes((1 << 20) - 8)
    url = url_of(kind, large, shared_origin, folder)
    status, error = failed(server, video(url))
    assert (status, error["modality"], error["index"]) in ((400, "video", 0), (422, "video", 0))
    # As a video alone it is small enough.
    rendered(server, video(url), mm_processor_kwargs={})


def test_the_option_must_be_a_boolean(server: Server) -> None:
    url = data_url(clip(), "video/mp4")
    status, error = failed(server, video(url), mm_processor_kwargs={"use_audio_in_video": "yes"})
    assert (status, error["param"]) == (400, "mm_processor_kwargs")


def test_a_model_without_the_way_refuses_the_option(render_server: Server) -> None:
    url = data_url(make_video(), "video/mp4")
    status, error = failed(render_server, video(url))
    assert status == 400
    assert "use_audio_in_video" in error["message"]
