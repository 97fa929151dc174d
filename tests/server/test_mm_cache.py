"""Requests that pass the caches by, and emptying the caches."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.builders import make_jpeg
from tests.origin import Origin
from tests.server.harness import Server, data_url, image, request, text
from tests.server.test_tokenize import ok, traces


def picture(**fields: Any) -> dict[str, Any]:
    return image(data_url(make_jpeg(size=(64, 48)) + os.urandom(8)), **fields)


@pytest.fixture(scope="module")
def keyed_server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    with Server(tiny_model("qwen2_5_vl", weights=False), engine="none", api_key="k") as server:
        yield server


def engine_hashes(server: Server) -> list[str]:
    server.wait_idle()
    snapshot = server.context.engine.cache_snapshot_async()
    return asyncio.run_coroutine_threadsafe(snapshot, server.loop).result(60)


def test_a_request_can_pass_the_caches_by(chat_server: Server, shared_origin: Origin) -> None:
    uuid, path = os.urandom(8).hex(), f"/{os.urandom(8).hex()}"
    shared_origin.serve(path, make_jpeg() + os.urandom(8))
    known, new = image(shared_origin.url(path), uuid=uuid), picture(uuid=os.urandom(8).hex())
    chat = {"max_tokens": 2, "temperature": 0}
    answers = {}
    for route in ("/v1/chat/completions", "/v1/chat/completions/render"):
        answers[route] = ok(chat_server, route, request(known, text(), **chat))
    before, held, decodes = traces(chat_server), engine_hashes(chat_server), chat_server.decodes()
    hits = shared_origin.hits(path)
    for route, part in (
        ("/v1/chat/completions", known),
        ("/v1/chat/completions", new),
        ("/v1/chat/completions/render", known),
        ("/v1/chat/completions/render", new),
    ):
        answer = ok(chat_server, route, request(part, text(), **chat, skip_mm_cache=True))
        if part is known:
            for field in ("features", "choices"):
                assert answer.get(field) == answers[route].get(field)
    assert traces(chat_server) == before
    assert engine_hashes(chat_server) == held
    # Nothing was read either.
    assert chat_server.decodes() == decodes + 4
    assert shared_origin.hits(path) == hits + 2


def test_a_uuid_alone_cannot_pass_the_caches_by(render_server: Server) -> None:
    uuid = os.urandom(8).hex()
    ok(render_server, "/v1/chat/completions/render", request(picture(uuid=uuid)))
    body = request(picture(), image(None, uuid=uuid), skip_mm_cache=True)
    response = render_server.render(body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["modality"], error["index"]) == ("image", 1)
    assert "needs the processor cache" in error["message"]


def test_the_caches_of_both_sides_are_emptied_at_once(chat_server: Server) -> None:
    part = picture(uuid=os.urandom(8).hex())
    body = request(part, text(), max_tokens=2, temperature=0)
    first = ok(chat_server, "/v1/chat/completions", body)["choices"]
    ok(chat_server, "/v1/chat/completions/render", body)
    renderer = chat_server.context.renderer
    assert renderer.sender_cache is not None and renderer.render_cache is not None
    expected = {
        "render": len(renderer.render_cache),
        "sender": len(renderer.sender_cache),
        "uuids": len(renderer.identities.bindings),
    }
    assert all(expected.values())
    assert ok(chat_server, "/reset_mm_cache", {}) == {"cleared": expected}
    assert traces(chat_server)[0][0][0] == traces(chat_server)[0][1][0] == []
    assert engine_hashes(chat_server) == []
    assert ok(chat_server, "/reset_mm_cache", b"") == {
        "cleared": {"render": 0, "sender": 0, "uuids": 0}
    }
    alone = request({**part, "image_url": None})
    assert chat_server.render(alone).status_code == 400
    before = chat_server.metric("repairs_total", reason="cache_miss")
    assert ok(chat_server, "/v1/chat/completions", body)["choices"] == first
    assert chat_server.metric("repairs_total", reason="cache_miss") == before
    assert engine_hashes(chat_server) == renderer.sender_cache.snapshot()


@pytest.mark.parametrize(
    "path",
    ["/reset_mm_cache", "/tokenize", "/detokenize", "/v1/chat/completions/count"],
)
def test_the_key_is_asked_for(keyed_server: Server, path: str) -> None:
    body = {"tokens": [1]} if path == "/detokenize" else {"prompt": "a"}
    body = request(text()) if path.endswith("count") else body
    assert keyed_server.post(path, body).status_code == 401
    wrong = {"authorization": "Bearer wrong"}
    assert keyed_server.post(path, body, headers=wrong).status_code == 401
    right = {"authorization": "Bearer k"}
    assert keyed_server.post(path, body, headers=right).status_code == 200
    assert httpx.get(f"{keyed_server.url}{path}", headers=right, timeout=180).status_code == 405


def test_what_fails_while_another_workers_caches_are_emptied_is_logged(
    render_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    async def fail(clear_engine: Callable[[], None]) -> None:
        failed.set()
        raise RuntimeError("the cache is broken")

    context = render_server.context
    monkeypatch.setattr(context.renderer, "clear_caches", fail)
    render_server.call(context._clear_later)
    assert failed.wait(10)
    render_server.call(lambda: None)  # the task's end comes before
    assert not context._clearing
    assert "the caches were not emptied" in caplog.text
