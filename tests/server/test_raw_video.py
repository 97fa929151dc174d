"""A model that opens videos itself, through the server: render, hits, errors, generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builders import make_jpeg
from tests.builders_video import make_audio_only_mp4, make_mp4, make_video, with_index_first
from tests.server.harness import Server, data_url, image, request, text, video


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    with Server(tiny_model("dots3_note"), served_model_name=("m",)) as started:
        yield started


def clip(data: bytes) -> str:
    return data_url(data, "video/mp4")


def test_the_model_answers_to_pictures_and_videos(server: Server) -> None:
    body = request(
        image(data_url(make_jpeg((64, 48)))),
        video(clip(make_mp4(24, 12, (84, 56)))),
        text("What is it?"),
        max_tokens=3,
        temperature=0,
    )
    before = server.decodes("video")
    answers = []
    for _ in range(2):
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        answers.append(response.json()["choices"][0]["message"]["content"])
    assert answers[0] == answers[1]
    assert server.decodes("video") - before == 1


def test_headers_alone_give_the_ids_and_identities_of_full_rendering(server: Server) -> None:
    url = clip(make_mp4(31, 10, (140, 84)))
    before = server.decodes("video")
    sketched = server.render(request(video(url), mm_payload="none")).json()
    assert server.decodes("video") == before
    full = server.render(request(video(url))).json()
    assert server.decodes("video") == before + 1
    assert sketched["token_ids"] == full["token_ids"]
    for name in ("mm_hashes", "mm_placeholders"):
        assert sketched["features"][name] == full["features"][name]


def test_a_backend_by_name_has_another_identity(server: Server) -> None:
    part = video(clip(make_mp4(30, 10, (56, 56))))
    found = {
        server.render(request(part, mm_payload="none", media_io_kwargs=options)).json()["features"][
            "mm_hashes"
        ]["video"][0]
        for options in ({}, {"video": {"video_backend": "pyav"}}, {"video": {"num_frames": 4}})
    }
    assert len(found) == 3


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no video at all", "it is text"),
        (make_jpeg(), "cannot be opened"),
        (make_audio_only_mp4(), "no video stream"),
        (with_index_first(make_mp4(40, 10, (256, 192)))[:-1500], "cut off"),
        (make_video(20, 10, (64, 48), container="avi", codec="mpeg4")[:600], "video"),
    ],
    ids=["text", "picture", "sound", "cut", "head"],
)
def test_what_is_no_video_is_refused_by_its_index(server: Server, data: bytes, reason: str) -> None:
    body = request(video(clip(make_mp4(8, 4, (56, 56)))), video(clip(data)), max_tokens=2)
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        response = server.post(path, body)
        assert response.status_code == 422, response.text
        error = response.json()["error"]
        assert (error["modality"], error["index"]) == ("video", 1)
        assert reason in error["message"]


def test_an_unknown_backend_is_refused_with_the_known_ones(server: Server) -> None:
    part = video(clip(make_mp4(8, 4, (56, 56))))
    options = {"video": {"video_backend": "telepathy"}}
    response = server.render(request(part, media_io_kwargs=options))
    assert response.status_code == 400
    assert "pyav" in response.json()["error"]["message"]
    assert "telepathy" in response.json()["error"]["message"]
