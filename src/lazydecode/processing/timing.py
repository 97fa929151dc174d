"""Where the time of a request goes: per stage, and per item for whoever wants to know."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Literal, Protocol, TypeAlias

ItemStage: TypeAlias = Literal["digest", "lookup", "decode_wait", "decode", "process"]
"""What happened to an item: its hash was made, it was looked up (hit or miss), its decode stood
in the queue of the media pool, it was decoded, it went through the model's processor."""


class ItemObserver(Protocol):
    """Is told what each item's stages took. Called from any thread; must not block."""

    def record_item(
        self,
        modality: str,
        index: int,
        stage: ItemStage,
        seconds: float,
        *,
        hit: bool | None = None,
        shared: bool = False,
    ) -> None:
        """Note one stage of the item at `index` of the request.

        Args:
            modality: The item's modality.
            index: Its position as the client counts.
            stage: What was done.
            seconds: How long it took, wall clock.
            hit: For `lookup`, whether a cache or an earlier result had the item.
            shared: Whether another request or another item of this one paid for it.
        """
        ...


class TimingContext:
    """Collects the seconds of each stage of one request.

    Args:
        enabled: Whether stages are measured.
        observer: Is told about single items, whether or not stages are measured.
    """

    def __init__(self, enabled: bool = True, *, observer: ItemObserver | None = None) -> None:
        self.enabled = enabled
        self.observer = observer
        self.stage_secs: dict[str, float] = {}
        # Stages of one request run on several threads, rarely at once.
        self._lock = threading.Lock()

    def record(self, stage: str) -> AbstractContextManager[None]:
        """Add the time that the body takes to `stage_secs[stage]`."""
        return _Stage(self, stage) if self.enabled else _NO_STAGE

    def add(self, stage: str, seconds: float) -> None:
        """Add to `stage_secs[stage]`, if stages are measured."""
        if self.enabled:
            with self._lock:
                self.stage_secs[stage] = self.stage_secs.get(stage, 0.0) + seconds

    @property
    def total_secs(self) -> float:
        """Sum over all stages."""
        with self._lock:
            return sum(self.stage_secs.values())

    @contextmanager
    def record_item(self, modality: str, index: int, stage: ItemStage) -> Iterator[None]:
        """Tell the observer how long the body took for one item."""
        if self.observer is None:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.observer.record_item(modality, index, stage, time.perf_counter() - start)


class _Stage(AbstractContextManager[None]):
    """Measures one stage; some ten of them per request are worth a class."""

    __slots__ = ("_stage", "_start", "_timing_ctx")

    def __init__(self, timing_ctx: TimingContext, stage: str) -> None:
        self._timing_ctx = timing_ctx
        self._stage = stage
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._timing_ctx.add(self._stage, time.perf_counter() - self._start)


_NO_STAGE: Final = nullcontext()


class ObservedExecutor(Executor):
    """Hands one item's decode on, and tells the observer how long it waited and ran."""

    def __init__(
        self, executor: Executor, timing_ctx: TimingContext, modality: str, index: int
    ) -> None:
        self._executor = executor
        self._timing_ctx = timing_ctx
        self._modality = modality
        self._index = index

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit `fn`, timed."""
        queued_at = time.perf_counter()

        def run() -> Any:
            observer = self._timing_ctx.observer
            assert observer is not None
            waited_s = time.perf_counter() - queued_at
            observer.record_item(self._modality, self._index, "decode_wait", waited_s)
            with self._timing_ctx.record_item(self._modality, self._index, "decode"):
                return fn(*args, **kwargs)

        return self._executor.submit(run)
