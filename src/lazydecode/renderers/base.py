"""`BaseRenderer`: a chat request becomes what an engine needs, in order and within budgets.

One request's way, and where each step runs:

    fetch all items              event loop and media threads
    template, tokenize           tokenizer threads, meanwhile; if short, the event loop before
    budget of decoded bytes      event loop; for items that no cache holds
    phase 1                      the ordered worker: hash, look up, start what is missing
    decode, process              media threads, processing threads
    wait                         event loop
    phase 2, submit              the ordered worker, in one job: the engine's cache sees
                                 requests in the order in which ours was updated; the same
                                 job as phase 1 if nothing is missing
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from lazydecode.cache import BaseMultiModalProcessorCache, Bindings
from lazydecode.cache.base import GIB
from lazydecode.config import Settings
from lazydecode.errors import PluginBrokenError, PluginFailedError
from lazydecode.media.base import MediaIO
from lazydecode.media.budget import ByteBudget
from lazydecode.media.connector import MediaConnector
from lazydecode.media.executor import MediaExecutor, yield_cpu
from lazydecode.media.known_texts import KnownTexts
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.pairing import choose_sounds
from lazydecode.parse import MultiModalDataItems
from lazydecode.processing.flights import ItemFlights
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.remote import ItemWorkers
from lazydecode.renderers.both import both
from lazydecode.renderers.caches import ClearedCaches, FrontendCaches, Purpose, open_store
from lazydecode.renderers.chat import (
    MediaRequest,
    check_item_counts,
    with_sounds,
)
from lazydecode.renderers.chunks import ChunkResolver
from lazydecode.renderers.decode_options import merge_media_io_kwargs
from lazydecode.renderers.embeds import EmbeddingLoader, check_embeds
from lazydecode.renderers.guards import naming_first, naming_videos, until
from lazydecode.renderers.hold import EncodedHold
from lazydecode.renderers.identities import ItemIdentities
from lazydecode.renderers.jobs import Job
from lazydecode.renderers.late import LateMedia
from lazydecode.renderers.media import EncodedItem, MediaFetcher
from lazydecode.renderers.multimodal import MultiModalRunner
from lazydecode.renderers.opened import Held, Opened
from lazydecode.renderers.ordered import OrderedWorker
from lazydecode.renderers.prompts import PromptWriter, RenderRequest
from lazydecode.renderers.recordings import Recordings
from lazydecode.renderers.rendered import RenderedRequest
from lazydecode.renderers.timeline import Timeline
from lazydecode.renderers.warm_up import WarmUp

_T = TypeVar("_T")


def lower_limits(
    model: Mapping[str, int | None], server: Mapping[str, int]
) -> dict[str, int | None]:
    """Return the most items of each modality that both take; None: no limit."""
    limits = dict(model)
    for modality, limit in server.items():
        known = limits.get(modality)
        limits[modality] = limit if known is None else min(known, limit)
    return limits


class BaseRenderer:
    """Renders chat requests for one model.

    Args:
        frontend: The model's template, tokenizer and processor.
        connector: Fetches media. Closed with the renderer.
        settings: Options, limits and cache sizes.
        executor: Media threads. Shut down with the renderer.
        mirrors_engine: Whether an engine follows that has a receiver cache.
        bindings: What uuids stand for, if other front ends share it.
        workers: Processes that decode and process; None: threads do. To be closed after the
            renderer.
    """

    def __init__(
        self,
        frontend: ModelFrontend,
        connector: MediaConnector,
        settings: Settings,
        *,
        executor: MediaExecutor,
        mirrors_engine: bool,
        bindings: Bindings | None = None,
        workers: ItemWorkers | None = None,
    ) -> None:
        self.frontend = frontend
        self.settings = settings
        self.executor = executor
        limits = self.limits = settings.request_limits
        self._max_items = lower_limits(frontend.max_items, limits.max_items)
        self._connector = connector
        self._mm_executor = OrderedWorker("lazydecode-mm")
        self.prompts = PromptWriter(frontend, max_chars=limits.max_prompt_chars)
        cache_bytes = int(settings.mm_processor_cache_gb * GIB)
        self.caches = FrontendCaches()
        if cache_bytes:
            self.caches = FrontendCaches.create(
                settings.mm_processor_cache,
                capacity_bytes=cache_bytes,
                mirrors_engine=mirrors_engine,
                store=open_store(frontend, settings),
            )
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
        self._embeddings = EmbeddingLoader(
            connector,
            frontend.embeddings,
            executor=executor.quick,
            limits=settings.decode_limits,
            request_limits=limits,
        )
        chunks: ChunkResolver | None = None
        if frontend.mm_processor is not None and frontend.mm_processor.splitter is not None:
            chunks = ChunkResolver(
                frontend.mm_processor, executor, time_limit_s=settings.media_decode_timeout
            )
        self.identities = ItemIdentities(
            frontend.info,
            conflict=settings.uuid_conflict,
            holds_video=None if chunks is None else chunks.holds,
            bindings=bindings,
        )
        self._processing = ThreadPoolExecutor(
            settings.processing_threads,
            "lazydecode-process",
            yield_cpu,
            (settings.worker_niceness,),
        )
        self._flights = ItemFlights(
            self._processing,
            media_executor=executor,
            workers=workers,
            time_limit_s=settings.media_decode_timeout,
        )
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
                chunks=chunks,
                fingerprint=frontend.fingerprint,
                caches=self.caches,
            )

    @property
    def sender_cache(self) -> BaseMultiModalProcessorCache | None:
        """Mirrors the engine's cache; None: there is none."""
        return self.caches.sender

    @property
    def render_cache(self) -> BaseMultiModalProcessorCache | None:
        """Keeps what was rendered for others; None: it is off."""
        return self.caches.render

    def open(
        self,
        request: RenderRequest,
        *,
        timeline: Timeline,
        hold: EncodedHold | None = None,
        purpose: Purpose = "render",
    ) -> Opened[RenderedRequest]:
        """Fetch the media and write the prompt; the block decides what is made of them.

        Everything that the request holds is released at the end of the block.

        Args:
            request: What to render.
            timeline: Is told of stages and items.
            hold: What the request holds of the memory budget already.
            purpose: Which of the methods will be called, `render`, `process` or `count`: what
                their cache holds need not be fetched if a uuid names it.

        Raises:
            LazyDecodeError: In `__aenter__`, if the request cannot be rendered; nothing was
                fetched for one that has too many items.
        """
        held = Held(hold or EncodedHold(self.encoded_budget))
        return Opened(self._open(request, timeline, held, purpose), held)

    async def _open(
        self, request: RenderRequest, timeline: Timeline, held: Held, purpose: Purpose
    ) -> RenderedRequest:
        conversation = request.conversation
        counts = conversation.counts()
        if conversation.embeds:
            check_embeds(
                conversation.embeds, conversation.media, enabled=self.settings.enable_mm_embeds
            )
        check_item_counts(
            counts,
            modalities=self.frontend.modalities,
            max_items=self._max_items,
            are_off=self.frontend.media_are_off,
        )
        if (token_ids := request.prompt_token_ids) is not None:
            self.prompts.check_token_count(token_ids, parameter="prompt_token_ids")
            await self.prompts.on_thread(
                lambda: self.frontend.check_prompt_tokens(token_ids, counts)
            )
        processor_kwargs, wants_sounds = choose_sounds(
            request.mm_processor_kwargs,
            self.settings.mm_processor_kwargs,
            has_video="video" in counts,
            pairs_sound=self.frontend.pairs_sound,
        )
        media = with_sounds(conversation.media) if wants_sounds else conversation.media
        with naming_videos(media), naming_first(media):
            media_io_kwargs = merge_media_io_kwargs(
                self.settings.media_io_kwargs, request.media_io_kwargs
            )
            decoders = self._fetcher.resolve(
                sorted({item.modality for item in media} | request.media_io_kwargs.keys()),
                media_io_kwargs,
            )
        # Embeddings are not processed, so that no hit could spare anything; what is made of an
        # item with chance in it is never wanted again.
        random = self.frontend.random(processor_kwargs)
        skips_cache = (
            request.skip_mm_cache
            or bool(conversation.embeds)
            or (bool(random) and any(item.modality in random for item in media))
        )
        options, named = None, list[str]()
        if any(item.uuid is not None for item in media):
            options = self._options(request, processor_kwargs, media_io_kwargs)
            named = [] if skips_cache else self.identities.named_hashes(media, options)
        limit_s = self.settings.max_render_time
        deadline = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        if named:
            loan = self.caches.borrowing(self.executor.quick, named)
            await loan.__aenter__()
            held.loan = loan
        if options is not None:
            with naming_videos(media):
                cache = self.caches.select(purpose, skip=skips_cache)
                self.identities.find_held(media, options, cache)
        async with until(deadline):
            prompt, held.items = await self._write_and_fetch(
                request, media, decoders, held.hold, timeline
            )
        embeddings: Mapping[str, Any] = {}
        if conversation.embeds:
            async with until(deadline):
                embeddings = await self._embeddings.load(conversation.embeds, hold=held.hold)
        job = Job(
            request_id=request.request_id,
            prompt=prompt,
            items=held.items,
            media_io_kwargs=media_io_kwargs,
            embeddings=embeddings,
            mm_processor_kwargs=processor_kwargs,
            cache_salt=request.cache_salt,
            deadline=deadline,
        )
        late = LateMedia(
            self._fetcher, held.items, decoders, held.hold, timeline, request.cache_salt
        )
        job.load = late.load
        return RenderedRequest(self, job, timeline, late, skips_cache=skips_cache)

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

    async def clear_caches(self, clear_engine: Callable[[], None]) -> ClearedCaches:
        """Empty all caches of processed items, at one point of the order of requests.

        Requests that run then end as if their items had been evicted.

        Args:
            clear_engine: Tells the engine, which empties its cache at the same point.
        """

        def clear() -> ClearedCaches:
            num_uuids = len(self.identities.bindings)
            render, sender = self.caches.clear()
            if (processor := self.frontend.any_processor) is not None:
                processor.clear_outputs()
            self.identities.bindings.clear()
            clear_engine()
            return ClearedCaches(render, sender, num_uuids)

        # What it still has to do is left out; it keeps nothing that would have to be cleared.
        await asyncio.to_thread(self.warm_up.join)
        return await self.on_worker(clear)

    async def _write_and_fetch(
        self,
        request: RenderRequest,
        media: Sequence[MediaRequest],
        decoders: Mapping[str, MediaIO[Any]],
        hold: EncodedHold,
        timeline: Timeline,
    ) -> tuple[str | list[int], list[EncodedItem]]:
        """The prompt and the items: both at once, if either is worth a task of its own."""
        if not media:
            return await self.prompts.write(request, timeline), []
        prompt = self.prompts.write_at_once(request, timeline)
        fetching = self._fetcher.fetch_all(
            media, decoders, hold=hold, timeline=timeline, tenant=request.cache_salt
        )
        if prompt is not None:
            return prompt, await fetching
        return await both(self.prompts.write(request, timeline), fetching)

    @property
    def known_texts(self) -> KnownTexts:
        """Base64 texts that came before, and what they were."""
        return self._connector.known_texts

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
        try:
            # A plug-in's failure was logged, and is nobody's error any more.
            with suppress(PluginFailedError), self._connector.contained():
                await self._connector.close()
        finally:
            await asyncio.to_thread(self._shutdown)

    def _shutdown(self) -> None:
        self.warm_up.join()
        self._flights.close()
        self._processing.shutdown()
        self.prompts.shutdown()
        self._mm_executor.shutdown()
        try:
            with suppress(PluginBrokenError):
                self.caches.close()
        finally:
            self.executor.shutdown()
