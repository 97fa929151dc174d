"""The MessagePack form in which an item's tensors leave for other engines, and its reader.

One entry is a map from field name to `{"data": ..., "field": ...}`. A tensor is `[dtype name,
shape, extension type 3]`, the extension holding its raw little-endian C-order bytes; a list of
tensors is an array of such arrays, a number stands for itself, nil is no data. `field` says how
items join to a batch: `batched`, `flat` or `shared`, with that kind's options. This is the form
of vLLM's tokens-in server, so its names and shapes are not ours to change.

`encode_item` copies each tensor once, from where it is into the entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import torch

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

RAW_BYTES_CODE: Final = 3
"""MessagePack extension type of a tensor's raw bytes."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
"""Every dtype that an item may have, by its name on the wire."""

_Chunk = bytes | memoryview
_MAX_EXT_BYTES: Final = 2**32 - 1
_encoder: Final = msgspec.msgpack.Encoder()


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name on the wire, for example `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def encode_item(item: MultiModalKwargsItem, *, dtype: torch.dtype | None = None) -> bytes:
    """Return an item as one MessagePack map; base64 is for the caller to add.

    Args:
        item: The tensors of one item, on any device.
        dtype: The model's dtype: floating-point tensors are cast to it. None keeps theirs.
    """
    return b"".join(_item_chunks(item, dtype))


def item_chunks(
    item: MultiModalKwargsItem, *, dtype: torch.dtype | None = None
) -> list[bytes | memoryview]:
    """Return what `encode_item` joins, piece by piece.

    Tensors are views of their own memory, so that a large item need not be copied at once, which
    would hold the interpreter's lock for as long as it takes.
    """
    return list(_item_chunks(item, dtype))


def is_at_hand(item: MultiModalKwargsItem, *, dtype: torch.dtype | None = None) -> bool:
    """Whether `item_chunks` makes nothing but views: no tensor is cast, copied or fetched."""
    return all(_is_view(elem.data, dtype) for elem in item.values())


def encode_metadata(
    item: MultiModalKwargsItem, *, dtype: torch.dtype | None = None
) -> bytes | None:
    """Return the small part of an item, its fields that stay on the CPU, in the same form.

    None if it has no such field.
    """
    small = {name: elem for name, elem in item.items() if elem.field.keep_on_cpu}
    return b"".join(_item_chunks(small, dtype)) if small else None


def small_numbers(item: MultiModalKwargsItem) -> dict[str, Any]:
    """Return the small part of an item as numbers and nested lists of them, by field."""
    return {name: elem.numbers() for name, elem in item.items() if elem.field.keep_on_cpu}


def decode_item(data: bytes | bytearray | memoryview) -> MultiModalKwargsItem:
    """Read what `encode_item` wrote; the tensors are copies and do not refer to `data`.

    Raises:
        ValidationError: If `data` is not such an entry, or declares other sizes than it has.
    """
    try:
        fields = msgspec.msgpack.decode(data, type=dict[str, Any], ext_hook=_ext_hook)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise _malformed(f"it is not a MessagePack map: {exc}") from exc
    item = MultiModalKwargsItem()
    for name, entry in fields.items():
        if not isinstance(entry, dict) or entry.keys() != {"data", "field"}:
            raise _malformed(f"field {name!r} must be a map of `data` and `field`")
        item[name] = MultiModalFieldElem(
            _read_nested(name, entry["data"], depth=0), _read_field(name, entry["field"])
        )
    return item


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the C-order bytes of a tensor; a view of its memory if it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_from_buffer(name: str, shape: list[int], buffer: bytearray | memoryview) -> torch.Tensor:
    """Return the tensor whose C-order bytes `buffer` holds; they share memory.

    Args:
        name: The dtype's name on the wire.
        shape: Its dimensions.
        buffer: Writable memory, aligned to the dtype.

    Raises:
        ValueError: If the dtype is unknown, or the sizes do not agree.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"dtype {name!r} is none of {', '.join(DTYPES)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} has a negative dimension")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(buffer):
        raise ValueError(f"{name}{shape} takes {expected} bytes, but {len(buffer)} were given")
    if expected == 0:  # torch.frombuffer refuses empty buffers
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


# -- writing


def _item_chunks(
    item: Mapping[str, MultiModalFieldElem], dtype: torch.dtype | None
) -> Iterator[_Chunk]:
    yield map_header(len(item))
    for name, elem in item.items():
        yield _encoder.encode(name)
        yield map_header(2)
        yield _encoder.encode("data")
        yield from _nested_chunks(elem.data, dtype)
        yield _encoder.encode("field")
        yield _encoder.encode(_field_form(elem))


def _nested_chunks(value: NestedTensors, dtype: torch.dtype | None) -> Iterator[_Chunk]:
    if isinstance(value, torch.Tensor):
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        raw = tensor_bytes(value)
        yield array_header(3)
        yield _encoder.encode(dtype_name(value.dtype))
        yield _encoder.encode(list(value.shape))
        yield _ext_header(len(raw))
        yield raw
    elif isinstance(value, list):
        yield array_header(len(value))
        for part in value:
            yield from _nested_chunks(part, dtype)
    else:
        yield _encoder.encode(value)


def _is_view(value: NestedTensors, dtype: torch.dtype | None) -> bool:
    if isinstance(value, list):
        return all(_is_view(part, dtype) for part in value)
    if not isinstance(value, torch.Tensor):
        return True
    is_cast = dtype is not None and value.is_floating_point() and value.dtype != dtype
    return not is_cast and value.is_cpu and value.is_contiguous()


def _field_form(elem: MultiModalFieldElem) -> list[Any]:
    field = elem.field
    options: dict[str, Any] = {"keep_on_cpu": field.keep_on_cpu}
    match field:
        case BatchedField():
            return ["batched", options]
        case SharedField():
            return ["shared", {**options, "batch_size": field.batch_size}]
        case FlatField() | PaddedField():
            # The form has no kind for zero-padded joins. For an item alone they are `flat`.
            dim, size = _dim_and_size(elem.data, field.dim)
            whole: list[list[int | None]] = [[None, None, None] for _ in range(dim)]
            return ["flat", {**options, "slices": [[*whole, [0, size, None]]], "dim": dim}]


def _dim_and_size(value: NestedTensors, dim: int) -> tuple[int, int]:
    """Return `dim` counted from the front, and the size of `value` along it."""
    if isinstance(value, torch.Tensor) and value.ndim:
        dim = dim % value.ndim
        return dim, value.shape[dim]
    return 0, len(value) if isinstance(value, list) else 1


def map_header(size: int) -> bytes:
    """Return how a MessagePack map of so many entries begins."""
    if size < 16:
        return bytes((0x80 | size,))
    return b"\xde" + size.to_bytes(2, "big") if size < 2**16 else b"\xdf" + size.to_bytes(4, "big")


def array_header(size: int) -> bytes:
    """Return how a MessagePack array of so many entries begins."""
    if size < 16:
        return bytes((0x90 | size,))
    return b"\xdc" + size.to_bytes(2, "big") if size < 2**16 else b"\xdd" + size.to_bytes(4, "big")


def _ext_header(num_bytes: int) -> bytes:
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(num_bytes)
    if fixed is not None:
        return bytes((fixed, RAW_BYTES_CODE))
    if num_bytes < 2**8:
        return bytes((0xC7, num_bytes, RAW_BYTES_CODE))
    if num_bytes < 2**16:
        return b"\xc8" + num_bytes.to_bytes(2, "big") + bytes((RAW_BYTES_CODE,))
    if num_bytes > _MAX_EXT_BYTES:
        raise ValueError(f"a tensor of {num_bytes} bytes is too large for MessagePack (4 GiB)")
    return b"\xc9" + num_bytes.to_bytes(4, "big") + bytes((RAW_BYTES_CODE,))


# -- reading


class _Raw:
    """The bytes of one extension: a view of the message, until the tensor copies them."""

    __slots__ = ("data",)

    def __init__(self, data: memoryview) -> None:
        self.data = data


def _ext_hook(code: int, data: memoryview) -> _Raw:
    if code != RAW_BYTES_CODE:
        raise _malformed(f"extension type {code} is unknown")
    return _Raw(data)


_MAX_DEPTH: Final = 16


def _read_nested(name: str, value: Any, *, depth: int) -> NestedTensors:
    if value is None or isinstance(value, int | float):
        return value
    if not isinstance(value, list) or depth > _MAX_DEPTH:
        raise _malformed(f"field {name!r} holds neither a tensor, a list, a number nor nil")
    match value:
        case [str() as dtype, list() as shape, _Raw() as raw]:
            # `type(...)` instead of isinstance: True is an int.
            if not all(type(size) is int for size in shape):
                raise _malformed(f"field {name!r} has the shape {shape}")
            try:
                return tensor_from_buffer(dtype, shape, bytearray(raw.data))
            except ValueError as exc:
                raise _malformed(f"field {name!r}: {exc}") from exc
    return [_read_nested(name, part, depth=depth + 1) for part in value]


def _read_field(name: str, value: Any) -> ItemField:
    match value:
        case ["batched", {**options}]:
            return BatchedField(keep_on_cpu=bool(options.get("keep_on_cpu", False)))
        case ["flat", {"dim": int() as dim, **options}]:
            return FlatField(dim=dim, keep_on_cpu=bool(options.get("keep_on_cpu", False)))
        case ["shared", {"batch_size": int() as batch_size, **options}]:
            return SharedField(batch_size, keep_on_cpu=bool(options.get("keep_on_cpu", False)))
    raise _malformed(f"field {name!r} joins by a rule that is none of batched, flat, shared")


def _malformed(why: str) -> ValidationError:
    return ValidationError(f"the entry of kwargs_data cannot be read: {why}")
