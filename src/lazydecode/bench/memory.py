"""Memory that retained hits take, measured in a process of its own.

`python -m lazydecode.bench.memory SIDE COUNT SIZE` prints bytes of growth.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil

from lazydecode.bench import eager, lazy
from lazydecode.bench.media import encode_picture
from lazydecode.media.image import ImageMediaIO
from lazydecode.parse import MultiModalDataParser


def memory_section(sizes: str, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return how much each side grows by holding hits, beyond the payloads themselves."""
    if sizes == "tiny":
        cases = [("eager", 3, 64), ("ref", 3, 64)]
    else:
        # Eager at 10,000 would be 30 GB; its growth per hit is that of 100.
        cases = [("eager", 100, 1024), ("ref", 100, 1024), ("ref", 10_000, 1024)]
    rows = []
    for side, count, size in cases:
        progress(f"memory of {count:,} retained hits, {side}")
        grown = _in_subprocess(side, count, size)
        rows.append(
            {
                "side": side,
                "hits": count,
                "image": f"JPEG {size}²",
                "growth_mb": grown / 1e6,
                "growth_kb_per_hit": grown / 1e3 / count,
            }
        )
    return rows


def retain(side: str, count: int, size: int) -> int:
    """Return by how many bytes this process grows while it holds so many hits."""
    payload = encode_picture((size, size))
    image_io = ImageMediaIO(trust_exif_image_id=False)
    parser = MultiModalDataParser()
    cache = lazy.new_cache()

    def hit(data: bytes) -> object:
        if side == "eager":
            media, digest = eager.decode_and_hash(image_io, "image", data)
            held: object = media
        else:
            ref = image_io.load_bytes_ref(data)
            (digest,) = lazy.identify(parser, "image", [ref])
            held = ref
        cached = cache.is_cached_item(digest)
        cache.get_and_update_item(None if cached else lazy.NOTHING, digest)
        return held

    for _ in range(3):
        hit(payload)  # Imports, lazy parts of the decoder, the entry itself.
    before = _settled_rss()
    held = [hit(payload) for _ in range(count)]
    after = _settled_rss()
    assert len(held) == count
    return after - before


def _settled_rss() -> int:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    rss: int = psutil.Process().memory_info().rss
    return rss


def _in_subprocess(side: str, count: int, size: int) -> int:
    command = [sys.executable, "-m", "lazydecode.bench.memory", side, str(count), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)  # noqa: S603  # our own words
    if done.returncode:
        raise RuntimeError(f"the memory benchmark failed:\n{done.stderr[-2000:]}")
    return int(done.stdout)


if __name__ == "__main__":
    sys.stdout.write(f"{retain(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))}\n")
