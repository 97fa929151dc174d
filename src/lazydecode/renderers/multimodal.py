"""One request through the two phases, cancelled or not, within the budget of decoded bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.errors import MissingMediaError
from lazydecode.inputs import MultiModalInput
from lazydecode.limits import RequestLimits
from lazydecode.media.base import MediaRef
from lazydecode.media.budget import ByteBudget
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.models.chunks import VISION_CHUNK
from lazydecode.models.generic import GenericMultiModalProcessor, HeaderRendering
from lazydecode.parse import VisionChunkProcessorItems
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
    all_refs,
)
from lazydecode.renderers.guards import (
    check_placeholders,
    client_errors,
    naming_videos,
    time_limit,
)
from lazydecode.renderers.identities import ItemIdentities, NamedItem
from lazydecode.renderers.media import EncodedItem
from lazydecode.renderers.timeline import HEADERS_FALL_SHORT, Timeline

_T = TypeVar("_T")

Load: TypeAlias = "Callable[[Sequence[EncodedRef]], Awaitable[None]]"
"""Takes modality, index and ref of the items whose bytes are needed."""


_MAX_COUNTS: Final = 3
"""How often what has to be decoded is counted; if it changes as often, all items are."""
_SHORT_CHARS: Final = 1024
_FEW_ITEMS: Final = 4
"""Prompts of as many characters and known sizes are built on the event loop, in some 0.3 ms."""


@dataclass(slots=True)
class Job:
    """What is processed: a prompt, and encoded items that outlive each processing."""

    request_id: str
    prompt: str | list[int]
    """Text with placeholders; token ids if there are no items."""
    items: list[EncodedItem]
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    embeddings: Mapping[str, Any] = field(default_factory=dict)
    """Modality -> embeddings in the place of its media, as the data parser takes them."""
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None
    deadline: float | None = None
    """Time of the event loop by which the first processing must have ended; None: no limit."""
    is_paid: bool = False
    """Whether the memory of the decoded items is reserved already, by who made the job."""
    load: Load | None = None
    """Reads payloads that were left unread, within the budget; None: all were read."""


Deliver: TypeAlias = Callable[[MultiModalInput], None]
"""Takes what was rendered. Runs on the ordered worker, must not block; if it raises, the cache
is as it was before the request."""


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
        worker: Executor,
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
        self._identities = identities
        self._chunks = chunks
        self._fingerprint = fingerprint
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
        inputs, named = self._build_inputs(job, cache, refs)
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

    async def render_from_headers(
        self, job: Job, cache: BaseMultiModalProcessorCache | None, timeline: Timeline
    ) -> MultiModalInput | None:
        """Return ids, ranges and identities without decoding anything.

        None if no item is missing from the cache, so that `run` decodes nothing either, or if
        a header does not say enough.

        Raises:
            LazyDecodeError: If an item's size or an option cannot be used.
        """
        processor = self._processor
        if not isinstance(processor, GenericMultiModalProcessor):
            return None
        refs: list[MediaRef[Any]] = []
        try:
            with timeline.stage("headers"), client_errors(), naming_videos(job.items):
                inputs, named = self._build_inputs(job, cache, refs)
                missing = self._counter.find_missing(inputs)
                if not missing:
                    return None
                if job.load is not None:
                    # What a chunk model's videos give is worked out from their headers always.
                    needed = missing if self._chunks is None else all_refs(inputs)
                    await job.load([item for item in needed if not item[2].knows_header])
                if self._chunks is None and _is_short(job):
                    known = processor.render_known(inputs)
                    if known is not None:
                        prompt = self._sketched(processor, inputs, known)
                        self._bind(named, cache)
                        return prompt
                rendering = await self._on(
                    self._processing, lambda: self._render_from_headers(processor, job, inputs)
                )
                if rendering is not None:
                    self._bind(named, cache)
            if rendering is None:
                timeline.fall_back(job.request_id, HEADERS_FALL_SHORT)
            return rendering
        finally:
            for ref in refs:
                ref.release()

    def needs_media(self, job: Job, cache: BaseMultiModalProcessorCache | None) -> bool:
        """Whether an item of the job would have to be decoded now; changes no order."""
        refs: list[MediaRef[Any]] = []
        try:
            return bool(self._counter.find_missing(self._build_inputs(job, cache, refs)[0]))
        finally:
            for ref in refs:
                ref.release()

    def _render_from_headers(
        self, processor: GenericMultiModalProcessor, job: Job, inputs: ProcessorInputs
    ) -> MultiModalInput | None:
        if self._chunks is not None:
            chunked = self._chunks.from_headers(job.items, inputs)
            if chunked is None:
                return None
            inputs = chunked
        rendering = processor.render_from_headers(inputs)
        return None if rendering is None else self._sketched(processor, inputs, rendering)

    def _sketched(
        self,
        processor: GenericMultiModalProcessor,
        inputs: ProcessorInputs,
        rendering: HeaderRendering,
    ) -> MultiModalInput:
        info = processor.info
        algorithm = info.ctx.get_mm_config().mm_hasher_algorithm
        prompt = MultiModalInput(
            type="multimodal",
            prompt_token_ids=rendering.token_ids,
            mm_kwargs={},
            mm_hashes=inputs.get_mm_hashes(info.model_id, algorithm),
            mm_placeholders=rendering.placeholders,
        )
        _name_origins(prompt, inputs)
        self._check_placeholders(prompt, inputs)
        return prompt

    def _check_placeholders(self, prompt: MultiModalInput, inputs: ProcessorInputs) -> None:
        if self._processor.items_in_prompt:
            check_placeholders(prompt, inputs)

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

    def _build_inputs(
        self, job: Job, cache: BaseMultiModalProcessorCache | None, refs: list[MediaRef[Any]]
    ) -> tuple[ProcessorInputs, list[NamedItem]]:
        """Return the inputs, and what uuids stand for once they were processed."""
        data: dict[str, Any] = {}
        numbers: dict[str, list[int]] = {}
        for item in job.items:
            ref = item.new_ref()
            if ref is not None:
                refs.append(ref)
            elif cache is None:
                raise MissingMediaError(
                    "an item with a uuid alone needs the processor cache, which is off",
                    modality=item.modality,
                    index=item.index,
                )
            data.setdefault(item.modality, []).append(ref)
            numbers.setdefault(item.modality, []).append(item.index)
        data.update(job.embeddings)
        groups = self._processor.info.parse_mm_data(data, validate=False)
        for modality, indices in numbers.items():
            groups[modality] = groups[modality].numbered(indices)
        inputs = ProcessorInputs(
            job.prompt,
            groups,
            hf_processor_mm_kwargs=job.mm_processor_kwargs,
            media_io_kwargs=job.media_io_kwargs,
            cache=cache,
            cache_salt=job.cache_salt,
            processor_fingerprint=self._fingerprint,
            sound_pairs=[
                (item.of_video, numbers["audio"].index(item.index))
                for item in job.items
                if item.of_video is not None
            ],
        )
        if cache is None:
            return self._processor.set_apart(inputs), []
        resolved = self._identities.resolve(job.items, inputs)
        return replace(inputs, mm_hash_items=resolved.hashes), resolved.named

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
        """Run the phases; `check` runs on the worker before the first, in one step with it."""
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

        def finish(state: MultiModalApplyState) -> None:
            self._finish(
                inputs, named, deliver, cancellation, lambda: processor.apply_phase2(state)
            )

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
                await self._on(self._processing, lambda: processor.apply_process(state))
            with timing.record("phase2"):
                await self._on(self._worker, lambda: finish(state))

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
            _name_origins(prompt, inputs)
            self._check_placeholders(prompt, inputs)
            self._bind(named, inputs.cache)
            deliver(prompt)

    def _bind(self, named: Sequence[NamedItem], cache: BaseMultiModalProcessorCache | None) -> None:
        """Let uuids stand for the bytes that were seen, unless the request may change nothing."""
        if cache is not None and cache.keeps_items:
            self._identities.bind(named)

    @staticmethod
    async def _on(executor: Executor, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(executor, function)


def _nothing() -> None:
    pass


def _name_origins(prompt: MultiModalInput, inputs: ProcessorInputs) -> None:
    """Say what chunks were cut from."""
    chunks = inputs.mm_data_items.get(VISION_CHUNK)
    if isinstance(chunks, VisionChunkProcessorItems):
        prompt["mm_origins"] = {VISION_CHUNK: list(chunks.origins)}


def _is_short(job: Job) -> bool:
    """Whether the prompt is built in less time than a thread takes to be asked for it."""
    return (
        isinstance(job.prompt, str)
        and len(job.prompt) <= _SHORT_CHARS
        and len(job.items) <= _FEW_ITEMS
        and not job.embeddings
    )
