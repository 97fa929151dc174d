"""Join rules from probes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazydecode.inputs import BatchedField, FlatField, PaddedField, SharedField
from lazydecode.models.field_inference import FieldInferenceError, FieldRules, infer_rules
from lazydecode.models.joining import join_items


def numbers(*shape: int, start: int = 1) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def padded(tensor: torch.Tensor, *shape: int, left: bool = False) -> torch.Tensor:
    full = torch.zeros(shape, dtype=tensor.dtype)
    window = tuple(
        slice(total - size, total) if left and axis else slice(0, size)
        for axis, (size, total) in enumerate(zip(tensor.shape, shape, strict=True))
    )
    full[window] = tensor
    return full


CASES: list[tuple[str, Any, Any, Any, Any]] = [
    ("batched", numbers(1, 20), numbers(1, 20, start=5), None, BatchedField()),
    ("small batched", numbers(1, 3), numbers(1, 3, start=5), None, BatchedField(True)),
    ("flat", numbers(4, 6), numbers(2, 6, start=9), None, FlatField(0)),
    ("few whole", numbers(2, 3).int(), numbers(1, 3, start=9).int(), None, FlatField(0, True)),
    ("few", numbers(2, 3), numbers(1, 3, start=9), None, FlatField(0)),
    ("flat on 1", numbers(1, 4, 6), numbers(1, 2, 6), "dim1", FlatField(1)),
    ("flat on the last", numbers(1, 3, 8), numbers(1, 3, 4), "dim2", FlatField(2)),
]


@pytest.mark.parametrize(("name", "a", "b", "how", "rule"), CASES, ids=[c[0] for c in CASES])
def test_a_concatenation_is_recognised(name: str, a: Any, b: Any, how: Any, rule: Any) -> None:
    dim = 0 if how is None else int(how[-1])
    both = torch.cat([a, b], dim)
    rules = infer_rules({"x": a}, {"x": b}, {"x": both})
    assert rules.rules == {"x": rule}
    assert rules.differs == ()
    items = [rules.item({"x": a}), rules.item({"x": b})]
    assert torch.equal(join_items(items)["x"], both)  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [False, True])
def test_zero_padding_is_recognised(left: bool) -> None:
    a, b = numbers(1, 5, 2), numbers(1, 3, 2, start=50)
    both = torch.cat([a, padded(b, 1, 5, 2, left=left)])
    rules = infer_rules({"x": a}, {"x": b}, {"x": both})
    assert rules.rules == {"x": PaddedField(0)}
    assert rules.differs == ()
    if not left:
        joined = join_items([rules.item({"x": t}) for t in (a, b)])
        assert torch.equal(joined["x"], both)  # type: ignore[arg-type]


def test_values_that_a_batch_changes_are_reported() -> None:
    a, b = numbers(1, 4), numbers(1, 2)
    both = torch.cat([a, padded(b, 1, 4) + 1])
    rules = infer_rules({"x": a}, {"x": b}, {"x": both})
    assert rules.rules == {"x": PaddedField(0)}
    assert rules.differs == ("x",)


def test_one_value_for_all_is_shared() -> None:
    value = torch.tensor([7])
    rules = infer_rules({"x": value}, {"x": value}, {"x": value})
    assert rules.rules == {"x": SharedField()}


def test_row_numbers_are_renumbered_when_items_join() -> None:
    pixels = [numbers(2, 3, 4), numbers(1, 3, 4)]
    a = torch.tensor([[0, 5], [-1, 2]])
    b = torch.tensor([[1, -1]])
    both = torch.cat([a, torch.tensor([[7, -1]])])
    rules = infer_rules(
        {"p": pixels[0], "rows": a},
        {"p": pixels[1], "rows": b},
        {"p": torch.cat(pixels), "rows": both},
    )
    assert rules.steps == {"rows": ("p", 2)}
    items = [
        rules.item({"p": pixels[0], "rows": a}),
        rules.item({"p": pixels[1], "rows": b}),
        rules.item({"p": pixels[1], "rows": b}),
    ]
    joined = join_items(items)
    assert torch.equal(joined["rows"], torch.tensor([[0, 5], [-1, 2], [7, -1], [10, -1]]))  # type: ignore[arg-type]


def test_a_tensor_that_some_items_lack_is_optional() -> None:
    a = {"x": numbers(1, 20), "crops": numbers(3, 2)}
    b = {"x": numbers(1, 20)}
    both = {"x": numbers(2, 20), "crops": numbers(3, 2)}
    rules = infer_rules(a, b, both)
    assert rules.optional == ("crops",)
    joined = join_items([rules.item(a), rules.item(b), rules.item(a)])
    assert joined["crops"].shape == (6, 2)  # type: ignore[union-attr]


def test_a_join_of_no_known_kind_is_refused_by_name() -> None:
    with pytest.raises(FieldInferenceError, match="'x'"):
        infer_rules({"x": numbers(2, 3)}, {"x": numbers(2, 3)}, {"x": numbers(5, 7)})


def test_a_tensor_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(FieldInferenceError, match="'extra'"):
        FieldRules({"x": BatchedField()}).item({"extra": numbers(1, 2)})


def test_a_batched_tensor_with_several_rows_joins_row_by_row() -> None:
    rules = FieldRules({"x": BatchedField()})
    items = [rules.item({"x": numbers(1, 2)}), rules.item({"x": numbers(3, 2)})]
    assert [type(item["x"].field) for item in items] == [BatchedField, FlatField]
    assert join_items(items)["x"].shape == (4, 2)  # type: ignore[union-attr]


def test_batched_tensors_that_do_not_stack_stay_a_list() -> None:
    rules = FieldRules({"x": BatchedField()})
    items = [rules.item({"x": numbers(1, 2)}), rules.item({"x": numbers(1, 3)})]
    joined = join_items(items)["x"]
    assert isinstance(joined, list)
    assert [tuple(t.shape) for t in joined] == [(2,), (3,)]  # type: ignore[union-attr]
