"""Downloaded media on disk: bounded, atomic, checked, shared between processes.

An entry is one file: a header line, then the payload. It is written under another name and
renamed, so nobody sees half of one; its digest is checked on every read, so a damaged one is
dropped. That digest is the payload's content identity, which the keys continue: the check
costs no second pass. Who has identified the payload before needs nothing but that digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from lazydecode.errors import MediaTooLargeError
from lazydecode.limits import DownloadCacheLimits
from lazydecode.media.base import PayloadDigest
from lazydecode.media.local_files import read_up_to

logger = logging.getLogger(__name__)

_MAGIC: Final = b"lazydecode-media-1\n"
_DIGEST_BYTES: Final = 32
_HEADER_BYTES: Final = len(_MAGIC) + 8 + _DIGEST_BYTES
"""Magic, seconds since 1970 at the download (8 bytes, big-endian), content digest."""
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SUFFIX: Final = ".media"
_TEMPORARY_MAX_AGE_S: Final = 3600.0
_SCAN_INTERVAL_S: Final = 60.0


class _Entry(NamedTuple):
    """An open entry that has not expired."""

    descriptor: int
    """Stands at the payload."""
    num_bytes: int
    content: bytes
    """The payload's content digest, as it was when it was kept."""


class DownloadCache:
    """Keeps payloads by URL; least recently used first out. All methods do file I/O.

    Threads and processes may share a folder. Only the sizes that a process itself wrote are
    known between two scans of the folder (at most a minute apart while it writes), so the
    total may exceed the limit for that long by what others wrote. The lock covers the two
    numbers that say when to scan; files are read and written outside it.

    Args:
        limits: With a folder; it is created if it does not exist.

    Raises:
        ValueError: If there is no folder, or it cannot be written to.
    """

    def __init__(self, limits: DownloadCacheLimits) -> None:
        if limits.folder is None:
            raise ValueError("a download cache needs a folder")
        self._folder = limits.folder
        self._max_bytes = limits.max_bytes
        self._max_age_s = limits.max_age_s
        self._lock = threading.Lock()
        self._total_bytes = 0
        self._next_scan = 0.0
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise ValueError(f"the download cache cannot create its folder: {exc}") from exc
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise ValueError(f"the download cache cannot write to {self._folder}")

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
                return self._drop(self._path(url), "cannot be read")
            digest = PayloadDigest(data)
            if digest.content() != entry.content:
                return self._drop(self._path(url), "is damaged")
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
                return self._drop(path, "is damaged")
            header = os.read(descriptor, _HEADER_BYTES)
            if not header.startswith(_MAGIC):
                return self._drop(path, "is damaged")
            downloaded = int.from_bytes(header[len(_MAGIC) : len(_MAGIC) + 8], "big")
            if self._has_expired(min(downloaded, status.st_mtime)):
                return self._drop(path, "has expired")
            if num_bytes > max_bytes:
                raise MediaTooLargeError(f"the encoded media is larger than {max_bytes} bytes")
            os.utime(descriptor)
        except OSError:
            return self._drop(path, "cannot be read")
        return _Entry(descriptor, num_bytes, header[-_DIGEST_BYTES:])

    def put(self, url: str, data: bytes, digest: PayloadDigest) -> None:
        """Keep a complete payload; then make room. A failure is logged, not raised."""
        size = _HEADER_BYTES + len(data)
        if size > self._max_bytes:
            return
        path = self._path(url)
        temporary = self._folder / f".{secrets.token_hex(8)}.part"
        try:
            self._write(temporary, data, digest)
            os.replace(temporary, path)
        except OSError as exc:
            logger.warning("The download cache could not keep an entry: %s", exc.strerror)
            with contextlib.suppress(OSError):
                temporary.unlink()
            return
        with self._lock:
            self._total_bytes += size
            now = time.monotonic()
            must_scan = self._total_bytes > self._max_bytes or now >= self._next_scan
            if must_scan:
                self._next_scan = now + _SCAN_INTERVAL_S
        if must_scan:
            self._make_room(keep=path)

    def clear(self) -> None:
        """Drop every entry."""
        for entry in self._entries():
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
        with self._lock:
            self._total_bytes = 0

    def _path(self, url: str) -> Path:
        return self._folder / (hashlib.sha256(url.encode("utf-8")).hexdigest() + _SUFFIX)

    def _has_expired(self, since: float) -> bool:
        return time.time() - since > self._max_age_s

    @staticmethod
    def _drop(path: Path, why: str) -> None:
        logger.info("An entry of the download cache %s and was dropped", why)
        with contextlib.suppress(OSError):
            path.unlink()

    @staticmethod
    def _write(path: Path, data: bytes, digest: PayloadDigest) -> None:
        header = _MAGIC + int(time.time()).to_bytes(8, "big") + digest.content()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            for part in (header, data):
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._folder) as folder:
            for entry in folder:
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                    yield entry

    def _make_room(self, keep: Path) -> None:
        """Remove leftovers and what has expired, then the oldest until the rest fits."""
        self._remove_leftovers()
        entries: list[tuple[float, int, str]] = []
        for entry in self._entries():
            with contextlib.suppress(OSError):  # Another process removed it.
                status = entry.stat(follow_symlinks=False)
                if self._has_expired(status.st_mtime) and entry.name != keep.name:
                    os.unlink(entry.path)
                else:
                    entries.append((status.st_mtime, status.st_size, entry.path))
        entries.sort()
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self._max_bytes:
                break
            if path != str(keep):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size
        with self._lock:
            self._total_bytes = total

    def _remove_leftovers(self) -> None:
        """Remove temporary files of processes that died while writing."""
        with os.scandir(self._folder) as folder:
            for entry in folder:
                if entry.name.startswith(".") and entry.name.endswith(".part"):
                    with contextlib.suppress(OSError):
                        age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                        if age_s > _TEMPORARY_MAX_AGE_S:
                            os.unlink(entry.path)
