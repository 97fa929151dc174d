"""Prompts without tensors: of media that no cache holds, from headers alone, so that nothing is
decoded; of media that the cache holds, from what it has, without the ordered worker's phases.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.errors import LazyDecodeError
from lazydecode.inputs import MultiModalInput
from lazydecode.models.generic import GenericMultiModalProcessor, HeaderRendering
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.processor import BaseMultiModalProcessor
from lazydecode.renderers.chunks import ChunkResolver
from lazydecode.renderers.decode_counting import DecodeCounter, all_refs
from lazydecode.renderers.guards import client_errors, naming_videos
from lazydecode.renderers.identities import NamedItem
from lazydecode.renderers.jobs import Job, JobInputs
from lazydecode.renderers.ordered import OrderedWorker
from lazydecode.renderers.timeline import HEADERS_FALL_SHORT, Timeline

logger = logging.getLogger(__name__)


class HeaderRenderer:
    """Renders jobs from the headers of their media, where these say enough.

    Args:
        processor: The model's.
        inputs: Makes its inputs.
        counter: Finds what would have to be decoded.
        worker: The one thread that changes caches.
        processing: Threads for sizes and prompts that take longer than asking a thread.
        chunks: Cuts videos, for a model that wants chunks; else None.
    """

    def __init__(
        self,
        processor: BaseMultiModalProcessor,
        inputs: JobInputs,
        counter: DecodeCounter,
        *,
        worker: OrderedWorker,
        processing: Executor,
        chunks: ChunkResolver | None,
    ) -> None:
        self._processor = processor
        self._inputs = inputs
        self._counter = counter
        self._worker = worker
        self._processing = processing
        self._chunks = chunks

    async def render(
        self, job: Job, cache: BaseMultiModalProcessorCache | None, timeline: Timeline
    ) -> MultiModalInput | None:
        """Return ids, ranges, identities and small tensors without decoding anything.

        None if a header does not say enough, or if no item is missing from the cache, so that
        processing decodes nothing either, and the cache does not say enough at once.

        Raises:
            LazyDecodeError: If an item's size or an option cannot be used.
        """
        processor = self._processor
        if not isinstance(processor, GenericMultiModalProcessor):
            return None
        with timeline.stage("headers"), client_errors(), naming_videos(job.items):
            inputs, named = self._inputs.build(job, cache)
            hits = self._render_hits(processor, job, inputs, named, timeline)
            if hits is not None:
                return hits
            missing = self._counter.find_missing(inputs)
            if not missing:
                return None
            if job.load is not None:
                # What a chunk model's videos give is worked out from their headers always.
                needed = missing if self._chunks is None else all_refs(inputs)
                await job.load([item for item in needed if not item[2].knows_header])
            if self._chunks is None and job.is_short:
                known = processor.render_known(inputs)
                if known is not None:
                    prompt = self._finish(processor, inputs, known)
                    self._inputs.bind(named, cache)
                    return prompt
            rendering = await asyncio.get_running_loop().run_in_executor(
                self._processing, lambda: self._render(processor, job, inputs)
            )
            if rendering is not None:
                self._inputs.bind(named, cache)
        if rendering is None:
            timeline.fall_back(job.request_id, HEADERS_FALL_SHORT)
        return rendering

    def _render_hits(
        self,
        processor: GenericMultiModalProcessor,
        job: Job,
        inputs: ProcessorInputs,
        named: Sequence[NamedItem],
        timeline: Timeline,
    ) -> MultiModalInput | None:
        """Return the prompt of a short request all of whose items are cached; else None.

        What was read from the cache is right whatever happens to it meanwhile. That the items were
        used is noted in order with other requests, and not waited for.
        """
        cache, hashes = inputs.cache, inputs.mm_hash_items
        if self._chunks is not None or not job.is_short or cache is None or hashes is None:
            return None
        started = time.perf_counter()
        known = processor.render_cached(inputs)
        if known is None:
            return None
        prompt = self._finish(processor, inputs, known)
        self._inputs.bind(named, cache)
        if cache.keeps_items:
            used = [mm_hash for group in hashes.values() for mm_hash in group]
            self._worker.note(partial(_note_use, cache, used))
        seconds = time.perf_counter() - started
        for items in inputs.mm_data_items.values():
            for position in range(items.get_count()):
                item = items.get_client_position(position)
                timeline.record_item(*item, "lookup", seconds, hit=True)
        return prompt

    def _render(
        self, processor: GenericMultiModalProcessor, job: Job, inputs: ProcessorInputs
    ) -> MultiModalInput | None:
        if self._chunks is not None:
            chunked = self._chunks.from_headers(job.items, inputs)
            if chunked is None:
                return None
            inputs = chunked
        rendering = processor.render_from_headers(inputs)
        return None if rendering is None else self._finish(processor, inputs, rendering)

    def _finish(
        self,
        processor: GenericMultiModalProcessor,
        inputs: ProcessorInputs,
        rendering: HeaderRendering,
    ) -> MultiModalInput:
        prompt = MultiModalInput(
            type="multimodal",
            prompt_token_ids=rendering.token_ids,
            mm_kwargs={m: [*items] for m, items in rendering.metadata.items()},
            mm_hashes=inputs.get_mm_hashes(*processor.info.identity_scope),
            mm_placeholders=rendering.placeholders,
        )
        self._inputs.finish(prompt, inputs)
        return prompt


def _note_use(cache: BaseMultiModalProcessorCache, mm_hashes: Sequence[str]) -> None:
    """Do to a cache what hits of these do to it: they are its youngest, and are counted."""
    try:
        for mm_hash in mm_hashes:
            if cache.is_cached_item(mm_hash):
                cache.get_and_update_item(None, mm_hash)
    except LazyDecodeError:
        # A plug-in's cache; the requests that need it to work hear of it themselves.
        logger.warning("the cache cannot note what was used", exc_info=True)
