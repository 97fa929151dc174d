"""What a server takes of the machine's memory, every page counted once (Linux).

A sum of RSS counts a page in each process that has it mapped: those that a fork shares, and what
one process hands to another. The kernel's proportional set size gives each its part of such pages.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_SIZES: Final = re.compile(r"^Pss_(Anon|Shmem|File):\s+(\d+) kB", re.MULTILINE)
_MEMORY_FILE: Final = "/memfd:"
_BLOCK_BYTES: Final = 512
FRONT_END: Final = "front end"


@dataclass(frozen=True, slots=True)
class Pages:
    """Bytes of one process by kind; of pages that several have, its part."""

    anonymous: int = 0
    """Heaps and stacks."""
    shared: int = 0
    """Memory files that are mapped."""
    file: int = 0
    """Code and data of files, which the system drops and reads again as it likes."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a server's processes."""

    processes: Mapping[str, Pages]
    """By name; the first is the front end."""
    memory_files: int
    """Bytes that shared memory takes, mapped or not."""

    @property
    def anonymous(self) -> int:
        """Bytes of heaps and stacks."""
        return sum(pages.anonymous for pages in self.processes.values())

    @property
    def shared(self) -> int:
        """Bytes of shared memory: what is written counts before anybody has mapped it."""
        mapped = sum(pages.shared for pages in self.processes.values())
        return max(self.memory_files, mapped)

    @property
    def file(self) -> int:
        """Bytes of files; other programs share the code, so that their coming and going shows."""
        return sum(pages.file for pages in self.processes.values())

    @property
    def own(self) -> int:
        """Bytes that only the server's work can make more: all but files."""
        return self.anonymous + self.shared


def measure_footprint(tree: Sequence[psutil.Process]) -> Footprint:
    """Return what these processes take now; one that ends meanwhile counts with what was read.

    Args:
        tree: A server's first process, and all below it.

    Raises:
        FileNotFoundError: If this system does not tell.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        raise FileNotFoundError("only Linux says what processes share")
    processes: dict[str, Pages] = {}
    files: dict[tuple[int, int], int] = {}
    for process in tree:
        # What belongs to a process that has ended is gone in the middle of reading.
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            processes[_name(process, len(processes))] = _pages(process.pid)
            files |= _memory_files(process.pid)
    return Footprint(processes, sum(files.values()))


def _name(process: psutil.Process, number: int) -> str:
    return FRONT_END if number == 0 else f"{process.name()} {number}"


def _pages(pid: int) -> Pages:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
    sizes = {kind: int(kib) * 1024 for kind, kib in _SIZES.findall(text)}
    return Pages(sizes["Anon"], sizes["Shmem"], sizes["File"])


def _memory_files(pid: int) -> dict[tuple[int, int], int]:
    """Return (device, inode) -> bytes of the memory files that a process has open."""
    found: dict[tuple[int, int], int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(_MEMORY_FILE):
                status = link.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return found
