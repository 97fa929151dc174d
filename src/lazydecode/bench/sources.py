"""The part of `bench frontend` that asks the connector for media that came before."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pybase64

from lazydecode.bench.measure import measure
from lazydecode.bench.media import encode_picture
from lazydecode.limits import FetchPolicy
from lazydecode.media.connector import MediaConnector
from lazydecode.media.image import ImageMediaIO

MEGABYTES: Final = (0.1, 1.0, 30.0)
_SETTLED_S: Final = 2.2
"""After this long a change of a file shows in its times."""


def sources_section(sizes: str, rounds: int, max_s: float) -> dict[str, Any]:
    """Ask for pictures of several lengths by data: and by file: URL, again and again.

    Args:
        sizes: As for `frontend_items`; `tiny` has the first length only.
        rounds: See `measure`.
        max_s: See `measure`.

    Returns:
        `sizes`: per length the floors and what the connector takes; `loop` and `look`: what an
        empty task takes, and one that asks a thread for a file's state.
    """
    megabytes = MEGABYTES[:1] if sizes == "tiny" else MEGABYTES
    image_io = ImageMediaIO(trust_exif_image_id=False)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        connector = MediaConnector(policy=FetchPolicy(allowed_local_media_path=Path(folder)))

        def load(url: str | memoryview) -> object:
            return runner.run(connector.load_from_url_async(url, image_io))

        async def nothing() -> None:
            await asyncio.sleep(0)

        async def look() -> None:
            quick = connector.executor.quick
            await asyncio.get_running_loop().run_in_executor(quick, os.stat, folder)

        paths = [Path(folder) / f"{size:g}.jpg" for size in megabytes]
        for path, size in zip(paths, megabytes, strict=True):
            path.write_bytes(_payload(size))
        # A file that was written a moment ago is not remembered: it may change unnoticed.
        time.sleep(_SETTLED_S)
        known: dict[str, Callable[[], object]] = {
            "loop": lambda: runner.run(nothing()),
            "look": lambda: runner.run(look()),
        }
        for path in paths:
            known[path.name] = partial(load, path.as_uri())
        # Apart from all that reads megabytes: what these take is mostly what is in the core's
        # caches, whatever the file's length.
        timings = measure(known, rounds=rounds, max_s=max_s)
        rows = []
        for path, size in zip(paths, megabytes, strict=True):
            data = path.read_bytes()
            contestants = _linear(data, path, load)
            found = {**measure(contestants, rounds=rounds, max_s=max_s / len(paths))}
            found["file_url"] = timings[path.name]
            named = {name: timing.to_dict() for name, timing in found.items()}
            rows.append({"megabytes": size, "bytes": len(data), "timings": named})
        runner.run(connector.close())
    return {
        "sizes": rows,
        "loop": timings["loop"].to_dict(),
        "look": timings["look"].to_dict(),
    }


def _linear(
    data: bytes, path: Path, load: Callable[[memoryview], object]
) -> dict[str, Callable[[], object]]:
    """What takes as long as the payload is: the floors, and a data: URL."""
    text = base64.b64encode(data)
    # A view, as the server has it: a part of the request's body.
    url = memoryview(b"data:image/jpeg;base64," + text)
    return {
        "data_floor": lambda: hashlib.sha256(pybase64.b64decode(text, validate=True)).digest(),
        "data_url": lambda: load(url),
        "file_floor": lambda: hashlib.sha256(path.read_bytes()).digest(),
    }


def _payload(megabytes: float) -> bytes:
    """A picture with zeros behind it, which nobody reads who does not decode it."""
    picture = encode_picture((512, 384))
    return picture.ljust(int(megabytes * 1e6), b"\0")
