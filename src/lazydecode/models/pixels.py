"""Pixels as the uint8 patches they were before rescale and normalize, and the rest later.

Rescale and normalize act on every pixel alone and come last in most image processors, so they
can follow anywhere without changing a bit: a quarter of the memory and of the bytes to send.
Whether that holds for a family is found out when its model is loaded: one run without the two
steps has to give uint8, laid out in a way that names the channel of every position and without
padding, and the arithmetic below has to turn it into the floats of the ordinary run, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from PIL import Image

from lazydecode.errors import InvalidRequestError
from lazydecode.inputs import MultiModalFieldElem, MultiModalKwargsItem
from lazydecode.models.item import ItemProcessor

SCOPES: Final = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
"""Modality -> the group of options that is its own."""
_PARTS: Final = {"image": "image_processor", "video": "video_processor"}
_OPTIONS: Final = frozenset(
    {"do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"}
)
_RAW: Final = {"do_rescale": False, "do_normalize": False}
_LEVELS: Final = (37, 101, 223)
"""One value per channel: what a probe of one colour is painted with."""
_IMAGE_SIZES: Final = ((224, 336), (600, 400), (64, 448), (450, 60), (50, 50))
_VIDEO_SHAPES: Final = ((4, 112, 168), (3, 168, 112))


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """How one uint8 tensor becomes the processor's floats."""

    dim: int
    """Dimension that holds the channel."""
    repeat: int
    """Times that the sequence of channels is repeated along it."""
    run: int
    """Consecutive positions of one channel along it."""
    order: Literal["fused", "separate", "rescale"]
    """`fused`: (x - mean/scale) / (std/scale); `separate`: (x*scale - mean) / std."""
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def finish(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the floats of the processor for its uint8 values, bit by bit."""
        if self.order == "rescale":
            return raw * self.scale
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        if self.order == "fused":
            mean, std = mean * (1.0 / self.scale), std * (1.0 / self.scale)
            values = raw.to(torch.float32)
        else:
            values = raw * self.scale
        return values.sub_(self._along(mean, raw)).div_(self._along(std, raw))

    def _along(self, per_channel: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        """Return one value per position of the channel's dimension, ready to broadcast."""
        row = per_channel.repeat_interleave(self.run).repeat(self.repeat).to(raw.device)
        shape = [1] * raw.ndim
        shape[self.dim] = row.numel()
        return row.view(shape)


@dataclass(frozen=True, slots=True)
class PixelPlan:
    """Field name -> how it is finished. Small, and made to be sent to another process."""

    tensors: Mapping[str, ChannelPlan] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tensors)


def finish_pixels(item: MultiModalKwargsItem, plan: PixelPlan) -> MultiModalKwargsItem:
    """Return the item with float pixels, bit-equal to what the model's processor gives.

    Fields that are no raw pixels, or are finished already, stay as they are; the item itself
    is not changed.
    """
    finished: dict[str, MultiModalFieldElem] = {}
    for name, channel in plan.tensors.items():
        elem = item.get(name)
        if elem is None or not isinstance(elem.data, torch.Tensor):
            continue
        if elem.data.dtype != torch.uint8:
            continue
        # A batched field lost its first dimension, so the channel's is one less.
        lost = channel.dim - _lost_dims(elem)
        plan_here = ChannelPlan(
            lost,
            channel.repeat,
            channel.run,
            channel.order,
            channel.scale,
            channel.mean,
            channel.std,
        )
        finished[name] = MultiModalFieldElem(plan_here.finish(elem.data), elem.field)
    if not finished:
        return item
    return MultiModalKwargsItem({**item, **finished})


def _lost_dims(elem: MultiModalFieldElem) -> int:
    from lazydecode.inputs import BatchedField

    return 1 if isinstance(elem.field, BatchedField) else 0


def raw_options(modality: str, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return options that skip the two steps; None if the request sets one of them itself."""
    options = dict(options or {})
    scope = dict(options.get(SCOPES[modality]) or {})
    if _OPTIONS & set(options) or _OPTIONS & set(scope):
        return None
    return {**options, SCOPES[modality]: {**scope, **_RAW}}


def plan_pixels(processor: ItemProcessor, modality: str) -> PixelPlan:
    """Return the plan that is proven for this modality; an empty one if none is.

    Args:
        processor: Runs one item of the family.
        modality: `image` or `video`.
    """
    part = getattr(processor.call.processor, _PARTS.get(modality, ""), None)
    options = raw_options(modality, processor.call.options)
    if part is None or options is None:
        return PixelPlan()
    plan: PixelPlan | None = None
    for flat, textured in _probes(modality):
        try:
            raw_flat = processor.run(modality, flat, options).tensors
            raw = processor.run(modality, textured, options).tensors
            full = processor.run(modality, textured).tensors
        except InvalidRequestError:
            continue  # a size that the family does not take
        layouts = _layouts(raw_flat, raw, full)
        if layouts is None:
            return PixelPlan()
        found = _choose(layouts, raw, full, part)
        if found is None or (plan is not None and found != plan):
            return PixelPlan()
        plan = found
    return plan or PixelPlan()


def merge_plans(plans: Sequence[PixelPlan]) -> tuple[PixelPlan, frozenset[str]]:
    """Return one plan for all modalities, and the fields on which they disagree."""
    merged: dict[str, ChannelPlan] = {}
    disputed: set[str] = set()
    for plan in plans:
        for name, channel in plan.tensors.items():
            if merged.setdefault(name, channel) != channel:
                disputed.add(name)
    return PixelPlan({n: c for n, c in merged.items() if n not in disputed}), frozenset(disputed)


def _probes(modality: str) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of the same size: one colour, and every value in every channel."""
    if modality == "image":
        for width, height in _IMAGE_SIZES:
            flat = np.empty((height, width, 3), dtype=np.uint8)
            flat[:] = _LEVELS
            yield Image.fromarray(flat), Image.fromarray(_texture(height, width))
        return
    for frames, width, height in _VIDEO_SHAPES:
        flat = np.empty((frames, height, width, 3), dtype=np.uint8)
        flat[:] = _LEVELS
        textured = np.stack([_texture(height, width, shift=40 * i) for i in range(frames)])
        metadata = {
            "fps": 12.0,
            "duration": frames / 2,
            "total_num_frames": frames * 6,
            "frames_indices": [6 * i for i in range(frames)],
            "width": width,
            "height": height,
            "video_backend": "pyav",
            "do_sample_frames": False,
        }
        yield (flat, metadata), (textured, metadata)


def _texture(height: int, width: int, shift: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a picture with smooth ramps through all 256 values, different per channel."""
    rows = np.arange(height, dtype=np.float64)[:, None] / max(height - 1, 1)
    columns = np.arange(width, dtype=np.float64)[None, :] / max(width - 1, 1)
    ramps = (rows + 0 * columns, 0 * rows + columns, (rows + columns) / 2)
    picture = np.stack([(255 * r + shift) % 256 for r in ramps], axis=-1)
    return picture.astype(np.uint8)


_Layout = tuple[int, int, int]


def _layouts(
    raw_flat: Mapping[str, Any], raw: Mapping[str, Any], full: Mapping[str, Any]
) -> dict[str, _Layout] | None:
    """Return where the channel is in each pixel tensor; None if the family has no raw form."""
    layouts: dict[str, _Layout] = {}
    if raw.keys() != full.keys():
        return None
    for name, value in raw.items():
        other = full[name]
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            if value != other:
                return None
            continue
        if value.dtype == other.dtype and value.dtype != torch.uint8:
            if not torch.equal(value, other):
                return None
            continue
        if value.dtype != torch.uint8 or other.dtype != torch.float32:
            return None
        if value.shape != other.shape:
            return None
        layout = _channel_layout(raw_flat[name])
        if layout is None:
            return None
        layouts[name] = layout
    return layouts or None


def _channel_layout(flat: torch.Tensor) -> _Layout | None:
    """Return (dim, repeat, run) of the channel in the tensor of a picture of one colour."""
    for dim in range(flat.ndim):
        size = flat.shape[dim]
        if size % len(_LEVELS):
            continue
        rows = flat.movedim(dim, -1).reshape(-1, size)
        if not bool((rows == rows[0]).all()):
            continue
        pattern = rows[0].tolist()
        run = next((i for i, v in enumerate(pattern) if v != pattern[0]), size)
        repeat = size // (run * len(_LEVELS)) if size % (run * len(_LEVELS)) == 0 else 0
        expected = [level for level in _LEVELS for _ in range(run)] * repeat
        if pattern == expected:
            return dim, repeat, run
    return None


def _choose(
    layouts: Mapping[str, _Layout], raw: Mapping[str, Any], full: Mapping[str, Any], part: Any
) -> PixelPlan | None:
    """Return the arithmetic that gives the processor's floats; None if none does."""
    scale = float(getattr(part, "rescale_factor", None) or 1 / 255)
    mean, std = getattr(part, "image_mean", None), getattr(part, "image_std", None)
    orders: list[Literal["fused", "separate", "rescale"]] = ["fused", "separate", "rescale"]
    if not (isinstance(mean, list | tuple) and isinstance(std, list | tuple)):
        mean, std, orders = (0.0,) * 3, (1.0,) * 3, ["rescale"]
    for order in orders:
        plans = {
            name: ChannelPlan(*layout, order, scale, tuple(mean), tuple(std))
            for name, layout in layouts.items()
        }
        if all(torch.equal(plan.finish(raw[n]), full[n]) for n, plan in plans.items()):
            return PixelPlan(plans)
    return None
