"""The process that a server's workers are forked from: with its allocator, and under its name."""

from __future__ import annotations

import socket
from typing import Final

from lazydecode.engine.child import SpawnedChild, name_process
from lazydecode.server.allocator import give_back_free_memory, tune_allocator
from lazydecode.workers.nursery import run_nursery

NAME: Final = "lazydecode-item"


def main(control: socket.socket) -> int:
    """Run as such a process until the server is gone; returns the exit status."""
    name_process(NAME)
    return run_nursery(control, tune_allocator, give_back_free_memory)


def spawn_nursery() -> SpawnedChild:
    """Start one in a fresh interpreter: a server that has threads cannot be copied.

    Raises:
        OSError: If it cannot be started.
    """
    return SpawnedChild(f"{__name__}:{main.__name__}")
