"""uvicorn's protocol without its copies, on a connection that is played."""

import asyncio
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from lazydecode.server.http_protocol import UncopiedBodies


class Transport(asyncio.Transport):
    """Takes what is written, and lets reading be paused."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@pytest.mark.parametrize("at_once", [1, 3])
async def test_pieces_of_a_body_arrive_whole_and_one_alone_is_not_copied(at_once: int) -> None:
    received: list[Message] = []
    done = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            received.append(await receive())
            more = received[-1]["more_body"]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        done.set()

    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    config.load()
    protocol: Any = UncopiedBodies(config, ServerState(), {}, asyncio.get_running_loop())
    transport = Transport()
    protocol.connection_made(transport)
    protocol.data_received(b"POST / HTTP/1.1\r\ncontent-length: 300000\r\n\r\n")
    pieces = [bytes([number]) * 100_000 for number in range(3)]
    for number in range(0, 3, at_once):
        for piece in pieces[number : number + at_once]:
            protocol.on_body(piece)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    protocol.on_message_complete()
    await asyncio.wait_for(done.wait(), 10)
    assert b"".join(message["body"] for message in received) == b"".join(pieces)
    if at_once == 1:
        assert all(
            message["body"] is piece for message, piece in zip(received, pieces, strict=False)
        )
    assert transport.written.startswith(b"HTTP/1.1 204")
    protocol.timeout_keep_alive_task.cancel()
