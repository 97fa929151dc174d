"""Videos in chunks: cut where the family's class cuts them, each chunk an item of its own.

A class that writes a text for every few frames makes of each chunk alone what it makes of it
within its video. So chunks are cached one by one, and an evicted one costs itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch

from lazydecode.errors import InvalidRequestError
from lazydecode.inputs import PlaceholderRange
from lazydecode.media.faults import describe
from lazydecode.models.expansion import ItemText
from lazydecode.models.item import ItemProcessor
from lazydecode.models.joining import join_items
from lazydecode.models.probing import Probes
from lazydecode.models.processor_call import as_if_whole, plain_metadata
from lazydecode.models.tokenization import CollapsedText

logger = logging.getLogger(__name__)

VISION_CHUNK: Final = "vision_chunk"
"""The modality of pictures and of chunks of videos, in request order."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk of a video, before its pixels are at hand."""

    frames: tuple[int, ...]
    """Positions among the decoded frames."""
    metadata: Mapping[str, Any]
    """Of the chunk as a video of its own: the times of its frames are those in the source."""


class VideoSplitter:
    """Cuts videos where one class does. Threads share it.

    Args:
        part: The processor's video part.
    """

    def __init__(self, part: Any) -> None:
        self._part = part

    def plan(self, metadata: Mapping[str, Any], options: Mapping[str, Any]) -> list[ChunkPlan]:
        """Return the chunks of a decoded video, in order.

        Args:
            metadata: What the decoder says about it, or will say.
            options: The request's processor options, merged. If they have the class choose among
                the decoded frames, it does so before the video is cut.

        Raises:
            InvalidRequestError: If the class refuses the options.
        """
        num_frames = len(metadata["frames_indices"])
        known: Mapping[str, Any] = metadata
        kept = list(range(num_frames))
        if self._option("do_sample_frames", options, metadata.get("do_sample_frames", False)):
            known = as_if_whole(dict(metadata), num_frames)
            kept = self._sample(known, options)
        size = int(self._option("temporal_patch_size", options, self._part.temporal_patch_size))
        plans = []
        for start in range(0, len(kept), size):
            frames = tuple(kept[start : start + size])
            chosen = [known["frames_indices"][frame] for frame in frames]
            plans.append(
                ChunkPlan(
                    frames,
                    {
                        **plain_metadata(known),
                        "frames_indices": chosen,
                        "do_sample_frames": False,
                    },
                )
            )
        return plans

    def split(self, video: tuple[Any, Mapping[str, Any]], options: Mapping[str, Any]) -> list[Any]:
        """Return (frames, metadata) of each chunk of a decoded video; frames are views."""
        frames, metadata = video
        return [
            (_take(frames, plan.frames), dict(plan.metadata))
            for plan in self.plan(metadata, options)
        ]

    def _option(self, name: str, options: Mapping[str, Any], default: Any) -> Any:
        scoped = options.get("videos_kwargs") or {}
        return scoped.get(name, options.get(name, default))

    def _sample(self, metadata: Mapping[str, Any], options: Mapping[str, Any]) -> list[int]:
        from transformers.video_utils import VideoMetadata

        names = ("num_frames", "fps")
        chosen = {n: self._option(n, options, getattr(self._part, n, None)) for n in names}
        try:
            indices = self._part.sample_frames(
                metadata=VideoMetadata(**plain_metadata(metadata)), **chosen
            )
        except Exception as exc:
            # Hugging Face code over the request's options.
            raise InvalidRequestError(
                f"the model's processor refuses it: {describe(exc)}",
                parameter="mm_processor_kwargs",
            ) from exc
        return [int(index) for index in indices]


def for_chunk(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a request's processor options for a chunk, whose frames were chosen before."""
    return {**(options or {}), "do_sample_frames": False}


def join_texts(texts: Sequence[ItemText]) -> ItemText:
    """Return what stands in the prompt for a video, from the texts of its chunks."""
    parts = [text.replacement for text in texts]
    if any(part is None for part in parts):
        raise ValueError("chunks are known by the text in place of their video's placeholder")
    joined, _ = CollapsedText.join(part for part in parts if part is not None)
    return ItemText("video", joined, shape=texts[0].shape)


def split_range(place: PlaceholderRange, num_chunks: int) -> list[PlaceholderRange]:
    """Return the range of each chunk of a video: its unbroken run of embeddings.

    Raises:
        ValueError: If there are more or fewer runs than chunks.
    """
    mask = np.ones(place.length, dtype=bool)
    if place.is_embed is not None:
        mask = np.asarray(place.is_embed, dtype=bool)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    runs = [
        PlaceholderRange(place.offset + int(start), int(stop - start))
        for start, stop in edges.reshape(-1, 2)
    ]
    if len(runs) != num_chunks:
        raise ValueError(f"the prompt has {len(runs)} runs of embeddings for {num_chunks} chunks")
    return runs


def proven_splitter(config: Any, probes: Probes, items: ItemProcessor) -> VideoSplitter | None:
    """Return how a model's videos are cut, if it wants one modality for pictures and chunks.

    None if its configuration does not say so, or its class makes something else of the chunks
    of a probe than of the whole; a line in the log says which.
    """
    part = getattr(probes.call.processor, "video_processor", None)
    if not getattr(config, "use_unified_vision_chunk", False) or "video" not in items.rules:
        return None
    if not isinstance(getattr(part, "temporal_patch_size", None), int):
        logger.warning("videos are not cut into chunks: their processor does not say where")
        return None
    splitter = VideoSplitter(part)
    video = probes.item("video", 0)
    whole = items.result("video", video, probes.output("video", 0))
    options = for_chunk(items.call.options)
    chunks = [items.process("video", chunk, options) for chunk in splitter.split(video, options)]
    joined = join_items([chunk.kwargs for chunk in chunks])
    same = join_texts([c.text for c in chunks]).replacement == whole.text.replacement and all(
        torch.equal(torch.as_tensor(joined[name]), torch.as_tensor(elem.data))
        for name, elem in whole.kwargs.items()
    )
    if not same:
        logger.warning("videos are not cut into chunks: their class makes something else of them")
        return None
    return splitter


def texts_of_items(
    origins: Sequence[tuple[str, int]], texts: Sequence[ItemText]
) -> dict[str, list[ItemText]]:
    """Return modality -> per item of the client what stands in the prompt for it.

    Args:
        origins: Per chunk the client's item that it is or is cut from, in request order.
        texts: Per chunk its own text.
    """
    items: dict[str, list[ItemText]] = {}
    for (modality, _), group in groupby(zip(origins, texts, strict=True), key=lambda p: p[0]):
        chunks = [text for _, text in group]
        items.setdefault(modality, []).append(
            join_texts(chunks) if modality == "video" else chunks[0]
        )
    return items


def ranges_of_chunks(
    origins: Sequence[tuple[str, int]], placeholders: Mapping[str, Sequence[PlaceholderRange]]
) -> list[PlaceholderRange]:
    """Return the range of each chunk, in request order, from those of the client's items."""
    ranges: list[PlaceholderRange] = []
    taken: Counter[str] = Counter()
    for (modality, _), group in groupby(origins):
        place = placeholders[modality][taken[modality]]
        taken[modality] += 1
        ranges += split_range(place, sum(1 for _ in group)) if modality == "video" else [place]
    return ranges


def _take(frames: Any, positions: Sequence[int]) -> Any:
    """Return the frames at `positions`: a view if they follow each other."""
    first, last = positions[0], positions[-1]
    if list(positions) == list(range(first, last + 1)):
        return frames[first : last + 1]
    return frames[list(positions)]
