"""Prompts of media that no cache holds, from headers alone: nothing is decoded."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Any

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.inputs import MultiModalInput
from lazydecode.media.base import MediaRef
from lazydecode.models.generic import GenericMultiModalProcessor, HeaderRendering
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.processor import BaseMultiModalProcessor
from lazydecode.renderers.chunks import ChunkResolver
from lazydecode.renderers.decode_counting import DecodeCounter, all_refs
from lazydecode.renderers.guards import client_errors, naming_videos
from lazydecode.renderers.jobs import Job, JobInputs
from lazydecode.renderers.timeline import HEADERS_FALL_SHORT, Timeline


class HeaderRenderer:
    """Renders jobs from the headers of their media, where these say enough.

    Args:
        processor: The model's.
        inputs: Makes its inputs.
        counter: Finds what would have to be decoded.
        processing: Threads for sizes and prompts that take longer than asking a thread.
        chunks: Cuts videos, for a model that wants chunks; else None.
    """

    def __init__(
        self,
        processor: BaseMultiModalProcessor,
        inputs: JobInputs,
        counter: DecodeCounter,
        *,
        processing: Executor,
        chunks: ChunkResolver | None,
    ) -> None:
        self._processor = processor
        self._inputs = inputs
        self._counter = counter
        self._processing = processing
        self._chunks = chunks

    async def render(
        self, job: Job, cache: BaseMultiModalProcessorCache | None, timeline: Timeline
    ) -> MultiModalInput | None:
        """Return ids, ranges, identities and small tensors without decoding anything.

        None if no item is missing from the cache, so that processing decodes nothing either, or
        if a header does not say enough.

        Raises:
            LazyDecodeError: If an item's size or an option cannot be used.
        """
        processor = self._processor
        if not isinstance(processor, GenericMultiModalProcessor):
            return None
        refs: list[MediaRef[Any]] = []
        try:
            with timeline.stage("headers"), client_errors(), naming_videos(job.items):
                inputs, named = self._inputs.build(job, cache, refs)
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
        finally:
            for ref in refs:
                ref.release()

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
        info = processor.info
        algorithm = info.ctx.get_mm_config().mm_hasher_algorithm
        prompt = MultiModalInput(
            type="multimodal",
            prompt_token_ids=rendering.token_ids,
            mm_kwargs={m: [*items] for m, items in rendering.metadata.items()},
            mm_hashes=inputs.get_mm_hashes(info.model_id, algorithm),
            mm_placeholders=rendering.placeholders,
        )
        self._inputs.finish(prompt, inputs)
        return prompt
