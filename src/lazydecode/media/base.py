"""Encoded media with an identity, and the decode deferred.

`MediaRef` carries the encoded bytes and their identity with a closure that decodes on demand;
`MediaIO` is what every kind of media implements. The parts of an identity (`DecodeSpec`,
`derive_media_key`) and the headers are re-exported from here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

import pybase64

from lazydecode.errors import CorruptMediaError, MediaTooLargeError
from lazydecode.media.headers import AudioHeader, ImageHeader, MediaHeader, VideoHeader
from lazydecode.media.identity import EMPTY_SPEC, DecodeSpec, PayloadDigest, derive_media_key
from lazydecode.media.lazy_payload import LazyPayload

__all__ = [
    "EMPTY_SPEC",
    "AudioHeader",
    "DecodeSpec",
    "HeaderProbe",
    "ImageHeader",
    "MediaHeader",
    "MediaIO",
    "MediaRef",
    "PayloadDigest",
    "VideoHeader",
    "decode_base64",
    "derive_media_key",
]

_T = TypeVar("_T")
_U = TypeVar("_U")

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
        data: The encoded bytes, or what reads them when they are needed.
        spec: How they are to be decoded; None is the empty spec.
        key: The identity; None derives it now with `derive_media_key`.
        header_probe: Reads the header on first use of `header`.
        header: The header, if it is known; it is then not read.
        key_covers_spec: False when `key` is an identity from elsewhere (EXIF ImageID) that
            does not tell two decodes of the same media apart; hashing then adds the spec.
        recipe: See the property.
    """

    __slots__ = (
        "__weakref__",
        "_data",
        "_decoder",
        "_header",
        "_header_lock",
        "_header_probe",
        "_key",
        "_key_covers_spec",
        "_lock",
        "_media",
        "_recipe",
        "_spec",
    )

    def __init__(
        self,
        decoder: Callable[[], _T],
        data: bytes | LazyPayload,
        spec: DecodeSpec | None = None,
        *,
        key: bytes | None = None,
        header_probe: HeaderProbe | None = None,
        header: MediaHeader | None = None,
        key_covers_spec: bool = True,
        recipe: DecodeSpec | None = None,
    ) -> None:
        self._decoder: Callable[[], _T] | None = decoder
        self._data = data
        self._spec = EMPTY_SPEC if spec is None else spec
        self._key = derive_media_key(self.data, self._spec) if key is None else key
        self._key_covers_spec = key_covers_spec
        self._recipe = recipe
        self._lock = threading.RLock()
        self._media: _T | _Missing = _MISSING
        self._header: MediaHeader | _Missing | None = _MISSING if header is None else header
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
    def recipe(self) -> DecodeSpec | None:
        """The spec from which another process rebuilds the decoder (see `rebuild`).

        It is that of the decoder itself, before anything was mapped. None: only the closure
        decodes, in this process.
        """
        return self._recipe

    @property
    def data(self) -> bytes:
        """The encoded bytes; `b""` once released. Blocks while a lazy payload is read.

        Raises:
            PayloadChangedError: If a lazy payload is not what was identified any more.
        """
        data = self._data
        return data.load()[0] if isinstance(data, LazyPayload) else data

    @property
    def payload(self) -> bytes | LazyPayload:
        """What holds the encoded bytes, read or not; refs over the same media share it."""
        return self._data

    @property
    def num_bytes(self) -> int:
        """Length of the encoded bytes, which are not read for it; 0 once released."""
        data = self._data
        return data.num_bytes if isinstance(data, LazyPayload) else len(data)

    @property
    def is_loaded(self) -> bool:
        """Whether the encoded bytes are in memory."""
        data = self._data
        return not isinstance(data, LazyPayload) or data.is_loaded

    @property
    def held_bytes(self) -> int:
        """Memory that is held for the encoded bytes, which need not be there themselves."""
        data = self._data
        return data.held_bytes if isinstance(data, LazyPayload) else len(data)

    @property
    def is_decoded(self) -> bool:
        """Whether `decode` will return at once."""
        return self._media is not _MISSING

    @property
    def knows_header(self) -> bool:
        """Whether `header` will return without a look at the encoded bytes."""
        return not isinstance(self._header, _Missing)

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
        return MediaRef(
            _Derived(self, transform),
            self._data,
            spec,
            key=key,
            header_probe=lambda: self.header,
            key_covers_spec=covers,
            recipe=self._recipe,
        )

    def fork(self) -> MediaRef[_T]:
        """Return a ref to the same media whose release does not touch this one.

        It decodes through this ref, so this one is decoded and memoized too; a fork of a
        decoded ref is decoded at once.
        """
        fork: MediaRef[_T] = MediaRef(
            _Derived(self, None),
            self._data,
            self._spec,
            key=self._key,
            header_probe=lambda: self.header,
            key_covers_spec=self._key_covers_spec,
            recipe=self._recipe,
        )
        fork._header, fork._media = self._header, self._media
        return fork

    def renew(self) -> MediaRef[_T]:
        """Return an undecoded ref to the same media that decodes on its own.

        Nothing that it decodes is kept here, nor in what this ref was mapped or forked from:
        whoever holds encoded media for later hands out renewed refs, and holds no pixels.

        Raises:
            RuntimeError: If this ref was released.
        """
        decoder = self._decoder
        if decoder is None:
            raise RuntimeError("cannot renew: the encoded media was released")
        if isinstance(decoder, _Derived):
            decoder = decoder.renew()
        renewed = MediaRef(
            decoder,
            self._data,
            self._spec,
            key=self._key,
            header_probe=lambda: self.header,
            key_covers_spec=self._key_covers_spec,
            recipe=self._recipe,
        )
        renewed._header = self._header
        return renewed

    def release(self) -> None:
        """Let go of the payload and of the decoder; a running decode still finishes.

        Decoded media stays readable. Calling it again is harmless.
        """
        self._data = b""
        self._decoder = None
        self._header_probe = None

    def __copy__(self) -> MediaRef[_T]:
        """A fork: without this, `copy` would go through `__reduce__` and decode."""
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> MediaRef[_T]:
        """A fork: payload and decoded media are values that nobody changes in place."""
        fork = self.fork()
        memo[id(self)] = fork
        return fork

    def __repr__(self) -> str:
        state = "decoded" if self.is_decoded else "undecoded"
        return f"<MediaRef {state}, {self.num_bytes} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.decode(), self._key, self._spec, self._key_covers_spec, self.header)
        return _media_ref_from_pickle, state


class _Derived(Generic[_T]):
    """Decoder of a mapped or forked ref: the parent's decode, then the transform."""

    __slots__ = ("_parent", "_transform")

    def __init__(self, parent: MediaRef[Any], transform: Callable[[Any], _T] | None) -> None:
        self._parent = parent
        self._transform = transform

    def __call__(self) -> _T:
        media = self._parent.decode()
        transformed: _T = media if self._transform is None else self._transform(media)
        return transformed

    def renew(self) -> _Derived[_T]:
        """The same over a parent with a memo of its own."""
        return _Derived(self._parent.renew(), self._transform)


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


RefMaker: TypeAlias = Callable[[PayloadDigest], MediaRef[_T]]
"""Makes the ref of a payload from its digest."""


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

    def option_names(self) -> frozenset[str] | None:
        """Names of all options that mean something here; None: any name may."""
        return None

    def check_size(self, num_bytes: int) -> None:
        """Refuse a payload of that many bytes; asked before it is read or decoded from text.

        Raises:
            MediaTooLargeError: If it is over `get_max_bytes`. A kind may raise its own error.
        """
        max_bytes = self.get_max_bytes()
        if max_bytes is not None and num_bytes > max_bytes:
            raise MediaTooLargeError(f"the encoded media is larger than {max_bytes} bytes")

    def get_decode_spec(self) -> DecodeSpec | None:
        """Every setting that changes what is decoded; None is the empty spec."""
        return None

    def identity_scope(self) -> Hashable | None:
        """Everything besides the bytes that `load_bytes_ref` goes by, what it refuses included.

        Two decoders with equal scopes give the same bytes the same key and spec, so that an
        answer can be remembered. None: not known, and never remembered.
        """
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
            recipe=self.recipe(spec),
        )

    def ref_at_once(self, data: bytes) -> RefMaker[_T] | None:
        """Return what makes the ref of `data` from its digest in some 50 µs, whatever is in it.

        An event loop then calls it itself. None: it may take longer. Must be as quick.
        """
        return None

    def recipe(self, spec: DecodeSpec) -> DecodeSpec | None:
        """Return `spec` if it says all that this decoder goes by besides its limits; else None."""
        return None if self.identity_scope() is None else spec

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
