"""A folder of files that several processes share: bounded, oldest first out, never half a file."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_TEMPORARY_MAX_AGE_S: Final = 3600.0
_SCAN_INTERVAL_S: Final = 60.0


class BoundedFolder:
    """Keeps files under names with one suffix. All methods do file I/O.

    A file is written under another name and renamed, so nobody sees half of one. Only the sizes
    that a process itself wrote are known between two scans of the folder (at most a minute
    apart while it writes), so the total may exceed the limit for that long by what others wrote.
    The lock covers the two numbers that say when to scan.

    Args:
        folder: Is created if it does not exist.
        what: What the folder is, for messages.
        suffix: Of its files.
        max_bytes: Largest total.
        max_age_s: Files that were not touched for so long are removed.

    Raises:
        ValueError: If the folder cannot be created or written to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        what: str,
        suffix: str,
        max_bytes: int,
        max_age_s: float = math.inf,
    ) -> None:
        self._folder = folder
        self._what = what
        self._suffix = suffix
        self.max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._total_bytes = 0
        self._next_scan = 0.0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise ValueError(f"the {what} cannot create its folder: {exc}") from exc
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise ValueError(f"the {what} cannot read and write {folder}")

    def path(self, name: str) -> Path:
        """Return where the file of that name is, if there is one."""
        return self._folder / (name + self._suffix)

    def write(self, name: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        """Keep a file of `size` bytes; then make room. A failure is logged, not raised."""
        if size > self.max_bytes:
            return
        path = self.path(name)
        temporary = self._folder / f".{secrets.token_hex(8)}.part"
        try:
            self._write(temporary, parts)
            os.replace(temporary, path)
        except OSError as exc:
            logger.warning("The %s could not keep an entry: %s", self._what, exc.strerror)
            with contextlib.suppress(OSError):
                temporary.unlink()
            return
        with self._lock:
            self._total_bytes += size
            now = time.monotonic()
            must_scan = self._total_bytes > self.max_bytes or now >= self._next_scan
            if must_scan:
                self._next_scan = now + _SCAN_INTERVAL_S
        if must_scan:
            try:
                self._make_room(keep=path)
            except OSError as exc:  # the folder itself cannot be read any more
                logger.warning("The %s could not make room: %s", self._what, exc.strerror)

    def drop(self, path: Path, why: str) -> None:
        """Remove a file that cannot be used."""
        logger.info("An entry of the %s %s and was dropped", self._what, why)
        with contextlib.suppress(OSError):
            path.unlink()

    def clear(self) -> None:
        """Remove every file."""
        for entry in self._entries():
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
        with self._lock:
            self._total_bytes = 0

    def has_expired(self, since: float) -> bool:
        """Whether that time (seconds since 1970) is too long ago."""
        return time.time() - since > self._max_age_s

    @staticmethod
    def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._folder) as folder:
            for entry in folder:
                if entry.name.endswith(self._suffix) and not entry.name.startswith("."):
                    yield entry

    def _make_room(self, keep: Path) -> None:
        """Remove leftovers and what has expired, then the oldest until the rest fits."""
        self._remove_leftovers()
        entries: list[tuple[float, int, str]] = []
        for entry in self._entries():
            with contextlib.suppress(OSError):  # Another process removed it.
                status = entry.stat(follow_symlinks=False)
                if self.has_expired(status.st_mtime) and entry.name != keep.name:
                    os.unlink(entry.path)
                else:
                    entries.append((status.st_mtime, status.st_size, entry.path))
        entries.sort()
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.max_bytes:
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
