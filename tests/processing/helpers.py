"""A small real processor, and references that count their decodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from lazydecode.cache import (
    BaseMultiModalProcessorCache,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
)
from lazydecode.inputs import MultiModalKwargsItem
from lazydecode.media.base import MediaRef
from lazydecode.media.image import ImageMediaIO
from lazydecode.parse import MultiModalDataItems
from lazydecode.processing.context import (
    BaseProcessingInfo,
    InputProcessingContext,
    ModelConfig,
    MultiModalConfig,
)
from lazydecode.processing.fields import MultiModalFieldConfig
from lazydecode.processing.flights import ItemFlights
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.processor import BaseMultiModalProcessor
from lazydecode.processing.prompt_updates import (
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)
from tests.builders import make_jpeg

IMAGE_TOKEN, BEGIN, PAD, END = 900, 901, 902, 903
MIB = 1024 * 1024


class CountingImageIO(ImageMediaIO):
    """The real image decoder, counting its runs; can be held at a gate."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_decodes = 0
        self.gate: threading.Event | None = None
        self._lock = threading.Lock()

    def ref(self, data: bytes) -> MediaRef[Image.Image]:
        ref = self.load_bytes_ref(data)
        decode = ref.decode

        def counted() -> Image.Image:
            with self._lock:
                self.num_decodes += 1
            if self.gate is not None:
                assert self.gate.wait(120)
            return decode()

        return MediaRef(counted, data, ref.spec, key=ref.key)


def jpeg(seed: int, size: tuple[int, int] = (32, 24)) -> bytes:
    """A JPEG that differs for each seed."""
    return make_jpeg((size[0] + seed % 7, size[1] + seed // 7))


def make_info(**config: Any) -> BaseProcessingInfo:
    model_config = ModelConfig("tests/tiny", multimodal_config=MultiModalConfig(**config))
    return BaseProcessingInfo(InputProcessingContext(model_config, None))


class PixelProcessor(BaseMultiModalProcessor):
    """Scales images to [0, 1]; an image takes a begin, (width // 8) pads, and an end token."""

    def __init__(self, *, flights: ItemFlights | None = None, **kwargs: Any) -> None:
        super().__init__(make_info(), None, flights=flights, **kwargs)
        self.num_calls = 0
        self.num_images = 0
        self.on_call: Callable[[], None] | None = None

    def _call_hf_processor(
        self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        self.num_calls += 1
        self.num_images += len(hf_data["images"])
        if self.on_call is not None:
            self.on_call()
        pixels, sizes = [], []
        for image in hf_data["images"]:
            if image.size[0] >= 500:
                raise ValueError("images must be narrower than 500 pixels")
            array = np.asarray(image, dtype=np.float32) / 255
            pixels.append(torch.from_numpy(array).reshape(-1, 3))
            sizes.append(image.size)
        return {
            "pixels": torch.cat(pixels),
            "sizes": torch.tensor(sizes),
            "input_ids": torch.zeros(1, 1),
        }

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        sizes = hf_inputs.get("sizes", torch.empty(0, 2))
        return {
            "pixels": MultiModalFieldConfig.flat_from_sizes("image", sizes.prod(-1)),
            "sizes": MultiModalFieldConfig.batched("image"),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem]],
    ) -> Sequence[PromptUpdate]:
        def replacement(index: int) -> PromptUpdateDetails:
            width = int(out_mm_kwargs["image"][index]["sizes"].data[0])
            ids = [BEGIN, *[PAD] * (width // 8), END]
            return PromptUpdateDetails.select_token_id(ids, PAD)

        return [PromptReplacement("image", [IMAGE_TOKEN], replacement)]


class ItemwisePixelProcessor(PixelProcessor):
    """The same, item by item."""

    per_item = True


def make_inputs(
    processor: BaseMultiModalProcessor,
    images: Sequence[Any],
    *,
    cache: BaseMultiModalProcessorCache | None = None,
    uuids: Sequence[str | None] | None = None,
    prompt: list[int] | None = None,
    **fields: Any,
) -> ProcessorInputs:
    """A request over `images` with a placeholder for each."""
    items = processor.info.parse_mm_data({"image": list(images)})
    if prompt is None:
        prompt = [1, *[token for _ in images for token in (IMAGE_TOKEN, 2)], 3]
    uuid_items = None if uuids is None else {"image": uuids}
    return ProcessorInputs(prompt, items, uuid_items, cache=cache, **fields)


def only_cache(capacity: int = 64 * MIB) -> MultiModalProcessorOnlyCache:
    return MultiModalProcessorOnlyCache(capacity_bytes=capacity)


def sender_cache(capacity: int = 64 * MIB) -> MultiModalProcessorSenderCache:
    return MultiModalProcessorSenderCache(capacity_bytes=capacity)


def tensors_of(item: MultiModalKwargsItem | None) -> dict[str, Any]:
    assert item is not None
    return {name: value.tolist() for name, value in item.get_data().items()}  # type: ignore[union-attr]
