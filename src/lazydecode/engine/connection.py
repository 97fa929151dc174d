"""One front end, seen from the engine: its connection, its receiver cache, its requests."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable
from contextlib import closing

from lazydecode.cache import BaseMultiModalReceiverCache
from lazydecode.engine.arena import ArenaView
from lazydecode.engine.channel import Channel, ChannelClosedError
from lazydecode.engine.generation import Generation
from lazydecode.engine.messages import (
    Abort,
    ClearCache,
    Configure,
    Failed,
    InvalidateCache,
    Message,
    Outputs,
    Ready,
    Released,
    Snapshot,
    StartFailed,
    Submit,
    TakeSnapshot,
    form_of_error,
    request_of_form,
)
from lazydecode.engine.protocol import EngineInfo, EngineOutput
from lazydecode.engine.receiver import Receiver
from lazydecode.engine.scheduler import Scheduler
from lazydecode.errors import LazyDecodeError

logger = logging.getLogger(__name__)


class Loaded:
    """What became of the model; readers wait for it."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: tuple[EngineInfo, Scheduler] | str = "it was never loaded"

    def succeed(self, info: EngineInfo, scheduler: Scheduler) -> None:
        """Let requests through to the scheduler."""
        self._result = (info, scheduler)
        self._done.set()

    def fail(self, reason: str) -> None:
        """Let everyone who waits hear why there is no model."""
        self._result = reason
        self._done.set()

    def wait(self) -> tuple[EngineInfo, Scheduler] | str:
        """Return the model and who runs it, or why there is none."""
        self._done.wait()
        return self._result


def split_id(scheduled_id: str) -> tuple[int, str]:
    """Return the front end's number and its own id of a request in the scheduler."""
    number, _, request_id = scheduled_id.partition("/")
    return int(number), request_id


class Connection:
    """Reads what one front end sends, and applies it in order, on a thread of its own.

    `send` and what calls it may be used on any thread; a front end that is gone gets nothing.

    Args:
        number: Of the front end, among all that the process has seen.
        channel: To the front end.
        view: The memory that is shared with it, if there is.
        loaded: The model.
        begin: Is given the front end's configuration.
    """

    def __init__(
        self,
        number: int,
        channel: Channel,
        view: ArenaView | None,
        loaded: Loaded,
        begin: Callable[[Configure], None],
    ) -> None:
        self.number = number
        self.is_closed = False
        """Whether the front end is gone."""
        self._channel = channel
        self._view = view
        self._loaded = loaded
        self._begin = begin
        self._requests: set[str] = set()
        """Ids in the scheduler that may still run. Guarded by the lock."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to read."""
        name = f"engine-reader-{self.number}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send something, unless the front end is gone."""
        if isinstance(message, Outputs):
            ended = {o.request_id for o in message.outputs if o.finish_reason is not None}
            if ended:
                with self._lock:
                    self._requests -= ended
        try:
            self._channel.send(message)
        except ChannelClosedError:
            # Gone, or it has not read for long and got half a message: the reader sees it too.
            self._channel.close()

    def send_failure(self, request_id: str, error: Exception) -> None:
        """Tell of a request that failed."""
        with self._lock:
            self._requests.discard(request_id)
        self.send(Failed(request_id, form_of_error(error)))

    def send_released(self) -> None:
        """Give memory back whose last tensor has died since the last call."""
        if self._view is not None and (offsets := self._view.take_released()):
            self.send(Released(offsets))

    # -- the reader

    def _run(self) -> None:
        try:
            self._read()
        except ChannelClosedError:
            pass  # the front end is gone, or wants no more
        except BaseException:
            # Wide: without its reader a front end is mute, and nobody would tell it.
            logger.exception("the engine's reader failed")
            os._exit(1)

    def _read(self) -> None:
        try:
            configure = self._channel.receive()
            assert isinstance(configure, Configure)
            try:
                receiver = Receiver(_make_cache(configure))
            except Exception as exc:
                # Wide: a cache of another package; the one who starts the server is told.
                text = f"the processor cache {configure.receiver_cache!r} cannot be made"
                self.send(StartFailed(f"{text}: {type(exc).__name__}: {exc}"))
                return
            with closing(receiver):
                self._begin(configure)
                self._serve(receiver)
        finally:
            self.is_closed = True
            self._channel.close()

    def _serve(self, receiver: Receiver) -> None:
        loaded = self._loaded.wait()
        if isinstance(loaded, str):
            self.send(StartFailed(loaded))
            return
        info, scheduler = loaded
        self.send(Ready(info))
        try:
            while True:
                self._handle(self._channel.receive(), receiver, info, scheduler)
                self.send_released()
        finally:
            self._abandon(scheduler)

    def _abandon(self, scheduler: Scheduler) -> None:
        """Stop what runs for a front end that is gone."""
        with self._lock:
            left = list(self._requests)
            self._requests.clear()
        for request_id in left:
            scheduler.abort(self._scheduled_id(request_id))

    def _handle(
        self, message: Message, receiver: Receiver, info: EngineInfo, scheduler: Scheduler
    ) -> None:
        match message:
            case Submit():
                self._submit(message, receiver, info, scheduler)
            case Abort(request_id):
                scheduler.abort(self._scheduled_id(request_id))
            case ClearCache():
                receiver.clear()
            case InvalidateCache(hashes):
                receiver.invalidate(hashes)
            case TakeSnapshot(number):
                self.send(Snapshot(number, receiver.snapshot()))
            case _:
                raise AssertionError(f"unexpected message {type(message).__name__}")

    def _submit(
        self, form: Submit, receiver: Receiver, info: EngineInfo, scheduler: Scheduler
    ) -> None:
        request = request_of_form(form)
        try:
            # First, and also for a request that fails below: the mirror counts it.
            items, num_cached = receiver.receive(request)
            generation = Generation(request, items, info)
        except Exception as exc:
            # Wide: the request is told, whatever is wrong with it; the reader must go on.
            if not isinstance(exc, LazyDecodeError):
                logger.exception("request %s cannot be taken", request.request_id)
            self.send_failure(request.request_id, exc)
            return
        accepted = EngineOutput(request.request_id, num_cached_items=num_cached)
        with self._lock:
            self._requests.add(request.request_id)
        self.send(Outputs([accepted]))
        generation.request_id = self._scheduled_id(request.request_id)
        scheduler.add(generation)

    def _scheduled_id(self, request_id: str) -> str:
        return f"{self.number}/{request_id}"


def _make_cache(configure: Configure) -> BaseMultiModalReceiverCache:
    module, _, name = configure.receiver_cache.partition(":")
    cache_class = getattr(importlib.import_module(module), name)
    cache: BaseMultiModalReceiverCache = cache_class(capacity_bytes=configure.cache_bytes)
    return cache
