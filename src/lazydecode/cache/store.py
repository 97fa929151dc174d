"""Results of processors on disk, shared by processes and replicas: a second level below a cache.

The identities of items do not depend on process or machine, and hold everything on which a result
depends; so a result may come from whoever made it first. An entry is one file:

    magic, length of the head (8 bytes), length of the file (8), SHA-256 of the head (32)
    head: the pickled item and its prompt updates, with tensors as (dtype, shape, place)
    tensors, each at a multiple of 64 bytes

Nothing in a head is code: values of this package's own dataclasses are all that it may name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import io
import logging
import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazydecode.cache.base import ProcessedItem
from lazydecode.inputs import MultiModalKwargsItem
from lazydecode.media.bounded_folder import BoundedFolder

logger = logging.getLogger(__name__)

_MAGIC: Final = b"lazydecode-item-2\n"
_FRAME: Final = struct.Struct(f"<{len(_MAGIC)}sQQ32s")
_ALIGNMENT: Final = 64
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SUFFIX: Final = ".item"


class ItemStore:
    """Processed items by hash. All methods do file I/O; threads and processes share a folder.

    Args:
        folder: Is created if it does not exist. Who can write to it decides what the model sees.
        max_bytes: Largest total; least recently used first out, as `BoundedFolder` says.

    Raises:
        ValueError: If the folder cannot be created or written to.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = BoundedFolder(
            folder, what="processor store", suffix=_SUFFIX, max_bytes=max_bytes
        )

    def get(self, mm_hash: str) -> ProcessedItem | None:
        """Return an item and keep it longest; None if it is not here, or damaged."""
        path = self._folder.path(_name(mm_hash))
        try:
            descriptor = os.open(path, _READ_FLAGS)
        except OSError:
            return None
        try:
            with open(descriptor, "rb") as file:  # buffered, which reads on until it has all
                data = bytearray(os.fstat(descriptor).st_size)
                if file.readinto(data) != len(data):
                    raise ValueError("it is cut off")
                os.utime(descriptor)
            return _decode(data)
        except Exception as exc:
            # Wide: unpickling raises what it likes. The item is made anew, and written anew.
            logger.debug("an entry of the processor store cannot be read", exc_info=True)
            self._folder.drop(path, f"cannot be read ({type(exc).__name__})")
            return None

    def put(self, mm_hash: str, item: ProcessedItem) -> None:
        """Keep an item; a failure to write is logged.

        Raises:
            Exception: If what its prompt needs cannot be pickled.
        """
        parts, size = _encode(item)
        self._folder.write(_name(mm_hash), parts, size)

    def clear(self) -> None:
        """Forget everything, for all who share the folder."""
        self._folder.clear()


def _name(mm_hash: str) -> str:
    return hashlib.sha256(mm_hash.encode()).hexdigest()


def _encode(item: ProcessedItem) -> tuple[list[bytes | memoryview], int]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(item)
    head = file.getvalue()
    start = _aligned(_FRAME.size + len(head))
    size = start + pickler.end
    frame = _FRAME.pack(_MAGIC, len(head), size, hashlib.sha256(head).digest())
    parts: list[bytes | memoryview] = [frame, head, bytes(start - _FRAME.size - len(head))]
    for raw in pickler.tensors:
        parts += [raw, bytes(_aligned(len(raw)) - len(raw))]
    return parts, size


def _decode(data: bytearray) -> ProcessedItem:
    magic, head_size, size, digest = _FRAME.unpack_from(data)
    if magic != _MAGIC or size != len(data):
        raise ValueError("it is no entry, or cut off")
    view = memoryview(data)
    head = view[_FRAME.size : _FRAME.size + head_size]
    if hashlib.sha256(head).digest() != digest:
        raise ValueError("its head is damaged")
    tensors = view[_aligned(_FRAME.size + head_size) :]
    kwargs, updates = _Unpickler(io.BytesIO(head), tensors).load()
    if not isinstance(kwargs, MultiModalKwargsItem):
        raise TypeError("it is no item")
    return kwargs, updates


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    """Writes tensors and arrays aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[memoryview] = []
        self.end = 0

    def persistent_id(self, value: Any) -> tuple[str, str, tuple[int, ...], int] | None:
        """Return what stands for a tensor: kind, dtype, shape and place."""
        import torch

        if isinstance(value, torch.Tensor):
            kind, dtype = "tensor", str(value.dtype).removeprefix("torch.")
            flat = value.detach().cpu().contiguous().reshape(-1)
            raw = flat.view(torch.uint8).numpy().data
        elif isinstance(value, np.ndarray):
            kind, dtype = "array", value.dtype.str
            raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        else:
            return None
        place = self.end
        self.tensors.append(raw)
        self.end += _aligned(len(raw))
        return kind, dtype, tuple(value.shape), place


class _Unpickler(pickle.Unpickler):
    """Reads tensors where they are, and no class but plain values of ours."""

    def __init__(self, file: io.BytesIO, tensors: memoryview) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        """Return the tensor that `persistent_id` wrote; it shares the entry's memory."""
        import torch

        kind, name, shape, place = pid
        is_tensor = kind == "tensor"
        dtype = getattr(torch, name) if is_tensor else np.dtype(name)
        if is_tensor and not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name!r} is no dtype")
        size = math.prod(shape) * dtype.itemsize
        raw = self._tensors[place : place + size]
        if place < 0 or len(raw) != size or (not is_tensor and dtype.hasobject):
            raise ValueError("a tensor lies outside the entry")
        if not is_tensor:
            return np.frombuffer(raw, dtype).reshape(shape)
        if size == 0:  # torch.frombuffer refuses empty buffers
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).reshape(shape)

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of this package that only holds values.

        Raises:
            pickle.UnpicklingError: For anything else.
        """
        if module.startswith("lazydecode.") and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and (
                found is MultiModalKwargsItem or dataclasses.is_dataclass(found)
            ):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a stored item")
