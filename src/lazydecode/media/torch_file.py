"""Tensors written by `torch.save`, read without running anything that the file says.

Such a file is a zip archive: the raw bytes of each storage, and a pickle that says how tensors
lie over them. A pickle is a program. The few instructions that describe tensors are read here
by a reader of our own, which knows four names and calls none of them; any other instruction or
name is refused. Sizes are checked against the bytes that are there before anything is made.

Source: torch/serialization.py (archive layout, persistent ids), torch/_utils.py (arguments of
the `_rebuild` functions), Python's pickletools (instructions).
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

__all__ = ["load_torch"]

_MAX_PICKLE_BYTES: Final = 1024 * 1024
_MAX_ENTRIES: Final = 4096
_MAX_DIMENSIONS: Final = 8
_STORAGES: Final = {
    "torch DoubleStorage": "f8",
    "torch FloatStorage": "f4",
    "torch HalfStorage": "f2",
    "torch BFloat16Storage": "bf16",
    "torch LongStorage": "i8",
    "torch IntStorage": "i4",
    "torch ShortStorage": "i2",
    "torch CharStorage": "i1",
    "torch ByteStorage": "u1",
    "torch BoolStorage": "b1",
}
"""Name in the pickle -> numpy type of its bytes."""
_DENSE: Final = "torch._utils _rebuild_tensor_v2"
_SPARSE: Final = "torch._utils _rebuild_sparse_tensor"
_PARAMETER: Final = "torch._utils _rebuild_parameter"
_LAYOUT: Final = "torch.serialization _get_layout"
_SIZE: Final = "torch Size"
_DICT: Final = "collections OrderedDict"
_NAMES: Final = frozenset({*_STORAGES, _DENSE, _SPARSE, _PARAMETER, _LAYOUT, _SIZE, _DICT})


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that the pickle mentions; nothing is imported for it."""

    text: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """Bytes of the archive, and what they are."""

    dtype: np.dtype[Any]
    is_bfloat16: bool
    """Whether the numbers are the upper halves of floats."""
    data: bytes


def load_torch(data: bytes, *, max_dense_bytes: int) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Return the tensor, or the named tensors, of a `torch.save` archive.

    bfloat16 becomes float32, exactly; a sparse tensor in coordinate form becomes dense.

    Args:
        data: The file.
        max_dense_bytes: Size to which all sparse tensors together may grow.

    Raises:
        ValueError: If the file is malformed, or holds anything but plain tensors.
    """
    reader = _Reader(data, max_dense_bytes)
    value = reader.read()
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, dict) and value:
        if not all(isinstance(part, np.ndarray) for part in value.values()):
            raise ValueError("the file holds more than tensors by name")
        if len({id(part) for part in value.values()}) < len(value):
            raise ValueError("the file names a tensor twice")
        return value
    raise ValueError("the file holds neither a tensor nor tensors by name")


class _Reader:
    def __init__(self, data: bytes, max_dense_bytes: int) -> None:
        self._dense_bytes_left = max_dense_bytes
        self._archive = zipfile.ZipFile(io.BytesIO(data))
        entries = self._archive.infolist()
        if len(entries) > _MAX_ENTRIES:
            raise ValueError(f"an archive of {len(entries)} entries is not accepted")
        for entry in entries:
            # torch stores and never compresses; so no entry is larger than the file.
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
                raise ValueError("compressed entries are not accepted")
        names = [entry.filename for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("the zip archive was not written by torch.save")
        self._root = names[0].removesuffix("data.pkl")
        self._order = self._byte_order()
        self._used: set[str] = set()

    def _byte_order(self) -> Literal["<", ">"]:
        try:
            order = self._archive.read(f"{self._root}byteorder")
        except KeyError:  # files of before 2023: of the machine that wrote them, so little
            return "<"
        if order not in (b"little", b"big"):
            raise ValueError("the byte order of the file is not known")
        return "<" if order == b"little" else ">"

    # -- the pickle

    def read(self) -> Any:
        """Return what the pickle describes."""
        pickle = self._archive.read(f"{self._root}data.pkl")
        if len(pickle) > _MAX_PICKLE_BYTES:
            raise ValueError(f"a description of {len(pickle)} bytes is not accepted")
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[Any, Any] = {}

        def above_mark() -> list[Any]:
            at = marks.pop()
            taken = stack[at:]
            del stack[at:]
            return taken

        def take(count: int) -> tuple[Any, ...]:
            if len(stack) < count or (marks and len(stack) - count < marks[-1]):
                raise ValueError("the description takes more than it gave")
            taken = stack[len(stack) - count :]
            del stack[len(stack) - count :]
            return tuple(taken)

        for opcode, argument, _ in pickletools.genops(pickle):
            match opcode.name:
                case "PROTO":
                    pass
                case "MARK":
                    marks.append(len(stack))
                case "GLOBAL":
                    if argument not in _NAMES:
                        raise ValueError(f"the name {str(argument)[:80]!r} is not accepted")
                    stack.append(_Name(argument))
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                    stack.append(argument)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(opcode.name == "NEWTRUE")
                case "NONE":
                    stack.append(None)
                case "EMPTY_TUPLE":
                    stack.append(())
                case "TUPLE":
                    stack.append(tuple(above_mark()))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    stack.append(take(int(opcode.name[-1])))
                case "EMPTY_DICT":
                    stack.append({})
                case "SETITEM":
                    self._set_items(stack, take(2))
                case "SETITEMS":
                    self._set_items(stack, above_mark())
                case "BINPERSID":
                    stack.append(self._storage(*take(1)))
                case "REDUCE":
                    stack.append(self._make(*take(2)))
                case "STOP":
                    (value,) = stack
                    return value
                case name:
                    raise ValueError(f"the instruction {name} is not accepted")
        raise ValueError("the description does not end")

    @staticmethod
    def _set_items(stack: list[Any], items: Any) -> None:
        if not isinstance(stack[-1], dict) or len(items) % 2:
            raise ValueError("the description sets items of what has none")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise ValueError("tensors are named by text")
            stack[-1][key] = value

    def _make(self, name: Any, arguments: Any) -> Any:
        """Return what a call in the pickle means; the names are known, and none is called."""
        match name, arguments:
            case _Name(text), () if text == _DICT:
                return {}
            case _Name(text), (tuple() as size,) if text == _SIZE:
                return size
            case _Name(text), ("torch.sparse_coo",) if text == _LAYOUT:
                return "coo"
            case _Name(text), (np.ndarray() as array, *_) if text == _PARAMETER:
                return array
            case _Name(text), (_Storage() as storage, offset, size, stride, *_) if text == _DENSE:
                return _dense(storage, offset, size, stride)
            case _Name(text), ("coo", (indices, values, size, *_)) if text == _SPARSE:
                return self._sparse(indices, values, size)
        raise ValueError("the description calls something that makes no plain tensor")

    # -- tensors

    def _storage(self, persistent_id: Any) -> _Storage:
        match persistent_id:
            case ("storage", _Name(text), str(key), _, int(count)) if text in _STORAGES:
                pass
            case _:
                raise ValueError("the description names no plain storage")
        if key in self._used:
            # A few bytes of description could ask for a copy of the whole file each.
            raise ValueError("tensors that share their storage are not accepted; save clones")
        self._used.add(key)
        data = self._archive.read(f"{self._root}data/{key}")
        kind = _STORAGES[text]
        if count * _dtype(kind).itemsize != len(data):
            raise ValueError(f"a storage of {count} {kind} does not fit {len(data)} bytes")
        return _Storage(_dtype(kind).newbyteorder(self._order), kind == "bf16", data)

    def _sparse(self, indices: Any, values: Any, size: Any) -> NDArray[Any]:
        if not (isinstance(indices, np.ndarray) and isinstance(values, np.ndarray)):
            raise ValueError("a sparse tensor needs tensors of indices and values")
        _check_size(size)
        if indices.ndim != 2 or indices.dtype.kind != "i" or not 1 <= len(indices) <= len(size):
            raise ValueError(f"indices of shape {indices.shape} do not index {len(size)} axes")
        if values.shape != (indices.shape[1], *size[len(indices) :]):
            raise ValueError(f"values of shape {values.shape} do not fit a tensor of size {size}")
        ends = size[: len(indices)]
        if indices.size and (int(indices.min()) < 0 or (indices.max(axis=1) >= ends).any()):
            raise ValueError("a sparse tensor has indices beyond its size")
        nbytes = prod(size) * values.dtype.itemsize
        if nbytes > self._dense_bytes_left:
            raise ValueError(
                f"a sparse tensor of {nbytes} bytes when dense is more than the "
                f"{self._dense_bytes_left} that are left"
            )
        self._dense_bytes_left -= nbytes
        dense = np.zeros(size, values.dtype)
        np.add.at(dense, tuple(indices), values)  # entries that stand twice add up
        return dense


def _dtype(kind: str) -> np.dtype[Any]:
    return np.dtype("<u2" if kind == "bf16" else kind)


def _check_size(size: Any, what: str = "size") -> None:
    if not isinstance(size, tuple) or len(size) > _MAX_DIMENSIONS:
        raise ValueError(f"a {what} of this form is not accepted")
    for side in size:
        if not isinstance(side, int) or isinstance(side, bool) or side < 0:
            raise ValueError(f"{what} {size} is not of whole numbers")


def _dense(storage: _Storage, offset: Any, size: Any, stride: Any) -> NDArray[Any]:
    _check_size(size)
    _check_size(stride, "stride")
    _check_size((offset,), "offset")
    if len(stride) != len(size):
        raise ValueError(f"stride {stride} does not fit size {size}")
    flat: NDArray[Any] = np.frombuffer(storage.data, storage.dtype)
    count = prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    # Fewer elements than numbers: a stride of 0 would make much out of little.
    if count > len(flat) or (count and last >= len(flat)):
        raise ValueError(f"size {size} at offset {offset} does not fit {len(flat)} numbers")
    if count == 0:
        array = np.zeros(size, flat.dtype)
    else:
        step_bytes = tuple(step * flat.itemsize for step in stride)
        array = as_strided(flat[offset:], size, step_bytes, writeable=False)
    if storage.is_bfloat16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
