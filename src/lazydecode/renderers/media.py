"""Fetching the media of one request: all parts at once, each once, within the memory budget.

What comes out is encoded and identified; nothing is decoded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

from lazydecode.errors import (
    InvalidRequestError,
    LazyDecodeError,
    MediaTooLargeError,
    OverloadedError,
    PayloadChangedError,
)
from lazydecode.limits import RequestLimits
from lazydecode.media.base import MediaIO, MediaRef
from lazydecode.media.connector import FetchTrace, MediaConnector, trace_fetch
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.media.lazy_payload import LazyPayload
from lazydecode.processing.context import BaseProcessingInfo
from lazydecode.renderers.chat import MediaRequest
from lazydecode.renderers.decode_options import MediaIOKwargs, resolve_media_io
from lazydecode.renderers.hold import EncodedHold
from lazydecode.renderers.timeline import Timeline

Fetched: TypeAlias = "tuple[tuple[MediaRef[Any], ...], FetchTrace]"

_GUESS_BYTES: Final = 1024 * 1024
"""Reserved for an item whose size is not known before it was fetched."""
_AT_HAND_BYTES: Final = 1024 * 1024
"""Payloads that a request brought and that are identified one by one: up to 0.8 ms for all."""
_MAX_CHANGES: Final = 3
"""How often what changes while it is read is identified anew."""


@dataclass(slots=True)
class EncodedItem:
    """One fetched item. Its ref is never decoded itself: it is renewed for each processing."""

    modality: str
    index: int
    uuid: str | None
    ref: MediaRef[Any] | None
    """None: the client gave a uuid alone, or a cache holds the item."""
    origin: MediaRequest | None = None
    """Where to fetch it, late or anew; None for what came with the request."""
    of_video: int | None = None
    """For the sound of a video: the video's index."""

    @property
    def is_left_out(self) -> bool:
        """Whether it was not fetched, since a cache held it."""
        return self.ref is None and self.origin is not None

    def new_ref(self) -> MediaRef[Any] | None:
        """An undecoded ref over the same payload, to be decoded and released by its taker."""
        return None if self.ref is None else self.ref.renew()

    def release(self) -> None:
        """Let go of the payload."""
        if self.ref is not None:
            self.ref.release()


class MediaFetcher:
    """Fetches the items of requests.

    Args:
        connector: Brings encoded bytes.
        info: Chooses the decoder of each modality.
        limits: What one request may hold.
    """

    def __init__(
        self,
        connector: MediaConnector,
        info: BaseProcessingInfo,
        *,
        limits: RequestLimits,
    ) -> None:
        self._connector = connector
        self._info = info
        self._limits = limits
        self._plain: dict[str, MediaIO[Any]] = {}
        """Modality -> decoder without options: they keep nothing between items."""

    def resolve(
        self, modalities: Sequence[str], media_io_kwargs: MediaIOKwargs
    ) -> dict[str, MediaIO[Any]]:
        """Return modality -> decoder with the given options.

        Raises:
            ValidationError: If an option is unknown or wrong.
        """
        if media_io_kwargs:
            return {m: resolve_media_io(self._info, m, media_io_kwargs) for m in modalities}
        for modality in modalities:
            if modality not in self._plain:
                self._plain[modality] = resolve_media_io(self._info, modality, {})
        return {modality: self._plain[modality] for modality in modalities}

    async def fetch_all(
        self,
        media: Sequence[MediaRequest],
        decoders: Mapping[str, MediaIO[Any]],
        *,
        hold: EncodedHold,
        timeline: Timeline,
        tenant: str | None,
    ) -> list[EncodedItem]:
        """Return the items in the order of `media`, when all have ended.

        Args:
            media: What to fetch. Views of the request body are dropped from them, so that it
                can go.
            decoders: Modality -> decoder.
            hold: What the request holds of the memory budget; to be released after the items.
            timeline: Is told of each item.
            tenant: Whose request it is.

        Raises:
            LazyDecodeError: The first failure in the order of `media`, with its item named.
        """
        known = unknown = 0
        for item in media:
            num_bytes = _known_bytes(item)
            if item.of_video is None:
                known += num_bytes
            if isinstance(item.source, str) and not num_bytes and not item.is_held:
                unknown += _GUESS_BYTES
        if known > self._limits.max_encoded_bytes_per_request:
            self._refuse(known, [(item, _known_bytes(item)) for item in media])
        await hold.require(known + unknown)
        items = await self._fetch_each(media, decoders, timeline, tenant)
        try:
            needed = self._check_totals(items, hold)
            try:
                await hold.require(needed)
            except OverloadedError:
                # Larger than expected, and memory is short: wait for a turn with nothing held,
                # then fetch again what can be fetched again.
                items = await self._fetch_again(
                    media, decoders, items, needed, hold, timeline, tenant
                )
                needed = self._check_totals(items, hold)
                await hold.require(needed)
            hold.shrink(needed)
        except BaseException:
            _release(items)
            raise
        return items

    async def fetch_late(
        self,
        items: Sequence[EncodedItem],
        decoders: Mapping[str, MediaIO[Any]],
        *,
        hold: EncodedHold,
        timeline: Timeline,
        tenant: str | None,
    ) -> None:
        """Fetch into `items` what was left out since a cache held it, and does no more.

        Raises:
            LazyDecodeError: The first failure, with its item named.
        """
        late = [item for item in items if item.is_left_out]
        needed = hold.measure(item.ref for item in items).needed
        await hold.require(needed + len(late) * _GUESS_BYTES)
        await self._replace(items, late, decoders, hold, timeline, tenant)

    async def fetch_changed(
        self,
        items: Sequence[EncodedItem],
        decoders: Mapping[str, MediaIO[Any]],
        *,
        hold: EncodedHold,
        timeline: Timeline,
        tenant: str | None,
    ) -> None:
        """Identify anew what was identified from memory: some of it is not that any more.

        All payloads are in memory afterwards, and cannot change again.

        Raises:
            PayloadChangedError: If it changes faster than it can be read.
            LazyDecodeError: The first failure, with its item named.
        """
        for _ in range(_MAX_CHANGES):
            unread = [item for item in items if item.ref is not None and not item.ref.is_loaded]
            elsewhere = [item for item in unread if item.origin is not None]
            await self._replace(items, elsewhere, decoders, hold, timeline, tenant)
            refs = [(item.modality, item.index, item.ref) for item in unread if item.ref]
            try:
                await self.load(items, refs, hold)
            except PayloadChangedError as exc:
                changed = exc
            else:
                return
        raise changed

    async def load(
        self,
        items: Sequence[EncodedItem],
        wanted: Sequence[tuple[str, int, MediaRef[Any]]],
        hold: EncodedHold,
    ) -> None:
        """Read the payloads of some items, if they were left unread.

        Args:
            items: All of the request.
            wanted: Modality, index and ref of those whose bytes are needed.
            hold: What the request holds of the memory budget.

        Raises:
            PayloadChangedError: If one is not what was identified any more; it names the item.
            OverloadedError: If there is no room for them, or not in time.
        """
        unread = {
            id(payload): (payload, modality, index)
            for modality, index, ref in wanted
            if isinstance(payload := ref.payload, LazyPayload) and not payload.is_loaded
        }
        if not unread:
            return
        needed = hold.measure(item.ref for item in items).needed + sum(
            payload.num_bytes for payload, _, _ in unread.values() if not payload.held_bytes
        )
        try:
            await hold.require(needed)
        except OverloadedError:
            # Memory is short: wait for a turn with nothing held.
            hold.release()
            await hold.require(needed)
        loop, executor = asyncio.get_running_loop(), self._connector.executor.quick
        jobs = [loop.run_in_executor(executor, payload.load) for payload, _, _ in unread.values()]
        # Also when cancelled: what threads still read is held until they have ended.
        results = await await_with_cancellation_drain(asyncio.gather(*jobs, return_exceptions=True))
        for result, (_, modality, index) in zip(results, unread.values(), strict=True):
            if isinstance(result, LazyDecodeError):
                raise result.at(modality, index) from result
            if isinstance(result, BaseException):
                raise result
        hold.shrink(hold.measure(item.ref for item in items).needed)

    def settle(self, items: Sequence[EncodedItem], hold: EncodedHold) -> None:
        """Hold what is in memory for some items, and nothing for what might be decoded from it."""
        hold.shrink(hold.measure(item.ref for item in items).held)

    async def _replace(
        self,
        items: Sequence[EncodedItem],
        stale: Sequence[EncodedItem],
        decoders: Mapping[str, MediaIO[Any]],
        hold: EncodedHold,
        timeline: Timeline,
        tenant: str | None,
    ) -> None:
        """Fetch the refs of some of the request's items."""
        origins = [item.origin for item in stale if item.origin is not None]
        for origin in origins:
            origin.is_held = False
        fetched = await self._fetch_each(origins, decoders, timeline, tenant)
        try:
            others = [item for item in items if item not in stale]
            needed = self._check_totals([*others, *fetched], hold)
            await hold.require(needed)
            hold.shrink(needed)
        except BaseException:
            _release(fetched)
            raise
        for item, new in zip(stale, fetched, strict=True):
            item.release()
            item.ref = new.ref

    async def _fetch_again(
        self,
        media: Sequence[MediaRequest],
        decoders: Mapping[str, MediaIO[Any]],
        items: Sequence[EncodedItem],
        needed: int,
        hold: EncodedHold,
        timeline: Timeline,
        tenant: str | None,
    ) -> list[EncodedItem]:
        remote = [
            at for at, item in enumerate(media) if item.source is not None and not item.is_held
        ]
        _release([items[at] for at in remote])
        hold.release()
        await hold.require(needed)
        fetched = await self._fetch_each([media[at] for at in remote], decoders, timeline, tenant)
        renewed = list(items)
        for at, item in zip(remote, fetched, strict=True):
            renewed[at] = item
        return renewed

    def _check_totals(self, items: Sequence[EncodedItem], hold: EncodedHold) -> int:
        """Check the size of all payloads; return the memory that they need."""
        sizes = hold.measure(item.ref for item in items)
        if sizes.total > self._limits.max_encoded_bytes_per_request:
            self._refuse(sizes.total, [(item, item.ref.num_bytes) for item in items if item.ref])
        return sizes.needed

    def _refuse(
        self, total: int, sizes: Iterable[tuple[MediaRequest | EncodedItem, int]]
    ) -> NoReturn:
        """Refuse a request of too many bytes; name the item, if one is too large by itself.

        Args:
            total: Bytes of all items.
            sizes: Each item's bytes.

        Raises:
            MediaTooLargeError: Always.
        """
        limit = self._limits.max_encoded_bytes_per_request
        for item, size in sizes:
            if size > limit:
                raise MediaTooLargeError(
                    f"the item has {size} bytes; at most {limit} are allowed in a request",
                    modality=item.modality,
                    index=item.index,
                )
        raise MediaTooLargeError(
            f"the request's media have {total} bytes in all; at most {limit} are allowed"
        )

    def _fetch_each(
        self,
        media: Sequence[MediaRequest],
        decoders: Mapping[str, MediaIO[Any]],
        timeline: Timeline,
        tenant: str | None,
    ) -> Coroutine[Any, Any, list[EncodedItem]]:
        if len(media) == 1 or _are_at_hand(media):
            return self._fetch_in_turn(media, decoders, timeline, tenant)
        return self._fetch_together(media, decoders, timeline, tenant)

    async def _fetch_together(
        self,
        media: Sequence[MediaRequest],
        decoders: Mapping[str, MediaIO[Any]],
        timeline: Timeline,
        tenant: str | None,
    ) -> list[EncodedItem]:
        with_sound = {item.where for item in media if item.of_video is not None}
        tasks: dict[tuple[str, str], asyncio.Task[Fetched]] = {}
        waits: list[Coroutine[Any, Any, EncodedItem]] = []
        for item in media:
            task: asyncio.Task[Fetched] | None = None
            if item.source is not None and not item.is_held:
                is_pair = item.where in with_sound
                kind = "video" if is_pair else item.modality
                key = (kind, item.source if isinstance(item.source, str) else item.where)
                task = tasks.get(key)
                if task is None:
                    media_ios = [decoders[kind]] + ([decoders["audio"]] if is_pair else [])
                    task = tasks[key] = asyncio.create_task(
                        self._fetch(item, item.source, media_ios, tenant),
                        name=f"fetch-{item.where}",
                    )
            _drop_view(item)
            waits.append(_wait_for_item(item, task, timeline))
        # Also when cancelled: threads may still be reading a payload.
        results = await await_with_cancellation_drain(
            asyncio.gather(*waits, return_exceptions=True),
            on_cancel=lambda: [task.cancel() for task in tasks.values()],
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        items = [result for result in results if isinstance(result, EncodedItem)]
        if failures:
            _release(items)
            raise failures[0]
        return items

    async def _fetch_in_turn(
        self,
        media: Sequence[MediaRequest],
        decoders: Mapping[str, MediaIO[Any]],
        timeline: Timeline,
        tenant: str | None,
    ) -> list[EncodedItem]:
        """Fetch one item after the other: there is nothing to wait for beside it."""
        items: list[EncodedItem] = []
        try:
            for item in media:
                if items:
                    await asyncio.sleep(0)  # others get their turn between the payloads
                fetched: Coroutine[Any, Any, Fetched] | None = None
                if item.source is not None and not item.is_held:
                    fetched = self._fetch(item, item.source, [decoders[item.modality]], tenant)
                _drop_view(item)
                items.append(await _wait_for_item(item, fetched, timeline))
        except BaseException:
            _release(items)
            raise
        return items

    async def _fetch(
        self,
        item: MediaRequest,
        source: str | memoryview,
        media_ios: Sequence[MediaIO[Any]],
        tenant: str | None,
    ) -> Fetched:
        """Bring one item, or one payload for a video and the sound in it."""
        connector = self._connector
        with trace_fetch(tenant, source, item.tag) as trace:
            if len(media_ios) == 2:
                return await connector.fetch_video_and_audio_async(source, *media_ios), trace
            (media_io,) = media_ios
            if item.media_type is not None:
                data = source.encode() if isinstance(source, str) else source
                ref = await connector.load_base64_async(item.media_type, data, media_io)
            elif item.modality == "image":
                ref = await connector.fetch_image_async(source, media_io)
            elif item.modality == "video":
                ref = await connector.fetch_video_async(source, media_io)
            else:
                ref = await connector.fetch_audio_async(source, media_io)
            return (ref,), trace


async def _wait_for_item(
    item: MediaRequest, task: Awaitable[Fetched] | None, timeline: Timeline
) -> EncodedItem:
    record = timeline.item(item.modality, item.index)
    origin = None if item.source is None else item
    if task is None:
        return EncodedItem(item.modality, item.index, item.uuid, None, origin, item.of_video)
    is_sound = item.of_video is not None
    where = ("video", item.of_video) if item.of_video is not None else (item.modality, item.index)
    try:
        refs, trace = await task
    except LazyDecodeError as exc:
        raise exc.at(*where) from exc.__cause__
    except (ValueError, NotImplementedError) as exc:
        raise InvalidRequestError(str(exc), modality=where[0], index=where[1]) from exc
    # Items that share a fetch are released one by one: each needs a ref of its own.
    ref = refs[is_sound].renew()
    if not is_sound:
        record.num_bytes = ref.num_bytes
        record.add("fetch", trace.fetch_s)
        record.add("digest", trace.digest_s)
    return EncodedItem(item.modality, item.index, item.uuid, ref, origin, item.of_video)


def _are_at_hand(media: Sequence[MediaRequest]) -> bool:
    """Whether all items came with the request, and are so small that no thread is asked."""
    total = 0
    for item in media:
        num_bytes = 0 if item.source is None else _known_bytes(item)
        if item.of_video is not None or (item.source is not None and not num_bytes):
            return False
        total += num_bytes
    return total <= _AT_HAND_BYTES


def _drop_view(item: MediaRequest) -> None:
    """Let go of what came with the request, now that somebody else has it."""
    if isinstance(item.source, memoryview) or _known_bytes(item):
        item.source = None


def _release(items: Iterable[EncodedItem]) -> None:
    for item in items:
        item.release()


def _known_bytes(item: MediaRequest) -> int:
    """Encoded bytes of an item that came with the request; base64 is four thirds of them."""
    source = item.source
    if source is None:
        return 0
    if isinstance(source, str) and item.media_type is None and source[:5].lower() != "data:":
        return 0
    return len(source) * 3 // 4
