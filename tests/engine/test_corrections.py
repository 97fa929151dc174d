"""What is put right on model classes gives what the class gives where it is right itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from lazydecode.engine.loading import load_model


def test_kimi_takes_chunks_of_any_length_in_one_call(tiny_model: Callable[..., Path]) -> None:
    model = load_model(
        str(tiny_model("kimi_k25")), device="cpu", dtype="float32", trust_remote_code=False
    )
    grids = torch.tensor([[4, 4, 6], [1, 2, 4], [2, 4, 6], [4, 2, 2], [1, 4, 4]])
    size = model.config.vision_config.patch_size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(int(grids.prod(-1).sum()), 3, size, size, generator=generator)
    with torch.no_grad():
        together = model.model.get_video_features(pixels, grids).pooler_output
        parts = torch.split(pixels, grids.prod(-1).tolist())
        assert [len(f) for f in together] == [6, 2, 6, 1, 4]
        for features, own, grid in zip(together, parts, grids, strict=True):
            alone = model.model.get_video_features(own, grid[None]).pooler_output[0]
            assert torch.allclose(features, alone, atol=1e-5)
        # Chunks of one frame are pictures, of which the class's own way is right.
        single = model.model.get_image_features(parts[1], grids[1:2]).pooler_output[0]
        assert torch.allclose(together[1], single, atol=1e-5)
        # The mean over frames, by the class's own way to compute it.
        hidden = model.model.vision_tower(parts[0], grid_thw=grids[:1]).last_hidden_state
        merged = model.model.vision_tower.temporal_patch_merger(hidden, grids[:1])
        projected = model.model.mm_projector(merged).squeeze(1)
        assert torch.allclose(together[0], projected, atol=1e-5)


def test_other_models_are_left_alone(tiny_model: Callable[..., Path]) -> None:
    path = str(tiny_model("qwen2_5_vl"))
    model = load_model(path, device="cpu", dtype="float32", trust_remote_code=False)
    assert "get_video_features" not in vars(model.model)
