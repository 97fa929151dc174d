"""Downloaded media on disk: bounded, atomic, checked, shared between processes.

An entry is one file: a header line, then the payload. It is written under another name and
renamed, so nobody sees half of one; its digest is checked on every read, so a damaged one is
dropped. That digest is the payload's content identity, which the keys continue: the check
costs no second pass. Who has identified the payload before needs nothing but that digest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from lazydecode.errors import MediaTooLargeError
from lazydecode.limits import DownloadCacheLimits
from lazydecode.media.base import PayloadDigest
from lazydecode.media.bounded_folder import BoundedFolder
from lazydecode.media.local_files import read_up_to

logger = logging.getLogger(__name__)

_MAGIC: Final = b"lazydecode-media-1\n"
_DIGEST_BYTES: Final = 32
_HEADER_BYTES: Final = len(_MAGIC) + 8 + _DIGEST_BYTES
"""Magic, seconds since 1970 at the download (8 bytes, big-endian), content digest."""
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SUFFIX: Final = ".media"


class _Entry(NamedTuple):
    """An open entry that has not expired."""

    descriptor: int
    """Stands at the payload."""
    num_bytes: int
    content: bytes
    """The payload's content digest, as it was when it was kept."""


class DownloadCache:
    """Keeps payloads by URL; least recently used first out. All methods do file I/O.

    Threads and processes may share a folder, within the limits as `BoundedFolder` says.

    Args:
        limits: With a folder; it is created if it does not exist.

    Raises:
        ValueError: If there is no folder, or it cannot be written to.
    """

    def __init__(self, limits: DownloadCacheLimits) -> None:
        if limits.folder is None:
            raise ValueError("a download cache needs a folder")
        self._folder = BoundedFolder(
            limits.folder,
            what="download cache",
            suffix=_SUFFIX,
            max_bytes=limits.max_bytes,
            max_age_s=limits.max_age_s,
        )

    def get(self, url: str, max_bytes: int) -> tuple[bytes, PayloadDigest] | None:
        """Return the payload of `url` and its digest, and make it the youngest entry.

        Raises:
            MediaTooLargeError: If the payload is larger than `max_bytes`; it is not read then.
        """
        with self._open(url, max_bytes) as entry:
            if entry is None:
                return None
            try:
                data = read_up_to(entry.descriptor, entry.num_bytes)
            except OSError:
                self._folder.drop(self._path(url), "cannot be read")
                return None
            digest = PayloadDigest(data)
            if digest.content() != entry.content:
                self._folder.drop(self._path(url), "is damaged")
                return None
            return data, digest

    def peek(self, url: str, max_bytes: int) -> bytes | None:
        """Return the content digest of `url` as it was recorded, without reading the payload.

        It becomes the youngest entry, as by `get`, which may still find it damaged.

        Raises:
            MediaTooLargeError: If the payload is larger than `max_bytes`.
        """
        with self._open(url, max_bytes) as entry:
            return None if entry is None else entry.content

    @contextmanager
    def _open(self, url: str, max_bytes: int) -> Iterator[_Entry | None]:
        """Open an entry at its payload; None if there is none that holds."""
        path = self._path(url)
        try:
            descriptor = os.open(path, _READ_FLAGS)
        except OSError:
            yield None
            return
        try:
            yield self._check(path, descriptor, max_bytes)
        finally:
            os.close(descriptor)

    def _check(self, path: Path, descriptor: int, max_bytes: int) -> _Entry | None:
        try:
            status = os.fstat(descriptor)
            num_bytes = status.st_size - _HEADER_BYTES
            if not stat.S_ISREG(status.st_mode) or num_bytes <= 0:
                self._folder.drop(path, "is damaged")
                return None
            header = os.read(descriptor, _HEADER_BYTES)
            if not header.startswith(_MAGIC):
                self._folder.drop(path, "is damaged")
                return None
            downloaded = int.from_bytes(header[len(_MAGIC) : len(_MAGIC) + 8], "big")
            if self._folder.has_expired(min(downloaded, status.st_mtime)):
                self._folder.drop(path, "has expired")
                return None
            if num_bytes > max_bytes:
                raise MediaTooLargeError(f"the encoded media is larger than {max_bytes} bytes")
            os.utime(descriptor)
        except OSError:
            self._folder.drop(path, "cannot be read")
            return None
        return _Entry(descriptor, num_bytes, header[-_DIGEST_BYTES:])

    def put(self, url: str, data: bytes, digest: PayloadDigest) -> None:
        """Keep a complete payload; then make room. A failure is logged, not raised."""
        header = _MAGIC + int(time.time()).to_bytes(8, "big") + digest.content()
        self._folder.write(_name(url), (header, data), len(header) + len(data))

    def clear(self) -> None:
        """Drop every entry."""
        self._folder.clear()

    def _path(self, url: str) -> Path:
        return self._folder.path(_name(url))


def _name(url: str) -> str:
    return hashlib.sha256(url.encode("utf-8")).hexdigest()
