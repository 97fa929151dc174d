"""How the tensors that a Hugging Face processor returns split into items, and join again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from lazydecode.inputs import (
    BatchedField,
    FlatField,
    ItemField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    NestedTensors,
    PaddedField,
    SharedField,
)
from lazydecode.processing.failures import ItemCountError


@dataclass(frozen=True, slots=True)
class MultiModalFieldConfig:
    """The rule for one named output: which modality it belongs to and how it splits."""

    modality: str
    field: ItemField
    slices: tuple[slice, ...] | None = None
    """For a flat field, the part of each item along `field.dim`."""

    @staticmethod
    def batched(modality: str, *, keep_on_cpu: bool = False) -> MultiModalFieldConfig:
        """Item i is `data[i]`; items are stacked along a new first dimension."""
        return MultiModalFieldConfig(modality, BatchedField(keep_on_cpu))

    @staticmethod
    def flat(
        modality: str, slices: Sequence[slice], dim: int = 0, *, keep_on_cpu: bool = False
    ) -> MultiModalFieldConfig:
        """Item i is the part `slices[i]` along `dim`; items are concatenated along it."""
        return MultiModalFieldConfig(modality, FlatField(dim, keep_on_cpu), tuple(slices))

    @staticmethod
    def flat_from_sizes(
        modality: str, sizes: Any, dim: int = 0, *, keep_on_cpu: bool = False
    ) -> MultiModalFieldConfig:
        """Item i takes `sizes[i]` entries along `dim`, one item after the other."""
        ends = list(accumulate(int(size) for size in sizes))
        slices = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=False)]
        return MultiModalFieldConfig.flat(modality, slices, dim, keep_on_cpu=keep_on_cpu)

    @staticmethod
    def shared(
        modality: str, batch_size: int, *, keep_on_cpu: bool = False
    ) -> MultiModalFieldConfig:
        """All `batch_size` items of the request have the same value."""
        return MultiModalFieldConfig(modality, SharedField(batch_size, keep_on_cpu))

    def build_elems(self, data: Any) -> list[MultiModalFieldElem]:
        """Split `data` into one element per item."""
        field = self.field
        if isinstance(field, SharedField):
            return [MultiModalFieldElem(data, field)] * field.batch_size
        if isinstance(field, FlatField) and self.slices is not None:
            return [
                MultiModalFieldElem(_narrow(data, part, field.dim), field) for part in self.slices
            ]
        return [MultiModalFieldElem(item, field) for item in data]


def _narrow(data: Any, part: slice, dim: int) -> Any:
    if isinstance(data, torch.Tensor) and dim != 0:
        return data[(*(slice(None),) * (dim % data.ndim), part)]
    return data[part]


def split_into_items(
    hf_outputs: Mapping[str, Any], config: Mapping[str, MultiModalFieldConfig]
) -> dict[str, list[MultiModalKwargsItem]]:
    """Return modality -> per item its named tensors.

    Outputs that have no rule belong to the text and are left out.

    Raises:
        ItemCountError: If the outputs of one modality have different numbers of items.
    """
    by_modality: dict[str, dict[str, list[MultiModalFieldElem]]] = {}
    for name, rule in config.items():
        data = hf_outputs.get(name)
        if data is not None:
            by_modality.setdefault(rule.modality, {})[name] = rule.build_elems(data)
    items: dict[str, list[MultiModalKwargsItem]] = {}
    for modality, elems in by_modality.items():
        counts = {name: len(values) for name, values in elems.items()}
        if len(set(counts.values())) > 1:
            raise ItemCountError(f"{modality} outputs disagree on the number of items: {counts}")
        num_items = next(iter(counts.values()))
        items[modality] = [
            MultiModalKwargsItem({name: values[index] for name, values in elems.items()})
            for index in range(num_items)
        ]
    return items


def own_storage(item: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """Return the item over memory of its own.

    Items that were split from one batch are views; one of them would keep all of it in memory.
    """
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(_own(elem.data), elem.field) for name, elem in item.items()}
    )


def _own(data: NestedTensors) -> NestedTensors:
    if isinstance(data, list):
        return [_own(part) for part in data]
    if isinstance(data, torch.Tensor) and data.untyped_storage().nbytes() > data.nbytes:
        return data.clone(memory_format=torch.contiguous_format)
    return data


def join_elems(elems: Sequence[MultiModalFieldElem]) -> NestedTensors:
    """Join one named tensor of several items by its rule, as the model takes it.

    Batched and flat tensors of different shapes stay a list.
    """
    field = elems[0].field
    data = [elem.data for elem in elems]
    if isinstance(field, SharedField):
        return data[0]
    if not all(isinstance(value, torch.Tensor) for value in data):
        return data
    tensors: list[torch.Tensor] = [value for value in data if isinstance(value, torch.Tensor)]
    if isinstance(field, PaddedField):
        return torch.cat(_pad_to_largest(tensors, field.dim), dim=field.dim)
    if isinstance(field, BatchedField):
        same = len({tensor.shape for tensor in tensors}) == 1
        return torch.stack(tensors) if same else data
    dim = field.dim
    rests = {_without_dim(tensor.shape, dim) for tensor in tensors}
    return torch.cat(tensors, dim=dim) if len(rests) == 1 else data


def join_items(items: Sequence[MultiModalKwargsItem]) -> dict[str, NestedTensors]:
    """Join all named tensors of several items: the inverse of `split_into_items`."""
    names = dict.fromkeys(name for item in items for name in item)
    return {name: join_elems([item[name] for item in items if name in item]) for name in names}


def _without_dim(shape: torch.Size, dim: int) -> tuple[int, ...]:
    dims = list(shape)
    if dims:
        del dims[dim % len(dims)]
    return tuple(dims)


def _pad_to_largest(tensors: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Zero-pad at the end of every dimension but `dim`."""
    ndim = tensors[0].ndim
    largest = [max(tensor.shape[axis] for tensor in tensors) for axis in range(ndim)]
    padded = []
    for tensor in tensors:
        target = [
            tensor.shape[axis] if axis == dim % ndim else largest[axis] for axis in range(ndim)
        ]
        if list(tensor.shape) == target:
            padded.append(tensor)
            continue
        full = tensor.new_zeros(target)
        full[tuple(slice(0, size) for size in tensor.shape)] = tensor
        padded.append(full)
    return padded


class ConfiguredItemFields:
    """Split and join by field rules: what `parse.DictEmbeddingItems` needs."""

    def __init__(self, modality: str, config: Mapping[str, MultiModalFieldConfig]) -> None:
        self._modality = modality
        self._config = config

    def split(self, data: Mapping[str, Any]) -> Sequence[MultiModalKwargsItem]:
        """Return per item its tensors."""
        return split_into_items(data, self._config).get(self._modality, [])

    def join(self, items: Sequence[MultiModalKwargsItem]) -> Mapping[str, NestedTensors]:
        """Return the tensors of all items together."""
        return join_items(items)
