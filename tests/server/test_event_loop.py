"""Nothing of ours blocks the event loop: no sleep, no file and no socket on it.

A blocking call of our code on the loop's thread fails where it is made, and is remembered in case
somebody swallows the failure. What takes the processor instead is measured elsewhere: `/health`
answers while large media are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import blockbuster
import httpx
import pytest

import lazydecode
from tests.builders import encode_image, make_jpeg, make_wav, noise
from tests.builders_video import make_mp4
from tests.origin import Origin
from tests.server import cases
from tests.server.harness import Server, data_url, image, request, text, video


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the blocking functions that our code called on an event loop."""
    seen: list[str] = []

    class Blocked(blockbuster.BlockingError):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            seen.append(name)

    monkeypatch.setattr("blockbuster.blockbuster.BlockingError", Blocked)
    with blockbuster.blockbuster_ctx("lazydecode") as buster:
        for name in ("threading.Lock.acquire", "threading.Lock.acquire_lock"):
            # Ours guard a few statements, and who else is in there is chance.
            buster.functions[name].deactivate()
        yield seen


def test_a_blocking_call_would_be_noticed(chat_server: Server, blocked: list[str]) -> None:
    sleep = compile("import time\ntime.sleep(0.001)", lazydecode.__file__, "exec")
    with pytest.raises(blockbuster.BlockingError):
        chat_server.call(lambda: exec(sleep, {}))
    assert blocked == ["time.sleep"]
    blocked.clear()


def test_generating_over_every_way_of_sending_media(
    chat_server: Server, shared_origin: Origin, blocked: list[str]
) -> None:
    picture, clip = make_jpeg(size=(72, 56)), make_mp4(frames=8)
    hosted = shared_origin.serve("/loop.jpg", make_jpeg(size=(64, 80)))
    parts = (image(data_url(picture)), image(hosted), video(data_url(clip, "video/mp4")))
    body = request(*parts, text("x"), max_tokens=3, temperature=0)
    for _ in range(2):  # misses, then hits
        assert chat_server.post("/v1/chat/completions", body).status_code == 200
        answer = chat_server.post("/v1/chat/completions", {**body, "stream": True})
        assert answer.text.rstrip().endswith("data: [DONE]")
    messages = {"messages": body["messages"]}
    for path in ("/v1/chat/completions/count", "/tokenize"):
        assert chat_server.post(path, messages).status_code == 200, path
    for payload in ("none", "tensors"):
        assert chat_server.render({**body, "mm_payload": payload}).status_code == 200
    for path in ("/health", "/metrics", "/v1/models", "/version"):
        assert chat_server.get(path).status_code == 200, path
    assert blocked == []


def test_refusals_and_clients_that_leave(
    chat_server: Server, shared_origin: Origin, blocked: list[str]
) -> None:
    for part in (
        image(data_url(b"no picture")),
        image(f"http://{shared_origin.netloc}/missing.jpg"),
        image("http://169.254.169.254/"),
        image("file:///etc/hostname"),
    ):
        assert 400 <= chat_server.render(request(part)).status_code < 500
    body = request(text("x"), max_tokens=2000, stream=True, ignore_eos=True)
    with httpx.stream("POST", f"{chat_server.url}/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    chat_server.wait_idle()
    assert blocked == []


def test_sound_and_a_body_of_megabytes(
    chat_server: Server, audio_render_server: Server, blocked: list[str]
) -> None:
    recording = data_url(make_wav(), "audio/wav")
    sound = {"type": "audio_url", "audio_url": {"url": recording}}
    large = encode_image(noise((1024, 1024)), "PNG")
    assert len(large) > 2_000_000
    for _ in range(2):
        assert audio_render_server.render(request(sound, text("x"))).status_code == 200
        answer = chat_server.render(request(image(data_url(large, "image/png")), text("x")))
        assert answer.status_code == 200
    assert blocked == []


def test_local_files(media_folder_server: Server, blocked: list[str]) -> None:
    files: list[Path] = (
        sorted(cases.MEDIA.glob("*.jpg"))[:3] + sorted(cases.MEDIA.glob("*.png"))[:3]
    )
    assert len(files) >= 3
    for _ in range(2):
        for path in files:
            media_folder_server.render(request(image(path.as_uri())))
    media_folder_server.wait_idle()
    assert blocked == []
