"""Pictures and videos become chunks of one modality, in request order, before look-up.

How many chunks a video has is known once it was decoded, and then remembered by the video's
identity. So the first request decodes a video here, beside the others of the request and off
the event loop; later ones find the chunks by their identities, `<identity of the video>-<n>`,
and decode nothing unless one of them was evicted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from lazydecode.cache import BaseMultiModalProcessorCache, LRUCache
from lazydecode.errors import LazyDecodeError, MissingMediaError
from lazydecode.media.base import MediaRef, VideoHeader
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.media.transforms import MediaTransform
from lazydecode.media.video import VideoMetadata, plan_frames
from lazydecode.models.chunks import VISION_CHUNK
from lazydecode.models.generic import GenericMultiModalProcessor
from lazydecode.parse import (
    MultiModalDataItems,
    ProcessorBatchItems,
    VisionChunkProcessorItems,
)
from lazydecode.processing.failures import decode_error, time_limit_error
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.timing import ObservedExecutor, TimingContext
from lazydecode.renderers.cancellation import EXPIRE_PERIOD_S
from lazydecode.renderers.media import EncodedItem

MAX_LAYOUTS: Final = 1 << 16
"""Videos whose number of chunks is remembered; some 10 MB."""


@dataclass(slots=True)
class _OpenVideo:
    """A video that requests work on now: decoded once for all of them."""

    ref: MediaRef[Any]
    decode: Future[Any] | None = None
    num_users: int = 0
    started_at: float | None = None
    """When a thread began to decode it."""

    def run(self) -> Any:
        """Decode it; on a thread."""
        self.started_at = time.perf_counter()
        return self.ref.decode()

    def takes_longer_than(self, limit_s: float) -> bool:
        """Whether a thread has decoded it for so long."""
        started_at = self.started_at
        return started_at is not None and time.perf_counter() - started_at > limit_s


@dataclass(slots=True)
class _Chunks:
    """The chunks of a request as they are collected."""

    data: list[Any] = field(default_factory=list)
    origins: list[tuple[str, int]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    metadata: list[dict[str, Any] | None] = field(default_factory=list)

    def add(self, data: Any, origin: tuple[str, int], mm_hash: str, metadata: Any = None) -> None:
        self.data.append(data)
        self.origins.append(origin)
        self.hashes.append(mm_hash)
        self.metadata.append(metadata)

    def inputs(self, inputs: ProcessorInputs) -> ProcessorInputs:
        """Return the request with the chunks in the place of its pictures and videos."""
        # Embeddings are no media: they stay what they are.
        others = {
            modality: items
            for modality, items in inputs.mm_data_items.items()
            if not isinstance(items, ProcessorBatchItems)
        }
        if not self.data:
            return inputs
        items = VisionChunkProcessorItems(self.data, self.origins, self.metadata)
        # A request with embeddings passes the caches by, so that it needs no names.
        hashes = None if others else {VISION_CHUNK: self.hashes}
        return replace(
            inputs,
            mm_data_items=MultiModalDataItems({**others, VISION_CHUNK: items}),
            mm_hash_items=hashes,
        )


class ChunkResolver:
    """Cuts the videos of requests for a model that wants chunks. Used on one event loop.

    Args:
        processor: The model's; it says where videos are cut.
        executor: Runs decodes.
        time_limit_s: How long a thread may take to decode a video before it has failed for those
            who wait. It goes on all the same.
    """

    def __init__(
        self,
        processor: GenericMultiModalProcessor,
        executor: Executor,
        *,
        time_limit_s: float = math.inf,
    ) -> None:
        self._processor = processor
        self._executor = executor
        self._time_limit_s = time_limit_s
        self._counts: LRUCache[int] = LRUCache(MAX_LAYOUTS)
        self._open: dict[bytes, _OpenVideo] = {}
        self.transform = MediaTransform(
            "video_chunk", "video", frozenset({"video_chunk", "video_chunk_options"}), self._take
        )
        """Video -> one of its chunks; where the model cuts is its own, so that this is too."""

    def __len__(self) -> int:
        """Number of videos that requests work on now."""
        return len(self._open)

    def holds(self, mm_hash: str, cache: BaseMultiModalProcessorCache) -> bool:
        """Whether nothing has to be decoded for the video with this identity."""
        count = self._counts.peek(mm_hash)
        warm = self._processor.warm_outputs
        return count is not None and all(
            cache.is_cached_item(chunk) or chunk in warm for chunk in _names(mm_hash, count)
        )

    @asynccontextmanager
    async def resolved(
        self, items: Sequence[EncodedItem], inputs: ProcessorInputs, timing: TimingContext
    ) -> AsyncIterator[ProcessorInputs]:
        """Yield the inputs with chunks; whatever the block leaves is released after it.

        A video that cannot be decoded is one chunk that cannot: its failure takes the way of
        all others, and what the request has beside it is not lost.

        Args:
            items: The client's items, in request order.
            inputs: The same, by modality.
            timing: Is told of decodes.

        Raises:
            MissingMediaError: If a video is a uuid alone and nobody knows its chunks.
        """
        chunks = _Chunks()
        users: list[_OpenVideo] = []
        try:
            videos = self._acquire(items, inputs, users)
            await self._decode_unknown(videos, inputs, timing)
            for item in items:
                mm_hash = self._hash(inputs, item)
                if item.modality != "video":
                    raw = inputs.mm_data_items[item.modality].get_raw(item.index)
                    chunks.add(raw, (item.modality, item.index), mm_hash)
                else:
                    self._add_video(chunks, item.index, mm_hash, videos.get(item.index), inputs)
            yield chunks.inputs(inputs)
        finally:
            for origin, ref in zip(chunks.origins, chunks.data, strict=True):
                if origin[0] == "video" and isinstance(ref, MediaRef):
                    ref.release()
            for video in users:
                self._leave(video)

    def from_headers(
        self, items: Sequence[EncodedItem], inputs: ProcessorInputs
    ) -> ProcessorInputs | None:
        """Return the inputs with chunks as the headers have them; nothing is decoded.

        None if a header does not say enough. The chunks of videos cannot be decoded then.

        Raises:
            InvalidRequestError: If an option is wrong.
        """
        chunks = _Chunks()
        for item in items:
            raw = inputs.mm_data_items[item.modality].get_raw(item.index)
            origin, mm_hash = (item.modality, item.index), self._hash(inputs, item)
            if item.modality != "video":
                chunks.add(raw, origin, mm_hash)
                continue
            count = self._counts.peek(mm_hash) if raw is None else None
            if count is not None:
                for name in _names(mm_hash, count):
                    chunks.add(None, origin, name)
                continue
            try:
                metadata = _planned(raw)
            except LazyDecodeError as exc:
                raise decode_error(*origin, exc) from exc
            if metadata is None:
                return None
            plans = self._processor.plan_video_chunks(metadata, inputs.hf_processor_mm_kwargs)
            for name, plan in zip(_names(mm_hash, len(plans)), plans, strict=True):
                chunks.add(raw, origin, name, plan.metadata)
        return chunks.inputs(inputs)

    # -- videos that are worked on

    def _acquire(
        self, items: Sequence[EncodedItem], inputs: ProcessorInputs, users: list[_OpenVideo]
    ) -> dict[int, _OpenVideo]:
        """Return index -> video for those that came with data."""
        videos: dict[int, _OpenVideo] = {}
        for item in items:
            if item.modality != "video":
                continue
            ref = inputs.mm_data_items["video"].get_raw(item.index)
            if not isinstance(ref, MediaRef):
                continue
            video = self._open.get(ref.key)
            if video is None:
                # A ref of its own: the first request may end before the others.
                video = self._open[ref.key] = _OpenVideo(ref.renew())
            video.num_users += 1
            users.append(video)
            videos[item.index] = video
        return videos

    def _leave(self, video: _OpenVideo) -> None:
        video.num_users -= 1
        if video.num_users == 0:
            del self._open[video.ref.key]
            video.ref.release()

    async def _decode_unknown(
        self, videos: Mapping[int, _OpenVideo], inputs: ProcessorInputs, timing: TimingContext
    ) -> None:
        """Return when every video whose chunks are not known was decoded, well or not, or has
        taken too long."""
        waiting: list[_OpenVideo] = []
        try:
            for index, video in videos.items():
                mm_hash = self._hash_at(inputs, "video", index)
                if video.decode is None and self._counts.get(mm_hash) is None:
                    executor = ObservedExecutor(self._executor, timing, "video", index)
                    video.decode = executor.submit(video.run)
                if video.decode is not None and not video.decode.done():
                    waiting.append(video)
        finally:
            # Also when one could not be submitted: the others use their payloads.
            if waiting:
                await await_with_cancellation_drain(self._wait_for(waiting))

    async def _wait_for(self, videos: Sequence[_OpenVideo]) -> None:
        jobs = {
            asyncio.wrap_future(video.decode): video for video in videos if video.decode is not None
        }
        pending = set(jobs)
        while pending:
            await asyncio.wait(pending, timeout=EXPIRE_PERIOD_S)
            late = {job for job in pending if jobs[job].takes_longer_than(self._time_limit_s)}
            pending = {job for job in pending if not job.done()} - late
        for job in jobs:
            # Not the shared decode: only our view of it, whose outcome nobody reads.
            if not job.cancel():
                job.exception()

    def _add_video(
        self,
        chunks: _Chunks,
        index: int,
        mm_hash: str,
        video: _OpenVideo | None,
        inputs: ProcessorInputs,
    ) -> None:
        origin = ("video", index)
        count = self._counts.get(mm_hash)
        options = inputs.hf_processor_mm_kwargs
        if video is None:
            if count is None:
                raise MissingMediaError(
                    f"Cache miss for video at index {index} but data is not provided.",
                    modality="video",
                    index=index,
                )
            for name in _names(mm_hash, count):
                chunks.add(None, origin, name)
            return
        failure: BaseException | None = None
        if video.decode is not None and not video.decode.done():
            failure = time_limit_error(self._time_limit_s)
        elif video.decode is not None:
            failure = video.decode.exception()
        if failure is not None:
            chunks.add(_failed(video.ref, failure), origin, mm_hash)
            return
        if count is None:
            _, metadata = video.ref.decode()
            count = len(self._processor.plan_video_chunks(metadata, options))
            self._counts.put(mm_hash, count, 1)
        for number, name in enumerate(_names(mm_hash, count)):
            chunk = self.transform.map(
                video.ref, video_chunk=number, video_chunk_options=dict(options)
            )
            chunks.add(chunk, origin, name)

    def _take(self, video: Any, *, video_chunk: int, video_chunk_options: Mapping[str, Any]) -> Any:
        return self._processor.split_video_chunks(video, video_chunk_options)[video_chunk]

    # -- identities

    def _hash(self, inputs: ProcessorInputs, item: EncodedItem) -> str:
        return self._hash_at(inputs, item.modality, item.index)

    def _hash_at(self, inputs: ProcessorInputs, modality: str, index: int) -> str:
        info = self._processor.info
        return inputs.get_item_hash(modality, index, *info.identity_scope)


def _names(mm_hash: str, count: int) -> list[str]:
    return [f"{mm_hash}-{number}" for number in range(count)]


def _planned(raw: object) -> VideoMetadata | None:
    """Return what a decode will say about a video, if its header says enough."""
    if not isinstance(raw, MediaRef) or not isinstance(raw.header, VideoHeader):
        return None
    return plan_frames(raw.spec, raw.header)


def _failed(ref: MediaRef[Any], failure: BaseException) -> MediaRef[Any]:
    """Return a ref that fails as the decode did, without doing it again."""

    def fail() -> NoReturn:
        raise failure

    return MediaRef(fail, ref.payload, ref.spec, key=ref.key)
