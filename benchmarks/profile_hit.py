"""Show where the time of a hit goes, beyond the digest of its bytes.

`python benchmarks/profile_hit.py [MODEL]`: without a model the item's path alone; with one, the
whole request from headers and from the cache.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Callable

from lazydecode.bench import lazy
from lazydecode.bench.floors import digest_floor
from lazydecode.bench.measure import measure
from lazydecode.bench.media import BenchItem, encode_picture
from lazydecode.media.executor import MediaExecutor
from lazydecode.media.image import ImageMediaIO
from lazydecode.parse import MultiModalDataParser
from lazydecode.processing.inputs import ProcessorInputs

CALLS = 300
ROWS = 18


def main() -> None:
    """Print stages in µs, then functions by their own time."""
    image_io = ImageMediaIO(trust_exif_image_id=False)
    data = encode_picture((640, 480))
    parser = MultiModalDataParser()
    cache = lazy.new_cache()
    ref = image_io.load_bytes_ref(data)
    items = parser.parse_mm_data({"image": [ref]})
    with_items = ProcessorInputs("", items)
    executor = MediaExecutor(1)

    def hit() -> object:
        return lazy.request(image_io, "image", data, cache, parser, executor)

    hit()
    stages = measure(
        {
            "sha256": digest_floor(data),
            "load_bytes_ref": lambda: image_io.load_bytes_ref(data),
            "parse_mm_data": lambda: parser.parse_mm_data({"image": [ref]}),
            "get_mm_hashes": lambda: with_items.get_mm_hashes("bench", "sha256"),
            "whole hit": hit,
        },
        rounds=15,
    )
    for name, timing in stages.items():
        print(f"{name:16} {timing.cpu_ms * 1e3:8.1f} µs")
    profile(hit)
    executor.shutdown()
    if len(sys.argv) > 1:
        from lazydecode.bench.model_rows import ModelRows

        rows = ModelRows(sys.argv[1])
        item = BenchItem("JPEG 640x480", "image", "jpeg", data, image_io)
        for name, run in rows.contestants(item).items():
            if name in ("hit", "headers_only"):
                print(f"\n{name}")
                profile(run)


def profile(run: Callable[[], object]) -> None:
    """Print the functions of many calls, by own time."""
    run()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(CALLS):
        run()
    profiler.disable()
    stats = pstats.Stats(profiler)
    entries = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])  # type: ignore[attr-defined]
    for (path, line, name), (_, count, own, total, _) in entries[:ROWS]:
        where = f"{path.rpartition('lazydecode/')[2]}:{line}" if line else ""
        print(
            f"{own / CALLS * 1e6:8.1f} µs own {total / CALLS * 1e6:8.1f} µs in all "
            f"{count / CALLS:6.1f} calls  {name} {where}"
        )


if __name__ == "__main__":
    main()
