"""One engine process, from spawn to reaping, seen from the front end."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lazydecode.engine.arena import SharedArena
from lazydecode.engine.channel import Channel, ChannelClosedError
from lazydecode.engine.messages import Configure, Message, Ready, StartFailed
from lazydecode.engine.protocol import EngineInfo
from lazydecode.errors import EngineError

logger = logging.getLogger(__name__)

_BOOT: Final = Path(__file__).with_name("boot.py")
_EXIT_S: Final = 5.0
"""How long a process may take to end after it was asked; then it is killed."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine process runs."""

    runner: str
    """`module:function` that returns a `ModelRunner` when called with `runner_options`."""
    runner_options: Mapping[str, Any] = field(default_factory=dict)
    """Picklable."""
    cache_bytes: int = 0
    """Capacity of the receiver cache: that of the sender cache, or the mirrors differ."""
    receiver_cache: str = "lazydecode.cache:MultiModalReceiverCache"
    """`module:class` of the receiver cache; called with `capacity_bytes`."""
    max_batch_size: int = 8
    log_level: str = "info"
    shared_bytes: int = 0
    """Memory shared with the process for tensors on their way and in its cache; 0: none."""


class EngineProcess:
    """A spawned engine process and the connection to it.

    A fresh interpreter, not a fork (threads and CUDA do not survive one), and not
    `multiprocessing`, which would import the caller's main module again and leave a resource
    tracker behind.
    """

    def __init__(self, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        arena = SharedArena.create(config.shared_bytes) if config.shared_bytes else None
        passed, arguments = [theirs.fileno()], [str(theirs.fileno())]
        if arena is not None:
            passed.append(arena.fd)
            arguments += [str(arena.fd), str(arena.size)]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own file, no shell
                [sys.executable, "-P", str(_BOOT), *arguments],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the command that runs the front end
            )
        except BaseException:
            ours.close()
            if arena is not None:
                arena.close()
            raise
        finally:
            theirs.close()
        self.arena = arena
        self.channel = Channel(ours, arena=arena)
        self._config = config
        self._path = [str(Path.cwd()) if entry == "" else entry for entry in sys.path]
        self._socket = ours

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def wait_ready(self) -> EngineInfo:
        """Send what to run and return once the model is loaded.

        Raises:
            EngineError: If it cannot be loaded, or the process went away.
        """
        path = json.dumps(self._path).encode()
        config = self._config
        try:
            self._socket.sendall(struct.pack("<I", len(path)) + path)
            self.channel.send(
                Configure(
                    runner=config.runner,
                    runner_options=pickle.dumps(dict(config.runner_options)),
                    cache_bytes=config.cache_bytes,
                    receiver_cache=config.receiver_cache,
                    max_batch_size=config.max_batch_size,
                    log_level=config.log_level,
                )
            )
            answer: Message = self.channel.receive()
        except (ChannelClosedError, OSError) as exc:
            status = self.end()
            raise EngineError(f"the engine process ended while it started ({status})") from exc
        if isinstance(answer, Ready):
            return answer.info
        self.end()
        reason = answer.reason if isinstance(answer, StartFailed) else "it answered out of turn"
        raise EngineError(f"the engine cannot start: {reason}")

    def end(self) -> str:
        """Close the connection, which ends the process, and reap it; says how it ended.

        It is killed if it lingers.
        """
        self.channel.close()
        try:
            status = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self.arena is not None:
            self.arena.close()
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def kill(self) -> None:
        """End the process at once, without asking; the reader of the channel sees it close."""
        self._process.kill()
