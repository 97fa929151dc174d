"""The cases about the shape of requests, through the server."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.builders import make_png
from tests.origin import Gate, Origin
from tests.server import cases
from tests.server.harness import Server, data_url, image, request, text

CLOSE = {"Connection": "close"}
OK_FILES = [n for n, c in cases.FILES.items() if c["kind"] == 7]


def fixed(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(cases.read(name))
    return body


@pytest.mark.parametrize("name", OK_FILES)
def test_request_file(render_server: Server, audio_render_server: Server, name: str) -> None:
    server = audio_render_server if "audio" in name else render_server
    expected = cases.FILES[name]["expected"]
    response = server.render(fixed(name))
    allowed = expected.get("http", "2xx") + (" 2xx" if "or_ok" in expected else "")
    assert cases.matches(response.status_code, allowed), response.text
    if response.status_code == 200:
        hashes = response.json()["features"]["mm_hashes"]
        assert sum(map(len, hashes.values())) == expected.get("media", 1)
    if "names_part" in expected:
        assert response.json()["error"]["index"] == expected["names_part"]


def test_text_that_spells_a_placeholder_is_text(render_server: Server) -> None:
    picture = image(data_url(make_png(), "image/png"))
    spelled = render_server.render(request(picture, text("a <|image_pad|> b"))).json()
    plain = render_server.render(request(picture, text("a b"))).json()
    ranges = spelled["features"]["mm_placeholders"]["image"]
    assert ranges == plain["features"]["mm_placeholders"]["image"]
    pad = spelled["token_ids"][ranges[0]["offset"]]
    assert spelled["token_ids"].count(pad) == ranges[0]["length"]
    assert len(spelled["token_ids"]) > len(plain["token_ids"])


def test_interleaved_parts_keep_their_order(render_server: Server) -> None:
    answer = render_server.render(fixed("k7_interleaved.json")).json()
    offsets = [place["offset"] for place in answer["features"]["mm_placeholders"]["image"]]
    assert offsets == sorted(offsets)
    assert len(set(answer["features"]["mm_hashes"]["image"])) == 3


def test_too_many_items_are_refused_before_any_fetch(
    two_images_server: Server, shared_origin: Origin
) -> None:
    urls = [shared_origin.serve(f"/limit/{n}", make_png()) for n in range(3)]
    response = two_images_server.render(request(*map(image, urls)))
    assert response.status_code == 400
    assert "at most 2" in response.json()["error"]["message"]
    assert sum(shared_origin.hits(f"/limit/{n}") for n in range(3)) == 0
    assert two_images_server.render(request(*map(image, urls[:2]))).status_code == 200


def test_media_for_a_text_model_are_refused(text_render_server: Server) -> None:
    response = text_render_server.render(cases.chat_request(cases.REQUESTS["r7-text-model"]))
    assert response.status_code == 400
    assert "text-only" in response.json()["error"]["message"]
    answer = text_render_server.render(request(text("Hello")))
    assert answer.status_code == 200
    assert answer.json()["features"] is None


def test_another_modality_is_refused_by_name(render_server: Server) -> None:
    part = {"type": "audio_url", "audio_url": {"url": cases.as_data_url("k2_silence.wav")}}
    response = render_server.render(request(part))
    assert response.status_code == 400
    assert "takes no audio" in response.json()["error"]["message"]


def test_a_stream_with_a_bad_image_is_a_plain_error(chat_server: Server) -> None:
    body = cases.chat_request(cases.REQUESTS["r7-stream-bad-image"])
    response = chat_server.post("/v1/chat/completions", body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["index"] == 0


@pytest.mark.parametrize("case_id", ["r7-missing-url", "r7-list-url"])
def test_a_url_that_is_none(render_server: Server, case_id: str) -> None:
    response = render_server.render(cases.chat_request(cases.REQUESTS[case_id]))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0].image_url.url"


def test_a_plain_system_string_beside_parts(render_server: Server) -> None:
    body = request(image(cases.as_data_url("k1_gray.jpg")), text("x"))
    body["messages"].insert(0, {"role": "system", "content": "a plain string"})
    response = render_server.render(body)
    assert response.status_code == 200
    assert len(response.json()["features"]["mm_hashes"]["image"]) == 1


def test_items_keep_their_order_when_the_first_comes_last(
    render_server: Server, shared_origin: Origin
) -> None:
    names = [f"k6_burst/{n:02}.png" for n in range(12)]
    expected = [
        render_server.render(request(image(cases.as_data_url(name)))).json()["features"][
            "mm_hashes"
        ]["image"][0]
        for name in names
    ]
    gate = Gate()
    urls = [
        shared_origin.serve(
            f"/order/{n}", cases.read(name), gate=gate if n == 0 else None, headers=CLOSE
        )
        for n, name in enumerate(names)
    ]
    found: list[str] = []

    def send() -> None:
        answer = render_server.render(request(*map(image, urls)))
        found.extend(answer.json()["features"]["mm_hashes"]["image"])

    thread = threading.Thread(target=send)
    thread.start()
    gate.wait_arrived()
    gate.open()
    thread.join(120)
    assert found == expected
    assert len(set(expected)) == 12


def test_a_vector_drawing_is_never_an_empty_answer(render_server: Server) -> None:
    response = render_server.render(cases.chat_request(cases.REQUESTS["r7-never-empty-200"]))
    assert response.status_code == 422


@pytest.mark.parametrize(("case_id", "grid_frames"), [("r3-all-frames", 10), ("r3-four-frames", 2)])
def test_the_frames_that_were_asked_for(
    render_server: Server, case_id: str, grid_frames: int
) -> None:
    response = render_server.render(cases.chat_request(cases.REQUESTS[case_id]))
    assert response.status_code == 200, response.text
    # Two frames to a temporal patch; 64 x 48 gives the same number of tokens for each.
    length = response.json()["features"]["mm_placeholders"]["video"][0]["length"]
    assert length % grid_frames == 0
    one = render_server.render(
        cases.chat_request({**cases.REQUESTS[case_id]["request"], "num_frames": 2})
    ).json()["features"]["mm_placeholders"]["video"][0]["length"]
    assert length == grid_frames * one


@pytest.mark.parametrize("num_frames", [0, -5])
def test_no_frames_are_refused(render_server: Server, num_frames: int) -> None:
    case = cases.REQUESTS["r3-zero-frames-asked"]["request"]
    response = render_server.render(cases.chat_request({**case, "num_frames": num_frames}))
    assert response.status_code == 400
    assert "num_frames" in response.json()["error"]["message"]


@pytest.mark.parametrize("case_id", ["r3-sampled-twice", "r3-client-metadata"])
def test_sampled_twice_and_described_by_the_client(render_server: Server, case_id: str) -> None:
    response = render_server.render(cases.chat_request(cases.REQUESTS[case_id]))
    assert response.status_code == 200, response.text
    assert response.json()["features"]["mm_placeholders"]["video"][0]["length"] > 0


def test_a_picture_sent_as_a_video(render_server: Server) -> None:
    response = render_server.render(cases.chat_request(cases.REQUESTS["r3-picture-as-video"]))
    assert cases.matches(response.status_code, "4xx 2xx")


def test_the_sound_of_a_video(audio_render_server: Server) -> None:
    response = audio_render_server.render(cases.chat_request(cases.REQUESTS["r2-video-as-sound"]))
    assert response.status_code == 200
    assert response.json()["features"]["mm_placeholders"]["audio"][0]["length"] >= 50


def test_sound_that_is_too_long_says_so(audio_render_server: Server) -> None:
    response = audio_render_server.render(cases.chat_request(cases.REQUESTS["r2-too-long-text"]))
    assert response.status_code == 422
    assert "duration" in response.json()["error"]["message"]
