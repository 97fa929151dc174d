"""Faults of Transformers' model classes that keep a model from running, put right on the object.

They are faults of the release that this project is pinned to; whoever moves it looks here.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling


def correct(model: Any) -> None:
    """Put right what is known to be wrong with a loaded model; most have nothing."""
    if model.config.model_type == "kimi_k25":
        model.model.get_video_features = MethodType(_kimi_k25_video_features, model.model)


def _kimi_k25_video_features(
    self: Any, pixel_values_videos: Any, video_grid_thw: Any = None, **kwargs: Any
) -> Any:
    """As the class's own, for chunks of several frames, and of different numbers of them.

    The tower takes the mean over the frames of a chunk, so a chunk has as many features as one
    frame; the class cuts them as if there were some for each, and cannot gather chunks of
    different lengths (Transformers 5.23). Chunks do not see each other, so those of one length
    go through the tower together.
    """
    kwargs.pop("return_dict", None)
    height, width = self.vision_tower.merge_kernel_size
    sizes = video_grid_thw.prod(-1).tolist()
    patches = torch.split(pixel_values_videos, sizes)
    features: list[Any] = [None] * len(sizes)
    for length in sorted(set(video_grid_thw[:, 0].tolist())):
        chosen = [at for at, grid in enumerate(video_grid_thw.tolist()) if grid[0] == length]
        grids = video_grid_thw[chosen]
        pixels = torch.cat([patches[at] for at in chosen])
        outputs = self.vision_tower(pixels, grid_thw=grids, **kwargs)
        pooled = self.mm_projector(outputs.pooler_output).squeeze(1)
        counts = (grids[:, 1:].prod(-1) // (height * width)).tolist()
        for at, own in zip(chosen, torch.split(pooled, counts), strict=True):
            features[at] = own
    return BaseModelOutputWithPooling(pooler_output=tuple(features))
