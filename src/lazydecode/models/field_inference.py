"""How the tensors of several items join into a batch: learnt from probes, never written down.

A processor is run on item a alone, on item b alone, and on both. What the third run returns
must be one of a few joins of the first two, value by value; anything else is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from lazydecode.inputs import (
    BatchedField,
    FlatField,
    ItemField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PaddedField,
    SharedField,
)

_SMALL: Final = 16
"""Elements per item up to which a batched tensor counts as metadata and stays on the CPU."""


class FieldInferenceError(ValueError):
    """A tensor of the processor joins in no way that is known."""


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Tensor name -> how items join, for one modality."""

    rules: Mapping[str, ItemField]
    differs: tuple[str, ...] = ()
    """Tensors whose values in a batch differ from those of the item alone beyond padding."""
    optional: tuple[str, ...] = field(default=())
    """Tensors that some items lack."""
    steps: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Tensor of row numbers -> the tensor whose rows it counts, and how many of that one's first
    dimensions make a row number."""

    def item(self, tensors: Mapping[str, Any]) -> MultiModalKwargsItem:
        """Return one item's tensors with their rules; batched ones lose their batch dimension.

        Raises:
            FieldInferenceError: If a tensor has no rule.
        """
        return MultiModalKwargsItem(
            {name: self._element(name, value, tensors) for name, value in tensors.items()}
        )

    def small(self, tensors: Mapping[str, Any]) -> MultiModalKwargsItem:
        """Return only those tensors that stay on the CPU: grids, sizes, counts."""
        kept = {
            n: v for n, v in tensors.items() if getattr(self.rules.get(n), "keep_on_cpu", False)
        }
        return self.item(kept)

    def _element(self, name: str, value: Any, tensors: Mapping[str, Any]) -> MultiModalFieldElem:
        rule = self.rules.get(name)
        if rule is None:
            raise FieldInferenceError(f"the processor returned {name!r}, which no probe had")
        if name in self.steps:
            counted, dims = self.steps[name]
            rule = FlatField(step=math.prod(tensors[counted].shape[:dims]))
        elif isinstance(value, list) and len(value) == 1 and isinstance(rule, BatchedField):
            value = value[0]
        elif isinstance(rule, BatchedField) and isinstance(value, torch.Tensor) and value.ndim:
            if value.shape[0] == 1:
                value = value[0]
            else:  # an item that has several rows after all joins the same way
                rule = FlatField(dim=0, keep_on_cpu=rule.keep_on_cpu)
        if isinstance(value, torch.Tensor):
            value = value.contiguous()
        return MultiModalFieldElem(value, rule)


def infer_rules(
    a: Mapping[str, Any], b: Mapping[str, Any], both: Mapping[str, Any] | None
) -> FieldRules:
    """Return the rules of one modality from the outputs of its probes.

    Args:
        a: Tensors of the first item alone.
        b: Tensors of the second item alone.
        both: Tensors of one run over both; None if the family takes one item only.

    Raises:
        FieldInferenceError: If a tensor joins in no known way.
    """
    rules: dict[str, ItemField] = {}
    differs: list[str] = []
    optional: list[str] = []
    steps: dict[str, tuple[str, int]] = {}
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            optional.append(name)
        first, second = a.get(name, b.get(name)), b.get(name, a.get(name))
        joined = None if both is None or name in optional else both.get(name)
        rule, same = infer_rule(name, first, second, joined)
        rules[name] = rule
        if not same:
            counted = None if both is None else _counted(rule, first, second, joined, a)
            if counted is None:
                differs.append(name)
            else:
                steps[name] = counted
    return FieldRules(rules, tuple(differs), tuple(optional), steps)


def infer_rule(name: str, a: Any, b: Any, both: Any) -> tuple[ItemField, bool]:
    """Return how `a` and `b` became `both`, and whether the values stayed the same."""
    if both is None:
        return _lone_rule(name, a), True
    if isinstance(a, list) or isinstance(both, list):
        return BatchedField(), True
    if not all(isinstance(v, torch.Tensor) for v in (a, b, both)):
        return SharedField(), bool(a == both)
    if a.ndim == 0:
        return (BatchedField(keep_on_cpu=True), True) if both.ndim else (SharedField(), True)
    for dim in range(a.ndim):
        if both.ndim != a.ndim or both.shape[dim] != a.shape[dim] + b.shape[dim]:
            continue
        others = [d for d in range(a.ndim) if d != dim]
        exact = all(a.shape[d] == b.shape[d] == both.shape[d] for d in others)
        if not exact and any(both.shape[d] < max(a.shape[d], b.shape[d]) for d in others):
            continue
        same = _same_values(a, b, both, dim)
        if not exact:
            return PaddedField(dim=dim), same
        if dim == 0 and a.shape[0] == b.shape[0] == 1:
            return BatchedField(keep_on_cpu=a.numel() <= _SMALL), same
        # A grid per piece of an item is as small as a grid per item.
        small = dim == 0 and not a.is_floating_point() and max(a.numel(), b.numel()) <= _SMALL
        return FlatField(dim=dim, keep_on_cpu=small), same
    if a.shape == b.shape == both.shape and torch.equal(a, both):
        return SharedField(), True
    raise FieldInferenceError(
        f"the processor's {name!r} joins in no known way: items of shape {tuple(a.shape)} and "
        f"{tuple(b.shape)} become {tuple(both.shape)}"
    )


def _counted(
    rule: ItemField, a: Any, b: Any, both: Any, tensors: Mapping[str, Any]
) -> tuple[str, int] | None:
    """Return the tensor whose rows the second item's numbers were moved by; None if by none."""
    if not (isinstance(rule, FlatField) and rule.dim == 0 and isinstance(both, torch.Tensor)):
        return None
    if both.is_floating_point() or not torch.equal(both[: len(a)], a):
        return None
    moved = both[len(a) :] - b
    by = set(moved[b >= 0].tolist())
    if len(by) != 1 or bool(moved[b < 0].any()):
        return None
    step = by.pop()
    for name, value in tensors.items():
        for dims in range(1, getattr(value, "ndim", 0)):
            if math.prod(value.shape[:dims]) == step:
                return name, dims
    return None


def _lone_rule(name: str, a: Any) -> ItemField:
    """Return the rule of a tensor that no run shows for two items."""
    if isinstance(a, torch.Tensor) and a.ndim and a.shape[0] != 1:
        return FlatField(dim=0)
    small = isinstance(a, torch.Tensor) and a.numel() <= _SMALL
    return BatchedField(keep_on_cpu=small)


def _same_values(a: torch.Tensor, b: torch.Tensor, both: torch.Tensor, dim: int) -> bool:
    """Whether `both` holds the values of `a` and `b`, and nothing but zeros beside them."""
    first = both.narrow(dim, 0, a.shape[dim])
    second = both.narrow(dim, a.shape[dim], b.shape[dim])
    return _is_padded(a, first) and _is_padded(b, second)


def _is_padded(alone: torch.Tensor, padded: torch.Tensor) -> bool:
    window = tuple(slice(0, size) for size in alone.shape)
    if not torch.equal(padded[window], alone):
        # Some classes pad on the left.
        window = tuple(slice(p - s, p) for s, p in zip(alone.shape, padded.shape, strict=True))
        if not torch.equal(padded[window], alone):
            return False
    return int(torch.count_nonzero(padded)) == int(torch.count_nonzero(alone))


def same_values(a: Any, b: Any) -> bool:
    """Whether two outputs of a processor are equal, bit by bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return (
            isinstance(b, list)
            and len(a) == len(b)
            and all(same_values(x, y) for x, y in zip(a, b, strict=True))
        )
    return bool(a == b)
