"""The parts of one server, built and closed together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import torch

from lazydecode.config import Settings
from lazydecode.engine.protocol import Engine
from lazydecode.engine.wire import DTYPES
from lazydecode.models.frontend import ModelFrontend
from lazydecode.renderers.base import BaseRenderer
from lazydecode.renderers.caches import ClearedCaches
from lazydecode.server.body import RequestTurns
from lazydecode.server.membership import Clear, Member
from lazydecode.server.metrics import Metrics
from lazydecode.server.queueing import RequestQueue
from lazydecode.server.recent import RecentRequests
from lazydecode.server.samples import sum_up, write_samples
from lazydecode.workers.nursery import Configure
from lazydecode.workers.pool import WorkerPool

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerContext:
    """Everything that a handler may need."""

    settings: Settings
    frontend: ModelFrontend
    renderer: BaseRenderer
    engine: Engine
    generates: bool
    """False: the server renders only."""
    model_names: tuple[str, ...]
    """The first is the one that answers state."""
    metrics: Metrics
    queue: RequestQueue
    recent: RecentRequests
    created: int
    """Unix time at which the model was loaded."""
    stated_dtype: torch.dtype
    """In which a consumer elsewhere wants floating-point tensors."""
    member: Member | None = None
    """Connection to the supervisor, in a worker."""
    workers: WorkerPool | None = None
    """Processes that decode and process items; None: threads do."""
    turns: RequestTurns = field(default_factory=RequestTurns, init=False)
    """Which requests go on in an iteration of the event loop."""
    _clearing: set[asyncio.Task[ClearedCaches]] = field(default_factory=set, init=False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the render route hands out floating-point tensors."""
        info = self.engine.info
        return DTYPES[info.dtype] if self.generates and info is not None else self.stated_dtype

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served now, by every worker."""
        is_complete = self.member is None or self.member.is_complete
        return self.engine.is_alive and is_complete

    def render_metrics(self) -> bytes:
        """Return Prometheus' text form, over all workers; may block for a moment."""
        if self.member is None:
            return self.metrics.render()
        own = self.metrics.read()
        return write_samples(sum_up([own, self.member.ask_others(own)]))

    async def clear_caches(self) -> ClearedCaches:
        """Empty the caches of all workers; returns what this one's held."""
        if self.member is not None:
            self.member.say(Clear())
        return await self._clear_own()

    async def _clear_own(self) -> ClearedCaches:
        return await self.renderer.clear_caches(self.engine.clear_cache)

    def _clear_later(self) -> None:
        """Begin to empty this worker's caches, as another one was told to."""
        task = asyncio.create_task(self._clear_own(), name="clear-caches")
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)
        task.add_done_callback(_log_failure)

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus answer in tokens, if known."""
        info = self.engine.info
        return None if info is None else info.max_model_len

    @property
    def default_sampling(self) -> Mapping[str, float]:
        """What the model recommends."""
        info = self.engine.info
        return {} if info is None else info.default_sampling

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the engine, and close everything at the end, whatever happened."""
        async with contextlib.AsyncExitStack() as parts:
            # The last one first: what the renderer still runs may need both of the others.
            parts.push_async_callback(self.engine.close)
            if self.workers is not None:
                parts.push_async_callback(asyncio.to_thread, self.workers.close)
            parts.push_async_callback(self.renderer.close)
            self.engine.on_restart(lambda: self.renderer.forget_engine(self.engine.clear_cache))
            await self.engine.start()
            if self.member is not None:
                loop = asyncio.get_running_loop()
                self.member.on_clear = lambda: loop.call_soon_threadsafe(self._clear_later)
            if self.workers is not None:
                self.workers.start(
                    Configure(
                        self.frontend.model_id,
                        self.settings,
                        self.frontend.fingerprint,
                        self.frontend.findings,
                    )
                )
            if self.settings.warmup:
                self.renderer.warm_up.start()
            beats = [asyncio.create_task(self.metrics.watch_loop(), name="watch-loop")]
            if self.member is not None:
                beats.append(asyncio.create_task(self.member.beat(), name="beat"))
            try:
                yield
            finally:
                for beat in beats:
                    beat.cancel()
                await asyncio.wait(beats)


def _log_failure(task: asyncio.Task[ClearedCaches]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the caches were not emptied", exc_info=error)
