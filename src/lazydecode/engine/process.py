"""The engine process and the connection to it, from start to reaping, seen from a front end."""

from __future__ import annotations

import logging
import pickle
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lazydecode.engine.arena import SharedArena
from lazydecode.engine.channel import Channel, ChannelClosedError
from lazydecode.engine.child import Child, SpawnedChild, attach_front_end
from lazydecode.engine.messages import Configure, Message, Ready, StartFailed
from lazydecode.engine.protocol import EngineInfo
from lazydecode.errors import EngineError

logger = logging.getLogger(__name__)

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
    """An engine process of our own and the connection to it.

    Args:
        config: What it runs.
        child: A process that waits for its first front end; None: one is spawned.

    Raises:
        OSError: If the process cannot be started, or is gone.
    """

    def __init__(self, config: EngineConfig, child: Child | None = None) -> None:
        self._child = child or SpawnedChild()
        ours, theirs = socket.socketpair()
        self.arena = SharedArena.create(config.shared_bytes) if config.shared_bytes else None
        self.channel = Channel(ours, arena=self.arena)
        memory = None if self.arena is None else (self.arena.fd, self.arena.size)
        try:
            attach_front_end(self._child.control, theirs, memory)
        except OSError:
            self.end()
            raise
        finally:
            theirs.close()
        self._config = config

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._child.poll() is None

    def wait_ready(self) -> EngineInfo:
        """Send what to run and return once the model is loaded.

        Raises:
            EngineError: If it cannot be loaded, or the process went away.
        """
        try:
            return introduce(self.channel, self._config)
        except ChannelClosedError as exc:
            raise EngineError(f"the engine process ended while it started ({self.end()})") from exc
        except EngineError:
            self.end()
            raise

    def end(self) -> str:
        """Close the connection, which ends the process, and reap it; says how it ended.

        It is killed if it lingers.
        """
        self.channel.close()
        self._child.control.close()
        status = self._child.wait(_EXIT_S)
        while status is None:
            self._child.kill()
            status = self._child.wait(_EXIT_S)
        if self.arena is not None:
            self.arena.close()
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def kill(self) -> None:
        """End the process at once, without asking; the reader of the channel sees it close."""
        self._child.kill()


def introduce(channel: Channel, config: EngineConfig) -> EngineInfo:
    """Send what to run and return once the model is loaded.

    Raises:
        ChannelClosedError: If the engine went away.
        EngineError: If the model cannot be loaded.
    """
    channel.send(
        Configure(
            runner=config.runner,
            runner_options=pickle.dumps(dict(config.runner_options)),
            cache_bytes=config.cache_bytes,
            receiver_cache=config.receiver_cache,
            max_batch_size=config.max_batch_size,
            log_level=config.log_level,
        )
    )
    answer: Message = channel.receive()
    if isinstance(answer, Ready):
        return answer.info
    reason = answer.reason if isinstance(answer, StartFailed) else "it answered out of turn"
    raise EngineError(f"the engine cannot start: {reason}")
