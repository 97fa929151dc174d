"""The front end's side: order, streams, errors, aborts, and what a lost process leaves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from lazydecode.engine.client import EngineClient
from lazydecode.engine.protocol import Engine, EngineOutput, EngineRequest, SamplingParams
from lazydecode.errors import (
    CacheMissError,
    EngineDeadError,
    EngineError,
    ValidationError,
)
from lazydecode.inputs import FlatField, MultiModalFieldElem, MultiModalKwargsItem, PlaceholderRange
from tests.engine.conftest import scripted_config
from tests.engine.scripted import DIE, FAIL, FATAL, HANG, STEP_MS

_numbers = itertools.count()


def new_id() -> str:
    return f"request-{next(_numbers)}"


def item(value: int, size: int = 10) -> MultiModalKwargsItem:
    data = torch.full((size,), value)
    return MultiModalKwargsItem({"x": MultiModalFieldElem(data, FlatField())})


def request(
    prompt: list[int],
    items: list[MultiModalKwargsItem | None] | None = None,
    hashes: list[str] | None = None,
    *,
    max_tokens: int = 3,
    resumed: int = 0,
) -> EngineRequest:
    return EngineRequest(
        new_id(),
        prompt,
        {"image": items} if items else {},
        {"image": hashes} if hashes else {},
        {"image": [PlaceholderRange(i, 1) for i in range(len(items))]} if items else {},
        SamplingParams(max_tokens=max_tokens),
        resumed,
    )


async def answer(engine: EngineClient, one: EngineRequest) -> list[int]:
    engine.submit(one)
    return [t async for output in engine.stream(one.request_id) for t in output.new_token_ids]


async def eventually(condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# -- answers


async def test_it_is_an_engine_and_says_what_runs(engine: EngineClient) -> None:
    assert isinstance(engine, Engine)
    assert engine.is_alive
    assert engine.info is not None
    assert engine.info.model == "scripted"
    assert engine.info.eos_token_ids == (999_999,)
    assert engine.pid not in (None, os.getpid())


async def test_the_first_output_says_accepted_then_tokens_come_one_by_one(
    engine: EngineClient,
) -> None:
    one = request([5])
    engine.submit(one)
    outputs = [output async for output in engine.stream(one.request_id)]
    assert [output.new_token_ids for output in outputs] == [[], [6], [7], [8]]
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
    assert {output.request_id for output in outputs} == {one.request_id}


async def test_many_requests_get_their_own_answers(engine: EngineClient) -> None:
    requests = [request([1000 * n], max_tokens=1 + n % 9) for n in range(60)]
    answers = await asyncio.gather(*(answer(engine, one) for one in requests))
    assert answers == [[1000 * n + s for s in range(1, 2 + n % 9)] for n in range(60)]


async def test_tensors_arrive_once_and_are_cached_after(engine: EngineClient) -> None:
    assert await answer(engine, request([5], [item(40)], ["seen"])) == [45, 46, 47]
    again = request([5], [None], ["seen"])
    engine.submit(again)
    outputs = [output async for output in engine.stream(again.request_id)]
    assert outputs[0].num_cached_items == 1
    assert [t for output in outputs for t in output.new_token_ids] == [45, 46, 47]


async def test_every_kind_of_tensor_crosses(engine: EngineClient) -> None:
    for data in (
        torch.tensor([7.0, 1.5], dtype=torch.bfloat16),
        torch.tensor([[7, 1], [2, 3]], dtype=torch.uint8).T,
        torch.tensor(7),
        torch.full((300, 1000), 7, dtype=torch.float32),
    ):
        one = MultiModalKwargsItem({"x": MultiModalFieldElem(data, FlatField())})
        assert await answer(engine, request([0], [one], [new_id()])) == [7, 8, 9]


async def test_large_tensors_go_through_shared_memory_and_its_loans_end() -> None:
    size = 200_000
    engine = EngineClient(scripted_config(cache_bytes=2 * (size + 256), shared_bytes=8 * size))
    await engine.start()
    try:
        assert engine._process is not None
        arena = engine._process.arena
        assert arena is not None

        def big(value: int) -> MultiModalKwargsItem:
            data = torch.full((size,), value, dtype=torch.uint8)
            return MultiModalKwargsItem({"x": MultiModalFieldElem(data, FlatField())})

        for number in range(1, 40):
            one = request([5], [big(number)], [f"big-{number}"])
            assert await answer(engine, one) == [5 + number + step for step in range(3)]
        assert await engine.cache_snapshot_async() == ["big-38", "big-39"]
        # What the cache holds is still lent; what it evicted has come back.
        await eventually(lambda: arena.lent_bytes == 2 * size)
        assert await answer(engine, request([5], [None], ["big-38"])) == [43, 44, 45]
        # Nine at once are more than fits: the rest goes through the socket.
        many = [request([5], [big(n)], [f"many-{n}"]) for n in range(1, 10)]
        answers = await asyncio.gather(*(answer(engine, one) for one in many))
        assert [a[0] for a in answers] == [5 + n for n in range(1, 10)]
        engine.clear_cache()
        await engine.cache_snapshot_async()
        await eventually(lambda: arena.lent_bytes == 0)
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: engine.pid not in (None, pid))
        assert await answer(engine, request([5], [big(3)], ["again"])) == [8, 9, 10]
        assert engine._process.arena is not arena
    finally:
        await engine.close()


# -- errors


async def test_all_missing_items_are_named_before_any_output(engine: EngineClient) -> None:
    one = request([5], [None, item(1), None], ["gone-1", new_id(), "gone-2"])
    engine.submit(one)
    with pytest.raises(CacheMissError) as caught:
        await anext(engine.stream(one.request_id))
    assert caught.value.hashes == ["gone-1", "gone-2"]
    repaired = request([5], [item(1), item(1), item(1)], ["gone-1", new_id(), "gone-2"])
    assert await answer(engine, repaired) == [8, 9, 10]


async def test_a_prompt_that_does_not_fit_is_the_clients_error(engine: EngineClient) -> None:
    with pytest.raises(ValidationError, match="the prompt has 1000 tokens") as caught:
        await answer(engine, request([1] * 1000))
    assert (caught.value.status, caught.value.parameter) == (400, "messages")
    with pytest.raises(ValidationError, match="max_tokens is 991"):
        await answer(engine, request([1] * 10, max_tokens=991))
    with pytest.raises(ValidationError, match="there is no token id 1000000"):
        await answer(engine, request([1_000_000]))


async def test_a_failing_request_fails_alone_and_without_the_models_words(
    engine: EngineClient,
) -> None:
    good = request([7], max_tokens=4)
    engine.submit(good)
    with pytest.raises(EngineError, match="the engine failed on this request: RuntimeError") as bad:
        await answer(engine, request([FAIL, 1]))
    assert "0x1234" not in str(bad.value)
    assert not isinstance(bad.value, EngineDeadError)
    outputs = [output async for output in engine.stream(good.request_id)]
    assert [t for output in outputs for t in output.new_token_ids] == [8, 9, 10, 11]


async def test_a_request_that_no_message_can_hold_fails_alone(engine: EngineClient) -> None:
    before = request([1, 2])
    engine.submit(before)
    async with asyncio.timeout(60):
        with pytest.raises(EngineError, match="cannot be sent"):
            await answer(engine, request([10**30]))
        assert len([o async for o in engine.stream(before.request_id)]) > 1
        assert len(await answer(engine, request([1, 2]))) == 3


async def test_misuse_is_a_value_error(engine: EngineClient) -> None:
    one = request([STEP_MS + 20], max_tokens=50)
    engine.submit(one)
    with pytest.raises(ValueError, match="is running already"):
        engine.submit(one)
    stream = engine.stream(one.request_id)
    await anext(stream)
    with pytest.raises(ValueError, match="is read elsewhere"):
        await anext(engine.stream(one.request_id))
    await stream.aclose()
    with pytest.raises(ValueError, match="is not running"):
        await anext(engine.stream("never-submitted"))


# -- ends


async def next_tokens(stream: AsyncIterator[EngineOutput]) -> EngineOutput:
    while True:
        output = await anext(stream)
        if output.new_token_ids:
            return output


async def test_abort_ends_the_stream_with_its_reason(engine: EngineClient) -> None:
    one = request([STEP_MS + 5], max_tokens=900)
    engine.submit(one)
    stream = engine.stream(one.request_id)
    await next_tokens(stream)
    engine.abort(one.request_id)
    rest = [output async for output in stream]
    assert rest[-1].finish_reason == "abort"
    engine.abort(one.request_id)
    engine.abort("unknown")


async def test_a_cancelled_consumer_stops_the_generation() -> None:
    engine = EngineClient(scripted_config(max_batch_size=1))
    await engine.start()
    try:
        slow = request([STEP_MS + 50], max_tokens=990)
        started = asyncio.Event()

        async def consume() -> None:
            engine.submit(slow)
            async for output in engine.stream(slow.request_id):
                if output.new_token_ids:
                    started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # There is room for one only: this is served because the other was stopped.
        begin = time.monotonic()
        assert await answer(engine, request([1])) == [2, 3, 4]
        assert time.monotonic() - begin < 30.0
        assert engine._streams == engine._streams_by_wire_id == {}
    finally:
        await engine.close()


async def test_an_aborted_request_that_nobody_read_leaves_nothing(engine: EngineClient) -> None:
    one = request([STEP_MS + 5], max_tokens=900)
    engine.submit(one)
    engine.abort(one.request_id)
    assert engine._streams == engine._streams_by_wire_id == {}
    engine.submit(one)  # the id is free again
    stream = engine.stream(one.request_id)
    assert (await next_tokens(stream)).new_token_ids == [STEP_MS + 6]
    await stream.aclose()


async def test_cache_updates_of_aborted_and_refused_requests_count(engine: EngineClient) -> None:
    engine.clear_cache()
    aborted = request([5], [item(1)], ["aborted"])
    engine.submit(aborted)
    engine.abort(aborted.request_id)
    refused = request([5] * 1000, [item(1)], ["refused"])
    engine.submit(refused)
    engine.abort(refused.request_id)
    assert await engine.cache_snapshot_async() == ["aborted", "refused"]


async def test_the_cache_is_cleared_in_order(engine: EngineClient) -> None:
    before, after = request([5], [item(1)], ["before"]), request([5], [item(2)], ["after"])
    engine.submit(before)
    engine.clear_cache()
    engine.submit(after)
    assert await engine.cache_snapshot_async() == ["after"]
    for one in (before, after):
        assert [o async for o in engine.stream(one.request_id)][-1].finish_reason == "length"


async def test_items_are_dropped_in_order(engine: EngineClient) -> None:
    engine.clear_cache()
    for name in ("kept", "dropped"):
        one = request([5], [item(1)], [name])
        engine.submit(one)
        engine.abort(one.request_id)
    engine.invalidate_cache(["dropped", "unknown"])
    assert await engine.cache_snapshot_async() == ["kept"]
    one = request([5], [item(3)], ["dropped"])
    assert await answer(engine, one) == [8, 9, 10]
    assert await engine.cache_snapshot_async() == ["kept", "dropped"]


async def test_a_cancelled_snapshot_disturbs_nobody(engine: EngineClient) -> None:
    task = asyncio.create_task(engine.cache_snapshot_async())
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert isinstance(await engine.cache_snapshot_async(), list)


# -- a process that is lost


async def test_a_killed_process_is_replaced_and_its_streams_fail_retryably(
    engine: EngineClient,
) -> None:
    order: list[str] = []
    engine.on_restart(lambda: order.append("callback"))
    engine.on_restart(lambda: 1 / 0)  # its failure is logged, not passed on
    running = [request([STEP_MS + 5], max_tokens=900) for _ in range(3)]
    for one in running:
        engine.submit(one)
    await next_tokens(stream := engine.stream(running[0].request_id))
    pid = engine.pid
    assert pid is not None
    try:
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDeadError) as caught:
            async for _ in stream:
                pass
        order.append("failed")
        assert time.monotonic() - killed < 30.0
        assert (caught.value.status, caught.value.retryable) == (503, True)
        assert order == ["callback", "failed"]
        for one in running[1:]:
            with pytest.raises(EngineDeadError):
                async for _ in engine.stream(one.request_id):
                    pass
        # Submitted while nobody is there to take it: it waits for the next process.
        assert await answer(engine, request([5], [item(40)], ["again"])) == [45, 46, 47]
        assert engine.pid not in (None, pid)
        assert is_gone(pid)
        assert await engine.cache_snapshot_async() == ["again"]
    finally:
        engine._callbacks.clear()


async def test_a_request_resumed_in_the_next_process_goes_on(engine: EngineClient) -> None:
    one = request([5, HANG, 7], max_tokens=6)
    engine.submit(one)
    stream = engine.stream(one.request_id)
    got = (await next_tokens(stream)).new_token_ids
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        async for output in stream:
            got += output.new_token_ids
    assert got == [8]
    resumed = request([5, STEP_MS, 7, *got], max_tokens=6, resumed=len(got))
    assert got + await answer(engine, resumed) == [8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize("order", [DIE, FATAL])
async def test_a_model_that_takes_the_process_down_is_replaced(
    engine: EngineClient, order: int
) -> None:
    pid = engine.pid
    with pytest.raises(EngineDeadError):
        await answer(engine, request([order]))
    assert await answer(engine, request([1])) == [2, 3, 4]
    assert engine.pid != pid


async def test_ctrl_c_is_not_the_engines_business(engine: EngineClient) -> None:
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert await answer(engine, request([1])) == [2, 3, 4]
    assert engine.pid == pid


async def test_requests_fail_while_no_process_can_start_and_succeed_after(tmp_path: Path) -> None:
    flag, hold = tmp_path / "fail", tmp_path / "hold"
    engine = EngineClient(scripted_config(fail_while=flag, wait_while=hold))
    lost = threading.Semaphore(0)
    engine.on_restart(lambda: lost.release() and None)
    await engine.start()
    try:
        flag.touch()
        hold.touch()  # the next process fails when there is a request that waits for it
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await eventually(lambda: not engine.is_alive)
        waiting = request([1])
        engine.submit(waiting)
        hold.unlink()
        with pytest.raises(EngineDeadError, match="could not be started again"):
            await anext(engine.stream(waiting.request_id))
        assert lost.acquire(timeout=60)
        assert lost.acquire(timeout=60)  # once more for the request that was dropped unsent
        with pytest.raises(EngineDeadError):
            await answer(engine, request([1]))
        with pytest.raises(EngineDeadError):
            await engine.cache_snapshot_async()
        assert not engine.is_alive
        flag.unlink()
        await eventually(lambda: engine.is_alive)
        assert await answer(engine, request([1])) == [2, 3, 4]
    finally:
        await engine.close()


# -- start and end


async def test_a_model_that_cannot_be_loaded_says_why_and_leaves_no_process() -> None:
    engine = EngineClient(scripted_config(fail_to_load="no such folder"))
    with pytest.raises(EngineError, match="cannot start: OSError: no such folder"):
        await engine.start()
    assert engine.pid is None
    await engine.close()


async def test_a_process_that_dies_while_loading_is_reported() -> None:
    engine = EngineClient(scripted_config(die_loading=True))
    with pytest.raises(EngineError, match=r"ended while it started \(signal 9\)"):
        await engine.start()
    await engine.close()


async def test_close_ends_process_threads_and_streams() -> None:
    engine = EngineClient(scripted_config())
    await engine.start()
    pid = engine.pid
    assert pid is not None
    one = request([STEP_MS + 50], max_tokens=900)
    engine.submit(one)
    stream = engine.stream(one.request_id)
    await next_tokens(stream)
    begin = time.monotonic()
    await engine.close()
    assert time.monotonic() - begin < 30.0
    with pytest.raises(EngineDeadError, match="closed"):
        async for _ in stream:
            pass
    assert is_gone(pid)
    assert not [t for t in engine._threads if t.is_alive()]
    assert not engine.is_alive
    await engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await answer(engine, request([1]))


async def test_close_while_a_dead_process_is_replaced(tmp_path: Path) -> None:
    flag = tmp_path / "fail"
    engine = EngineClient(scripted_config(fail_while=flag))
    await engine.start()
    flag.touch()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await eventually(lambda: not engine.is_alive)
    await engine.close()
    assert not [t for t in engine._threads if t.is_alive()]


async def test_close_before_start_is_harmless() -> None:
    await EngineClient(scripted_config()).close()


_FRONT_END = """
import asyncio, sys, time
sys.path[:] = {path!r}
from lazydecode.engine.client import EngineClient
from tests.engine.conftest import scripted_config
engine = EngineClient(scripted_config())
asyncio.run(engine.start())
print(engine.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("how", ["killed", "exits without closing"])
def test_the_engine_ends_with_its_front_end(how: str) -> None:
    then = "time.sleep(600)" if how == "killed" else "sys.exit(0)"
    script = _FRONT_END.format(path=sys.path, then=then)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as front_end:
        assert front_end.stdout is not None
        pid = int(front_end.stdout.readline())
        if how == "killed":
            front_end.kill()
        front_end.wait(60)
    deadline = time.monotonic() + 120
    while not is_gone(pid):
        assert time.monotonic() < deadline, "the engine outlived its front end"
        time.sleep(0.05)
