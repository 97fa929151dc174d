"""A model that wants chunks, through the server: answers, hits, errors in the client's count."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import make_jpeg
from tests.builders_video import make_mp4
from tests.server.harness import Server, data_url, image, request, text, video


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    with Server(tiny_model("kimi_k25"), served_model_name=("m",)) as started:
        yield started


def clip(frames: int = 30) -> dict[str, Any]:
    data = make_mp4(frames, 10, (84, 56)) + b"\x00\x00\x00\x10free" + os.urandom(8)
    return video(data_url(data, "video/mp4"))


def photo() -> dict[str, Any]:
    return image(data_url(make_jpeg((64, 48)) + os.urandom(8)))


def answer(server: Server, *parts: dict[str, Any]) -> str:
    body = request(*parts, text("What is it?"), max_tokens=4, temperature=0)
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_the_model_answers_and_a_hit_decodes_nothing(server: Server) -> None:
    parts = [photo(), clip(), photo(), clip(7)]
    before = server.decodes("video"), server.decodes("image")
    first = answer(server, *parts)
    assert (server.decodes("video"), server.decodes("image")) == (before[0] + 2, before[1] + 2)
    assert answer(server, *parts) == first
    assert (server.decodes("video"), server.decodes("image")) == (before[0] + 2, before[1] + 2)


def test_chunks_that_the_engine_lost_are_sent_again(server: Server) -> None:
    parts = [clip(), photo()]
    first = answer(server, *parts)
    cache = server.context.renderer.sender_cache
    assert cache is not None
    lost = cache.snapshot()[-3:]
    server.call(lambda: server.context.renderer.sender_cache.invalidate(lost))  # type: ignore[union-attr]
    assert answer(server, *parts) == first


def test_render_names_chunks_in_request_order(server: Server) -> None:
    parts = [clip(), photo(), clip(4)]
    sketched = server.render(request(*parts, mm_payload="none")).json()
    grids = sketched["features"]["mm_grids"]["vision_chunk"]
    of_clip, of_photo = ["video_grid_thw"], ["image_grid_thw"]
    assert [list(grid) for grid in grids] == [of_clip] * 8 + [of_photo] + [of_clip]
    full = server.render(request(*parts)).json()
    assert sketched["token_ids"] == full["token_ids"]
    (hashes,) = full["features"]["mm_hashes"].values()
    assert sketched["features"]["mm_hashes"] == {"vision_chunk": hashes}
    assert [h.rpartition("-")[2] for h in hashes[:8]] == [str(n) for n in range(8)]
    assert "-" not in hashes[8] and hashes[9].endswith("-0") and len(hashes) == 10
    places = full["features"]["mm_placeholders"]["vision_chunk"]
    offsets = [place["offset"] for place in places]
    assert offsets == sorted(offsets)
    assert len(full["features"]["kwargs_data"]["vision_chunk"]) == 10


def test_count_names_what_the_client_sent(server: Server) -> None:
    parts = [photo(), clip(), photo()]
    rendered = server.render(request(*parts, mm_payload="none")).json()["features"]
    lengths = [place["length"] for place in rendered["mm_placeholders"]["vision_chunk"]]
    body = request(*parts)
    for _ in range(2):  # from headers, then with what the cache holds
        response = server.post("/v1/chat/completions/count", body)
        assert response.status_code == 200, response.text
        items = response.json()["items"]
        assert [(item["modality"], item["index"]) for item in items] == [
            ("image", 0),
            ("video", 0),
            ("image", 1),
        ]
        assert [item["tokens"] for item in items] == [lengths[0], sum(lengths[1:-1]), lengths[-1]]
        server.render(body)


def test_errors_count_within_the_clients_modality(server: Server) -> None:
    bad_photo = image(data_url(make_jpeg((64, 48))[:150]))
    bad_clip = video(data_url(make_jpeg((64, 48)), "video/mp4"))
    for parts, named in (
        ([clip(), photo(), bad_photo], ("image", 1)),
        ([photo(), photo(), photo(), bad_clip], ("video", 0)),
    ):
        for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
            response = server.post(path, request(*parts, max_tokens=1))
            assert response.status_code == 422, response.text
            error = response.json()["error"]
            assert (error["modality"], error["index"]) == named
            assert "vision_chunk" not in response.text


def test_an_option_that_does_not_fit_a_videos_header_names_the_video(server: Server) -> None:
    body = request(
        clip(), photo(), clip(7), mm_payload="none", media_io_kwargs={"video": {"start_time": 2}}
    )
    response = server.render(body)
    error = response.json()["error"]
    assert (response.status_code, error["modality"], error["index"]) == (400, "video", 1)
