"""From per-item tensors to the batch that a model's forward takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from lazydecode.inputs import (
    BatchedField,
    FlatField,
    ItemField,
    MultiModalKwargsItem,
    NestedTensors,
    PaddedField,
    SharedField,
)


def join_items(items: Sequence[MultiModalKwargsItem]) -> dict[str, NestedTensors]:
    """Return field name -> batch, joined by the rule that each field carries.

    Items are in prompt order; an item may lack a field that others have. What cannot be
    stacked (batched tensors of different shapes) stays a list.

    Raises:
        ValueError: If a flat field's tensors do not fit together.
    """
    names = dict.fromkeys(name for item in items for name in item)
    joined: dict[str, NestedTensors] = {}
    for name in names:
        elems = [item[name] for item in items if name in item]
        joined[name] = _join([elem.data for elem in elems], [elem.field for elem in elems])
    return joined


def _join(values: Sequence[NestedTensors], fields: Sequence[ItemField]) -> NestedTensors:
    field = fields[0]
    if isinstance(field, SharedField):
        return values[0]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return _join_plain(values)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(isinstance(f, PaddedField) for f in fields):
        dim = next(f.dim for f in fields if isinstance(f, PaddedField))
        return torch.cat(_pad_all(tensors, dim), dim)
    if all(isinstance(f, BatchedField) for f in fields):
        shapes = {tensor.shape for tensor in tensors}
        return torch.stack(tensors) if len(shapes) == 1 else list(tensors)
    # Flat, and batched ones among them: a batched tensor is one row of its batch.
    rows = [
        tensor.unsqueeze(0) if isinstance(f, BatchedField) else tensor
        for tensor, f in zip(tensors, fields, strict=True)
    ]
    dim = next(f.dim for f in fields if isinstance(f, FlatField))
    return torch.cat(_renumber(rows, fields), dim)


def _renumber(rows: list[torch.Tensor], fields: Sequence[ItemField]) -> list[torch.Tensor]:
    """Make row numbers that count within an item count within the batch."""
    steps = [f.step if isinstance(f, FlatField) else 0 for f in fields]
    if not any(steps):
        return rows
    starts = [0, *accumulate(steps)]
    return [
        torch.where(row >= 0, row + start, row) if start else row
        for row, start in zip(rows, starts, strict=False)
    ]


def _join_plain(values: Sequence[NestedTensors]) -> NestedTensors:
    """Join numbers to a tensor, lists to one list."""
    if all(isinstance(value, int | float) for value in values):
        return torch.tensor(values)
    joined: list[NestedTensors] = []
    for value in values:
        if isinstance(value, list):
            joined.extend(value)
        else:
            joined.append(value)
    return joined


def _pad_all(tensors: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Zero-pad to the largest on every dimension but `dim`."""
    largest = [max(t.shape[d] for t in tensors) for d in range(tensors[0].ndim)]
    padded = []
    for tensor in tensors:
        shape = [tensor.shape[d] if d == dim else largest[d] for d in range(tensor.ndim)]
        if list(tensor.shape) == shape:
            padded.append(tensor)
            continue
        full = tensor.new_zeros(shape)
        full[tuple(slice(0, size) for size in tensor.shape)] = tensor
        padded.append(full)
    return padded
