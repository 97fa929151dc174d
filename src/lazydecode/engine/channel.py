"""Framed messages with attached tensors over a socket, between the front end and its processes.

A frame is a head (lengths), one MessagePack message, and the raw bytes of the tensors that the
message refers to. Small tensors are written from where they lie and read into memory of their
own: one copy into the socket and one out of it. Large ones go through shared memory, if there
is: one copy into it and none out of it.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from lazydecode.engine.arena import ArenaView, SharedArena
from lazydecode.engine.messages import Message

if TYPE_CHECKING:
    import torch

_HEAD: Final = struct.Struct("<II")  # bytes of the message, number of buffers
_TENSOR_CODE: Final = 1
_SHARED_CODE: Final = 2
_BLOB: Final = ""
"""In the place of a dtype's name."""
SHARED_BYTES: Final = 128 * 1024
"""Tensors from this size on go through shared memory. Into pages that are in use already, 256 KiB
took 0.04 ms against 0.36 through the socket, 5.6 MB 1.5 against 3.8."""
_MAX_IOV: Final = 512  # below every system's IOV_MAX


_M = TypeVar("_M")


class ChannelClosedError(Exception):
    """The other side is gone."""


class Blob:
    """Bytes of a message that take the tensors' way. Not a dataclass, which msgspec would write."""

    __slots__ = ("data",)

    def __init__(self, data: memoryview) -> None:
        self.data = data


class TensorChannel(Generic[_M]):
    """One end of a connection. `send` is thread-safe; `receive` is for one thread.

    Args:
        sock: Connected.
        messages: The union of all messages that may come.
        arena: Where `send` puts large tensors.
        view: Where `receive` finds them.
        stall_s: Longest time in which the other side neither reads nor writes within a frame;
            None: it is waited for without end.
    """

    def __init__(
        self,
        sock: socket.socket,
        messages: Any,
        *,
        arena: SharedArena | None = None,
        view: ArenaView | None = None,
        stall_s: float | None = None,
    ) -> None:
        sock.settimeout(stall_s)
        self._socket = sock
        self._messages = messages
        self._arena = arena
        self._view = view
        self._send_lock = threading.Lock()  # covers one whole frame

    def send(self, message: _M) -> None:
        """Write one message and its tensors; blocks while the other side does not read.

        Raises:
            ChannelClosedError: If the other side is gone.
            TimeoutError: If it stalls. The frame is not whole: nothing can follow it.
        """
        buffers: list[memoryview] = []
        shared: list[int] = []

        def hook(value: Any) -> Any:
            return self._pack_tensor(value, buffers, shared)

        try:
            body = msgspec.msgpack.encode(message, enc_hook=hook)
        except BaseException:
            if self._arena is not None:
                self._arena.release(shared)  # nobody will hear of them
            raise
        sizes = struct.pack(f"<{len(buffers)}Q", *(len(buffer) for buffer in buffers))
        head = _HEAD.pack(len(body), len(buffers)) + sizes
        with self._send_lock:
            try:
                _send_all(self._socket, [memoryview(head), memoryview(body), *buffers])
            except TimeoutError:
                raise
            except OSError as exc:
                raise ChannelClosedError(str(exc)) from exc

    def wait(self, timeout_s: float) -> bool:
        """Return whether something came, the other side's end included, within a time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def receive(self) -> _M:
        """Read one message; its tensors own their memory, or keep their extents lent.

        Raises:
            ChannelClosedError: If the other side is gone, or ended within a frame.
            TimeoutError: If it stalls. The frame is not whole: nothing can follow it.
        """
        num_body, num_buffers = _HEAD.unpack(self._read(_HEAD.size))
        sizes = struct.unpack(f"<{num_buffers}Q", self._read(8 * num_buffers))
        body = self._read(num_body)
        buffers = [self._read(size) for size in sizes]

        def hook(code: int, data: memoryview) -> Any:
            return self._unpack_tensor(code, data, buffers)

        message: _M = msgspec.msgpack.decode(body, type=self._messages, ext_hook=hook)
        return message

    def _pack_tensor(
        self, value: Any, buffers: list[memoryview], shared: list[int]
    ) -> msgspec.msgpack.Ext:
        if isinstance(value, Blob):
            return self._pack(value.data, _BLOB, [len(value.data)], buffers, shared)
        # Here, because connecting to an engine takes no torch; its import takes seconds.
        import torch

        from lazydecode.engine.wire import dtype_name, tensor_bytes

        if not isinstance(value, torch.Tensor):
            raise TypeError(f"cannot send a {type(value).__name__} to another process")
        raw = tensor_bytes(value)
        return self._pack(raw, dtype_name(value.dtype), list(value.shape), buffers, shared)

    def _pack(
        self,
        raw: memoryview,
        name: str,
        shape: list[int],
        buffers: list[memoryview],
        shared: list[int],
    ) -> msgspec.msgpack.Ext:
        code, place = _SHARED_CODE, self._share(raw)
        if place is not None:
            shared.append(place)
        else:
            code, place = _TENSOR_CODE, len(buffers)
            buffers.append(raw)
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode([name, shape, place]))

    def _unpack_tensor(
        self, code: int, data: memoryview, buffers: list[memoryview]
    ) -> torch.Tensor | Blob:
        name, shape, place = msgspec.msgpack.decode(data)
        if name == _BLOB:
            return Blob(self._bytes_at(code, place, shape[0], buffers))
        from lazydecode.engine.wire import DTYPES, tensor_from_buffer

        size = math.prod(shape) * DTYPES[name].itemsize
        return tensor_from_buffer(name, shape, self._bytes_at(code, place, size, buffers))

    def _bytes_at(self, code: int, place: int, size: int, buffers: list[memoryview]) -> memoryview:
        if code == _TENSOR_CODE:
            return buffers[place]
        assert self._view is not None
        return self._view.view(place, size)

    def _share(self, raw: memoryview) -> int | None:
        if self._arena is None or len(raw) < SHARED_BYTES:
            return None
        return self._arena.place(raw)

    def close(self) -> None:
        """Close the connection; a thread that reads or writes it gets ChannelClosedError."""
        with contextlib.suppress(OSError):  # the other side may have been first
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a blocked reader, close does not
        self._socket.close()

    def _read(self, size: int) -> memoryview:
        # Not bytearray(size): that zeroes the memory first.
        buffer = np.empty(size, np.uint8).data
        received = 0
        while received < size:
            try:
                count = self._socket.recv_into(buffer[received:])
            except TimeoutError:
                raise
            except OSError as exc:
                raise ChannelClosedError(str(exc)) from exc
            if count == 0:
                raise ChannelClosedError("the other side closed the connection")
            received += count
        return buffer


class Channel(TensorChannel[Message]):
    """One end of the connection between a front end and its engine.

    Args:
        sock: Connected.
        arena: Where `send` puts large tensors.
        view: Where `receive` finds them.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        arena: SharedArena | None = None,
        view: ArenaView | None = None,
    ) -> None:
        super().__init__(sock, Message, arena=arena, view=view)


def _send_all(sock: socket.socket, parts: Sequence[memoryview]) -> None:
    """Write all parts in order without joining them."""
    pending = [part for part in parts if len(part)]
    first = 0
    while first < len(pending):
        sent = sock.sendmsg(pending[first : first + _MAX_IOV])
        while first < len(pending) and sent >= len(pending[first]):
            sent -= len(pending[first])
            first += 1
        if sent:
            pending[first] = pending[first][sent:]
