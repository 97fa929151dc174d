"""The cases about identity and caching, through the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.builders import make_jpeg
from tests.origin import Origin
from tests.server import cases
from tests.server.harness import Server, data_url, image, request, text

GRAY = cases.read("k1_gray.jpg")


def hashes(server: Server, *parts: dict[str, Any], **fields: Any) -> list[str]:
    response = server.render(request(*parts, mm_payload="none", **fields))
    assert response.status_code == 200, response.text
    found = response.json()["features"]["mm_hashes"]
    return [mm_hash for group in found.values() for mm_hash in group]


def unique(data: bytes) -> bytes:
    """The same picture under an identity that no cache knows."""
    return data + os.urandom(16)


def test_one_picture_has_one_identity_wherever_it_comes_from(
    media_folder_server: Server, shared_origin: Origin
) -> None:
    server = media_folder_server
    shared_origin.serve("/k1_gray.jpg", GRAY)
    shared_origin.serve("/other-name.jpg", GRAY)
    case = cases.REQUESTS["r5-one-identity"]
    before = server.decodes()
    found = set()
    for step in case["request"]["sequence"]:
        body = cases.chat_request(step, media=shared_origin.netloc, out=str(cases.MEDIA))
        response = server.render(body)
        assert response.status_code == 200, response.text
        found.add(response.json()["features"]["mm_hashes"]["image"][0])
    assert len(found) == case["expected"]["identities"]
    assert server.decodes() - before == case["expected"]["decodes"]


def test_paths_that_differ_in_case_are_two(render_server: Server, shared_origin: Origin) -> None:
    for name in ("k5_urlcase_Photo.png", "k5_urlcase_photo.png"):
        shared_origin.serve(f"/{name}", cases.read(name))
    urls = [shared_origin.url(f"/k5_urlcase_{x}.png") for x in ("Photo", "photo")]
    first, second = hashes(render_server, image(urls[0]), image(urls[1]))
    assert first != second


def test_the_order_of_processor_options_does_not_matter(render_server: Server) -> None:
    url = cases.as_data_url("k6_burst/00.png")
    options = {"min_pixels": 784, "max_pixels": 100_352}
    turned = dict(reversed(options.items()))
    assert hashes(render_server, image(url), mm_processor_kwargs=options) == hashes(
        render_server, image(url), mm_processor_kwargs=turned
    )
    assert hashes(render_server, image(url)) != hashes(
        render_server, image(url), mm_processor_kwargs=options
    )


def test_each_way_to_decode_has_an_identity(render_server: Server) -> None:
    url = cases.as_data_url("k1_palette_trns.png")
    found = {
        hashes(render_server, image(url), media_io_kwargs={"image": options})[0]
        for options in (
            {"rgba_background_color": [255, 255, 255]},
            {"rgba_background_color": [0, 0, 0]},
            {"image_mode": "L"},
        )
    }
    assert len(found) == 3


def test_a_uuid_alone_finds_what_was_sent_under_it(render_server: Server) -> None:
    name = os.urandom(8).hex()
    before = render_server.decodes()
    first = render_server.render(request(image(data_url(unique(GRAY)), uuid=name), text()))
    second = render_server.render(request(image(None, uuid=name), text()))
    assert first.status_code == second.status_code == 200, second.text
    assert first.json()["features"] == second.json()["features"]
    assert render_server.decodes() == before + 1


def test_a_uuid_alone_that_nobody_knows_is_a_client_error(render_server: Server) -> None:
    response = render_server.render(cases.chat_request(cases.REQUESTS["r5-uuid-only-miss"]))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["modality"], error["index"]) == ("image", 0)


def test_a_salt_separates_tenants(render_server: Server) -> None:
    picture = image(data_url(unique(GRAY)))
    before = render_server.decodes()
    found = {
        hashes(render_server, picture, **fields)[0]
        for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"})
    }
    assert len(found) == 3
    # Header-only rendering decodes nothing; with tensors each tenant's picture is decoded.
    for salt in ("a", "b", "a"):
        render_server.render(request(picture, cache_salt=salt))
    assert render_server.decodes() == before + 2


def test_a_uuid_of_one_tenant_is_unknown_to_another(render_server: Server) -> None:
    name = os.urandom(8).hex()
    known = request(image(data_url(unique(GRAY)), uuid=name), cache_salt="a")
    assert render_server.render(known).status_code == 200
    assert render_server.render(request(image(None, uuid=name), cache_salt="a")).status_code == 200
    for other in ({"cache_salt": "b"}, {}):
        assert render_server.render(request(image(None, uuid=name), **other)).status_code == 400


def test_the_same_answer_again_after_a_hit(render_server: Server) -> None:
    body = request(image(cases.as_data_url("k6_burst/01.png")), text())
    answers = [render_server.render(body).json()["features"] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


def test_every_receiver_gets_the_sound_itself(audio_render_server: Server) -> None:
    """A consumer behind the render route holds nothing of ours: each answer is complete."""
    part = {"type": "audio_url", "audio_url": {"url": cases.as_data_url("k2_silence.wav")}}
    for _ in range(3):
        features = audio_render_server.render(request(part, text())).json()["features"]
        assert len(features["kwargs_data"]["audio"][0]) > 1000


def test_a_failure_is_not_kept(render_server: Server, shared_origin: Origin) -> None:
    url = shared_origin.serve_in_turn("/once", (404, b""), (200, unique(GRAY)))
    statuses = [render_server.render(request(image(url), text())).status_code for _ in range(2)]
    assert statuses == [422, 200]


def test_an_identity_is_the_same_in_every_process() -> None:
    found = set()
    for seed in ("1", "2"):
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "lazydecode",
                "inspect",
                "--json",
                str(cases.MEDIA / "k1_gray.jpg"),
            ],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        )
        found.add(json.loads(result.stdout)["key"])
    assert len(found) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("k5_same_bytes_other_shape_a.png", "k5_same_bytes_other_shape_b.png"),
        ("k5_same_rgb_other_alpha_a.png", "k5_same_rgb_other_alpha_b.png"),
        ("k5_same_pixels_other_orientation_a.jpg", "k5_same_pixels_other_orientation_b.jpg"),
    ],
)
def test_look_alikes_are_two(render_server: Server, first: str, second: str) -> None:
    parts = [image(cases.as_data_url(name)) for name in (first, second)]
    response = render_server.render(request(*parts))
    assert response.status_code == 200
    features = response.json()["features"]
    one, other = features["mm_hashes"]["image"]
    assert one != other
    tensors = features["kwargs_data"]["image"]
    assert tensors[0] != tensors[1] or "alpha" in first


def test_an_item_that_stands_three_times_is_decoded_once(render_server: Server) -> None:
    picture = image(data_url(unique(make_jpeg())))
    before = render_server.decodes()
    response = render_server.render(request(picture, text("a"), picture, text("b"), picture))
    features = response.json()["features"]
    assert len(set(features["mm_hashes"]["image"])) == 1
    assert len(features["mm_placeholders"]["image"]) == 3
    assert render_server.decodes() == before + 1


def test_nothing_is_fetched_twice_within_a_request(
    render_server: Server, shared_origin: Origin
) -> None:
    url = shared_origin.serve("/thrice.jpg", unique(make_jpeg()))
    response = render_server.render(request(image(url), image(url), text(), image(url)))
    assert response.status_code == 200
    assert shared_origin.hits("/thrice.jpg") == 1
