"""The part of `bench frontend` that has a model: its processor, whole hits and whole misses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lazydecode.bench import eager, lazy
from lazydecode.bench.floors import decoder_floor
from lazydecode.bench.measure import measure
from lazydecode.bench.media import BenchItem, encode_picture
from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.config import load_settings
from lazydecode.media.image import ImageMediaIO
from lazydecode.models.loading import load_model_frontend
from lazydecode.models.processor_call import audio_processor_of, plain_metadata
from lazydecode.processing.inputs import ProcessorInputs

_LONG_PROMPT: int = 100_000


class ModelRows:
    """Runs items through one loaded model, with one torch thread on every side."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        started = time.perf_counter()
        self._frontend = load_model_frontend(model, load_settings({}))
        self.load_s = time.perf_counter() - started
        if self._frontend.mm_processor is None:
            raise ValueError(f"{model} takes no media")
        self._processor = self._frontend.mm_processor
        self.modalities = self._frontend.modalities
        self._prompts: dict[tuple[str, int], str | list[int]] = {}

    def row(self, item: BenchItem, rounds: int, max_s: float) -> dict[str, Any]:
        """Return timings of one item: floors, eager, and this library, hit and miss."""
        contestants = self.contestants(item)
        timings = measure(contestants, rounds=rounds, max_s=max_s)
        floor = timings["decoder"].cpu_ms + timings["processor"].cpu_ms
        return {
            "timings": {name: timing.to_dict() for name, timing in timings.items()},
            "miss_over_floor": timings["miss"].cpu_ms / floor,
            "hit_speedup": timings["eager_hit"].cpu_ms / timings["hit"].cpu_ms,
            "miss_speedup": timings["eager_miss"].cpu_ms / timings["miss"].cpu_ms,
        }

    def contestants(self, item: BenchItem) -> dict[str, Callable[[], object]]:
        """Return the ways to treat one item; `headers_only` where the family allows it."""
        media = item.media_io.load_bytes(item.data)
        known = lazy.new_cache()
        known_eager = lazy.new_cache()
        contestants: dict[str, Callable[[], object]] = {
            "decoder": decoder_floor(item),
            "processor": lambda: self._bare(item.modality, media),
            "eager_hit": lambda: self._eager(item, known_eager),
            "eager_miss": lambda: self._eager(item, lazy.new_cache()),
            "hit": lambda: self._processor.apply(self._inputs(item, known)),
            "miss": lambda: self._miss(item),
        }
        if self._processor.render_from_headers(self._inputs(item, None)) is not None:
            contestants["headers_only"] = lambda: self._processor.render_from_headers(
                self._inputs(item, None)
            )
        contestants["hit"]()  # From here on it is one.
        return contestants

    def prompt_growth(self, rounds: int) -> list[dict[str, Any]]:
        """Return what rendering costs from headers as the prompt grows to 100,000 tokens."""
        if "image" not in self.modalities:
            return []
        image_io = ImageMediaIO(trust_exif_image_id=False)
        refs = [image_io.load_bytes_ref(encode_picture((1280, 720)))]
        one = self._render(refs)
        if one is None:
            return []
        full = max(1, _LONG_PROMPT // len(one.token_ids))
        counts = sorted({max(1, full // 10), max(1, full // 3), full})
        lengths = {count: len(self._render(refs * count).token_ids) for count in counts}
        timings = measure(
            {
                str(count): lambda count=count: self._render(refs * count)  # type: ignore[misc]
                for count in counts
            },
            rounds=rounds,
        )
        return [
            {"tokens": lengths[count], "items": count, "ms": timings[str(count)].cpu_ms}
            for count in counts
        ]

    def _render(self, refs: list[Any]) -> Any:
        items = self._frontend.info.parse_mm_data({"image": refs}, validate=False)
        inputs = ProcessorInputs(self._prompt("image", len(refs)), items)
        return self._processor.render_from_headers(inputs)

    def _miss(self, item: BenchItem) -> object:
        self._processor.clear_outputs()
        return self._processor.apply(self._inputs(item, lazy.new_cache()))

    def _inputs(
        self, item: BenchItem, cache: MultiModalProcessorOnlyCache | None
    ) -> ProcessorInputs:
        ref = item.media_io.load_bytes_ref(item.data)
        items = self._frontend.info.parse_mm_data({item.modality: [ref]}, validate=False)
        return ProcessorInputs(
            self._prompt(item.modality, 1),
            items,
            cache=cache,
            processor_fingerprint=self._frontend.fingerprint,
        )

    def _prompt(self, modality: str, count: int) -> str | list[int]:
        """A user's message with so many items; rendered once, as no side is to pay for it."""
        prompt = self._prompts.get((modality, count))
        if prompt is None:
            parts: list[dict[str, Any]] = [{"type": modality} for _ in range(count)]
            parts.append({"type": "text", "text": "What is this?"})
            rendered = self._frontend.render_chat([{"role": "user", "content": parts}])
            prompt = self._prompts[modality, count] = rendered.prompt
        return prompt

    def _bare(self, modality: str, media: Any) -> Any:
        """One call of the model's own processor of that modality, without any text."""
        processor = self._frontend.processor
        if modality == "image":
            return processor.image_processor(images=[media], return_tensors="pt")
        if modality == "video":
            frames, metadata = media
            return processor.video_processor(
                videos=[frames],
                video_metadata=[plain_metadata(metadata)],
                do_sample_frames=False,
                return_metadata=True,
                return_tensors="pt",
            )
        samples, rate = media
        extractor = audio_processor_of(processor)
        assert extractor is not None
        rate = getattr(extractor, "sampling_rate", rate)
        return extractor(samples, sampling_rate=rate, return_tensors="pt")

    def _eager(self, item: BenchItem, cache: MultiModalProcessorOnlyCache) -> object:
        media, digest = eager.decode_and_hash(item.media_io, item.modality, item.data)
        if not cache.is_cached_item(digest):
            self._bare(item.modality, media)
            return cache.get_and_update_item(lazy.NOTHING, digest)
        return cache.get_and_update_item(None, digest)
