"""Files that `file:` URLs may name: those below one folder, opened without a race.

A path is walked from the folder down, one component at a time, following no link. One that has
links or dots in it is resolved before, and compared with the folder. If anything was exchanged
between the two, the walk fails; it can never arrive elsewhere, and nothing outside the folder is
ever opened.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

from lazydecode.errors import BlockedURLError, CorruptMediaError, UnprocessableMediaError
from lazydecode.media.faults import shortage
from lazydecode.media.file_look import FileLook
from lazydecode.media.urls import FileURL

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS: Final = (
    # NONBLOCK: opening a FIFO would wait for a writer. NOCTTY: a terminal would become ours.
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
)
_CHANGED: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
_UNRESOLVED: Final = frozenset(("", ".", ".."))
"""Parts of a path that resolving it would take away."""
_SETTLED_NS: Final = 2_000_000_000
"""Age of the last change from which a later one cannot carry the same time: clocks of file
systems tick as coarsely as that."""


class FileState(NamedTuple):
    """What tells that a file was not written to, replaced or touched since."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    """Set by the kernel at every change; no program can choose it."""

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the state that a `stat` result tells of."""
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


class LocalFile:
    """A regular file that is open until the end of a `with` block; made by `LocalFiles.open`."""

    __slots__ = ("_descriptor", "_opened_ns", "state")

    def __init__(self, descriptor: int, status: os.stat_result) -> None:
        self._descriptor = descriptor
        self._opened_ns = time.time_ns()
        self.state = FileState.of(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self) -> bytes:
        """Return the content; of a file that grows meanwhile, as much as there was.

        Raises:
            UnprocessableMediaError: If it cannot be read.
            CorruptMediaError: If it is empty.
        """
        try:
            data = read_up_to(self._descriptor, self.state.num_bytes)
        except OSError:
            raise UnprocessableMediaError("the local file cannot be read") from None
        if not data:
            raise CorruptMediaError("the local file is empty")
        return data

    def is_settled(self) -> bool:
        """Whether the state stands for what was read: asked after the reading.

        False for a file that changed meanwhile or shortly before: one more change could leave
        its times as they are.
        """
        if self._opened_ns - self.state.ctime_ns < _SETTLED_NS:
            return False
        try:
            return FileState.of(os.fstat(self._descriptor)) == self.state
        except OSError:  # The server of a network file system is gone.
            return False


class LocalFiles:
    """Reads regular files below `root`.

    Args:
        root: The folder; links on the way to it are resolved now.

    Raises:
        ValueError: If it is not a folder.
    """

    def __init__(self, root: Path) -> None:
        try:
            self._root = root.resolve(strict=True)
        except (OSError, RuntimeError) as exc:  # RuntimeError: links in a circle.
            raise ValueError(f"the folder of local media does not exist: {root}") from exc
        if not self._root.is_dir():
            raise ValueError(f"the folder of local media is not a folder: {root}")
        self._prefix = os.path.join(self._root, "")
        self._look = FileLook()

    @property
    def root(self) -> Path:
        """The folder, with links resolved."""
        return self._root

    def look(self, url: FileURL) -> FileState | None:
        """Return the state of a file if that takes no waiting; for an event loop.

        Whether it may be read is not looked at: taking that away changes the state, too.

        Returns:
            None: Its path is not plain, or it is not known without waiting; `open` has to see.
        """
        if self._plain_parts(url.path) is None:
            return None
        status = self._look(url.path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return FileState.of(status)

    def read(self, url: FileURL, check_size: Callable[[int], None]) -> bytes:
        """Return the content of a file.

        Args:
            url: Which file.
            check_size: Raises if a file of that many bytes is too large. Called before reading.

        Raises:
            BlockedURLError: As `open`.
            UnprocessableMediaError: If it does not exist or cannot be read.
            CorruptMediaError: If it is empty.
        """
        with self.open(url) as file:
            check_size(file.state.num_bytes)
            return file.read()

    def open(self, url: FileURL) -> LocalFile:
        """Open a file for the length of a `with` block.

        Args:
            url: Which file; its path may go through links that stay below the folder.

        Raises:
            BlockedURLError: If the file is not below the folder, or is not a regular file.
            UnprocessableMediaError: If it does not exist or cannot be opened.
            OverloadedError: If this process has too many files open.
        """
        descriptor = self._open_plain(url.path)
        if descriptor is None:
            descriptor = self._open_resolved(url.path)
        try:
            try:
                status = os.fstat(descriptor)
            except OSError:
                raise UnprocessableMediaError("the local file cannot be read") from None
            if not stat.S_ISREG(status.st_mode):
                raise BlockedURLError("The file URL does not name a regular file.")
            self._look.learn(descriptor, status.st_dev)
            return LocalFile(descriptor, status)
        except BaseException:
            os.close(descriptor)
            raise

    def _open_plain(self, path: str) -> int | None:
        """Open a path that is resolved as it stands, without asking for each of its parts.

        None if it is not, or cannot be opened: `_open_resolved` says why.
        """
        if (parts := self._plain_parts(path)) is None:
            return None
        try:
            return self._walk(parts)
        except (OSError, ValueError):
            return None

    def _plain_parts(self, path: str) -> list[str] | None:
        """Return the parts below the root of a path that text alone shows to lead there."""
        if not path.startswith(self._prefix):
            return None
        parts = path[len(self._prefix) :].split(os.sep)
        return parts if _UNRESOLVED.isdisjoint(parts) else None

    def _open_resolved(self, path: str) -> int:
        """Open what a path with links or dots leads to."""
        try:
            resolved = os.path.realpath(path)
        except (OSError, ValueError):  # A path component that no file can have.
            raise UnprocessableMediaError("the local file cannot be opened") from None
        # Text, as both are resolved: `Path` takes longer than all system calls together.
        if not resolved.startswith(self._prefix) or resolved == self._prefix:
            raise BlockedURLError(
                "The file must be a subpath of the folder of local media that the server allows."
            )
        try:
            return self._walk(resolved[len(self._prefix) :].split(os.sep))
        except OSError as exc:
            if exc.errno in _CHANGED:
                raise BlockedURLError("The file URL does not name a regular file.") from None
            if (lacking := shortage(exc)) is not None:
                raise lacking from None
            # Without the cause: its text is the path.
            raise UnprocessableMediaError(
                "the local file does not exist"
                if exc.errno == errno.ENOENT
                else "the local file cannot be opened"
            ) from None

    def _walk(self, parts: Sequence[str]) -> int:
        """Open a file below the root, following no link; the caller closes the descriptor."""
        *folders, name = parts
        folder = os.open(self._root, _FOLDER_FLAGS)
        try:
            for part in folders:
                inner = os.open(part, _FOLDER_FLAGS, dir_fd=folder)
                os.close(folder)
                folder = inner
            return os.open(name, _FILE_FLAGS, dir_fd=folder)
        finally:
            os.close(folder)


def read_up_to(descriptor: int, num_bytes: int) -> bytes:
    """Read `num_bytes`, or less if the file ends; in one piece unless the system splits it."""
    data = os.read(descriptor, num_bytes)
    while len(data) < num_bytes and (more := os.read(descriptor, num_bytes - len(data))):
        data += more
    return data
