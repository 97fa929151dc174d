"""The demo's parts: its media decode, its origin serves them, and its verdict is right."""

from __future__ import annotations

import dataclasses
import urllib.request
from pathlib import Path
from typing import Any

import av
import pytest
import soundfile as sf
from PIL import Image

from lazydecode.demo.command import MODELS
from lazydecode.demo.media import RATE_HZ, write_media
from lazydecode.demo.origin import serve_folder
from lazydecode.demo.rounds import Item, Result, faults, plan_items
from lazydecode.demo.server import DemoError, DemoServer


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    return write_media(tmp_path_factory.mktemp("media"))


def test_every_file_decodes_and_differs_from_the_others(media: dict[str, list[Path]]) -> None:
    for path in media["image"]:
        with Image.open(path) as image:
            assert image.convert("RGB").size == (640, 480)
    for path in media["video"]:
        with av.open(str(path)) as container:
            assert [s.type for s in container.streams] == ["video", "audio"]
            assert sum(1 for _ in container.decode(video=0)) == 36
    for path in media["audio"]:
        samples, rate = sf.read(path)
        assert (rate, len(samples)) == (RATE_HZ, 5 * RATE_HZ // 2)
        assert 0.4 < abs(samples).max() <= 1
    contents = [path.read_bytes() for paths in media.values() for path in paths]
    assert len(set(contents)) == 9


def test_origin_serves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    with serve_folder(tmp_path) as origin, urllib.request.urlopen(f"http://{origin}/a.bin") as got:
        assert got.read() == b"abc"


def test_each_modality_is_sent_by_each_scheme(media: dict[str, list[Path]]) -> None:
    items = plan_items(media, MODELS)
    for modality in ("image", "video", "audio"):
        schemes = {item.scheme for item in items if item.modality == modality}
        assert schemes >= {"http", "data", "file"}
    urls = [item.url("127.0.0.1:1") for item in items]
    assert urls[0] == "http://127.0.0.1:1/picture1.jpg"
    assert urls[1].startswith("data:image/png;base64,iVBOR")
    assert urls[2].startswith("file:///") and urls[2].endswith("/picture3.webp")


def test_the_other_ways_have_models_of_their_own(media: dict[str, list[Path]]) -> None:
    speech, sound, raw = plan_items(media, MODELS)[-3:]
    assert (speech.model, speech.scheme, speech.path.name) == ("whisper", "upload", "voice1.wav")
    assert (sound.model, sound.modality) == ("qwen2_5_omni", "video")
    assert sound.options == {"mm_processor_kwargs": {"use_audio_in_video": True}}
    assert (raw.model, raw.modality, raw.options) == ("dots3_note", "video", {})


def result(**timeline: Any) -> Result:
    item = Item("image", Path("a.png"), "http", "m")
    return Result(item, [timeline], engine_ms=1.0, total_ms=2.0, answer="x")


def test_verdict_names_what_was_wrong_in_the_second_round() -> None:
    miss = result(hit=False, decode_ms=3.0)
    hit = result(hit=True)
    assert faults([miss], [hit], 0) == []
    assert faults([miss], [miss], 1) == [
        "a.png was not a hit",
        "a.png was decoded again",
        "the servers' metrics count 1 decoder runs",
    ]
    other = dataclasses.replace(hit, answer="y")
    assert faults([miss], [other], 0) == ["a.png got two different answers"]
    with_sound = dataclasses.replace(hit, timelines=[{"hit": True}, {"hit": False}])
    assert faults([hit], [with_sound], 0) == ["a.png was not a hit"]


def test_a_server_that_ends_at_once_is_told(tmp_path: Path) -> None:
    server = DemoServer(tmp_path / "no-model", tmp_path / "log", ["--no-such-flag"])
    try:
        with pytest.raises(DemoError, match="ended with status 2"):
            server.wait_until_serving()
    finally:
        server.stop()
    assert "--no-such-flag" in (tmp_path / "log").read_text()
