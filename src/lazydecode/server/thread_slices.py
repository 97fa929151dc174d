"""Short time slices for a thread that others wait for (Linux 6.12 and later)."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import sys
import threading
from typing import Final

logger = logging.getLogger(__name__)

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""Number of the system call by machine; the C library has no function for it."""
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQII")
_RESET_ON_FORK: Final = 0x01
"""Threads and processes that are started from this one have usual slices."""
_SLICE_NS: Final = 100_000
"""The shortest that the kernel takes."""


def shorten_slices() -> bool:
    """Let the calling thread run sooner after it wakes up, for less time at once.

    The scheduler lets whoever runs end its slice, some 3 ms, unless the one that wakes up asks
    for a shorter one; being preferred by priority alone changes that little. An event loop, which
    sleeps again before such a slice ends, loses nothing by it. Its share of a core is the same.

    Returns:
        Whether the system took it; older kernels take it and do nothing.

    Source:
        sched_setattr(2); "EEVDF Scheduler" in the kernel's documentation on latency-nice slices.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = _SCHED_ATTR.pack(
        _SCHED_ATTR.size, os.SCHED_OTHER, _RESET_ON_FORK, niceness, 0, _SLICE_NS, 0, 0, 0, 0
    )
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, 0, attributes, 0):
        # Sandboxes may forbid it.
        logger.debug("slices stay as they are: %s", os.strerror(ctypes.get_errno()))
        return False
    return True
