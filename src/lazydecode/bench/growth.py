"""How cost grows with the number of items in a request, and with the entries of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lazydecode.bench import lazy
from lazydecode.bench.measure import measure
from lazydecode.bench.media import encode_picture
from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.media.image import ImageMediaIO
from lazydecode.parse import MultiModalDataParser


def growth_section(sizes: str, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the cost per item and per lookup, at growing numbers of both."""
    counts = {"tiny": (1, 4), "short": (1, 16, 256)}.get(sizes, (1, 4, 16, 64, 256))
    entries = {"tiny": (10, 100), "short": (1_000, 100_000)}.get(
        sizes, (1_000, 10_000, 100_000, 1_000_000)
    )
    progress("items per request")
    items = _items(counts, rounds)
    progress("entries of the cache")
    return {"items": items, "lookups": _lookups(entries, rounds)}


def _items(counts: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    image_io = ImageMediaIO(trust_exif_image_id=False)
    parser = MultiModalDataParser()
    payloads = [encode_picture((160, 120), seed=seed) for seed in range(counts[-1])]
    cache = lazy.new_cache()

    def request(count: int) -> None:
        refs = [image_io.load_bytes_ref(data) for data in payloads[:count]]
        for digest in lazy.identify(parser, "image", refs):
            cached = cache.is_cached_item(digest)
            cache.get_and_update_item(None if cached else lazy.NOTHING, digest)

    timings = measure(
        {str(count): lambda count=count: request(count) for count in counts},  # type: ignore[misc]
        rounds=rounds,
    )
    return [
        {"items": count, "us_per_item": timings[str(count)].cpu_ms * 1e3 / count}
        for count in counts
    ]


def _lookups(entries: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    caches: dict[int, MultiModalProcessorOnlyCache] = {}
    for count in entries:
        caches[count] = cache = lazy.new_cache()
        for number in range(count):
            cache.get_and_update_item(lazy.NOTHING, f"{number:064x}")

    def look_up(count: int) -> None:
        cache = caches[count]
        for number in range(0, count, count // 10):
            key = f"{number:064x}"
            assert cache.is_cached_item(key)
            cache.get_and_update_item(None, key)

    timings = measure(
        {str(count): lambda count=count: look_up(count) for count in entries},  # type: ignore[misc]
        rounds=5 * rounds,  # of 5 ms each
    )
    return [
        {"entries": count, "us_per_lookup": timings[str(count)].cpu_ms * 1e3 / 10}
        for count in entries
    ]
