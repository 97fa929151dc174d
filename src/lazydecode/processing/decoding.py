"""Who decodes the references of one request: media threads, or the thread that waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from lazydecode.media.base import MediaRef
from lazydecode.media.decode import MediaDecodeJob, submit_media_decodes
from lazydecode.parse import MultiModalDataItems, ProcessorBatchItems
from lazydecode.processing.timing import ObservedExecutor, TimingContext


class CallingThread(Executor):
    """Runs each job at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn`; the future that is returned is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as exc:  # raised by whoever collects the job
            future.set_exception(exc)
        return future


def submit_ref_decodes(
    items: MultiModalDataItems,
    executor: Executor,
    decodes: list[MediaDecodeJob],
    timing_ctx: TimingContext,
    *,
    waits: bool = False,
) -> None:
    """Submit the decode of every reference, under its position in the request.

    Args:
        items: What is missing.
        executor: The media threads.
        decodes: Gets the jobs.
        timing_ctx: Is told how long each waits and runs.
        waits: Whether this thread waits for all of them next. One alone then runs in it: pixels
            that another thread made are in another core's cache, and this thread's own core was
            somebody else's meanwhile (a PNG of 512x512: 1.10 of the floor so, now 1.03).
    """
    refs = [
        (*group.get_client_position(position), item)
        for group in items.values()
        if isinstance(group, ProcessorBatchItems)
        for position, item in enumerate(group.get_all_raw())
        if isinstance(item, MediaRef) and not item.is_decoded
    ]
    if waits and len(refs) == 1:
        executor = CallingThread()
    for modality, index, ref in refs:
        on = executor
        if timing_ctx.observer is not None:
            on = ObservedExecutor(executor, timing_ctx, modality, index)
        submit_media_decodes([(modality, index, ref)], on, decodes)
