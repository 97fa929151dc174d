"""A small web server on loopback, from which the demo's server fetches media."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves one folder and prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Keep the demo's table free of access lines."""


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve `folder` inside the block; yield its `host:port`."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, name="demo-origin", daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
