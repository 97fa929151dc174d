"""Decode submission and collection, shared by the processor and the vision-chunk parser.

Whoever submits owns the list of jobs, so that what was submitted before a failure can still be
waited for. A payload may be released only after every job on it has ended; the waits here
return no earlier than that, whatever happens to the caller meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

from lazydecode.errors import forget_frames
from lazydecode.media.base import MediaRef

_T = TypeVar("_T")

ErrorFactory: TypeAlias = Callable[[str, int, Exception], Exception]
"""(modality, index of the item in the request, cause) -> the error to raise."""


class MediaDecodeJob(NamedTuple):
    """One decode that was submitted, and which item of the request it is."""

    modality: str
    original_index: int
    """Position among the items of the modality as the client sent them."""
    future: Future[Any]


def submit_media_decodes(
    items: Iterable[tuple[str, int, MediaRef[Any]]],
    executor: Executor,
    jobs: list[MediaDecodeJob],
) -> None:
    """Submit the decode of every `(modality, index, ref)` that is not decoded yet.

    Each job is appended at once: if a later submission fails, `jobs` holds the earlier ones.
    """
    for modality, index, ref in items:
        if not ref.is_decoded:
            jobs.append(MediaDecodeJob(modality, index, executor.submit(ref.decode)))


def collect_media_decodes(jobs: Sequence[MediaDecodeJob], error_factory: ErrorFactory) -> None:
    """Wait for all jobs, then raise for the first one in the list that failed, if any."""
    wait_for_jobs(jobs)
    for job in jobs:
        _raise_failure(job, job.future, error_factory)


def wait_for_jobs(jobs: Sequence[MediaDecodeJob]) -> None:
    """Block until all jobs have ended, whatever their outcome."""
    running = [job.future for job in jobs if not job.future.done()]
    if running:
        wait(running)


async def collect_media_decodes_async(
    jobs: Sequence[MediaDecodeJob], error_factory: ErrorFactory
) -> None:
    """As `collect_media_decodes`, off the event loop.

    If the caller is cancelled, once or more often, the jobs are waited for all the same;
    `CancelledError` is raised after that and hides their outcomes.
    """
    if not jobs:
        return
    futures = [asyncio.wrap_future(job.future) for job in jobs]
    await await_with_cancellation_drain(asyncio.gather(*futures, return_exceptions=True))
    for job, future in zip(jobs, futures, strict=True):
        _raise_failure(job, future, error_factory)


def _raise_failure(
    job: MediaDecodeJob, future: Future[Any] | asyncio.Future[Any], error_factory: ErrorFactory
) -> None:
    exc = future.exception()
    if isinstance(exc, Exception):
        raise error_factory(job.modality, job.original_index, exc) from exc
    if exc is not None:  # KeyboardInterrupt, SystemExit: not about the item.
        raise exc


async def await_job(job: Future[_T]) -> _T:
    """Return what a job of another thread gives, without blocking the event loop.

    A caller that is cancelled, once or more often, cancels the job; if it runs already, its end
    is waited for. `CancelledError` is raised after that and hides its outcome. It is what
    `await_with_cancellation_drain` does with any awaitable, without its two further futures.

    Raises:
        BaseException: Whatever the job raised.
    """
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        ended = loop.create_future()
        job.add_done_callback(lambda _, ended=ended: _wake(loop, ended))  # type: ignore[misc]
        try:
            await ended
        except asyncio.CancelledError as exc:
            if cancelled is None:
                cancelled = exc
                job.cancel()
    if cancelled is not None:
        raise cancelled
    if job.cancelled():  # with its pool; not of the class that asyncio knows
        raise asyncio.CancelledError
    return job.result()


def _wake(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    """End a wait on a loop, from any thread."""

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    # Of a loop that was closed nobody waits any more.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(end)


async def await_with_cancellation_drain(
    awaitable: Awaitable[_T], *, on_cancel: Callable[[], object] | None = None
) -> _T:
    """Await `awaitable` to its end, even if the caller is cancelled meanwhile.

    Uncancelled it is transparent. Cancelled, it calls `on_cancel` (once, at the first time;
    it must not raise), goes on waiting, and raises `CancelledError` when the work has ended,
    whatever its outcome was.
    """
    work = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            # Unlike `shield`, `wait` raises nothing of the work: a CancelledError is ours.
            await asyncio.wait((work,))
        except asyncio.CancelledError as exc:
            if cancelled is None:
                cancelled = exc
                if on_cancel is not None:
                    on_cancel()
    if cancelled is None:
        return work.result()
    # Retrieved, so that nothing logs it as lost.
    failure = None if work.cancelled() else work.exception()
    if failure is not None:
        forget_frames(failure)
    raise cancelled
