"""Every case file of the kinds image, audio and video, through the render route."""

from __future__ import annotations

import re

import pytest

from tests.server import cases
from tests.server.harness import Server, request, text


def of_kind(kind: int) -> list[str]:
    return [name for name, case in cases.FILES.items() if case["kind"] == kind]


def render_file(server: Server, name: str, modality: str) -> None:
    case = cases.FILES[name]
    expected = case["expected"]
    part_type = f"{modality}_url"
    part = {"type": part_type, part_type: {"url": cases.as_data_url(name)}}
    response = server.render(request(part, text("x")))
    allowed = expected.get("http", "2xx")
    for other in ("or_error", "processor"):
        if other in expected:
            allowed += " 4xx"
    if expected.get("samples", 10**6) < 400:
        allowed += " 400"  # Some milliseconds of sound are less than a token.
    if "or_ok" in expected:
        allowed += " 2xx"
    assert cases.matches(response.status_code, allowed), response.text
    if response.status_code == 200:
        ranges = response.json()["features"]["mm_placeholders"][modality]
        assert len(ranges) == 1
        assert ranges[0]["length"] > 0
        return
    error = response.json()["error"]
    assert (error["modality"], error["index"]) == (modality, 0)
    forbidden = expected.get("error_text_must_not_match", r"0x[0-9a-fA-F]{6,}|Traceback")
    assert not re.search(forbidden, error["message"])
    assert len(error["message"]) > 20


@pytest.mark.parametrize("name", of_kind(1))
def test_image(render_server: Server, name: str) -> None:
    render_file(render_server, name, "image")


@pytest.mark.parametrize("name", of_kind(3))
def test_video(render_server: Server, name: str) -> None:
    render_file(render_server, name, "video")


@pytest.mark.parametrize("name", of_kind(2))
def test_audio(audio_render_server: Server, name: str) -> None:
    render_file(audio_render_server, name, "audio")


def test_sound_of_a_file_without_pictures(audio_render_server: Server) -> None:
    part = {"type": "audio_url", "audio_url": {"url": cases.as_data_url("k3_audio_only.mp4")}}
    assert audio_render_server.render(request(part, text())).status_code == 200
