"""Embeddings through the library: item groups by selection, texts, and the path without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.inputs import FlatField
from lazydecode.parse.embeddings import DictEmbeddingItems
from lazydecode.processing.inputs import ProcessorInputs
from tests.models.conftest import LoadFrontend

GRIDS = torch.tensor([[1, 2, 4], [1, 6, 2], [1, 4, 4]])
COUNTS = [2, 3, 4]
DATA = {"image_embeds": torch.randn(sum(COUNTS), 64), "image_grid_thw": GRIDS}


def test_items_are_told_apart_and_selected_with_all_their_tensors(frontend: LoadFrontend) -> None:
    group = frontend("qwen2_5_vl").info.parse_mm_data({"image": DATA})["image"]
    assert isinstance(group, DictEmbeddingItems)
    assert [len(item["image_embeds"]) for item in group] == COUNTS
    assert group.get_processor_data() == {}
    assert group.get_passthrough_data() is DATA
    chosen = group.select([2, 0])
    assert [chosen.get_original_index(at) for at in range(2)] == [2, 0]
    assert chosen.data["image_grid_thw"].tolist() == GRIDS[[2, 0]].tolist()
    pieces = DATA["image_embeds"].split(COUNTS)  # type: ignore[no-untyped-call]  # torch's
    assert torch.equal(chosen.data["image_embeds"], torch.cat([pieces[2], pieces[0]]))
    assert chosen.select([1]).get(0)["image_grid_thw"].tolist() == GRIDS[0].tolist()


def test_each_item_takes_as_many_placeholders_as_it_has_tokens(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_5_vl")
    assert model.mm_processor is not None
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    prompt = model.render_chat([{"role": "user", "content": [*content, {"type": "image"}]}])
    cache = MultiModalProcessorOnlyCache(capacity_bytes=2**20)
    inputs = ProcessorInputs(
        prompt.text,
        model.info.parse_mm_data({"image": DATA}),
        cache=cache,
        processor_fingerprint=model.fingerprint,
    )
    assert not inputs.can_use_cache
    rendered = model.mm_processor.apply(inputs)
    assert cache.snapshot() == []
    places = rendered["mm_placeholders"]["image"]
    assert [place.length for place in places] == COUNTS
    assert len(set(rendered["mm_hashes"]["image"])) == 3
    for item, count in zip(rendered["mm_kwargs"]["image"], COUNTS, strict=True):
        assert item is not None
        assert isinstance(item["image_embeds"].field, FlatField)
        assert item["image_embeds"].data.shape == (count, 64)  # type: ignore[union-attr]
    headers = model.mm_processor.render_from_headers(inputs)
    assert headers is not None
    assert headers.token_ids == rendered["prompt_token_ids"]
    assert headers.placeholders == rendered["mm_placeholders"]


@pytest.mark.parametrize(
    ("family", "data", "reason"),
    [
        ("qwen2_5_vl", {"image": [torch.zeros(2, 64)]}, "need their image_grid_thw"),
        ("qwen2_5_vl", {"image": {"image_embeds": torch.zeros(2, 64)}}, "missing"),
        ("qwen2_5_vl", {"image": {**DATA, "image_grid_thw": GRIDS[:2]}}, "stands for 5 tokens"),
        ("qwen2_audio", {"audio": [torch.zeros(2, 3)]}, "hidden size 3"),
        ("qwen2_audio", {"audio": {"audio_embeds": torch.zeros(2, 64)}}, "no audio_embeds"),
        ("llava_onevision", {"image": [torch.zeros(2, 64)]}, "takes no image_embeds"),
    ],
)
def test_what_a_family_does_not_take_is_refused(
    frontend: LoadFrontend, family: str, data: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        frontend(family).info.parse_mm_data(data)
