"""One request through the two phases, cancelled or not, within the budget of decoded bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from functools import partial
from typing import Any, Final, TypeVar

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.inputs import MultiModalInput
from lazydecode.limits import RequestLimits
from lazydecode.media.base import MediaRef
from lazydecode.media.budget import ByteBudget
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.processor import BaseMultiModalProcessor
from lazydecode.processing.state import MultiModalApplyState
from lazydecode.processing.timing import TimingContext
from lazydecode.renderers.caches import FrontendCaches
from lazydecode.renderers.cancellation import Cancellation
from lazydecode.renderers.chunks import ChunkResolver
from lazydecode.renderers.decode_counting import (
    DecodeCounter,
    EncodedRef,
    UncountedError,
)
from lazydecode.renderers.guards import (
    client_errors,
    naming_videos,
    time_limit,
)
from lazydecode.renderers.header_rendering import HeaderRenderer
from lazydecode.renderers.identities import ItemIdentities, NamedItem
from lazydecode.renderers.jobs import Deliver, Job, JobInputs
from lazydecode.renderers.ordered import OrderedWorker
from lazydecode.renderers.timeline import Timeline

_T = TypeVar("_T")

_MAX_COUNTS: Final = 3
"""How often what has to be decoded is counted; if it changes as often, all items are."""


class MultiModalRunner:
    """Runs requests through a model's processor.

    Args:
        processor: The model's.
        worker: The ordered worker: one thread, so that caches change in one order.
        executor: Threads for what is linear in a payload.
        processing: Threads for processors that take a request's items together.
        budget: Decoded bytes that all requests together may hold.
        limits: Decoded bytes that one request may hold.
        identities: Finds what items are.
        chunks: Cuts videos, for a model that wants chunks; else None.
        fingerprint: Stands for everything of the processor that results depend on.
        caches: Know of the store below the caches of requests.
    """

    def __init__(
        self,
        processor: BaseMultiModalProcessor,
        *,
        worker: OrderedWorker,
        executor: Executor,
        processing: Executor,
        budget: ByteBudget,
        limits: RequestLimits,
        identities: ItemIdentities,
        chunks: ChunkResolver | None = None,
        fingerprint: str = "",
        caches: FrontendCaches | None = None,
    ) -> None:
        self._processor = processor
        self._caches = FrontendCaches() if caches is None else caches
        self._worker = worker
        self._executor = executor
        self._processing = processing
        self._budget = budget
        self._counter = DecodeCounter(
            processor, max_bytes=limits.max_decoded_bytes_per_request, chunks=chunks
        )
        self._inputs = JobInputs(processor, identities, fingerprint)
        self._chunks = chunks
        self.headers = HeaderRenderer(
            processor,
            self._inputs,
            self._counter,
            worker=worker,
            processing=processing,
            chunks=chunks,
        )
        """Renders without decoding what is missing."""
        self._given_up: set[asyncio.Task[None]] = set()

    async def run(
        self,
        job: Job,
        cache: BaseMultiModalProcessorCache | None,
        deliver: Deliver,
        timeline: Timeline,
    ) -> None:
        """Process `job` and hand the result to `deliver`, on the worker, in phase 2's job.

        A cancelled caller gets its CancelledError when nothing of the request runs any more
        and its references are released; the model's processor is then not called in vain.

        Raises:
            LazyDecodeError: If an item or an option cannot be used.
        """
        timing = TimingContext(observer=timeline)
        deadline, job.deadline = job.deadline, None  # repairs are not the client's doing
        try:
            with time_limit(deadline), client_errors(), naming_videos(job.items):
                for _ in range(_MAX_COUNTS):
                    try:
                        await self._run_counted(job, cache, deliver, timing, deadline)
                    except UncountedError:
                        continue
                    return
                await self._run_counted(job, cache, deliver, timing, deadline, trusts_hits=False)
        finally:
            for stage, seconds in timing.stage_secs.items():
                timeline.add(stage, seconds)

    async def _run_counted(
        self,
        job: Job,
        cache: BaseMultiModalProcessorCache | None,
        deliver: Deliver,
        timing: TimingContext,
        deadline: float | None,
        *,
        trusts_hits: bool = True,
    ) -> None:
        """Reserve memory for what has to be decoded, and run the phases within it.

        Raises:
            UncountedError: If in phase 1 something is missing that was cached before; nothing
                was decoded then, and nothing is held any more.
        """
        refs: list[MediaRef[Any]] = []
        inputs, named = self._inputs.build(job, cache, refs)
        async with AsyncExitStack() as stack:
            if cache is not None:
                known = [h for group in (inputs.mm_hash_items or {}).values() for h in group]
                await stack.enter_async_context(self._caches.borrowing(self._executor, known))
            with timing.record("budget"):
                missing = self._counter.find_missing(inputs, trusts_hits=trusts_hits)
                estimate = (
                    0 if job.is_paid else await self._estimate(job, inputs, missing, deadline)
                )
                async with asyncio.timeout_at(deadline):
                    await stack.enter_async_context(self._budget.reserve(estimate))
            cancellation = Cancellation()
            check = _nothing if job.is_paid else partial(self._counter.check, inputs, missing)
            task = asyncio.ensure_future(
                self._run_held(
                    stack.pop_all(), job, refs, inputs, named, deliver, timing, cancellation, check
                )
            )
        await self._wait_until(task, deadline, cancellation)

    def needs_media(self, job: Job, cache: BaseMultiModalProcessorCache | None) -> bool:
        """Whether an item of the job would have to be decoded now; changes no order."""
        inputs, _ = self._inputs.build(job, cache)
        return bool(self._counter.find_missing(inputs))

    async def drain(self) -> None:
        """Return when nothing runs any more of requests that were given up."""
        if self._given_up:
            await asyncio.wait(self._given_up)

    async def _wait_until(
        self, task: asyncio.Task[None], deadline: float | None, cancellation: Cancellation
    ) -> None:
        """Wait for `task`; past the deadline it is left to drain by itself.

        A decode cannot be interrupted. The client need not wait for its end, but what the
        request holds is released only then.
        """
        if deadline is not None:
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait((task,), timeout=max(0.0, left_s))
            except asyncio.CancelledError:
                cancellation.set()
                await await_with_cancellation_drain(asyncio.wait((task,)))
                raise
            if not task.done():
                cancellation.set()
                self._given_up.add(task)
                task.add_done_callback(self._given_up.discard)
                raise TimeoutError
        await await_with_cancellation_drain(task, on_cancel=cancellation.set)

    async def _run_held(
        self,
        held: AsyncExitStack,
        job: Job,
        refs: Sequence[MediaRef[Any]],
        inputs: ProcessorInputs,
        named: Sequence[NamedItem],
        deliver: Deliver,
        timing: TimingContext,
        cancellation: Cancellation,
        check: Callable[[], None],
    ) -> None:
        """Run the phases, then give back what the request holds; never cancelled itself."""
        async with held:
            try:
                async with self._resolved(job, inputs, timing) as inputs:
                    if not cancellation.is_set:
                        await self._run_phases(inputs, named, deliver, timing, cancellation, check)
            finally:
                for ref in refs:
                    ref.release()

    def _resolved(
        self, job: Job, inputs: ProcessorInputs, timing: TimingContext
    ) -> AbstractAsyncContextManager[ProcessorInputs]:
        """The inputs as the processor wants them: with chunks, if it does."""
        if self._chunks is None:
            return nullcontext(inputs)
        return self._chunks.resolved(job.items, inputs, timing)

    # -- the phases

    async def _estimate(
        self,
        job: Job,
        inputs: ProcessorInputs,
        missing: Sequence[EncodedRef],
        deadline: float | None,
    ) -> int:
        """Return the decoded bytes of what is missing.

        Its payloads are read now, if they were not: all that follows finds them in memory.
        """
        if not missing:
            return 0
        if job.load is not None:
            async with asyncio.timeout_at(deadline):
                await job.load(missing)
        options = inputs.hf_processor_mm_kwargs
        return await self._on(
            self._executor, lambda: self._counter.estimate_bytes(missing, options)
        )

    async def _run_phases(
        self,
        inputs: ProcessorInputs,
        named: Sequence[NamedItem],
        deliver: Deliver,
        timing: TimingContext,
        cancellation: Cancellation,
        check: Callable[[], None],
    ) -> None:
        """Run the phases.

        `check` runs on the worker before each, in one step with it: what was a hit may have been
        evicted, and is then counted before it is decoded.
        """
        processor = self._processor

        def apply() -> MultiModalInput:
            check()
            return processor.apply(inputs)

        def begin() -> MultiModalApplyState | None:
            check()
            state = processor.apply_phase1(inputs, timing)
            timing.add("phase1", time.perf_counter() - queued)
            if not processor.per_item or state.is_waiting:
                return state
            # All is known: there is nothing to wait for, nor to stand in the queue again for.
            with state, timing.record("phase2"):
                finish(state)
            return None

        def finish(state: MultiModalApplyState, before: Callable[[], None] = _nothing) -> None:
            def process() -> MultiModalInput:
                before()
                return processor.apply_phase2(state)

            self._finish(inputs, named, deliver, cancellation, process)

        if not processor.supports_two_phase_apply:
            await self._on(
                self._worker,
                lambda: self._finish(inputs, named, deliver, cancellation, apply),
            )
            return
        queued = time.perf_counter()
        state = await self._on(self._worker, begin)
        if state is None:
            return
        with state:
            await cancellation.wait_for_items(state)
            if cancellation.is_set:
                return
            if not processor.per_item:
                await self._on(self._processing, check)
                await self._on(self._processing, lambda: processor.apply_process(state))
            with timing.record("phase2"):
                await self._on(self._worker, lambda: finish(state, check))

    def _finish(
        self,
        inputs: ProcessorInputs,
        named: Sequence[NamedItem],
        deliver: Deliver,
        cancellation: Cancellation,
        process: Callable[[], MultiModalInput],
    ) -> None:
        """Runs on the worker. The cache learns of the items only if they were delivered."""
        if cancellation.is_set:
            return
        with nullcontext() if inputs.cache is None else inputs.cache.transaction():
            prompt = process()
            self._inputs.finish(prompt, inputs)
            self._inputs.bind(named, inputs.cache)
            deliver(prompt)

    @staticmethod
    async def _on(executor: Executor, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(executor, function)


def _nothing() -> None:
    pass
