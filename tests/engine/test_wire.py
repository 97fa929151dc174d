"""The wire form: byte for byte what tokens-in servers speak, and a reader that trusts nothing."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazydecode.engine.wire import (
    DTYPES,
    decode_item,
    dtype_name,
    encode_item,
    encode_metadata,
    is_at_hand,
    item_chunks,
    tensor_bytes,
    tensor_from_buffer,
)
from lazydecode.errors import ValidationError
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

REFERENCE = (Path(__file__).parent / "data" / "image_entry.msgpack").read_bytes()
"""An image's entry as another render server sent it, base64 removed."""


def item(**fields: tuple[NestedTensors, ItemField]) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({n: MultiModalFieldElem(*elem) for n, elem in fields.items()})


def read_independently(data: bytes) -> Any:
    """Plain MessagePack, without our reader: extensions become (code, bytes)."""
    return msgspec.msgpack.decode(data, ext_hook=lambda code, raw: (code, bytes(raw)))


# -- another server's entry


def test_our_reader_reads_another_servers_entry() -> None:
    read = decode_item(REFERENCE)
    assert read["image_grid_thw"].field == BatchedField(keep_on_cpu=True)
    assert read["image_grid_thw"].data.tolist() == [1, 4, 4]
    pixels = read["pixel_values"]
    assert pixels.field == FlatField(dim=0)
    assert (pixels.data.dtype, tuple(pixels.data.shape)) == (torch.uint8, (16, 1176))
    assert pixels.data[0, :8].tolist() == [192] * 8
    assert hashlib.sha256(pixels.data.numpy()).hexdigest().startswith("97aed4d39f9f8f1e671b1cd1")


def test_our_writer_writes_the_same_bytes() -> None:
    assert encode_item(decode_item(REFERENCE)) == REFERENCE


def test_metadata_is_the_part_that_stays_on_the_cpu() -> None:
    small = encode_metadata(decode_item(REFERENCE))
    assert small is not None
    assert len(small) == 87
    assert read_independently(small) == {
        "image_grid_thw": read_independently(REFERENCE)["image_grid_thw"]
    }
    assert encode_metadata(item(x=(torch.zeros(3), BatchedField()))) is None


# -- the form, field by field, for an independent reader


def test_each_kind_of_field_has_its_form() -> None:
    encoded = encode_item(
        item(
            grid=(torch.tensor([1, 4, 6]), BatchedField(keep_on_cpu=True)),
            rows=(torch.zeros(5, 2, dtype=torch.uint8), FlatField()),
            columns=(torch.zeros(1, 7, 2), FlatField(dim=1)),
            last=(torch.zeros(3, 4), FlatField(dim=-1)),
            padded=(torch.zeros(2, 3), PaddedField()),
            same=(torch.tensor(3), SharedField(4, keep_on_cpu=True)),
        )
    )
    fields = {name: entry["field"] for name, entry in read_independently(encoded).items()}
    whole = [None, None, None]
    assert fields == {
        "grid": ["batched", {"keep_on_cpu": True}],
        "rows": ["flat", {"keep_on_cpu": False, "slices": [[[0, 5, None]]], "dim": 0}],
        "columns": ["flat", {"keep_on_cpu": False, "slices": [[whole, [0, 7, None]]], "dim": 1}],
        "last": ["flat", {"keep_on_cpu": False, "slices": [[whole, [0, 4, None]]], "dim": 1}],
        "padded": ["flat", {"keep_on_cpu": False, "slices": [[[0, 2, None]]], "dim": 0}],
        "same": ["shared", {"keep_on_cpu": True, "batch_size": 4}],
    }


def test_each_kind_of_value_has_its_form() -> None:
    values: list[NestedTensors] = [
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int16),
        torch.tensor(2.5, dtype=torch.float32),
        [torch.tensor([7], dtype=torch.uint8), torch.tensor([8, 9], dtype=torch.uint8)],
        5,
        2.5,
        None,
        torch.empty(0, 3, dtype=torch.bool),
    ]
    encoded = encode_item(item(**{f"v{i}": (v, BatchedField()) for i, v in enumerate(values)}))
    assert [entry["data"] for entry in read_independently(encoded).values()] == [
        ["int16", [2, 2], (3, bytes([1, 0, 2, 0, 3, 0, 4, 0]))],
        ["float32", [], (3, np.float32(2.5).tobytes())],
        [["uint8", [1], (3, b"\x07")], ["uint8", [2], (3, b"\x08\x09")]],
        5,
        2.5,
        None,
        ["bool", [0, 3], (3, b"")],
    ]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 8, 16, 17, 255, 256, 65535, 65536])
def test_extension_headers_of_every_size(size: int) -> None:
    data = torch.arange(size).to(torch.uint8)
    read = read_independently(encode_item(item(x=(data, FlatField()))))
    assert read["x"]["data"] == ["uint8", [size], (3, bytes(data.tolist()))]


@pytest.mark.parametrize("count", [0, 15, 16, 70_000])
def test_maps_and_lists_of_every_size(count: int) -> None:
    many = item(x=([1] * count, BatchedField()))
    assert read_independently(encode_item(many))["x"]["data"] == [1] * count
    wide = item(**{f"f{i}": (i, BatchedField()) for i in range(min(count, 300))})
    assert len(read_independently(encode_item(wide))) == min(count, 300)


def test_floats_take_the_models_dtype_and_integers_keep_theirs() -> None:
    encoded = encode_item(
        item(
            pixels=(torch.tensor([1.0, 1.1]), FlatField()),
            seconds=(torch.tensor(0.4), BatchedField(keep_on_cpu=True)),
            mask=(torch.tensor([1], dtype=torch.int32), BatchedField()),
        ),
        dtype=torch.bfloat16,
    )
    read = decode_item(encoded)
    assert read["pixels"].data.equal(torch.tensor([1.0, 1.1]).to(torch.bfloat16))
    assert read["seconds"].data.equal(torch.tensor(0.4).to(torch.bfloat16))
    assert read["mask"].data.dtype == torch.int32


def test_strided_tensors_go_out_in_c_order() -> None:
    base = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    for view in (base.T, base[:, ::2], base[1:, 1], base.flip(0)):
        assert decode_item(encode_item(item(x=(view, FlatField()))))["x"].data.equal(view)


# -- round trips

shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(shapes)
    raw = draw(st.binary(min_size=0, max_size=64)) or b"\0"
    flat = torch.tensor(list(raw), dtype=torch.uint8)
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    values = flat.repeat(count // len(flat) + 1)[:count]
    return values.to(torch.int64).to(dtype).reshape(shape)


nested = st.recursive(
    st.one_of(tensors(), st.integers(-(2**63), 2**63 - 1), st.none(), st.floats(allow_nan=False)),
    lambda parts: st.lists(parts, max_size=4),
    max_leaves=6,
)
kinds = st.one_of(
    st.builds(BatchedField, keep_on_cpu=st.booleans()),
    st.builds(FlatField, keep_on_cpu=st.booleans()),
    st.builds(SharedField, st.integers(1, 9), keep_on_cpu=st.booleans()),
)


def same(left: NestedTensors, right: NestedTensors) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and left.equal(right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@settings(max_examples=200)
@given(st.dictionaries(st.text(max_size=8), st.tuples(nested, kinds), max_size=4))
def test_what_is_written_is_read_back(fields: dict[str, tuple[Any, ItemField]]) -> None:
    original = MultiModalKwargsItem({n: MultiModalFieldElem(*e) for n, e in fields.items()})
    read = decode_item(encode_item(original))
    assert list(read) == list(original)
    for name, elem in original.items():
        assert read[name].field == elem.field
        assert same(read[name].data, elem.data)


@settings(max_examples=300)
@given(st.integers(0, len(REFERENCE) - 1), st.integers(0, 255), st.booleans())
def test_damaged_entries_are_refused_or_read_never_worse(at: int, byte: int, cut: bool) -> None:
    damaged = REFERENCE[:at] if cut else REFERENCE[:at] + bytes([byte]) + REFERENCE[at + 1 :]
    try:
        decode_item(damaged)
    except ValidationError as exc:
        assert str(exc).startswith("the entry of kwargs_data cannot be read")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ([], "not a MessagePack map"),
        ({"x": 1}, "must be a map of `data` and `field`"),
        ({"x": {"data": 1, "field": ["batched", {}], "more": 1}}, "must be a map of"),
        ({"x": {"data": "text", "field": ["batched", {}]}}, "neither a tensor"),
        ({"x": {"data": 1, "field": ["stacked", {}]}}, "none of batched, flat, shared"),
        ({"x": {"data": 1, "field": ["flat", {}]}}, "none of batched, flat, shared"),
        ({"x": {"data": 1, "field": []}}, "none of batched, flat, shared"),
    ],
)
def test_malformed_entries_say_what_is_wrong(entry: Any, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        decode_item(msgspec.msgpack.encode(entry))


@pytest.mark.parametrize(
    ("dtype", "shape", "raw", "why"),
    [
        ("float8", [1], b"\0", "dtype 'float8' is none of bool, uint8"),
        ("object", [1], b"\0" * 8, "dtype 'object' is none of"),
        ("uint8", [2], b"\0", "takes 2 bytes, but 1 were given"),
        ("uint8", [-1], b"\0", "negative dimension"),
        ("uint8", [2**40, 2**40], b"\0", "bytes, but 1 were given"),
        ("uint8", [True], b"\0", "has the shape"),
        ("uint8", ["1"], b"\0", "has the shape"),
    ],
)
def test_tensors_that_lie_about_themselves_are_refused(
    dtype: str, shape: Any, raw: bytes, why: str
) -> None:
    data = [dtype, shape, msgspec.msgpack.Ext(3, raw)]
    entry = {"x": {"data": data, "field": ["batched", {"keep_on_cpu": False}]}}
    with pytest.raises(ValidationError, match=why):
        decode_item(msgspec.msgpack.encode(entry))


def test_deep_nesting_and_foreign_extensions_are_refused() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    field = ["batched", {"keep_on_cpu": False}]
    with pytest.raises(ValidationError, match="neither a tensor"):
        decode_item(msgspec.msgpack.encode({"x": {"data": deep, "field": field}}))
    foreign = ["uint8", [1], msgspec.msgpack.Ext(4, b"\0")]
    with pytest.raises(ValidationError, match="extension type 4 is unknown"):
        decode_item(msgspec.msgpack.encode({"x": {"data": foreign, "field": field}}))


# -- memory


def test_a_tensor_is_copied_once() -> None:
    size = 8 * 2**20
    big = item(x=(torch.zeros(size, dtype=torch.uint8), FlatField()))
    tracemalloc.start()
    try:
        encoded = encode_item(big)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(encoded) > size
    assert peak < 1.1 * size


def test_read_tensors_are_ours_to_change() -> None:
    message = bytearray(encode_item(item(x=(torch.ones(4), FlatField()))))
    read = decode_item(message)["x"].data
    message[:] = bytes(len(message))
    assert read.tolist() == [1.0] * 4
    read += 1


def test_bytes_of_a_contiguous_tensor_are_a_view() -> None:
    tensor = torch.arange(4, dtype=torch.int32)
    view = tensor_bytes(tensor)
    tensor[0] = 9
    assert bytes(view[:4]) == b"\x09\0\0\0"
    again = tensor_from_buffer("int32", [2, 2], bytearray(view))
    assert again.tolist() == [[9, 1], [2, 3]]
    assert dtype_name(torch.bfloat16) == "bfloat16"


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (torch.zeros(3, 4, dtype=torch.uint8), torch.float16, True),
        (torch.zeros(3, 4), None, True),
        (torch.zeros(3, 4), torch.float32, True),
        (torch.zeros(3, 4), torch.float16, False),
        (torch.zeros(3, 4).T, None, False),
        ([torch.zeros(2), [3, torch.zeros(0)]], torch.float32, True),
        ([torch.zeros(2), [torch.zeros(2, 2).T]], torch.float32, False),
        (7, torch.float16, True),
    ],
)
def test_what_is_at_hand_is_written_from_its_own_memory(
    value: NestedTensors, dtype: torch.dtype | None, expected: bool
) -> None:
    whole = item(x=(value, BatchedField()), n=(torch.ones(1, dtype=torch.int64), BatchedField()))
    assert is_at_hand(whole, dtype=dtype) is expected
    chunks = item_chunks(whole, dtype=dtype)
    addresses = {
        np.frombuffer(chunk, np.uint8).ctypes.data
        for chunk in chunks
        if isinstance(chunk, memoryview) and len(chunk)
    }

    def tensors(value: NestedTensors) -> list[torch.Tensor]:
        if isinstance(value, list):
            return [tensor for part in value for tensor in tensors(part)]
        return [value] if isinstance(value, torch.Tensor) and value.numel() else []

    assert all(tensor.data_ptr() in addresses for tensor in tensors(value)) is expected
