from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from lazydecode.errors import UnprocessableMediaError
from lazydecode.media.base import MediaRef
from lazydecode.media.decode import (
    MediaDecodeJob,
    await_job,
    await_with_cancellation_drain,
    collect_media_decodes,
    collect_media_decodes_async,
    submit_media_decodes,
)


def make_error(modality: str, index: int, cause: Exception) -> Exception:
    return UnprocessableMediaError(f"{modality} {index}: {cause}", modality=modality, index=index)


class Decoder:
    """A decoder that waits to be told to end."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        self.calls = 0
        self._error = error

    def __call__(self) -> str:
        self.calls += 1
        self.started.set()
        assert self.go.wait(120)
        if self._error is not None:
            raise self._error
        return "media"

    def ref(self) -> MediaRef[str]:
        return MediaRef(self, b"payload")


def submit(executor: Executor, *decoders: Decoder) -> list[MediaDecodeJob]:
    jobs: list[MediaDecodeJob] = []
    items = [("image", 10 + i, decoder.ref()) for i, decoder in enumerate(decoders)]
    submit_media_decodes(items, executor, jobs)
    return jobs


def test_undecoded_refs_are_submitted_with_their_position() -> None:
    decoded = MediaRef(lambda: 1, b"a")
    decoded.decode()
    fresh = MediaRef(lambda: 2, b"b")
    jobs: list[MediaDecodeJob] = []
    with ThreadPoolExecutor(1) as executor:
        submit_media_decodes([("image", 0, decoded), ("video", 5, fresh)], executor, jobs)
        collect_media_decodes(jobs, make_error)
    assert [(job.modality, job.original_index) for job in jobs] == [("video", 5)]
    assert jobs[0].future.result() == 2
    assert fresh.is_decoded


def test_a_failing_submission_leaves_the_earlier_jobs_in_the_list() -> None:
    class Full(Executor):
        calls = 0

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("full")
            assert not args
            assert not kwargs
            future: Future[Any] = Future()
            future.set_result(fn())
            return future

    refs = [MediaRef(lambda: 1, b"a") for _ in range(3)]
    jobs: list[MediaDecodeJob] = []
    with pytest.raises(RuntimeError, match="full"):
        submit_media_decodes([("image", i, ref) for i, ref in enumerate(refs)], Full(), jobs)
    assert [job.original_index for job in jobs] == [0]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_first_failure_in_the_list_is_raised_after_all_have_ended(is_async: bool) -> None:
    with ThreadPoolExecutor(3) as executor:
        slow, quick = Decoder(ValueError("slow")), Decoder(ValueError("quick"))
        last = Decoder()
        jobs = submit(executor, slow, quick, last)
        quick.go.set()
        jobs[1].future.exception()
        slow.go.set()
        threading.Timer(0.05, last.go.set).start()
        with pytest.raises(UnprocessableMediaError, match="image 10: slow") as caught:
            if is_async:
                asyncio.run(collect_media_decodes_async(jobs, make_error))
            else:
                collect_media_decodes(jobs, make_error)
        assert jobs[2].future.done()
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.index == 10


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_is_raised_as_it_is(is_async: bool) -> None:
    future: Future[Any] = Future()
    future.set_exception(SystemExit(3))
    jobs = [MediaDecodeJob("image", 0, future)]

    async def collect() -> None:
        with pytest.raises(SystemExit):
            await collect_media_decodes_async(jobs, make_error)

    if is_async:
        asyncio.run(collect())
    else:
        with pytest.raises(SystemExit):
            collect_media_decodes(jobs, make_error)


async def test_nothing_to_collect_returns_at_once() -> None:
    await collect_media_decodes_async([], make_error)
    collect_media_decodes([], make_error)


async def test_a_cancelled_collector_drains_every_job_even_when_cancelled_again() -> None:
    with ThreadPoolExecutor(1) as executor:
        running, queued = Decoder(), Decoder(ValueError("hidden"))
        jobs = submit(executor, running, queued)
        task = asyncio.create_task(collect_media_decodes_async(jobs, make_error))
        await asyncio.to_thread(running.started.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        running.go.set()
        await asyncio.to_thread(queued.started.wait)
        assert not task.done()
        queued.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(job.future.done() for job in jobs)
        assert (running.calls, queued.calls) == (1, 1)


# -- the drain


async def test_uncancelled_the_drain_is_transparent() -> None:
    async def work() -> int:
        return 7

    async def failing() -> int:
        raise KeyError("x")

    async def cancelled() -> int:
        raise asyncio.CancelledError

    calls: list[int] = []
    assert await await_with_cancellation_drain(work(), on_cancel=lambda: calls.append(1)) == 7
    with pytest.raises(KeyError):
        await await_with_cancellation_drain(failing(), on_cancel=lambda: calls.append(1))
    with pytest.raises(asyncio.CancelledError):
        await await_with_cancellation_drain(cancelled(), on_cancel=lambda: calls.append(1))
    assert calls == []


@pytest.mark.parametrize("error", [None, ValueError("hidden")])
async def test_cancelled_the_drain_waits_calls_back_once_and_raises_that(
    error: Exception | None,
) -> None:
    go = asyncio.Event()
    ended = False
    calls: list[int] = []

    async def work() -> int:
        nonlocal ended
        await go.wait()
        ended = True
        if error is not None:
            raise error
        return 7

    task = asyncio.create_task(
        await_with_cancellation_drain(work(), on_cancel=lambda: calls.append(1))
    )
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert (calls, task.done()) == ([1], False)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_a_cancellation_in_the_turn_in_which_the_work_ends_is_not_lost() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(await_with_cancellation_drain(work))
    await asyncio.sleep(0)
    work.set_result(7)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_time_out_around_the_drain_still_times_out() -> None:
    async def work() -> None:
        await asyncio.sleep(0.05)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await await_with_cancellation_drain(work())


# -- one job of another thread


async def test_an_awaited_job_gives_what_it_gave_or_raised() -> None:
    with ThreadPoolExecutor(1) as executor:
        assert await await_job(executor.submit(lambda: 7)) == 7
        done = executor.submit(lambda: 8)
        done.result()
        assert await await_job(done) == 8
        with pytest.raises(KeyError):
            await await_job(executor.submit(lambda: {}["x"]))


async def test_a_cancelled_wait_cancels_a_job_that_has_not_begun() -> None:
    with ThreadPoolExecutor(1) as executor:
        running, queued = Decoder(), Decoder()
        first, second = executor.submit(running), executor.submit(queued)
        task = asyncio.create_task(await_job(second))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (second.cancelled(), first.done()) == (True, False)
        running.go.set()
    assert queued.calls == 0


@pytest.mark.parametrize("error", [None, ValueError("hidden")])
async def test_a_wait_that_is_cancelled_again_and_again_lasts_as_long_as_the_job(
    error: Exception | None,
) -> None:
    with ThreadPoolExecutor(1) as executor:
        running = Decoder(error)
        job = executor.submit(running)
        task = asyncio.create_task(await_job(job))
        await asyncio.to_thread(running.started.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        running.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert job.done()


async def test_a_job_that_its_pool_has_dropped_ends_the_wait() -> None:
    job: Future[int] = Future()
    task = asyncio.create_task(await_job(job))
    await asyncio.sleep(0)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_in_the_turn_in_which_the_job_ends_is_not_lost() -> None:
    job: Future[int] = Future()
    task = asyncio.create_task(await_job(job))
    await asyncio.sleep(0)
    job.set_result(7)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_job_may_end_after_the_loop_that_waited_for_it() -> None:
    job: Future[int] = Future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(await_job(job))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    job.set_result(7)
    assert not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
