"""First file of a spawned process: takes over the parent's import path, then runs its function.

Started as `python -P boot.py CONTROL_FD MODULE:FUNCTION`. Imports nothing of ours before the path
is set, so that the process finds what its parent found, whatever the parent did to `sys.path`.
"""

import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys


def _main() -> None:
    # Ctrl-C reaches the whole process group; the front end decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Read by libgomp when torch loads it. Its threads spin at every barrier by default, which
    # takes the cores from the front end's decoders, and theirs from them: with both of two
    # cores busy a tiny model's step took 10 to 20 times as long as with waiting threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    control = socket.socket(fileno=int(sys.argv[1]))
    (size,) = struct.unpack("<I", _read(control, 4))
    sys.path[:] = json.loads(_read(control, size))
    # Until the model is loaded: half a million objects come that stay.
    gc.disable()
    module, _, name = sys.argv[2].partition(":")
    status = getattr(importlib.import_module(module), name)(control)
    sys.stderr.flush()
    os._exit(status)  # the readers and the watch are daemons: no interpreter teardown under them


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            sys.exit(0)  # the parent is gone
        data += part
    return data


if __name__ == "__main__":
    _main()
