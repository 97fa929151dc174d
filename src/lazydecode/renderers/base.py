"""`BaseRenderer`: a chat request becomes what an engine needs, in order and within budgets.

One request's way, and where each step runs:

    fetch all items              event loop and media threads
    template, tokenize           tokenizer threads, meanwhile
    budget of decoded bytes      event loop; for items that no cache holds
    phase 1                      the ordered worker: hash, look up, start what is missing
    decode, process              media threads, processing threads
    wait                         event loop
    phase 2, submit              the ordered worker, in one job: the engine's cache sees
                                 requests in the order in which ours was updated
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from lazydecode.cache import PROCESSOR_CACHE_REGISTRY, BaseMultiModalProcessorCache
from lazydecode.cache.base import GIB
from lazydecode.config import Settings
from lazydecode.errors import InvalidRequestError, MissingMediaError
from lazydecode.inputs import MultiModalInput
from lazydecode.media.budget import ByteBudget
from lazydecode.media.connector import MediaConnector
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.media.executor import MediaExecutor, yield_cpu
from lazydecode.models.loading import ModelFrontend
from lazydecode.models.pairing import split_option
from lazydecode.parse import MultiModalDataItems
from lazydecode.processing.flights import ItemFlights
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.renderers.chat import Conversation, check_item_counts, with_sounds
from lazydecode.renderers.hold import EncodedHold
from lazydecode.renderers.identities import ItemIdentities
from lazydecode.renderers.media import EncodedItem, MediaFetcher, merge_media_io_kwargs
from lazydecode.renderers.multimodal import (
    Deliver,
    Job,
    MultiModalRunner,
    naming_videos,
    time_limit,
)
from lazydecode.renderers.recordings import Recordings
from lazydecode.renderers.timeline import Timeline
from lazydecode.renderers.warm_up import WarmUp

_T = TypeVar("_T")
_TOKENIZER_THREADS: Final = 2


@dataclass(slots=True)
class RenderRequest:
    """What of a chat request matters for rendering."""

    request_id: str
    conversation: Conversation
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Modality -> decode options of this request."""
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None


class BaseRenderer:
    """Renders chat requests for one model.

    Args:
        frontend: The model's template, tokenizer and processor.
        connector: Fetches media. Closed with the renderer.
        settings: Options, limits and cache sizes.
        executor: Media threads. Shut down with the renderer.
        mirrors_engine: Whether an engine follows that has a receiver cache.
    """

    def __init__(
        self,
        frontend: ModelFrontend,
        connector: MediaConnector,
        settings: Settings,
        *,
        executor: MediaExecutor,
        mirrors_engine: bool,
    ) -> None:
        self.frontend = frontend
        self.settings = settings
        self.executor = executor
        limits = self.limits = settings.request_limits
        self._connector = connector
        self._mm_executor = ThreadPoolExecutor(1, "lazydecode-mm")
        self._tokenizers = ThreadPoolExecutor(_TOKENIZER_THREADS, "lazydecode-tokenize")
        cache_bytes = int(settings.mm_processor_cache_gb * GIB)
        self.sender_cache: BaseMultiModalProcessorCache | None = None
        self.render_cache: BaseMultiModalProcessorCache | None = None
        if cache_bytes and frontend.is_cacheable:
            caches = PROCESSOR_CACHE_REGISTRY.get(settings.mm_processor_cache)
            self.render_cache = caches.render(capacity_bytes=cache_bytes)
            if mirrors_engine:
                self.sender_cache = caches.sender(capacity_bytes=cache_bytes)
        self.encoded_budget = ByteBudget(
            limits.max_encoded_bytes,
            max_waiting=limits.max_waiting,
            max_wait_s=limits.max_wait_s,
        )
        self.decoded_budget = ByteBudget(
            limits.max_decoded_bytes,
            max_waiting=limits.max_waiting,
            max_wait_s=limits.max_wait_s,
        )
        self._fetcher = MediaFetcher(connector, frontend.info, limits=limits)
        self.identities = ItemIdentities(frontend.info, conflict=settings.uuid_conflict)
        self._processing = ThreadPoolExecutor(
            settings.processing_threads,
            "lazydecode-process",
            yield_cpu,
            (settings.worker_niceness,),
        )
        self._flights = ItemFlights(self._processing, media_executor=executor)
        self.recordings = Recordings(
            self.decoded_budget,
            max_bytes=limits.max_decoded_bytes_per_request,
            executor=executor,
        )
        self.warm_up = WarmUp(frontend, self._mm_executor)
        self._runner: MultiModalRunner | None = None
        processor = frontend.any_processor
        if processor is not None:
            processor.use_flights(self._flights, media_executor=executor)
            self._runner = MultiModalRunner(
                processor,
                worker=self._mm_executor,
                executor=executor.quick,
                processing=self._processing,
                budget=self.decoded_budget,
                limits=limits,
                identities=self.identities,
                fingerprint=frontend.fingerprint,
            )

    @asynccontextmanager
    async def open(
        self,
        request: RenderRequest,
        *,
        timeline: Timeline,
        hold: EncodedHold | None = None,
        for_engine: bool = False,
    ) -> AsyncIterator[RenderedRequest]:
        """Fetch the media and write the prompt; the block decides what is made of them.

        Everything that the request holds is released at the end of the block.

        Args:
            request: What to render.
            timeline: Is told of stages and items.
            hold: What the request holds of the memory budget already.
            for_engine: Whether it will be processed for the engine, and not just rendered: what
                that cache holds need not be fetched if a uuid names it.

        Raises:
            LazyDecodeError: If the request cannot be rendered; nothing was fetched for one
                that has too many items.
        """
        conversation = request.conversation
        check_item_counts(
            conversation.counts(),
            modalities=self.frontend.modalities,
            max_items=self._max_items(),
        )
        processor_kwargs, wants_sounds = self._split_option(request)
        media = with_sounds(conversation.media) if wants_sounds else conversation.media
        media_io_kwargs = merge_media_io_kwargs(
            self.settings.media_io_kwargs, request.media_io_kwargs
        )
        decoders = self._fetcher.resolve(sorted({item.modality for item in media}), media_io_kwargs)
        with naming_videos(media):
            self.identities.find_held(
                media,
                self._options(request, processor_kwargs, media_io_kwargs),
                self.sender_cache if for_engine else self.render_cache,
            )
        limit_s = self.settings.max_render_time
        deadline = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        async with hold or EncodedHold(self.encoded_budget) as hold:
            with time_limit(deadline):
                async with asyncio.timeout_at(deadline):
                    prompt, items = await _both(
                        self._render_prompt(request, timeline),
                        self._fetcher.fetch_all(media, decoders, hold=hold, timeline=timeline),
                    )
            job = Job(
                request_id=request.request_id,
                prompt=prompt,
                items=items,
                media_io_kwargs=media_io_kwargs,
                mm_processor_kwargs=processor_kwargs,
                cache_salt=request.cache_salt,
                deadline=deadline,
            )

            async def fetch_late() -> None:
                await self._fetcher.fetch_late(items, decoders, hold=hold, timeline=timeline)

            try:
                yield RenderedRequest(self, job, timeline, fetch_late)
            finally:
                for item in items:
                    item.release()

    def _options(
        self,
        request: RenderRequest,
        processor_kwargs: Mapping[str, Any],
        media_io_kwargs: Mapping[str, Mapping[str, Any]],
    ) -> ProcessorInputs:
        """What of a request tells the uses of a uuid apart."""
        return ProcessorInputs(
            "",
            MultiModalDataItems(),
            hf_processor_mm_kwargs=processor_kwargs,
            media_io_kwargs=media_io_kwargs,
            cache_salt=request.cache_salt,
            processor_fingerprint=self.frontend.fingerprint,
        )

    def _split_option(self, request: RenderRequest) -> tuple[Mapping[str, Any], bool]:
        """Return the request's other processor options, and whether videos bring their sound."""
        rest, wanted = split_option(request.mm_processor_kwargs)
        if wanted is None:
            wanted = split_option(self.settings.mm_processor_kwargs)[1]
        if not request.conversation.counts().get("video"):
            wanted = False
        if wanted and not self.frontend.pairs_sound:
            raise InvalidRequestError(
                "mm_processor_kwargs: the model does not take the sound of a video with it "
                "(use_audio_in_video)",
                parameter="mm_processor_kwargs",
            )
        return rest, bool(wanted)

    def _max_items(self) -> dict[str, int | None]:
        """The model's limits and the server's, the lower one each."""
        limits: dict[str, int | None] = dict(self.frontend.max_items)
        for modality, limit in self.limits.max_items.items():
            known = limits.get(modality)
            limits[modality] = limit if known is None else min(known, limit)
        return limits

    async def _render_prompt(self, request: RenderRequest, timeline: Timeline) -> str | list[int]:
        """The text with placeholders, or token ids if there are no media to be put into it."""
        conversation = request.conversation

        def render() -> str | list[int]:
            rendered = self.frontend.render_chat(
                conversation.messages,
                tools=request.tools,
                chat_template_kwargs=request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
            )
            return rendered.text if conversation.media else self.frontend.tokenize_prompt(rendered)

        with timeline.stage("template"):
            return await asyncio.get_running_loop().run_in_executor(self._tokenizers, render)

    @property
    def runner(self) -> MultiModalRunner:
        """What processes items; a text-only model has none, and is given none."""
        assert self._runner is not None
        return self._runner

    async def on_worker(self, function: Callable[[], _T]) -> _T:
        """Run `function` on the ordered worker."""
        return await asyncio.get_running_loop().run_in_executor(self._mm_executor, function)

    def forget_engine(self, clear_engine: Callable[[], None]) -> None:
        """Start anew after the engine was lost: both caches empty, at one point of the order."""

        def clear() -> None:
            if self.sender_cache is not None:
                self.sender_cache.clear_cache()
            clear_engine()

        self._mm_executor.submit(clear)

    async def close(self) -> None:
        """End all threads and connections; requests must have ended."""
        if self._runner is not None:
            await self._runner.drain()
        await self._connector.close()
        await asyncio.to_thread(self._shutdown)

    def _shutdown(self) -> None:
        self.warm_up.join()
        self._flights.close()
        self._processing.shutdown()
        self._tokenizers.shutdown()
        self._mm_executor.shutdown()
        self.executor.shutdown()


class RenderedRequest:
    """One request whose media are here, encoded, and whose prompt is written.

    It can be processed as often as needed: again when the engine lost what it was sent.
    """

    def __init__(
        self,
        renderer: BaseRenderer,
        job: Job,
        timeline: Timeline,
        fetch_late: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._renderer = renderer
        self._job = job
        self._timeline = timeline
        self._fetch_late = fetch_late
        self.num_prompt_tokens = 0
        """Length of the prompt with expanded placeholders; 0 before it was processed."""
        self.processing_s = 0.0
        """Time spent in `process` and `render` so far."""

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._job.request_id

    @property
    def has_sender_cache(self) -> bool:
        """Whether `process` can go by a cache that mirrors the engine's."""
        return self._renderer.sender_cache is not None

    async def process(self, deliver: Deliver, *, use_cache: bool = True) -> None:
        """Process for the engine, and hand the result to `deliver` on the ordered worker.

        Items that the engine's cache holds come without tensors, unless the caches are passed by.

        Raises:
            LazyDecodeError: If an item cannot be used; it names the item.
        """
        await self._run(self._renderer.sender_cache if use_cache else None, deliver)

    async def render(self, *, with_payload: bool) -> MultiModalInput:
        """Process for whoever asked: all items with tensors, if they are wanted.

        If they are not, headers may be enough, and nothing is decoded.
        """
        cache = self._renderer.render_cache
        if self._job.items and not with_payload:
            runner = self._renderer.runner
            sketched = await self._with_late_items(
                lambda: runner.render_from_headers(self._job, cache, self._timeline)
            )
            if sketched is not None:
                return sketched
        rendered: list[MultiModalInput] = []
        await self._run(cache, rendered.append)
        return rendered[0]

    async def invalidate(
        self, mm_hashes: Sequence[str], forget: Callable[[Sequence[str]], None]
    ) -> None:
        """Forget that the engine holds these; process again after it.

        Args:
            mm_hashes: What the engine lacked.
            forget: Tells the engine, in order with the sender cache.
        """
        cache = self._renderer.sender_cache
        if cache is None:
            return

        def on_both_sides() -> None:
            cache.invalidate(mm_hashes)
            forget(mm_hashes)

        await self._renderer.on_worker(on_both_sides)

    async def _run(self, cache: BaseMultiModalProcessorCache | None, deliver: Deliver) -> None:
        def take(prompt: MultiModalInput) -> None:
            deliver(prompt)
            self.num_prompt_tokens = len(prompt["prompt_token_ids"])

        started = time.perf_counter()
        try:
            if not self._job.items:
                assert not isinstance(self._job.prompt, str)
                # Without items no cache changes, so the order does not matter.
                take(_text_input(self._job.prompt))
            else:
                runner = self._renderer.runner
                await self._with_late_items(
                    lambda: runner.run(self._job, cache, take, self._timeline)
                )
        finally:
            self.processing_s += time.perf_counter() - started

    async def _with_late_items(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do `work`; what was not fetched, since the cache held it, is fetched if that lost it."""
        items, deadline = self._job.items, self._job.deadline
        try:
            return await work()
        except MissingMediaError:
            if self._fetch_late is None or not any(item.origin for item in items):
                raise
        with time_limit(deadline):
            async with asyncio.timeout_at(deadline):
                await self._fetch_late()
        self._job.deadline = deadline
        return await work()


def _text_input(prompt_token_ids: list[int]) -> MultiModalInput:
    return MultiModalInput(
        type="multimodal",
        prompt_token_ids=prompt_token_ids,
        mm_kwargs={},
        mm_hashes={},
        mm_placeholders={},
    )


async def _both(
    prompt: Awaitable[_T], items: Awaitable[list[EncodedItem]]
) -> tuple[_T, list[EncodedItem]]:
    """Await both at once; a failure of one ends the other before it is raised."""
    first, second = asyncio.ensure_future(prompt), asyncio.ensure_future(items)
    try:
        await asyncio.wait((first, second), return_when=asyncio.FIRST_EXCEPTION)
        if first.done() and second.done() and not first.exception():
            return first.result(), second.result()
    finally:
        if not (first.done() and second.done()):
            for task in (first, second):
                task.cancel()
            await await_with_cancellation_drain(asyncio.wait((first, second)))
    for item in () if second.cancelled() or second.exception() else second.result():
        item.release()
    # The media first: its errors name an item. A cancelled one was ended by the other's failure.
    for task in (second, first):
        if not task.cancelled():
            task.result()
    raise asyncio.CancelledError
