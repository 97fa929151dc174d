"""From a model's name to a listening server, and down again without leaving anything behind.

The order of a start: bind (a taken port is told at once), import what takes seconds to import,
fork the engine process (which so need not import it again) while this process has one thread,
then load the front end and the engine's model beside each other's imports.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

from lazydecode.config import Settings
from lazydecode.engine.child import Child, ForkedChild, can_fork
from lazydecode.server.allocator import tune_allocator

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S: Final = 0.001
"""The loop waits for the interpreter's lock behind decode and processing threads; the default
of 5 ms per thread adds up to noticeable lag."""
_FRONT_END: Final = ("lazydecode.server.serving",)
_ENGINE: Final = ("lazydecode.engine.core", "lazydecode.engine.transformers")
_LAZY: Final = (
    *("AutoConfig", "AutoProcessor", "AutoTokenizer", "PreTrainedTokenizerBase", "ProcessorMixin"),
)
_LAZY_ENGINE: Final = (
    *("AutoModelForMultimodalLM", "AutoModelForCausalLM", "GenerationConfig", "GenerationMixin"),
    *("LogitsProcessorList", "StoppingCriteriaList"),
)
"""Names that Transformers imports, with what they need, when they are first asked for."""


def run_server(
    model: str, settings: Settings, *, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve `model` until SIGINT or SIGTERM; return when everything is closed.

    To be called on the main thread.

    Args:
        model: Local folder or hub id.
        settings: What to serve and how.
        on_ready: Called with the server's base URL once it answers.

    Raises:
        LazyDecodeError: If the model cannot be loaded.
        OSError: If the address cannot be listened on.
    """
    listener = _listen(settings.host, settings.port)
    try:
        _end_on_signals()
        logger.info("loading %s", model)
        generates = settings.engine != "none"
        preload(generates=generates)
        child = _fork_engine(listener) if generates else None
        # After the fork: an engine keeps the allocator's defaults.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        tune_allocator()
        import uvloop

        from lazydecode.server.serving import serve

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(model, settings, listener, child=child, on_ready=on_ready))
    finally:
        listener.close()


def preload(*, generates: bool) -> None:
    """Import everything that a server needs, on this thread; no other thread is started."""
    # Read by libgomp when torch loads it. Its threads spin at every barrier by default, which
    # takes the cores from decoders: see `engine.boot`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Half a million objects that stay: looking through them again and again took 2 of 12 s.
    gc.disable()
    try:
        for module in (*_FRONT_END, *(_ENGINE if generates else ())):
            importlib.import_module(module)
        import transformers

        for name in (*_LAZY, *(_LAZY_ENGINE if generates else ())):
            getattr(transformers, name)
    finally:
        gc.enable()
        # Also after a fork: a collector that wrote into them would copy the shared pages.
        gc.freeze()


def _fork_engine(listener: socket.socket) -> Child | None:
    """Return an engine process that waits for its front end; None: it is to be spawned."""
    if not can_fork():
        return None
    from lazydecode.engine.core import main

    try:
        return ForkedChild(main, close=[listener.fileno()], name="lazydecode-eng")
    except OSError as exc:
        logger.warning("the engine cannot be forked (%s); it is spawned", exc)
        return None


def _end_on_signals() -> None:
    """Until the event loop has its own handlers: nothing has to be closed yet."""

    def end(number: int, frame: FrameType | None) -> None:
        logger.info("stopped while loading")
        logging.shutdown()
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded; connections are refused until there is who answers."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    return listener
