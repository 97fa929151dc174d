"""What identifies media: the encoded bytes together with the complete decode configuration."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Final

_LENGTH_BYTES: Final = 8


def _canonical_json(settings: Mapping[str, Any]) -> bytes:
    try:
        plain = _plain_json(settings, path="settings")
        text = json.dumps(
            plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except RecursionError:
        raise ValueError("settings are nested too deeply, or contain themselves") from None
    return text.encode("utf-8")


def _plain_json(value: object, *, path: str) -> object:
    """Copy `value` as plain JSON types; reject what JSON cannot hold exactly.

    `json` alone would coerce: integer keys to text, enum members and other subclasses to
    whatever their `repr` says.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} must be finite, got {float.__repr__(value)}")
        return float.__float__(value)
    if isinstance(value, Mapping):
        plain: dict[str, object] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} must have string keys, got {key!r}")
            plain[str.__str__(key)] = _plain_json(item, path=f"{path}.{key}")
        return plain
    if isinstance(value, list | tuple):
        return [_plain_json(item, path=f"{path}[{i}]") for i, item in enumerate(value)]
    raise TypeError(f"{path} must be a JSON value, got {type(value).__name__}")


class DecodeSpec:
    """Every setting that parameterizes a decode, as one immutable canonical value.

    The settings are snapshotted at construction as canonical JSON (sorted keys, no spaces,
    UTF-8); `1`, `1.0` and `True` stay distinct, tuples and lists are the same. Equality and
    hash follow the canonical bytes.

    Raises:
        TypeError: If a key is not a string, or a value is not a JSON value.
        ValueError: If a number is not finite, text is not valid Unicode, or the nesting has
            no end.
    """

    __slots__ = ("_canonical",)

    _canonical: bytes

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(
            self, "_canonical", _canonical_json({} if settings is None else settings)
        )

    @property
    def settings(self) -> dict[str, Any]:
        """A fresh copy of the settings; changing it changes nothing here."""
        settings: dict[str, Any] = json.loads(self._canonical)
        return settings

    def canonical_bytes(self) -> bytes:
        """The canonical JSON, UTF-8: equal for equal settings, on every machine."""
        return self._canonical

    def extend(self, **settings: Any) -> DecodeSpec:
        """Return a new spec with `settings` merged over the current ones."""
        items = tuple((name, type(value), value) for name, value in settings.items())
        if all(kind in _PLAIN_KINDS or (kind is float and value) for _, kind, value in items):
            return _extended(self, items)
        return DecodeSpec({**self.settings, **settings})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"DecodeSpec is immutable; cannot set {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DecodeSpec):
            return NotImplemented
        return self._canonical == other._canonical

    def __hash__(self) -> int:
        return hash(self._canonical)

    def __repr__(self) -> str:
        return f"DecodeSpec({self._canonical.decode('utf-8')})"

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodeSpec, (self.settings,)


EMPTY_SPEC: Final = DecodeSpec()
"""The spec of a decode that has no settings."""


_PLAIN_KINDS: Final = frozenset({str, int, bool, type(None)})
"""Types of which equal values are written alike; of floats 0.0 and -0.0 are not."""


@functools.lru_cache(maxsize=1024)
def _extended(spec: DecodeSpec, items: tuple[tuple[str, type, Any], ...]) -> DecodeSpec:
    """Return a spec with (name, type, value) merged over it: every clip is resampled alike."""
    return DecodeSpec({**spec.settings, **{name: value for name, _, value in items}})


def _begin(num_bytes: int) -> hashlib._Hash:
    """Return the SHA-256 state that a payload of so many bytes continues."""
    return hashlib.sha256(num_bytes.to_bytes(_LENGTH_BYTES, "little"))


class PayloadDigest:
    """One pass over a payload, shared by every key that is derived from it.

    Keys and the content digest continue copies of the same SHA-256 state, so a second decoder
    for the same payload costs no second pass. `hashlib` releases the GIL while it digests.
    """

    __slots__ = ("_state", "num_bytes")

    num_bytes: int
    """Length of the payload."""

    def __init__(self, data: bytes) -> None:
        self.num_bytes = len(data)
        self._state = _begin(len(data))
        self._state.update(data)

    def key(self, spec: DecodeSpec) -> bytes:
        """Return what `derive_media_key` returns for this payload and `spec`."""
        canonical = spec.canonical_bytes()
        state = self._state.copy()
        state.update(len(canonical).to_bytes(_LENGTH_BYTES, "little"))
        state.update(canonical)
        return state.digest()

    def content(self) -> bytes:
        """Identity of the payload alone (32 bytes): the same for every spec."""
        return self._state.copy().digest()


class DigestInSlices:
    """Makes the digest of a payload a part at a time, for an event loop.

    Args:
        data: The payload.
    """

    __slots__ = ("_data", "_num_taken", "_state")

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._state = _begin(len(data))
        self._num_taken = 0

    def take(self, num_bytes: int) -> PayloadDigest | None:
        """Digest the next bytes; return what `PayloadDigest(data)` gives when all were taken."""
        end = self._num_taken + num_bytes
        self._state.update(self._data[self._num_taken : end])
        self._num_taken = end
        if end < len(self._data):
            return None
        digest = PayloadDigest.__new__(PayloadDigest)
        digest.num_bytes, digest._state = len(self._data), self._state
        return digest


def derive_media_key(data: bytes, spec: DecodeSpec) -> bytes:
    """Return the identity of `data` decoded as `spec` says: 32 bytes.

    SHA-256 over the payload, then the canonical spec, each preceded by its length in 8
    little-endian bytes, so that content cannot shift a boundary. Never depends on decoded
    content, on installed packages or on the machine.
    """
    return PayloadDigest(data).key(spec)
