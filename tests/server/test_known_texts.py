"""Payloads that came before in a request's own text, through the server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pybase64
import pytest

from lazydecode.media import at_once, known_texts, local_files
from lazydecode.media.base import PayloadDigest
from lazydecode.media.budget import Reservation
from lazydecode.renderers.rendered import RenderedRequest
from lazydecode.server import payload_cut
from tests.builders import make_jpeg
from tests.server.harness import Server, data_url, image, request, text
from tests.server.test_known_files import clear_caches, render, rendered, replace

SETTLED_S = 0.05
MIN_CHARS = 32 * 1024


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember texts that are short for a test."""
    for module in (known_texts, at_once):
        monkeypatch.setattr(module, "MIN_CHARS", MIN_CHARS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path], folder: Path) -> Iterator[Server]:
    model = tiny_model("qwen2_5_vl", weights=False)
    with Server(model, engine="none", allowed_local_media_path=folder) as started:
        yield started


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to payloads."""
    done: list[str] = []
    decode, digest, is_plain = pybase64.b64decode, PayloadDigest.__init__, payload_cut.is_plain

    def b64decode(given: Any, **options: Any) -> bytes:
        done.append("decode")
        return decode(given, **options)

    def begin(self: PayloadDigest, data: bytes) -> None:
        done.append("digest")
        digest(self, data)

    def look_through(given: memoryview, **options: Any) -> bool:
        done.append("look through")
        return is_plain(given, **options)

    monkeypatch.setattr(pybase64, "b64decode", b64decode)
    monkeypatch.setattr(PayloadDigest, "__init__", begin)
    monkeypatch.setattr(payload_cut, "is_plain", look_through)
    return done


def picture(size: tuple[int, int] = (64, 48), num_bytes: int = 60_000) -> bytes:
    return make_jpeg(size=size) + os.urandom(num_bytes)


@pytest.mark.parametrize("payload", ["tensors", "none"])
@pytest.mark.parametrize("num_bytes", [60_000, 5_000_000], ids=["short", "long"])
def test_a_payload_that_came_before_is_neither_decoded_nor_digested_nor_looked_through(
    server: Server, work: list[str], payload: str, num_bytes: int
) -> None:
    parts = image(data_url(picture(num_bytes=num_bytes))), image(data_url(picture((96, 48))))
    first = render(server, *parts, mm_payload=payload)
    assert sorted(work) == ["decode"] * 2 + ["digest"] * 2 + ["look through"] * 2
    work.clear()
    again = render(server, *parts, mm_payload=payload)
    assert work == []
    assert rendered(again) == rendered(first)
    # Under other ways to write the same: what is the same is the identity.
    spaced = parts[0]["image_url"]["url"] + "\n"
    other = render(server, image(spaced), parts[1], mm_payload=payload)
    assert rendered(other) == rendered(first)
    server.wait_idle()
    assert server.context.renderer.encoded_budget.held_bytes == 0


@pytest.mark.parametrize("payload", ["tensors", "none"])
def test_what_the_cache_has_lost_is_decoded_from_the_text(
    server: Server, work: list[str], payload: str
) -> None:
    parts = image(data_url(picture())), image(data_url(picture((96, 48))))
    first, _ = (render(server, *parts, mm_payload=payload) for _ in range(2))
    clear_caches(server)
    work.clear()
    again = render(server, *parts, mm_payload=payload)
    assert rendered(again) == rendered(first)
    # Sizes are known, so that no pixels are needed for a prompt alone.
    assert sorted(work) == (["decode"] * 2 + ["digest"] * 2 if payload == "tensors" else [])
    server.wait_idle()
    renderer = server.context.renderer
    assert (renderer.encoded_budget.held_bytes, renderer.decoded_budget.held_bytes) == (0, 0)


def test_tenants_do_not_know_of_each_other(server: Server, work: list[str]) -> None:
    part = image(data_url(picture()))
    answers = []
    for salt, is_new in (("a", True), ("b", True), ("a", False), (None, True), ("b", False)):
        work.clear()
        fields = {} if salt is None else {"cache_salt": salt}
        answers.append(rendered(render(server, part, mm_payload="none", **fields))[0])
        assert (salt, bool(work)) == (salt, is_new)
    assert all(answer == answers[0] for answer in answers)


def test_a_known_text_beside_a_file_that_changes(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is identified anew is what can change; both have to be read."""
    monkeypatch.setattr(local_files, "_SETTLED_NS", int(SETTLED_S * 1e9))
    path = folder / "picture"
    path.write_bytes(picture())
    time.sleep(SETTLED_S * 1.2)
    parts = image(data_url(picture())), image(f"file://{path}")
    for _ in range(2):
        render(server, *parts)
    clear_caches(server)
    changed = picture((128, 96))
    read = local_files.LocalFiles.read

    def read_changed(*args: Any) -> bytes:
        monkeypatch.setattr(local_files.LocalFiles, "read", read)
        replace(path, changed)
        return read(*args)

    monkeypatch.setattr(local_files.LocalFiles, "read", read_changed)
    answer = render(server, *parts)
    truth = render(server, parts[0], image(data_url(changed)))
    assert rendered(answer) == rendered(truth)


def test_a_known_text_does_not_make_another_string_a_payload(server: Server) -> None:
    """What is no payload is not taken for one, whatever came before."""
    url = data_url(picture())
    first = rendered(render(server, image(url)))
    # JSON allows no line break in a string, also not in one that is known but for it.
    body = json.dumps(request(image("HERE"), text(), mm_payload="none")).encode()
    for end in (b"\n", b"\0"):
        broken = body.replace(b"HERE", url.encode() + end)
        assert server.post("/v1/chat/completions/render", broken).status_code == 400
    for escaped in (url.replace("/", "\\/"), url + "\\n", url.replace(",", ",\\u0020", 1)):
        answer = server.post(
            "/v1/chat/completions/render",
            json.dumps(request(image("HERE"), text())).encode().replace(b"HERE", escaped.encode()),
        )
        assert answer.status_code == 200
        assert rendered(answer.json()) == first


def test_a_request_holds_the_memory_of_a_text_that_is_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    renderer = server.context.renderer
    build = type(renderer.runner.headers)._render_hits

    def render_hits(*args: Any) -> Any:
        held.append(renderer.encoded_budget.held_bytes)
        return build(*args)

    monkeypatch.setattr(type(renderer.runner.headers), "_render_hits", render_hits)
    data, other = picture(num_bytes=2_000_000), picture(num_bytes=1_000_000)
    for parts in ([data], [data], [data, other]):
        body = request(*(image(data_url(part)) for part in parts), text(), mm_payload="none")
        response = server.post("/v1/chat/completions/render", body)
        assert response.status_code == 200
    # A text keeps the body that it is in, and what it may become is held with it.
    num_chars = len(response.request.content)
    assert held[0] == len(data)
    assert held[2] == num_chars + len(data) + len(other)
    assert 0 < held[1] - len(data) - len(data_url(data)) < 1000


def test_a_text_that_is_decoded_after_all_waits_for_no_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [image(data_url(picture(num_bytes=300_000))) for _ in range(4)]
    first, _ = (render(server, *parts) for _ in range(2))
    grown: list[int] = []
    monkeypatch.setattr(Reservation, "grow", lambda _, nbytes: grown.append(nbytes))
    clear_caches(server)
    assert rendered(render(server, *parts)) == rendered(first)
    # Nor one with escapes, of which there is no view but a copy.
    escaped = json.dumps(request(*parts, text())).replace("/", "\\/").encode()
    answer = server.post("/v1/chat/completions/render", escaped)
    assert rendered(answer.json()) == rendered(first)
    assert grown == []


def test_what_was_processed_holds_no_memory_for_a_decode(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    budget = server.context.renderer.encoded_budget
    render_all = RenderedRequest.render

    async def and_look(self: RenderedRequest, **options: Any) -> Any:
        answer = await render_all(self, **options)
        held.append(budget.held_bytes)
        return answer

    monkeypatch.setattr(RenderedRequest, "render", and_look)
    data = picture(num_bytes=2_000_000)
    for is_cleared in (False, False, True):
        if is_cleared:
            clear_caches(server)
        render(server, image(data_url(data)))
    assert (held[0], held[2]) == (len(data), len(data))
    assert 0 < held[1] - len(data_url(data)) < 1000


def test_a_text_of_which_the_engine_lost_the_item_is_decoded_again(
    chat_server: Server, work: list[str]
) -> None:
    body = request(image(data_url(picture())), text(), max_tokens=2, temperature=0)
    answers = [chat_server.post("/v1/chat/completions", body).json() for _ in range(2)]
    work.clear()
    chat_server.context.engine.clear_cache()
    answers.append(chat_server.post("/v1/chat/completions", body).json())
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert work == ["decode", "digest"]
    chat_server.wait_idle()
    assert chat_server.context.renderer.encoded_budget.held_bytes == 0
