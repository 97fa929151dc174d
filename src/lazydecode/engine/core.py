"""The engine process: receiver cache, scheduler and model behind one connection.

Three threads. The main thread loads and runs the model. The reader applies every submitted
request to the receiver cache, in order, and queues it. The watch ends the process when the
front end has died.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import socket
import sys
import threading
import time

from lazydecode.cache import BaseMultiModalReceiverCache
from lazydecode.engine.arena import ArenaView
from lazydecode.engine.channel import Channel, ChannelClosedError
from lazydecode.engine.generation import Generation, ModelRunner
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

_WATCH_INTERVAL_S = 1.0
_GRACE_S = 2.0
"""How long a running model step may take before the process ends without it."""


def main(sock: socket.socket, memory: tuple[int, int] | None) -> int:
    """Run the engine until the front end ends it.

    Args:
        sock: Connected to the front end.
        memory: Descriptor and size of the shared memory, if there is.

    Returns:
        The exit status.
    """
    parent = os.getppid()
    threading.Thread(target=_watch_parent, args=(parent,), name="engine-watch", daemon=True).start()
    view = None if memory is None else ArenaView(*memory)
    channel = Channel(sock, view=view)
    try:
        configure = channel.receive()
    except ChannelClosedError:
        return 0
    assert isinstance(configure, Configure)
    _configure_logging(configure.log_level)
    try:
        cache = _make_cache(configure)
        runner = _load_runner(configure)
    except Exception as exc:
        # Wide: whatever a model folder provokes is told to the one who starts the server.
        logger.debug("the model cannot be loaded", exc_info=True)
        reason = exc.message if isinstance(exc, LazyDecodeError) else f"{type(exc).__name__}: {exc}"
        with contextlib.suppress(ChannelClosedError):  # nobody may be left to tell
            channel.send(StartFailed(reason))
        return 1
    return _Core(channel, view, configure, runner, cache).run()


class _Core:
    """Wires reader, receiver cache and scheduler together."""

    def __init__(
        self,
        channel: Channel,
        view: ArenaView | None,
        configure: Configure,
        runner: ModelRunner,
        cache: BaseMultiModalReceiverCache,
    ) -> None:
        self._channel = channel
        self._view = view
        self._runner = runner
        self._receiver = Receiver(cache)
        self._scheduler = Scheduler(
            runner,
            max_batch_size=configure.max_batch_size,
            send=self._send_outputs,
            fail=self._send_failure,
            on_idle=self._send_released,
        )

    def run(self) -> int:
        """Serve until the front end closes the connection."""
        info: EngineInfo = self._runner.info
        try:
            self._channel.send(Ready(info))
            reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
            reader.start()
            self._scheduler.run()
        except ChannelClosedError:
            pass  # the front end is gone
        except Exception:
            # Wide: this is the process's last line. The front end sees the socket close.
            logger.exception("the engine cannot go on")
            return 1
        return 0

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._channel.receive())
                self._send_released()
        except ChannelClosedError:
            pass  # the front end is gone, or wants no more
        except BaseException:
            # Wide: without its reader the process is deaf, so it must end.
            logger.exception("the engine's reader failed")
            os._exit(1)
        self._scheduler.stop()
        time.sleep(_GRACE_S)
        os._exit(0)

    def _handle(self, message: Message) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id):
                self._scheduler.abort(request_id)
            case ClearCache():
                self._receiver.clear()
            case InvalidateCache(hashes):
                self._receiver.invalidate(hashes)
            case TakeSnapshot(number):
                self._channel.send(Snapshot(number, self._receiver.snapshot()))
            case _:
                raise AssertionError(f"unexpected message {type(message).__name__}")

    def _submit(self, form: Submit) -> None:
        request = request_of_form(form)
        try:
            # First, and also for a request that fails below: the mirror counts it.
            items, num_cached = self._receiver.receive(request)
            generation = Generation(request, items, self._runner.info)
        except Exception as exc:
            # Wide: the request is told, whatever is wrong with it; the reader must go on.
            if not isinstance(exc, LazyDecodeError):
                logger.exception("request %s cannot be taken", request.request_id)
            self._send_failure(request.request_id, exc)
            return
        accepted = EngineOutput(request.request_id, num_cached_items=num_cached)
        self._channel.send(Outputs([accepted]))
        self._scheduler.add(generation)

    def _send_outputs(self, outputs: list[EngineOutput]) -> None:
        self._channel.send(Outputs(outputs))
        self._send_released()

    def _send_released(self) -> None:
        """Give memory back whose last tensor has died since the last call."""
        if self._view is not None and (offsets := self._view.take_released()):
            self._channel.send(Released(offsets))

    def _send_failure(self, request_id: str, error: Exception) -> None:
        self._channel.send(Failed(request_id, form_of_error(error)))


def _make_cache(configure: Configure) -> BaseMultiModalReceiverCache:
    module, _, name = configure.receiver_cache.partition(":")
    cache_class = getattr(importlib.import_module(module), name)
    cache: BaseMultiModalReceiverCache = cache_class(capacity_bytes=configure.cache_bytes)
    return cache


def _load_runner(configure: Configure) -> ModelRunner:
    module, _, name = configure.runner.partition(":")
    factory = getattr(importlib.import_module(module), name)
    # Pickled by our own parent process, over a socket that nobody else holds.
    options = pickle.loads(configure.runner_options)  # noqa: S301
    runner: ModelRunner = factory(**options)
    return runner


def _watch_parent(parent: int) -> None:
    """End the process when its parent has changed, that is, died.

    The closed socket says so too, but not while another process that was forked from the
    parent still holds its end, nor while the model is being loaded.
    """
    while os.getppid() == parent:
        time.sleep(_WATCH_INTERVAL_S)
    os._exit(0)


def _configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s engine[%(process)d] %(name)s: %(message)s",
        stream=sys.stderr,
    )
