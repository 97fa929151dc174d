"""Slices of the thread that asks for shorter ones, and of threads that it starts."""

import os
import platform
import sys
import threading
from pathlib import Path

import pytest

from lazydecode.server.thread_slices import shorten_slices


def slice_ns() -> int | None:
    """The calling thread's slice, if this kernel tells it."""
    for line in Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "se.slice":
            return int(value)
    return None


def test_a_thread_of_its_own_gets_short_slices_and_its_children_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int | bool | None] = []

    def child() -> None:
        found.append(slice_ns())

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        found.append(shorten_slices())
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        found.append(slice_ns())
        thread = threading.Thread(target=child)
        thread.start()
        thread.join()

    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        taken, niceness, own, of_child = found
        assert niceness == 3
        major, minor = map(int, platform.release().split(".")[:2])
        if taken and own is not None and (major, minor) >= (6, 12):
            assert own == 100_000
            assert of_child != own
    monkeypatch.setattr(platform, "machine", lambda: "unknown")
    assert not shorten_slices()
