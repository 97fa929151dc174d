"""uvicorn's HTTP protocol, without its copies of request bodies, and with turns for large ones.

A large body that came with its head stays where it was read. Who reads another one of a stated
length can have the connection for itself (`straight_body`). An answer's head and body are one
write instead of two. A wish for another protocol is passed over. At the server's end, a request
that is under way to an idle connection is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lazydecode.server.straight_body import EXTENSION, StraightBody
from lazydecode.turns import Turns

_CONNECTIONS: Final = 2
"""Connections that go on reading or writing per iteration of the event loop, each by up to 512 KiB.
When 32 bodies of 4 MB arrived at once, an iteration took up to 27 ms without turns, 7 with them."""
_LAST_CALL_S: Final = 0.25
"""How long idle connections stay open at the server's end. Of 32 clients that asked again as soon
as they had an answer, 19 had their connections reset when they were closed at once."""
_READ_S: Final = 0.001
_LARGE_BYTES: Final = 16 * 1024
"""A body of so many bytes is worth some steps, to spare it a copy."""
_HEAD_END: Final = b"\r\n\r\n"
_INTERIM: Final = b"HTTP/1.1 100 "
_FRAMING: Final = (b"content-length", b"transfer-encoding")
"""Fields that say where a request ends."""


class BodyTurns(Turns):
    """Few connections go on with a large body, read or written, in one iteration of an event loop.

    Args:
        per_iteration: Connections, at least 1.
    """

    def __init__(self, per_iteration: int = _CONNECTIONS) -> None:
        super().__init__(per_iteration)


class UncopiedBodies(HttpToolsProtocol):
    """Hands each piece of a body on as it came from the parser.

    uvicorn adds pieces to a bytearray and copies that into the message: twice over every byte.
    Nearly every piece is fetched before the next arrives, so there is nothing to be added up.

    Args:
        args: As uvicorn passes them.
        turns: Shared by all connections of the event loop.
        kwargs: As uvicorn passes them.
    """

    flow: _FlowInTurns

    def __init__(self, *args: Any, turns: BodyTurns, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = turns
        self._brought_body = False
        self._is_lent = False
        self._to_drop = 0
        """Bytes of a body that will be read by nobody: the parser has not been told of them."""
        self._is_last = False
        """Whether the next request is the last one of this connection."""
        self._is_told_again = False
        """Whether a parser is told a head that another one was told before."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        self.flow = _FlowInTurns(transport, self._turns)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the transport; if they end within a body, the next wait for a turn."""
        self._brought_body = False
        if self._to_drop:
            num_dropped = min(self._to_drop, len(data))
            self._to_drop -= num_dropped
            data = data[num_dropped:]
            if not data:
                return
        if len(data) < _LARGE_BYTES or not self._take_whole(data):
            self._parse(data)
        # uvicorn lets up to 64 KiB add up; pieces below that came from all connections at once.
        # What comes after the answer is read and dropped.
        cycle = self.cycle
        if self._brought_body and cycle.more_body and not cycle.response_complete:
            self.flow.pause_reading()

    def _take_whole(self, data: bytes) -> bool:
        """Take a request that arrived with its whole body, which is not copied out of `data`.

        False: it is none, and nothing was done.
        """
        before: RequestResponseCycle | None = self.cycle  # None before the first request
        if not self._is_between_requests:
            return False  # It goes on with a head or a body.
        end = data.find(_HEAD_END, 0, _LARGE_BYTES) + len(_HEAD_END)
        if end < len(_HEAD_END):
            return False
        self._parse(data[:end])
        body = memoryview(data)[end:]
        if self.cycle is not before and _states(self.headers, len(body)):
            self.cycle.body = body  # type: ignore[assignment]
            self._new_parser()
            self.on_message_complete()
        elif not self.transport.is_closing():
            self._parse(body)
        return True

    def _parse(self, data: bytes | memoryview) -> None:
        """Take any part of requests."""
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as exc:
                data = memoryview(data)[exc.args[0] :]  # what follows the head
            except HttpParserError:
                break
            try:
                self._pass_over_wish()
            except HttpParserError:
                break
        message = "Invalid HTTP request received."
        self.logger.warning(message)
        self.send_400_response(message)

    def _pass_over_wish(self) -> None:
        """Go on with the body of a request that wishes for another protocol.

        A server may pass that over (RFC 9110, section 7.8); Java's own client has such a wish, for
        HTTP/2, in each request without TLS. The parser takes the body for that protocol's, and what
        it says for more requests. So another one is told how long the body is.
        """
        scope, headers = self.scope, self.headers
        framing = [b"%b: %b\r\n" % field for field in headers if field[0] in _FRAMING]
        self._is_told_again = True
        try:
            self._new_parser()
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b" % b"".join(framing))
            self.scope, self.headers = scope, headers
            self.parser.feed_data(b"\r\n")
        finally:
            self._is_told_again = False

    def _should_upgrade(self) -> bool:
        """Say that no wish is granted."""
        return False

    def on_headers_complete(self) -> None:
        """Begin a request."""
        if self._is_told_again:
            return
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            if self._is_last:
                self.cycle.keep_alive = False
            if self.scope["method"] != "HEAD":  # its answer has no body to wait for
                corked: Any = _Corked(self.transport, self.flow)  # uvicorn knows transports only
                self.cycle.transport = corked
            for name, _ in self.headers:
                if name == b"content-length":
                    straight: Any = StraightBody(self, self.cycle)  # uvicorn knows those of dicts
                    self.scope["extensions"] = {EXTENSION: straight}

    def on_message_complete(self) -> None:
        """End a request; one with a wish for another protocol ends with its body, not its head."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body from the parser."""
        self._brought_body = True
        cycle: Any = self.cycle
        if cycle.response_complete:
            return
        if not cycle.body:
            cycle.body = body  # a copy of bytes, which uvicorn hands on, is those bytes
        else:
            if isinstance(cycle.body, bytes):
                cycle.body = bytearray(cycle.body)
            cycle.body += body
        cycle.message_event.set()

    def shutdown(self) -> None:
        """End the connection with the answer that is due, of an idle one with the next request's.

        A client that has sent one does not know that the connection was idle here, and would have
        it reset. If none comes for a moment, the connection is closed.
        """
        if self._is_idle:
            self._is_last = True
            # What arrived while the loop was busy is read between the two.
            self.loop.call_later(_LAST_CALL_S, self.loop.call_later, _READ_S, self._close_if_idle)
        else:
            super().shutdown()

    @property
    def _is_between_requests(self) -> bool:
        """Whether what comes next is the beginning of a head."""
        begun: Any = self.scope  # None before the first head
        if begun is None:
            return True
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and cycle.scope is begun and not cycle.more_body

    @property
    def _is_idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete

    def _close_if_idle(self) -> None:
        if self._is_idle:
            self.transport.close()

    # -- while somebody else reads

    def lend(self, reader: StraightBody) -> None:
        """Let the rest of a body go to `reader`; it has had all that came before."""
        self._is_lent = True
        self._to_drop = 0
        self.flow.pause_reading()
        self.transport.set_protocol(reader)
        self._turns.ask(self._go_on)

    def read_in_turn(self) -> None:
        """Have the reader wait for its turn before it goes on."""
        if not self._turns.take():
            self.transport.pause_reading()
            self._turns.ask(self._go_on)

    def _go_on(self) -> None:
        if self._is_lent and not self.transport.is_closing():
            self.transport.resume_reading()

    def take_back(self, num_left: int) -> None:
        """Read again, in the usual way: what follows `num_left` bytes of the body."""
        self._is_lent = False
        if self.transport.is_closing():
            return
        self.transport.pause_reading()
        self.transport.set_protocol(self)
        self._new_parser()
        self._to_drop = num_left
        if not num_left:
            self.on_message_complete()

    def _new_parser(self) -> None:
        """Parse what comes next as another request: the old parser waits for a body."""
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)


def _states(headers: Sequence[tuple[bytes, bytes]], num_bytes: int) -> bool:
    """Whether a request has a body of exactly so many bytes."""
    return (b"content-length", b"%d" % num_bytes) in headers


class _FlowInTurns(FlowControl):
    """Reading and writing stop with each large piece of a body; they go on in turns with others."""

    def __init__(self, transport: asyncio.Transport, turns: BodyTurns) -> None:
        super().__init__(transport)
        self._turns = turns
        self._has_asked = False
        self._shall_read = False
        self._is_full = False
        """Whether the transport takes no more for now."""
        self._awaits_turn = False
        """Whether what is written next waits for a turn."""

    def pause_reading(self) -> None:
        self._shall_read = False
        super().pause_reading()

    def resume_reading(self) -> None:
        if not self.read_paused:
            return
        self._shall_read = True
        if not self._has_asked:
            self._has_asked = True
            self._turns.ask(self._go_on)

    def _go_on(self) -> None:
        self._has_asked = False
        if self._shall_read:
            super().resume_reading()

    def pause_writing(self) -> None:
        self._is_full = True
        super().pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        if not self._awaits_turn:
            super().resume_writing()

    def has_written(self, num_bytes: int) -> None:
        """Let the piece after a large one wait, if this iteration has had its share."""
        if num_bytes < _LARGE_BYTES or self._awaits_turn or self._turns.take():
            return
        self._awaits_turn = True
        super().pause_writing()
        self._turns.ask(self._write_on)

    def _write_on(self) -> None:
        self._awaits_turn = False
        if not self._is_full:
            super().resume_writing()


class _Corked:
    """What one answer is written to: its head goes out with the first piece of its body.

    A system call less, and the client wakes up once.
    """

    __slots__ = ("_flow", "_head", "_is_open", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: _FlowInTurns) -> None:
        self._transport = transport
        self._flow = flow
        self._head: bytes | None = None
        self._is_open = False
        """Whether the head was written."""

    def write(self, data: bytes) -> None:
        """Take the head, then the pieces of the body."""
        if self._is_open or data.startswith(_INTERIM):
            self._transport.write(data)
            self._flow.has_written(len(data))
        elif self._head is None:
            self._head = data
        else:
            self._is_open = True
            self._transport.writelines((self._head, data))
            self._flow.has_written(len(data))

    def is_closing(self) -> bool:
        """Whether the connection is being closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection when all is written."""
        if self._head is not None and not self._is_open:
            self.write(b"")
        self._transport.close()
