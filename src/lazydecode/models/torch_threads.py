"""One torch thread for each call of a processor: for the bits, and for the cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread for what the calling thread does in the block.

    The results of some operators depend on the number of threads: Molmo2's pixels differ by one
    level in places between one thread and two. Results are kept under a key that says nothing of
    threads, so all are made with one. Nothing is lost: a second thread on one call won 3 to 20 %
    where nothing else ran, and cost a factor of ten where other work held the cores.

    The main thread gets its setting back, which is the caller's; worker threads keep one.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            torch.set_num_threads(before)
