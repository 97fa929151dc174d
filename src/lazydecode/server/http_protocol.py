"""uvicorn's HTTP protocol, without its copies of request bodies."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class UncopiedBodies(HttpToolsProtocol):
    """Hands each piece of a body on as it came from the parser.

    uvicorn adds pieces to a bytearray and copies that into the message: twice over every byte.
    Nearly every piece is fetched before the next arrives, so there is nothing to be added up.
    """

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body from the parser."""
        if not self.cycle.body:
            # Empty bytes plus `body` are `body` itself, and so is a copy of bytes.
            self.cycle.body = b""  # type: ignore[assignment]
        super().on_body(body)
