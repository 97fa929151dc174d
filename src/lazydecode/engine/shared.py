"""An engine process that serves several front ends, seen from one of them."""

from __future__ import annotations

import socket
from typing import Protocol

from lazydecode.engine.arena import SharedArena
from lazydecode.engine.channel import Channel, ChannelClosedError
from lazydecode.engine.process import EngineConfig, introduce
from lazydecode.engine.protocol import EngineInfo
from lazydecode.errors import EngineError


class EngineBroker(Protocol):
    """Who keeps an engine for several front ends and introduces them to it."""

    def attach(self, channel: socket.socket, memory: tuple[int, int] | None) -> int:
        """Hand these to the engine, which is started if there is none; returns its process id.

        Args:
            channel: The engine's end of the connection.
            memory: Descriptor and size of the memory that is shared with it, if there is.

        Raises:
            OSError: If there is no engine, and none can be started.
        """
        ...


class SharedEngine:
    """Our connection to an engine that another process started; the others' are not touched.

    The receiver cache behind it is ours alone, and as new as the connection.

    Args:
        config: What the engine runs; the first front end's counts.
        broker: Knows the engine.

    Raises:
        OSError: If there is no engine.
    """

    def __init__(self, config: EngineConfig, broker: EngineBroker) -> None:
        self._config = config
        ours, theirs = socket.socketpair()
        self.arena = SharedArena.create(config.shared_bytes) if config.shared_bytes else None
        self.channel = Channel(ours, arena=self.arena)
        self._is_ended = False
        memory = None if self.arena is None else (self.arena.fd, self.arena.size)
        try:
            self.pid = broker.attach(theirs, memory)
        except BaseException:
            self.end()
            raise
        finally:
            theirs.close()

    @property
    def is_running(self) -> bool:
        """Whether the connection was not ended; the reader of the channel sees the engine go."""
        return not self._is_ended

    def wait_ready(self) -> EngineInfo:
        """Send what to run and return once the model is loaded.

        Raises:
            EngineError: If it cannot be loaded, or the engine went away.
        """
        try:
            return introduce(self.channel, self._config)
        except ChannelClosedError as exc:
            self.end()
            raise EngineError("the engine process ended while it started") from exc
        except EngineError:
            self.end()
            raise

    def end(self) -> str:
        """Close the connection; says what became of it."""
        self._is_ended = True
        self.channel.close()
        if self.arena is not None:
            self.arena.close()
        return "its connection was closed"

    def kill(self) -> None:
        """Close the connection; the engine itself is not ours to end."""
        self.channel.close()
