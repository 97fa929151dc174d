"""Encoded media with an identity, and the decode deferred.

`DecodeSpec` says how bytes are to be decoded, `derive_media_key` turns bytes and spec into the
identity, `MediaRef` carries both with a closure that decodes on demand, and `MediaIO` is what
every kind of media implements.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import pybase64

from lazydecode.errors import CorruptMediaError

_T = TypeVar("_T")
_U = TypeVar("_U")

_LENGTH_BYTES: Final = 8


def _canonical_json(value: Mapping[str, Any]) -> bytes:
    _check_json(value, path="settings")
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def _check_json(value: object, *, path: str) -> None:
    """Reject what JSON cannot hold exactly, instead of letting `json` coerce it."""
    if value is None or isinstance(value, bool | str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} must be finite, got {value!r}")
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} must have string keys, got {key!r}")
            _check_json(item, path=f"{path}.{key}")
        return
    if isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _check_json(item, path=f"{path}[{position}]")
        return
    raise TypeError(f"{path} must be a JSON value, got {type(value).__name__}")


class DecodeSpec:
    """Every setting that parameterizes a decode, as one immutable canonical value.

    The settings are snapshotted at construction as canonical JSON (sorted keys, no spaces,
    UTF-8); `1`, `1.0` and `True` stay distinct, tuples and lists are the same. Equality and
    hash follow the canonical bytes.

    Raises:
        TypeError: If a key is not a string, or a value is not a JSON value.
        ValueError: If a number is not finite.
    """

    __slots__ = ("_canonical",)

    _canonical: bytes

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "_canonical", _canonical_json(dict(settings or {})))

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
        self._state = hashlib.sha256(len(data).to_bytes(_LENGTH_BYTES, "little"))
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


def derive_media_key(data: bytes, spec: DecodeSpec) -> bytes:
    """Return the identity of `data` decoded as `spec` says: 32 bytes.

    SHA-256 over the payload, then the canonical spec, each preceded by its length in 8
    little-endian bytes, so that content cannot shift a boundary. Never depends on decoded
    content, on installed packages or on the machine.
    """
    return PayloadDigest(data).key(spec)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an encoded image says about itself. Nothing was rasterized for it."""

    width: int
    """Width in pixels after EXIF orientation: the width that the decoder will return."""
    height: int
    """Height in pixels after EXIF orientation."""
    mode: str
    """Mode as stored, in Pillow's terms, for example `RGB`, `L`, `P`, `CMYK`, `I;16`."""
    format: str
    """Container format in Pillow's terms, for example `JPEG`, `PNG`, `WEBP`."""
    num_frames: int = 1
    """Frames that the file states (animations, multi-page, MPO); only the first is decoded."""


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """What an encoded audio stream says about itself."""

    rate_hz: int
    """Native sampling rate."""
    channels: int
    duration_s: float | None = None
    """Stated duration; None if the container does not say."""
    num_samples: int | None = None
    """Stated samples per channel; None if the container does not say."""


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What an encoded video says about itself. No frame was decoded for it."""

    width: int
    """Width in pixels after rotation: the width that the decoder will return."""
    height: int
    """Height in pixels after rotation."""
    fps: float | None = None
    """Average frame rate; None if unknown."""
    duration_s: float | None = None
    num_frames: int | None = None
    """Frames that the container states, or that its packets count; None if unknown."""
    has_audio: bool = False
    """Whether there is an audio track."""


MediaHeader = ImageHeader | AudioHeader | VideoHeader

HeaderProbe = Callable[[], MediaHeader | None]
"""Reads a header from encoded bytes; None if the file does not parse. Must not rasterize."""


class MediaRef(Generic[_T]):
    """Encoded bytes, the identity derived from them, and a decode that has not happened yet.

    Nothing decodes by accident: there is no attribute forwarding, no iteration, no array
    protocol; who wants the media calls `decode`. `decode` is memoized and runs the decoder at
    most once across threads. The lock covers that memo and runs the decoder inside it;
    `release` never takes it, so it cannot deadlock and takes effect after a running decode.

    Args:
        decoder: Turns the payload into the media. It holds what it needs of the payload.
        data: The encoded bytes.
        spec: How they are to be decoded; None is the empty spec.
        key: The identity; None derives it now with `derive_media_key`.
        header_probe: Reads the header on first use of `header`.
        key_covers_spec: False when `key` is an identity from elsewhere (EXIF ImageID) that
            does not tell two decodes of the same media apart; hashing then adds the spec.
    """

    __slots__ = (
        "_data",
        "_decoder",
        "_header",
        "_header_lock",
        "_header_probe",
        "_key",
        "_key_covers_spec",
        "_lock",
        "_media",
        "_spec",
    )

    def __init__(
        self,
        decoder: Callable[[], _T],
        data: bytes,
        spec: DecodeSpec | None = None,
        *,
        key: bytes | None = None,
        header_probe: HeaderProbe | None = None,
        key_covers_spec: bool = True,
    ) -> None:
        self._decoder: Callable[[], _T] | None = decoder
        self._data = data
        self._spec = EMPTY_SPEC if spec is None else spec
        self._key = derive_media_key(data, self._spec) if key is None else key
        self._key_covers_spec = key_covers_spec
        self._lock = threading.RLock()
        self._media: _T | _Missing = _MISSING
        self._header: MediaHeader | _Missing | None = _MISSING
        self._header_probe = header_probe
        # Not `_lock`: reading a header must not wait for a decode that is under way.
        self._header_lock = threading.Lock()

    @property
    def key(self) -> bytes:
        """The cache identity. Never needs a decode."""
        return self._key

    @property
    def key_covers_spec(self) -> bool:
        """Whether two decodes of the same media have different keys."""
        return self._key_covers_spec

    @property
    def spec(self) -> DecodeSpec:
        """The resolved decode configuration."""
        return self._spec

    @property
    def data(self) -> bytes:
        """The encoded bytes; `b""` once released."""
        return self._data

    @property
    def is_decoded(self) -> bool:
        """Whether `decode` will return at once."""
        return self._media is not _MISSING

    @property
    def header(self) -> MediaHeader | None:
        """What the encoded bytes say about themselves; None if they do not parse.

        Read at most once, on first use, without rasterizing. After `release` it is what was
        read before, or None.
        """
        if isinstance(self._header, _Missing):
            with self._header_lock:
                if isinstance(self._header, _Missing):
                    probe = self._header_probe
                    self._header = None if probe is None else probe()
                    self._header_probe = None
        return self._header

    def decode(self) -> _T:
        """Return the decoded media; the decoder runs at most once over all threads.

        A decoder that raises leaves no memo, so that the next call runs it again.

        Raises:
            RuntimeError: If the ref was released before it was decoded.
            Exception: Whatever the decoder raises, unchanged.
        """
        media = self._media
        if not isinstance(media, _Missing):
            return media
        with self._lock:
            media = self._media
            if not isinstance(media, _Missing):
                return media
            decoder = self._decoder
            if decoder is None:
                raise RuntimeError("cannot decode: the encoded media was released")
            media = decoder()
            self._media = media
            return media

    def map(self, transform: Callable[[_T], _U], **settings: Any) -> MediaRef[_U]:
        """Return a ref that decodes to `transform(self.decode())` and shares these bytes.

        Without settings the key and spec stay; the transform must then not change what the
        media is. Settings name the transform and every parameter of it; they extend the spec,
        and the new key is derived from this key and the new spec, not from the payload.
        """
        if settings:
            spec = self._spec.extend(**settings)
            key, covers = derive_media_key(self._key, spec), True
        else:
            spec, key, covers = self._spec, self._key, self._key_covers_spec
        decode = self.decode
        return MediaRef(
            lambda: transform(decode()),
            self._data,
            spec,
            key=key,
            header_probe=lambda: self.header,
            key_covers_spec=covers,
        )

    def fork(self) -> MediaRef[_T]:
        """Return a ref to the same media whose release does not touch this one.

        It decodes through this ref, so this one is decoded and memoized too; a fork of a
        decoded ref is decoded at once.
        """
        fork = MediaRef(
            self.decode,
            self._data,
            self._spec,
            key=self._key,
            header_probe=lambda: self.header,
            key_covers_spec=self._key_covers_spec,
        )
        fork._media = self._media
        return fork

    def release(self) -> None:
        """Let go of the payload and of the decoder; a running decode still finishes.

        Decoded media stays readable. Calling it again is harmless.
        """
        self._data = b""
        self._decoder = None
        self._header_probe = None

    def __repr__(self) -> str:
        state = "decoded" if self.is_decoded else "undecoded"
        return f"<MediaRef {state}, {len(self._data)} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.decode(), self._key, self._spec, self._key_covers_spec, self.header)
        return _media_ref_from_pickle, state


class _Missing:
    """Marks a value that was not computed yet; the media itself may be None."""

    __slots__ = ()


_MISSING: Final = _Missing()


def _media_ref_from_pickle(
    media: _T,
    key: bytes,
    spec: DecodeSpec,
    key_covers_spec: bool = True,
    header: MediaHeader | None = None,
) -> MediaRef[_T]:
    """Rebuild a decoded ref without payload: neither closure nor lock can be pickled."""
    ref: MediaRef[_T] = MediaRef(lambda: media, b"", spec, key=key, key_covers_spec=key_covers_spec)
    ref._media = media
    ref._header = header
    return ref


class MediaIO(ABC, Generic[_T]):
    """How one kind of media is identified and decoded.

    `load_*` decode now and return plain objects; `load_*_ref` return a `MediaRef` and decode
    nothing. Options that change the decoded value are in `get_decode_spec`; limits are not.
    """

    @classmethod
    def merge_kwargs(
        cls,
        defaults: Mapping[str, Any] | None,
        runtime: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Merge a request's options over the server's; shallow, the request wins."""
        return {**(defaults or {}), **(runtime or {})}

    def get_max_bytes(self) -> int | None:
        """Largest payload in bytes that this decoder accepts; None is no limit of its own."""
        return None

    def get_decode_spec(self) -> DecodeSpec | None:
        """Every setting that changes what is decoded; None is the empty spec."""
        return None

    def probe_header(self, data: bytes) -> MediaHeader | None:
        """Read what `data` says about itself without decoding; None if it does not parse."""
        return None

    @abstractmethod
    def load_bytes(self, data: bytes) -> _T:
        """Decode `data`.

        Raises:
            CorruptMediaError: If no decoder reads it. It is a `ValueError`.
            MediaTooLargeError: If it is over a limit.
        """

    @abstractmethod
    def load_base64(self, media_type: str, data: str) -> _T:
        """Decode base64 text whose payload has the given media type."""

    @abstractmethod
    def load_file(self, filepath: Path) -> _T:
        """Decode a file."""

    def load_bytes_ref(self, data: bytes, *, digest: PayloadDigest | None = None) -> MediaRef[_T]:
        """Return a ref over `data`; linear in `data` unless its digest is given."""
        spec = self.get_decode_spec() or EMPTY_SPEC
        return MediaRef(
            partial(self.load_bytes, data),
            data,
            spec,
            key=(digest or PayloadDigest(data)).key(spec),
            header_probe=partial(self.probe_header, data),
        )

    def load_base64_ref(self, media_type: str, data: str | bytes | memoryview) -> MediaRef[_T]:
        """Return a ref over strictly decoded base64.

        Raises:
            CorruptMediaError: If `data` is not base64.
        """
        return self.load_bytes_ref(decode_base64(data))

    def load_file_ref(self, filepath: Path) -> MediaRef[_T]:
        """Return a ref over the content of a file, read now."""
        return self.load_bytes_ref(filepath.read_bytes())


def decode_base64(text: str | bytes | memoryview) -> bytes:
    """Decode standard base64 strictly: foreign characters and bad padding raise.

    Raises:
        CorruptMediaError: If `text` is not base64.
    """
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as exc:  # binascii.Error; UnicodeEncodeError for non-ASCII text
        raise CorruptMediaError("the data is not valid base64") from exc
