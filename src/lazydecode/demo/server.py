"""The server as a process of its own, started and ended by the demo."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 180.0
"""How long a server may take to load its model and answer."""
STOP_S = 20.0
"""How long it may take to end after SIGTERM; then it is killed."""
ANSWER_S = 120.0
"""How long one answer may take."""

_SERVING = re.compile(r"serving .* at http://([0-9.]+):([0-9]+)")


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class DemoServer:
    """One running server.

    Args:
        model: Folder of its model.
        log: File that gets its output.
        flags: Further flags of `lazydecode serve`.
    """

    def __init__(self, model: Path, log: Path, flags: Sequence[str]) -> None:
        self.log = log
        self._output = log.open("w")
        command = [sys.executable, "-m", "lazydecode", "serve", str(model), "--port", "0", *flags]
        # A session of its own: Ctrl-C reaches the demo alone, which then ends the server.
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._address: tuple[str, int] | None = None

    def wait_until_serving(self) -> None:
        """Return when the server answers.

        Raises:
            DemoError: It ended, or took too long.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = _SERVING.search(self.log.read_text(errors="replace"))
            if found is not None:
                self._address = (found[1], int(found[2]))
                return
            if self._process.poll() is not None:
                raise DemoError(f"the server ended with status {self._process.returncode}")
            time.sleep(0.05)
        raise DemoError(f"the server did not answer within {START_S:.0f} s")

    @property
    def url(self) -> str:
        """Where it answers."""
        assert self._address is not None
        return "http://{}:{}".format(*self._address)

    def get(self, path: str) -> str:
        """Return the text of a GET."""
        return self._exchange("GET", path, None, {}).decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a JSON request."""
        headers = {"content-type": "application/json"}
        content = self._exchange("POST", path, json.dumps(body).encode(), headers)
        answer: dict[str, Any] = json.loads(content)
        return answer

    def upload(
        self, path: str, file: Path, fields: dict[str, str], headers: dict[str, str]
    ) -> dict[str, Any]:
        """Return the answer to a form with `file` and further `fields`."""
        boundary = uuid.uuid4().hex
        start = f"--{boundary}\r\ncontent-disposition: form-data; name="
        form = "".join(f'{start}"{name}"\r\n\r\n{text}\r\n' for name, text in fields.items())
        form += f'{start}"file"; filename="{file.name}"\r\n\r\n'
        body = form.encode() + file.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
        content_type = {"content-type": f"multipart/form-data; boundary={boundary}"}
        answer: dict[str, Any] = json.loads(
            self._exchange("POST", path, body, {**headers, **content_type})
        )
        return answer

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> bytes:
        assert self._address is not None
        connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as exc:
            raise DemoError(f"{method} {path}: {type(exc).__name__} {exc}") from exc
        finally:
            connection.close()
        if response.status != 200:
            raise DemoError(f"{method} {path}: status {response.status}: {content.decode()[:500]}")
        return content

    def stop(self) -> None:
        """End the server and what it started; return when nothing of it runs."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()


@contextmanager
def running_servers(
    models: dict[str, Path], folder: Path, flags: Sequence[str]
) -> Iterator[dict[str, DemoServer]]:
    """Run one server per model inside the block; on failure show the end of their logs."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, model in models.items():
            servers[name] = DemoServer(model, folder / f"server-{name}.log", flags)
            stack.callback(servers[name].stop)
        for server in servers.values():
            server.wait_until_serving()
        yield servers
