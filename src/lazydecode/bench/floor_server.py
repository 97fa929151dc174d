"""The least that a request with media costs any server: `python -m lazydecode.bench.floor_server`.

It reads a body into memory, decodes and digests the base64 in it, and answers `{}`. There is no
request to parse, nothing to look up and nothing to say.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
from typing import Final, cast

import pybase64
import uvloop

_HEAD_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 256 * 1024
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MARKER: Final = b";base64,"
_ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class _Connection(asyncio.BufferedProtocol):
    """Requests whose head comes in one piece, one after the other, into the same memory."""

    def __init__(self) -> None:
        self._head = memoryview(bytearray(_HEAD_BYTES))
        self._memory = bytearray()
        self._length: int | None = None
        """Of the body; None: a head comes next."""
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._length is None:
            return self._head
        end = min(self._length, self._filled + _READ_BYTES)
        return memoryview(self._memory)[self._filled : end]

    def buffer_updated(self, nbytes: int) -> None:
        if self._length is None:
            received = bytes(self._head[:nbytes])
            end = received.index(_HEAD_END)
            stated = _LENGTH.search(received, 0, end)
            self._length = int(stated[1]) if stated else 0
            if self._length > len(self._memory):
                self._memory = bytearray(self._length)
            first = received[end + len(_HEAD_END) :]
            self._memory[: len(first)] = first
            self._filled = len(first)
        else:
            self._filled += nbytes
        if self._filled == self._length:
            _identify(self._memory, self._length)
            self._length = None
            self._transport.write(_ANSWER)


def _identify(memory: bytearray, length: int) -> None:
    at = memory.find(_MARKER, 0, length)
    while at >= 0:
        end = memory.index(b'"', at, length)
        payload = memoryview(memory)[at + len(_MARKER) : end]
        hashlib.sha256(pybase64.b64decode(payload, validate=True)).digest()
        at = memory.find(_MARKER, end, length)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
