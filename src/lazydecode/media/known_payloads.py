"""Payloads that were identified before: a hit on one of them reads nothing and digests nothing.

Identity stays that of the bytes. What is remembered is the answer for a source that cannot have
changed since: a file with the same device, inode, size and times, an entry of the download cache
with the same recorded digest, or the same base64 text (`known_texts`). Should somebody need the
bytes after all, they are read, and used only if their digest is the remembered one (`LazyPayload`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from lazydecode.errors import LazyDecodeError, PayloadChangedError
from lazydecode.media.base import (
    DecodeSpec,
    MediaHeader,
    MediaIO,
    MediaRef,
    PayloadDigest,
    VideoHeader,
)
from lazydecode.media.lazy_payload import LazyPayload

ReadAgain: TypeAlias = Callable[[], tuple[bytes, PayloadDigest]]
"""Reads a payload and digests it. Blocks; raises a `LazyDecodeError` if it is gone."""

_MAX_SCOPES: Final = 8
"""Decoders with different options whose answers are kept for one payload."""
_MAX_FRAME_TIMES: Final = 1024
"""Headers that list the times of more frames are not kept."""


@dataclass(slots=True)
class _Identity:
    """What one decoder made of a payload."""

    key: bytes
    spec: DecodeSpec
    key_covers_spec: bool
    header: MediaHeader | None = None
    """None: not read so far, or not worth keeping."""


@dataclass(slots=True)
class _Known:
    """A payload that was read once."""

    content: bytes
    """Its content digest."""
    num_bytes: int
    identities: dict[Hashable, _Identity] = field(default_factory=dict)
    """`MediaIO.identity_scope` -> identity."""


class KnownPayloads:
    """The identities of payloads by their unchanged source; least recently used first out.

    Threads share it. The lock covers the table; nothing is read inside it.

    Args:
        max_entries: Payloads that are remembered, about 1 KB each; 0: none.
    """

    def __init__(self, max_entries: int) -> None:
        self.capacity = max_entries
        """Payloads that are remembered at most."""
        self._lock = threading.Lock()
        self._table: OrderedDict[Hashable, _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, source: Hashable) -> bool:
        with self._lock:
            return source in self._table

    def find(
        self,
        source: Hashable,
        media_ios: Sequence[MediaIO[Any]],
        read: ReadAgain,
        *,
        unread_bytes: int = 0,
    ) -> list[MediaRef[Any]] | None:
        """Return a ref for each decoder over a payload that is not read; None if one is new.

        Args:
            source: What the payload comes from, in its present state.
            media_ios: The decoders. All refs share one payload.
            read: Reads it, should it be needed.
            unread_bytes: Memory that `read` holds.
        """
        if source not in self:
            return None
        scopes = [media_io.identity_scope() for media_io in media_ios]
        with self._lock:
            known = self._table.get(source)
            if known is None:
                return None
            identities = []
            for scope in scopes:
                identity = known.identities.get(scope)
                if identity is None:
                    return None
                identities.append(identity)
            self._table.move_to_end(source)
        payload = LazyPayload(
            known.num_bytes,
            partial(self._read_again, source, known.content, read),
            unread_bytes=unread_bytes,
        )
        return [
            _lazy_ref(media_io, identity, payload)
            for media_io, identity in zip(media_ios, identities, strict=True)
        ]

    def learn(
        self,
        source: Hashable,
        digest: PayloadDigest,
        media_ios: Sequence[MediaIO[Any]],
        refs: Sequence[MediaRef[Any]],
    ) -> None:
        """Remember what the decoders made of a payload that was read.

        Args:
            source: What it came from; its state has not changed since before the reading.
            digest: Of the payload.
            media_ios: The decoders; one that does not say what its answer depends on is left out.
            refs: What each of them made.
        """
        found = {
            scope: _Identity(ref.key, ref.spec, ref.key_covers_spec, _kept_header(ref))
            for media_io, ref in zip(media_ios, refs, strict=True)
            if (scope := media_io.identity_scope()) is not None
        }
        if not self.capacity or not found:
            return
        content = digest.content()
        with self._lock:
            known = self._table.get(source)
            if known is None or known.content != content:
                known = self._table[source] = _Known(content, digest.num_bytes)
            known.identities.update(found)
            while len(known.identities) > _MAX_SCOPES:
                del known.identities[next(iter(known.identities))]
            self._table.move_to_end(source)
            while len(self._table) > self.capacity:
                self._table.popitem(last=False)

    def forget(self, source: Hashable) -> None:
        """Remember nothing of a source from here on."""
        with self._lock:
            self._table.pop(source, None)

    def _read_again(
        self, source: Hashable, content: bytes, read: ReadAgain
    ) -> tuple[bytes, PayloadDigest]:
        """Return the payload and its digest, if it is what was identified.

        Raises:
            PayloadChangedError: If it is not, or cannot be read: whoever fetches it anew learns
                what it is now, or why it cannot be had.
        """
        try:
            data, digest = read()
        except LazyDecodeError as exc:
            self.forget(source)
            raise PayloadChangedError(_CHANGED) from exc
        if digest.content() != content:
            self.forget(source)
            raise PayloadChangedError(_CHANGED)
        return data, digest


_CHANGED: Final = "the media changed after it was identified; send the request again"


def _lazy_ref(media_io: MediaIO[Any], identity: _Identity, payload: LazyPayload) -> MediaRef[Any]:
    """Return a ref whose identity is known; all else is as for a ref over the loaded bytes."""

    def load() -> MediaRef[Any]:
        data, digest = payload.load()
        return media_io.load_bytes_ref(data, digest=digest)

    def probe() -> MediaHeader | None:
        ref = load()
        header = ref.header
        identity.header = _kept_header(ref)
        return header

    return MediaRef(
        lambda: load().decode(),
        payload,
        identity.spec,
        key=identity.key,
        header_probe=probe,
        header=identity.header,
        key_covers_spec=identity.key_covers_spec,
        recipe=media_io.recipe(identity.spec),
    )


def _kept_header(ref: MediaRef[Any]) -> MediaHeader | None:
    """Return the header if it was read and is worth keeping."""
    if not ref.knows_header:
        return None
    header = ref.header
    times = header.frame_times_s if isinstance(header, VideoHeader) else None
    return header if times is None or len(times) <= _MAX_FRAME_TIMES else None
