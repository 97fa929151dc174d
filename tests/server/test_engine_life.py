"""The engine dies, forgets, or is no longer wanted: what the client notices of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lazydecode.engine.client import EngineClient
from tests.builders import make_jpeg
from tests.server.harness import Server, data_url, image, request, text


@pytest.fixture(scope="module")
def mortal_server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """A server of its own, since its engine is killed. Its cache holds about four pictures."""
    with Server(
        tiny_model("qwen2_5_vl"), served_model_name=("tiny",), mm_processor_cache_gb=0.0003
    ) as server:
        yield server


def engine_of(server: Server) -> EngineClient:
    engine = server.context.engine
    assert isinstance(engine, EngineClient)
    return engine


def mirrors(server: Server) -> tuple[list[str], list[str]]:
    """Both caches' hashes in eviction order, after everything that was sent."""
    server.wait_idle()
    cache = server.context.renderer.sender_cache
    assert cache is not None
    snapshot = asyncio.run_coroutine_threadsafe(
        engine_of(server).cache_snapshot_async(), server.loop
    ).result(60)
    return cache.snapshot(), snapshot


def chat(server: Server, *parts: dict[str, Any], **fields: Any) -> str:
    body = {"max_tokens": 4, "temperature": 0, **request(*parts), **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def picture(number: int) -> dict[str, Any]:
    return image(data_url(make_jpeg(size=(96, 96)) + bytes([number])))


def kill(server: Server) -> None:
    pid = engine_of(server).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_a_killed_engine_is_replaced_and_the_next_request_waits_for_it(
    mortal_server: Server,
) -> None:
    before = chat(mortal_server, picture(1), text("a"))
    kill(mortal_server)
    assert chat(mortal_server, picture(1), text("a")) == before
    sender, receiver = mirrors(mortal_server)
    assert sender == receiver
    assert len(sender) == 1


def test_a_stream_goes_on_when_the_engine_dies_in_it(mortal_server: Server) -> None:
    messages: Any = request(picture(2), text("b"))["messages"]
    whole = chat(mortal_server, picture(2), text("b"), max_tokens=96)
    client = mortal_server.openai()

    def num_repairs() -> float:
        return mortal_server.metric("repairs_total", reason="engine_lost")

    before = num_repairs()
    for _ in range(20):  # the engine may be done before it is killed: nobody slows it down
        pieces: list[str] = []
        chunks = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=96, temperature=0, stream=True
        )
        for number, chunk in enumerate(chunks):
            pieces.append(chunk.choices[0].delta.content or "")
            if number == 6:
                kill(mortal_server)
        assert "".join(pieces) == whole
        if num_repairs() > before:
            break
    assert num_repairs() == before + 1
    sender, receiver = mirrors(mortal_server)
    assert sender == receiver


def test_an_answer_with_a_media_token_in_it_ends_with_the_engine(mortal_server: Server) -> None:
    """In a prompt, the token would stand for a picture that is not there."""
    ids = mortal_server.context.frontend.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "a"])
    body = request(picture(2), text("b"), max_tokens=20_000, stream=True, ignore_eos=True)
    body |= {"logit_bias": {str(token_id): 100 for token_id in ids}, "seed": 1}
    url = f"{mortal_server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=180) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        for _ in range(30):  # one of both, by chance
            next(lines)
        kill(mortal_server)
        *_, last = lines
    error = json.loads(last)["error"]
    assert (error["code"], error["retryable"]) == (503, True)
    assert chat(mortal_server, picture(2), text("b"))


def test_mirrors_forced_apart_are_repaired_within_the_request(mortal_server: Server) -> None:
    before = chat(mortal_server, picture(3), picture(4), text("c"))
    misses = mortal_server.metric("repairs_total", reason="cache_miss")
    decodes = mortal_server.decodes()
    # The engine forgets everything, and nobody tells the front end.
    engine_of(mortal_server).clear_cache()
    assert chat(mortal_server, picture(3), picture(4), text("c")) == before
    assert mortal_server.metric("repairs_total", reason="cache_miss") == misses + 1
    assert mortal_server.decodes() == decodes + 2
    sender, receiver = mirrors(mortal_server)
    assert sender[-2:] == receiver[-2:]


def test_a_request_larger_than_the_cache_is_answered(mortal_server: Server) -> None:
    """Burst: the cache holds four of twelve."""
    for number in range(4):
        chat(mortal_server, picture(number), text("d"), max_tokens=1)
    parts = [picture(number) for number in range(12)]
    first = chat(mortal_server, *parts, text("e"))
    assert chat(mortal_server, *parts, text("e")) == first
    sender, receiver = mirrors(mortal_server)
    assert sender == receiver


def test_a_client_that_leaves_ends_its_generation(mortal_server: Server) -> None:
    path = "/v1/chat/completions"
    body = {**request(picture(1), text("f")), "max_tokens": 20_000, "ignore_eos": True}
    before = mortal_server.metric("requests_total", route="chat", status="499")
    leaving = http.client.HTTPConnection("127.0.0.1", mortal_server.port)
    leaving.request("POST", path, json.dumps(body))
    deadline = time.monotonic() + 120
    while not engine_of(mortal_server)._streams:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    leaving.close()
    mortal_server.wait_idle()
    assert not engine_of(mortal_server)._streams
    url = f"{mortal_server.url}{path}"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=180) as response:
        next(response.iter_lines())
    mortal_server.wait_idle()
    assert not engine_of(mortal_server)._streams
    left = mortal_server.metric("requests_total", route="chat", status="499")
    assert left == before + 2
    started = time.monotonic()
    chat(mortal_server, text("g"), max_tokens=1)
    assert time.monotonic() - started < 20  # The 20,000 tokens of the others take longer.


def test_a_prompt_that_does_not_fit_is_a_400(mortal_server: Server) -> None:
    body = {**request(text("word " * 40_000)), "max_tokens": 1}
    response = mortal_server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "tokens" in response.json()["error"]["message"]
    body = {**request(text("word")), "max_tokens": 10_000_000}
    response = mortal_server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
