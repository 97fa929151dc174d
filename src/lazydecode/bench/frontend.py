"""`bench frontend`: every kind of item, eager and lazy, hit and miss, beside the floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from lazydecode.bench import eager, lazy
from lazydecode.bench.floors import decoder_floor, digest_floor
from lazydecode.bench.growth import growth_section
from lazydecode.bench.measure import Timing, measure
from lazydecode.bench.media import BenchItem, encode_picture, frontend_items
from lazydecode.bench.memory import memory_section
from lazydecode.bench.record import machine, new_record
from lazydecode.bench.sources import sources_section
from lazydecode.media.executor import MediaExecutor
from lazydecode.media.image import ImageMediaIO
from lazydecode.parse import MultiModalDataParser

HIT_RATES: Final = (0.5, 0.9, 0.99)
_AUDIO_RATE_HZ: Final = 16_000
SECTIONS: Final = ("items", "sources", "parallel", "hashing", "memory", "growth")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """How much is measured."""

    sizes: str = "full"
    """`full`, `short` or `tiny`: see `frontend_items`."""
    rounds: int = 15
    max_s: float = 15.0
    """Longest time for one row; see `measure`."""
    model: str | None = None
    """Folder of a model: adds the processor, whole hits and misses, and growth of prompts."""
    sections: tuple[str, ...] = SECTIONS
    items: tuple[str, ...] = ()
    """Only rows whose name contains one of these, upper or lower case; none given: all."""


def run_frontend(options: FrontendOptions, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Measure, and return the record."""
    settings = {
        "sizes": options.sizes,
        "rounds": options.rounds,
        "model": None if options.model is None else Path(options.model).name,
        "sections": list(options.sections),
        "items": list(options.items),
        "ratios": "of CPU time, medians of interleaved rounds",
    }
    record = new_record("frontend", settings)
    wanted = options.sections
    if options.model is not None:
        # Imports torch: not for those who measure media alone.
        from lazydecode.bench.model_rows import ModelRows

        model: ModelRows | None = ModelRows(options.model)
    else:
        model = None
    if "items" in wanted:
        record["items"] = _items(options, model, progress)
    if "sources" in wanted:
        progress("data: and file: URLs")
        record["sources"] = sources_section(options.sizes, options.rounds, options.max_s)
    if "parallel" in wanted:
        progress("parallel decode of eight images")
        record["parallel"] = _parallel(options)
    if "hashing" in wanted:
        progress("hash throughput")
        record["hashing"] = _hashing(options)
    if "memory" in wanted:
        record["memory"] = memory_section(options.sizes, progress)
    if "growth" in wanted:
        record["growth"] = growth_section(options.sizes, options.rounds, progress)
        if model is not None:
            progress("growth of the prompt")
            record["growth"]["prompt"] = model.prompt_growth(options.rounds)
    return record


def _items(options: FrontendOptions, model: Any, progress: Progress) -> list[dict[str, Any]]:
    wanted = [text.lower() for text in options.items]
    rows = [
        row
        for row in frontend_items(options.sizes)
        if not wanted or any(text in row[0].lower() for text in wanted)
    ]
    results = []
    for number, (name, build) in enumerate(rows, 1):
        progress(f"{name} ({number} of {len(rows)})")
        item: BenchItem = build()
        results.append(_item_row(item, options, model))
    return results


def _item_row(item: BenchItem, options: FrontendOptions, model: Any) -> dict[str, Any]:
    parser = MultiModalDataParser(target_sr=_AUDIO_RATE_HZ, target_channels=1)
    known_eager, known_lazy = lazy.new_cache(), lazy.new_cache()
    with media_executor(1) as executor:
        contestants: dict[str, Callable[[], object]] = {
            "digest": digest_floor(item.data),
            "decoder": decoder_floor(item),
            "eager_hit": partial(_eager, item, known_eager, parser),
            "eager_miss": lambda: _eager(item, lazy.new_cache(), parser),
            "ref_hit": lambda: lazy.request(
                item.media_io, item.modality, item.data, known_lazy, parser, executor
            ),
            "ref_miss": lambda: lazy.request(
                item.media_io, item.modality, item.data, lazy.new_cache(), parser, executor
            ),
        }
        contestants["ref_hit"]()  # From here on it is one.
        timings = measure(contestants, rounds=options.rounds, max_s=options.max_s)
    row = {
        "name": item.name,
        "modality": item.modality,
        "bytes": len(item.data),
        "timings": {name: timing.to_dict() for name, timing in timings.items()},
        "ratios": _item_ratios(timings),
        "blended_ms": {
            str(rate): {
                side: _blend(timings[f"{side}_hit"], timings[f"{side}_miss"], rate)
                for side in ("eager", "ref")
            }
            for rate in HIT_RATES
        },
    }
    if model is not None and item.modality in model.modalities:
        row["model"] = model.row(item, options.rounds, options.max_s)
    return row


def _eager(item: BenchItem, cache: Any, parser: MultiModalDataParser) -> object:
    return eager.request(item.media_io, item.modality, item.data, cache, lazy.NOTHING, parser)


def _item_ratios(timings: dict[str, Timing]) -> dict[str, float]:
    cpu = {name: max(timing.cpu_ms, 1e-6) for name, timing in timings.items()}
    return {
        "hit_speedup": cpu["eager_hit"] / cpu["ref_hit"],
        "miss_speedup": cpu["eager_miss"] / cpu["ref_miss"],
        "hit_over_digest": cpu["ref_hit"] / cpu["digest"],
        "hit_beyond_digest_ms": cpu["ref_hit"] - cpu["digest"],
        "miss_over_decoder": cpu["ref_miss"] / cpu["decoder"],
    }


def _blend(hit: Timing, miss: Timing, rate: float) -> float:
    return rate * hit.cpu_ms + (1 - rate) * miss.cpu_ms


# -- eight images at once


def _parallel(options: FrontendOptions) -> dict[str, Any]:
    size = (64, 48) if options.sizes == "tiny" else (2048, 2048)
    payloads = [encode_picture(size, seed=seed) for seed in range(8)]
    image_io = ImageMediaIO(trust_exif_image_id=False)
    workers = machine()["cores"]

    def run(executor: MediaExecutor) -> None:
        refs = [image_io.load_bytes_ref(data) for data in payloads]
        wait([executor.submit(ref.decode) for ref in refs])

    with media_executor(1) as single, media_executor(workers) as pool:
        timings = measure(
            {
                "eager_one_by_one": lambda: [image_io.load_bytes(data) for data in payloads],
                "pool_of_1": lambda: run(single),
                f"pool_of_{workers}": lambda: run(pool),
            },
            rounds=max(3, options.rounds // 2),
            max_s=options.max_s,
        )
    return {
        "images": len(payloads),
        "workers": workers,
        "timings": {name: timing.to_dict() for name, timing in timings.items()},
        "wall_speedup": timings["eager_one_by_one"].wall_ms / timings[f"pool_of_{workers}"].wall_ms,
    }


# -- bytes per second


def _hashing(options: FrontendOptions) -> list[dict[str, Any]]:
    image_io = ImageMediaIO(trust_exif_image_id=False)
    head = encode_picture((64, 48))
    rows = []
    for megabytes in (0.1,) if options.sizes == "tiny" else (0.1, 1, 8, 32):
        data = head + bytes(int(megabytes * 1e6) - len(head))
        timings = measure(
            {
                "digest": digest_floor(data),
                "identify": lambda data=data: image_io.load_bytes_ref(data).key,  # type: ignore[misc]
            },
            rounds=options.rounds,
            max_s=options.max_s,
        )
        rows.append(
            {
                "megabytes": megabytes,
                **{
                    f"{name}_mb_per_s": len(data) / 1e3 / max(timing.cpu_ms, 1e-6)
                    for name, timing in timings.items()
                },
                "timings": {name: timing.to_dict() for name, timing in timings.items()},
            }
        )
    return rows


@contextmanager
def media_executor(workers: int) -> Iterator[MediaExecutor]:
    """A media pool that ends with the block."""
    executor = MediaExecutor(workers)
    try:
        yield executor
    finally:
        executor.shutdown()
