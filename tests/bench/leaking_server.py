"""A server that keeps some bytes of each request for ever, and some of the first ones.

    python leaking_server.py PORT LEAKED WARMING

`LEAKED` bytes per request are never freed; `WARMING` bytes are for each of the first 500, as
pools and caches take them.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys

_WARM_AFTER = 500
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


async def main(port: int, leaked: int, warming: int) -> None:
    kept: list[bytes] = []
    num_requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = _LENGTH.search(head)
            if length is not None:
                await reader.readexactly(int(length[1]))
                num_requests += 1
                kept.append(os.urandom(leaked + warming * (num_requests <= _WARM_AFTER)))
            writer.write(_ANSWER)
            if head.startswith(b"GET"):  # the client asks whether it lives, and leaves
                writer.close()
                return

    async with await asyncio.start_server(serve, "127.0.0.1", port, limit=2**20) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:4])))
