"""Digests of arbitrary request values, framed so that different values cannot serialize alike."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lazydecode.media.base import MediaRef
from lazydecode.media.image import get_image_id_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Chunk: TypeAlias = "bytes | memoryview"

_LENGTH: Final = struct.Struct("<Q")
_FLOAT: Final = struct.Struct("<d")
_SHORT_CHARS: Final = 256


class _Digest(Protocol):
    def update(self, data: Chunk, /) -> object: ...

    def hexdigest(self) -> str: ...


def _new_blake3() -> _Digest:
    try:
        module = importlib.import_module("blake3")
    except ImportError as exc:
        raise ValueError("hash algorithm 'blake3' needs the package blake3") from exc
    digest: _Digest = module.blake3()
    return digest


_ALGORITHMS: Final[Mapping[str, Callable[[], _Digest]]] = {
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
    "blake3": _new_blake3,
}


class MultiModalHasher:
    """Turns named values into one hex digest.

    Each value becomes a type tag, its length or count in 8 little-endian bytes, and its content;
    containers hold their members in the same form. So a value ends where its frame says, and a
    different value, type, nesting or boundary gives different bytes. Lists and tuples are the
    same; the order of a mapping's keys does not matter.
    """

    @classmethod
    def serialize_item(cls, value: object) -> Iterator[Chunk]:
        """Yield the framed form of one value.

        A `MediaRef` is its key, as the same bytes would be: nothing is decoded. An image whose
        EXIF ImageID is a UUID is the 16 bytes of that. An object of no known type is pickled,
        with a warning, as its pickle may differ between processes.
        """
        if isinstance(value, MediaRef):
            return _frame(b"b", value.key)
        if value is None:
            return _frame(b"n", b"")
        if isinstance(value, bool):
            return _frame(b"?", b"\1" if value else b"\0")
        if isinstance(value, str):
            # JSON can carry lone surrogates, which strict UTF-8 refuses.
            return _frame(b"s", value.encode("utf-8", "surrogatepass"))
        if isinstance(value, bytes | bytearray | memoryview):
            return _frame(b"b", value if isinstance(value, memoryview) else memoryview(value))
        if isinstance(value, int):
            return _frame(b"i", b"%d" % value)
        if isinstance(value, float) and not isinstance(value, np.generic):
            return _frame(b"f", _FLOAT.pack(value))
        if isinstance(value, list | tuple):
            return cls._sequence(value)
        if isinstance(value, Mapping):
            return cls._mapping(value)
        if isinstance(value, Image.Image):
            return cls._image(value)
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            return cls._pickled(value) if array.dtype.hasobject else cls._array(array)
        torch = sys.modules.get("torch")
        if (
            torch is not None
            and isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and not value.is_quantized
        ):
            return cls._tensor(value)
        return cls._pickled(value)

    @classmethod
    def iter_item_to_bytes(cls, key: str, value: object) -> Iterator[Chunk]:
        """Yield the framed name, then the framed value."""
        yield from cls.serialize_item(key)
        yield from cls.serialize_item(value)

    @classmethod
    def hash_kwargs(cls, algorithm: str, /, **kwargs: object) -> str:
        """Return the hex digest of `kwargs`, which do not depend on their order.

        Raises:
            ValueError: If `algorithm` is unknown or not installed. There is no fallback: the
                same setting must give the same digest everywhere.
        """
        new = _ALGORITHMS.get(algorithm)
        if new is None:
            known = ", ".join(sorted(_ALGORITHMS))
            raise ValueError(f"unknown hash algorithm {algorithm!r}; known: {known}")
        digest = new()
        short: list[Chunk] = []
        for key in sorted(kwargs):
            value = kwargs[key]
            short.append(_framed_text(key))
            # What a hit's identity is made of, and digested in one call: names, and a reference.
            if type(value) is str and len(value) <= _SHORT_CHARS:
                short.append(_framed_text(value))
            elif isinstance(value, MediaRef):
                short += (b"b" + _LENGTH.pack(len(value.key)), value.key)
            else:
                digest.update(b"".join(short))
                short.clear()
                for chunk in cls.serialize_item(value):
                    digest.update(chunk)
        digest.update(b"".join(short))
        return digest.hexdigest()

    @classmethod
    def _sequence(cls, value: list[Any] | tuple[Any, ...]) -> Iterator[Chunk]:
        yield b"l" + _LENGTH.pack(len(value))
        for item in value:
            yield from cls.serialize_item(item)

    @classmethod
    def _mapping(cls, value: Mapping[Any, Any]) -> Iterator[Chunk]:
        yield b"d" + _LENGTH.pack(len(value))
        # Sorted by serialized key, as keys of different types do not compare.
        keyed = [(b"".join(cls.serialize_item(key)), item) for key, item in value.items()]
        for key_bytes, item in sorted(keyed, key=lambda pair: pair[0]):
            yield key_bytes
            yield from cls.serialize_item(item)

    @classmethod
    def _image(cls, image: Image.Image) -> Iterator[Chunk]:
        identity = get_image_id_bytes(image)
        if identity is not None:
            yield from _frame(b"b", identity)
            return
        palette: object = None
        if image.mode in ("P", "PA") and image.palette is not None:
            image.load()
            palette = (image.palette.mode, bytes(image.palette.palette))
        yield b"I"
        yield from cls.serialize_item(
            [image.mode, list(image.size), palette, image.info.get("transparency")]
        )
        yield from _frame(b"b", image.tobytes())

    @classmethod
    def _array(cls, array: NDArray[Any]) -> Iterator[Chunk]:
        yield b"A"
        yield from cls.serialize_item([array.dtype.str, list(array.shape)])
        # A byte view: memoryview cannot export datetimes, half-open strides or empty arrays.
        flat = np.ascontiguousarray(array).reshape(-1)
        yield from _frame(b"b", flat.view(np.uint8).data if flat.size else b"")

    @classmethod
    def _tensor(cls, tensor: torch.Tensor) -> Iterator[Chunk]:
        import torch

        yield b"T"
        yield from cls.serialize_item([str(tensor.dtype), list(tensor.shape)])
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        # NumPy has no bfloat16; bytes need no dtype.
        yield from _frame(b"b", flat.view(torch.uint8).numpy().data if flat.numel() else b"")

    @classmethod
    def _pickled(cls, value: object) -> Iterator[Chunk]:
        kind = type(value)
        logger.warning(
            "No serialization for %s.%s; its pickle is hashed", kind.__module__, kind.__qualname__
        )
        return _frame(b"p", pickle.dumps(value, protocol=4))


@functools.lru_cache(maxsize=1024)
def _framed_text(text: str) -> bytes:
    """Return the framed form of a short text, as of a model's name: most are seen again."""
    return b"".join(MultiModalHasher.serialize_item(text))


def _frame(tag: bytes, content: Chunk) -> Iterator[Chunk]:
    nbytes = content.nbytes if isinstance(content, memoryview) else len(content)
    yield tag + _LENGTH.pack(nbytes)
    if nbytes:
        yield content
