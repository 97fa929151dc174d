"""The front end's side of the engine process: start, restart, submit, stream, abort."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeAlias

import msgspec

from lazydecode.engine.channel import ChannelClosedError
from lazydecode.engine.child import Child
from lazydecode.engine.messages import (
    Abort,
    ClearCache,
    Failed,
    InvalidateCache,
    Message,
    Outputs,
    Released,
    Snapshot,
    Submit,
    TakeSnapshot,
    error_of_form,
    form_of_request,
)
from lazydecode.engine.process import EngineConfig, EngineProcess
from lazydecode.engine.protocol import EngineInfo, EngineOutput, EngineRequest
from lazydecode.engine.shared import EngineBroker, SharedEngine
from lazydecode.engine.streams import OutputStream
from lazydecode.errors import EngineDeadError, EngineError, LazyDecodeError

logger = logging.getLogger(__name__)

_Link: TypeAlias = EngineProcess | SharedEngine

_MAX_BACKOFF_S: Final = 30.0
_KILLED_S: Final = 5.0
_CLOSED: Final = "the engine was closed"


class EngineClient:
    """An `Engine` in a process of its own, which is replaced whenever it dies.

    Messages leave in the order in which they were submitted, through one queue and one writer
    thread. One reader thread hands out what comes back; when the process is lost, that thread
    tells the callbacks, fails the requests that were with the process, and starts the next one.
    What was queued but not sent goes to the new process.

    The lock covers all fields below it; messages, callbacks and streams are handled outside.

    Args:
        config: What the process runs.
        child: The first process, if one waits already. Ended by `close`, started or not.
        broker: Whose engine it is, if it is shared with other front ends; losing it and starting
            the next one then means the connection to it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        child: Child | None = None,
        broker: EngineBroker | None = None,
    ) -> None:
        self._config = config
        self._child = child
        self._broker = broker
        self._callbacks: list[Callable[[], None]] = []
        self._wire_ids = itertools.count()
        self._snapshot_numbers = itertools.count()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

        self._lock = threading.Condition()
        self._info: EngineInfo | None = None
        self._process: _Link | None = None
        """The process that runs; None before the start and while a dead one is replaced."""
        self._starting: _Link | None = None
        self._failure: str | None = None
        """Why requests cannot even be queued."""
        self._outbox: deque[Message] = deque()
        self._streams: dict[str, OutputStream] = {}
        self._streams_by_wire_id: dict[str, OutputStream] = {}
        self._snapshots: dict[int, Future[list[str]]] = {}

    # -- life

    @property
    def info(self) -> EngineInfo | None:
        """The model that runs; None before `start`."""
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served now."""
        process = self._process
        return process is not None and process.is_running

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None if there is none now."""
        process = self._process
        return None if process is None else process.pid

    def on_restart(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the engine process was lost, before its streams fail."""
        self._callbacks.append(callback)

    async def start(self) -> None:
        """Return once the model is loaded.

        Raises:
            EngineError: If it cannot be.
        """
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        if self._threads:
            raise RuntimeError("the engine was started before")
        self._adopt(self._spawn())
        for target, name in ((self._write, "engine-writer"), (self._read, "engine-reader")):
            # Daemons: a process that forgets `close` must still be able to exit, which closes
            # the connection and so ends the engine.
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)  # not before, since `close` joins what is in the list

    async def close(self) -> None:
        """End the engine within seconds; running streams fail with EngineDeadError."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._closing.set()
            self._failure = _CLOSED
            process, starting = self._process, self._starting
            self._lock.notify_all()
        if starting is not None:
            starting.kill()
        if self._child is not None:  # never started
            self._child.kill()
            self._child.wait(_KILLED_S)
            self._child.control.close()
        if process is not None:
            process.end()
        for thread in self._threads:
            thread.join()
        with self._lock:
            self._outbox.clear()
            streams = list(self._streams_by_wire_id.values())
        self._fail(streams, _CLOSED)

    # -- requests

    def submit(self, request: EngineRequest) -> None:
        """Hand over a request, in the order of the sender cache's updates; never blocks."""
        form = form_of_request(request)
        with self._lock:
            if request.request_id in self._streams:
                raise ValueError(f"request {request.request_id!r} is running already")
            wire_id = f"{request.request_id}#{next(self._wire_ids)}"
            stream = OutputStream(request.request_id, wire_id)
            self._streams[request.request_id] = stream
            if self._failure is not None:
                stream.put(EngineDeadError(self._failure))
                return
            self._streams_by_wire_id[wire_id] = stream
            self._outbox.append(msgspec.structs.replace(form, request_id=wire_id))
            self._lock.notify_all()

    async def stream(self, request_id: str) -> AsyncIterator[EngineOutput]:
        """Yield a submitted request's outputs as they come; once per request."""
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is None or stream.has_reader:
                raise ValueError(f"request {request_id!r} is not running, or is read elsewhere")
            stream.has_reader = True
        ended = False
        try:
            async for output in stream.read():
                ended = output.finish_reason is not None
                yield output
        except LazyDecodeError:
            ended = True
            raise
        finally:
            # Also for a consumer that was cancelled or closed the iterator.
            self._forget(stream, abort=not ended)

    def abort(self, request_id: str) -> None:
        """Stop generating for this request; unknown ids are ignored. Thread-safe."""
        with self._lock:
            stream = self._streams.get(request_id)
        if stream is not None:
            self._forget(stream, abort=True)
            stream.put(EngineOutput(request_id, finish_reason="abort"))

    def _forget(self, stream: OutputStream, *, abort: bool) -> None:
        with self._lock:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
            known = self._streams_by_wire_id.pop(stream.wire_id, None)
            if abort and known is not None:
                # Behind its own Submit, which still goes out: the mirror counts it.
                self._outbox.append(Abort(stream.wire_id))
                self._lock.notify_all()

    # -- cache

    async def cache_snapshot_async(self) -> list[str]:
        """Return the receiver cache's hashes in eviction order, after all earlier submits."""
        future: Future[list[str]] = Future()
        with self._lock:
            if self._failure is not None:
                raise EngineDeadError(self._failure)
            number = next(self._snapshot_numbers)
            self._snapshots[number] = future
            self._outbox.append(TakeSnapshot(number))
            self._lock.notify_all()
        return await asyncio.wrap_future(future)

    def clear_cache(self) -> None:
        """Empty the receiver cache, in order with the submits around it. Thread-safe."""
        with self._lock:
            self._outbox.append(ClearCache())
            self._lock.notify_all()

    def invalidate_cache(self, mm_hashes: Sequence[str]) -> None:
        """Drop these from the receiver cache, in order with the submits around it. Thread-safe."""
        with self._lock:
            self._outbox.append(InvalidateCache(list(mm_hashes)))
            self._lock.notify_all()

    # -- the writer thread

    def _write(self) -> None:
        while True:
            with self._lock:
                while not self._closing.is_set() and (not self._outbox or self._process is None):
                    self._lock.wait()
                if self._closing.is_set():
                    return
                message, process = self._outbox.popleft(), self._process
                assert process is not None
                if isinstance(message, Submit):
                    stream = self._streams_by_wire_id.get(message.request_id)
                    if stream is not None:
                        # Under the lock: when this process is lost, the reader fails it.
                        stream.sent = True
            try:
                process.channel.send(message)
            except ChannelClosedError:
                pass  # the reader sees it as well, and deals with everything that was sent
            except Exception as exc:
                # Nothing was written. Whatever cannot be put into a message fails alone: items
                # that the engine then lacks are sent again by the requests that need them.
                logger.exception("a %s cannot be sent to the engine", type(message).__name__)
                if isinstance(message, Submit):
                    error = EngineError("the request cannot be sent to the engine")
                    error.__cause__ = exc
                    self._put(message.request_id, error)

    # -- the reader thread

    def _read(self) -> None:
        process = self._process
        while process is not None:
            try:
                while True:
                    self._dispatch(process, process.channel.receive())
            except ChannelClosedError:
                pass
            except Exception:
                # Wide: a reader that just ends would leave everyone waiting for ever.
                logger.exception("the engine's answers cannot be read")
                process.kill()
            if self._closing.is_set():
                return
            self._lose(process)
            process = self._restart()

    def _dispatch(self, process: _Link, message: Message) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    self._put(output.request_id, output)
            case Failed(wire_id, error):
                self._put(wire_id, error_of_form(error))
            case Released(offsets):
                assert process.arena is not None
                process.arena.release(offsets)
            case Snapshot(number, hashes):
                future = self._snapshots.pop(number, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(hashes)
            case _:
                raise AssertionError(f"unexpected message {type(message).__name__}")

    def _put(self, wire_id: str, value: EngineOutput | LazyDecodeError) -> None:
        stream = self._streams_by_wire_id.get(wire_id)
        if stream is None:
            return  # nobody wants it any more
        if isinstance(value, EngineOutput):
            value = msgspec.structs.replace(value, request_id=stream.request_id)
        stream.put(value)

    def _lose(self, process: _Link) -> None:
        """Note that the process is gone; tell everyone whose work went with it."""
        pid = process.pid
        with self._lock:
            self._process = None
            lost = [stream for stream in self._streams_by_wire_id.values() if stream.sent]
        how = process.end()
        logger.error("engine process %d ended (%s); starting another one", pid, how)
        self._call_back()
        self._fail(lost, "the engine process went away while it served this request")

    def _restart(self) -> _Link | None:
        """Start processes until one is ready; None once the client is closed."""
        backoff_s = 0.5
        # We can hear of a shared engine's death before its owner does, and be led to it again.
        forgiven = 0 if self._broker is None else 1
        while not self._closing.is_set():
            try:
                process = self._spawn()
            except EngineError as exc:
                if self._closing.is_set():
                    return None
                logger.error("%s; trying again in %.1f s", exc, backoff_s)
                if not forgiven:
                    self._suspend("the engine process went away and could not be started again")
                forgiven = max(0, forgiven - 1)
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            else:
                logger.info("engine process %d serves", process.pid)
                self._adopt(process)
                return process
        return None

    def _spawn(self) -> _Link:
        child, self._child = self._child, None
        try:
            process = (
                EngineProcess(self._config, child)
                if self._broker is None
                else SharedEngine(self._config, self._broker)
            )
        except OSError as exc:
            raise EngineError(f"the engine process cannot be started: {exc}") from exc
        with self._lock:
            self._starting = process
            if self._closing.is_set():
                process.kill()
        try:
            self._info = process.wait_ready()
        finally:
            with self._lock:
                self._starting = None
        return process

    def _adopt(self, process: _Link) -> None:
        with self._lock:
            closed = self._closing.is_set()
            if not closed:
                self._process = process
                self._failure = None
            self._lock.notify_all()
        if closed:
            process.end()

    def _suspend(self, failure: str) -> None:
        """Take no requests until a process runs, and fail those that were queued."""
        with self._lock:
            if self._closing.is_set():
                return
            self._failure = failure
            self._outbox.clear()
            queued = list(self._streams_by_wire_id.values())
        if queued:
            # The sender cache has counted them; no receiver will.
            self._call_back()
        self._fail(queued, failure)

    def _call_back(self) -> None:
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                # Wide: another's callback must not keep the engine from being replaced.
                logger.exception("a restart callback failed")

    def _fail(self, streams: list[OutputStream], failure: str) -> None:
        """End streams with EngineDeadError, and every snapshot that was asked for."""
        with self._lock:
            for stream in streams:
                self._streams_by_wire_id.pop(stream.wire_id, None)
            snapshots = list(self._snapshots.values())
            self._snapshots.clear()
        for stream in streams:
            stream.put(EngineDeadError(failure))
        for future in snapshots:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDeadError(failure))
