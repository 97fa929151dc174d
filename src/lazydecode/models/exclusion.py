"""One thread at a time inside classes that are not made for more."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

_locks: Final[dict[str, threading.RLock]] = {}
_table_lock: Final = threading.Lock()


def lock_for(processor: object, *, reentrant: bool) -> AbstractContextManager[Any]:
    """Return what a thread must hold inside a processor's class; nothing if that is re-entrant.

    The lock belongs to the class and the process, not to a loaded model: what keeps a class from
    being entered twice (state on its type, a thread pool of its library) is shared by all models
    that have it, and probing one while another serves is an entry like any other.
    """
    if reentrant:
        return nullcontext()
    kind = type(processor)
    with _table_lock:
        return _locks.setdefault(f"{kind.__module__}.{kind.__qualname__}", threading.RLock())
