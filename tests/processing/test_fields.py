"""Outputs of a processor, split into items and joined again."""

from __future__ import annotations

import pytest
import torch

from lazydecode.inputs import MultiModalFieldElem, MultiModalKwargsItem, PaddedField
from lazydecode.parse import DictEmbeddingItems
from lazydecode.processing.fields import (
    ConfiguredItemFields,
    MultiModalFieldConfig,
    join_items,
    own_storage,
    split_into_items,
)

SIZES = [2, 1, 3]
OUTPUTS = {
    "grid": torch.arange(6).reshape(3, 2),
    "pixels": torch.arange(24.0).reshape(6, 4),
    "wide": torch.arange(12.0).reshape(1, 6, 2),
    "ragged": [torch.zeros(1), torch.zeros(2), torch.zeros(3)],
    "shared": torch.tensor([7.0]),
    "input_ids": torch.zeros(1, 9),
}
CONFIG = {
    "grid": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    "pixels": MultiModalFieldConfig.flat_from_sizes("image", SIZES),
    "wide": MultiModalFieldConfig.flat_from_sizes("image", torch.tensor(SIZES), dim=1),
    "ragged": MultiModalFieldConfig.batched("image"),
    "shared": MultiModalFieldConfig.shared("image", 3),
    "absent": MultiModalFieldConfig.batched("image"),
}


def test_items_get_their_parts_and_text_is_left_out() -> None:
    items = split_into_items(OUTPUTS, CONFIG)["image"]
    assert [sorted(item) for item in items] == [["grid", "pixels", "ragged", "shared", "wide"]] * 3
    assert [tuple(item["pixels"].data.shape) for item in items] == [(2, 4), (1, 4), (3, 4)]
    assert [tuple(item["wide"].data.shape) for item in items] == [(1, 2, 2), (1, 1, 2), (1, 3, 2)]
    assert items[1]["grid"].data.tolist() == [2, 3]
    assert items[0]["grid"].field.keep_on_cpu
    assert items[2]["shared"].data is OUTPUTS["shared"]


def test_joining_is_the_inverse_of_splitting() -> None:
    items = split_into_items(OUTPUTS, CONFIG)["image"]
    joined = join_items(items)
    for name in ("grid", "pixels", "wide", "shared"):
        assert torch.equal(joined[name], OUTPUTS[name]), name
    assert [len(part) for part in joined["ragged"]] == [1, 2, 3]
    picked = join_items([items[2], items[0]])
    assert torch.equal(picked["pixels"], OUTPUTS["pixels"][[3, 4, 5, 0, 1]])


def test_padded_items_grow_to_the_largest() -> None:
    items = [
        MultiModalKwargsItem({"x": MultiModalFieldElem(torch.ones(1, *shape), PaddedField())})
        for shape in ((2, 3), (4, 1))
    ]
    joined = join_items(items)["x"]
    assert joined.shape == (2, 4, 3)
    assert joined[0, :2].tolist() == [[1.0] * 3] * 2
    assert joined.sum() == 10


def test_disagreeing_outputs_are_our_own_bug() -> None:
    config = {
        "grid": MultiModalFieldConfig.batched("image"),
        "pixels": MultiModalFieldConfig.batched("image"),
    }
    with pytest.raises(RuntimeError, match="'grid': 3, 'pixels': 6"):
        split_into_items(OUTPUTS, config)


def test_no_outputs_are_no_items() -> None:
    assert split_into_items({}, CONFIG) == {}
    assert MultiModalFieldConfig.flat_from_sizes("image", []).slices == ()


def test_items_that_outlive_their_batch_do_not_keep_it() -> None:
    item = split_into_items(OUTPUTS, CONFIG)["image"][1]
    own = own_storage(item)
    tensor = own["pixels"].data
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert torch.equal(tensor, item["pixels"].data)
    assert own["shared"].data is item["shared"].data
    assert own.nbytes == item.nbytes


def test_dictionary_embeddings_split_by_configuration() -> None:
    def fields(data: object) -> ConfiguredItemFields:
        sizes = data["grid"].prod(-1)
        return ConfiguredItemFields(
            "image",
            {
                "grid": MultiModalFieldConfig.batched("image"),
                "embeds": MultiModalFieldConfig.flat_from_sizes("image", sizes),
            },
        )

    data = {"grid": torch.tensor([[1, 2], [2, 2]]), "embeds": torch.arange(12.0).reshape(6, 2)}
    items = DictEmbeddingItems(data, "image", {"grid", "embeds"}, fields)
    assert items.get_count() == 2
    picked = items.select([1])
    assert torch.equal(picked.data["embeds"], data["embeds"][2:])
    assert torch.equal(picked.data["grid"], data["grid"][1:])
