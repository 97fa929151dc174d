"""Audio clips: identity from the encoded bytes, mono samples at the native rate on demand."""

from __future__ import annotations

from collections.abc import Hashable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lazydecode.errors import (
    CorruptMediaError,
    LazyDecodeError,
    MediaTooLargeError,
    ValidationError,
)
from lazydecode.limits import MIB, DecodeLimits
from lazydecode.media.audio_decode import DECODERS, probe_audio
from lazydecode.media.audio_transforms import (
    RESAMPLING_METHODS,
    normalize_channels,
    resample,
    resampled_length,
)
from lazydecode.media.base import (
    AudioHeader,
    DecodeSpec,
    MediaIO,
    MediaRef,
    PayloadDigest,
    RefMaker,
    decode_base64,
)
from lazydecode.media.faults import corrupt_on_failure
from lazydecode.media.jpeg_sequence import is_jpeg_sequence

__all__ = [
    "AUDIO_DECODER",
    "RESAMPLING_METHODS",
    "Audio",
    "AudioMediaIO",
    "normalize_channels",
    "resample",
    "resampled_length",
]

AUDIO_DECODER: Final = "audio/1"
"""What decodes, and the version of what it gives: part of every key, so a change of our output
changes the keys."""

Audio: TypeAlias = tuple[NDArray[np.float32], int]
"""Samples of shape (samples,), float32, the mean of all channels, in [-1, 1]; rate in Hz."""

_FAILED: Final = "Failed to load audio"


class AudioMediaIO(MediaIO[Audio]):
    """Decodes one clip, or the first audio track of a video, to mono at its own rate.

    The decoder goes by the bytes alone; names and media types are not looked at.

    Args:
        limits: How large a file may be, and how long and large what it decodes to.
        kwargs: Options. `audio_backend` is `auto` (the default), `soundfile`, `pyav` or
            `torchcodec`; all others change nothing but the key.

    Raises:
        ValidationError: If an option is not valid, or the backend is not installed.
    """

    def __init__(
        self,
        *,
        limits: DecodeLimits = DecodeLimits(),  # noqa: B008  # frozen
        **kwargs: Any,
    ) -> None:
        backend = kwargs.pop("audio_backend", None)
        self.audio_backend: str = _parse_backend(backend)
        self.limits = limits
        self.kwargs = kwargs
        settings = {**kwargs, "audio_backend": self.audio_backend, "decoder": AUDIO_DECODER}
        try:
            self._spec = DecodeSpec(settings)
        except (TypeError, ValueError) as exc:
            raise ValidationError(f"audio options: {exc}", parameter="media_io_kwargs") from exc

    def option_names(self) -> frozenset[str]:
        """Names of all options that mean something here."""
        return frozenset({"audio_backend"})

    def with_limits(self, limits: DecodeLimits) -> AudioMediaIO:
        """Return the same decoder with other limits; what it decodes has the same keys."""
        return AudioMediaIO(limits=limits, audio_backend=self.audio_backend, **self.kwargs)

    def get_decode_spec(self) -> DecodeSpec:
        """All options, with the backend as it is used."""
        return self._spec

    def identity_scope(self) -> Hashable | None:
        """The options and the limits."""
        if type(self) is not AudioMediaIO:
            return None  # a subclass may go by more
        return (AudioMediaIO, self._spec, self.limits)

    def get_max_bytes(self) -> int:
        """Largest encoded clip, in bytes."""
        return self.limits.max_audio_clip_bytes

    def probe_header(self, data: bytes) -> AudioHeader | None:
        """Rate, channels and stated length; None if the bytes do not parse."""
        try:
            with corrupt_on_failure(_FAILED):
                return probe_audio(data)
        except LazyDecodeError:
            return None

    def load_bytes(self, data: bytes) -> Audio:
        """Decode `data`.

        Raises:
            ValidationError: If it is over the limit on encoded bytes.
            CorruptMediaError: If nothing reads it, it is damaged, or it has no samples.
            MediaTooLargeError: If it decodes to more than a limit; found out while decoding.
        """
        self.check_size(len(data))
        with corrupt_on_failure(_FAILED):
            return DECODERS[self.audio_backend](data, self.limits)

    def load_base64(self, media_type: str, data: str) -> Audio:
        """Decode base64 text; the media type is not looked at, the bytes say what they are."""
        self._check_base64(data)
        return self.load_bytes(decode_base64(data))

    def load_file(self, filepath: Path) -> Audio:
        """Decode a file."""
        self.check_size(filepath.stat().st_size)
        return self.load_bytes(filepath.read_bytes())

    def ref_at_once(self, data: bytes) -> RefMaker[Audio] | None:
        """Not None: nothing in it is looked at."""
        if type(self) is not AudioMediaIO:
            return None
        return lambda digest: self.load_bytes_ref(data, digest=digest)

    def load_bytes_ref(
        self, data: bytes, *, digest: PayloadDigest | None = None
    ) -> MediaRef[Audio]:
        """Return a ref over `data`; refuses at once what is over the limit on encoded bytes."""
        self.check_size(len(data))
        return super().load_bytes_ref(data, digest=digest)

    def load_base64_ref(self, media_type: str, data: str | bytes | memoryview) -> MediaRef[Audio]:
        """Return a ref over strictly decoded base64, whose length is checked before decoding."""
        self._check_base64(data)
        if is_jpeg_sequence(media_type):
            raise CorruptMediaError("the file has no audio track: it is a sequence of pictures")
        return super().load_base64_ref(media_type, data)

    def load_file_ref(self, filepath: Path) -> MediaRef[Audio]:
        """Return a ref over a file, whose size is checked before reading."""
        self.check_size(filepath.stat().st_size)
        return super().load_file_ref(filepath)

    def check_size(self, num_bytes: int) -> None:
        """Refuse a file over the limit on encoded bytes.

        Raises:
            ValidationError: If it is. It names the size in MiB.
        """
        if num_bytes > self.get_max_bytes():
            self._refuse(num_bytes)

    def check_duration(self, seconds: float) -> None:
        """Refuse a clip whose header states a duration over the limit, before it is decoded.

        Raises:
            MediaTooLargeError: If it is.
        """
        longest = self.limits.max_audio_duration_s
        if seconds > longest:
            raise MediaTooLargeError(
                f"the audio's duration of {seconds:.1f} s exceeds the limit of {longest:g} s",
                parameter="max_audio_decode_duration",
                value=seconds,
            )

    def _check_base64(self, text: str | bytes | memoryview) -> None:
        if len(text) > 4 * -(-self.get_max_bytes() // 3):
            self._refuse(len(text) * 3 / 4)

    def _refuse(self, num_bytes: float) -> NoReturn:
        size, most = num_bytes / MIB, self.get_max_bytes() / MIB
        raise ValidationError(
            f"Maximum file size exceeded: the audio has {size:.1f} MiB, {most:g} MiB are allowed",
            parameter="audio_filesize_mb",
            value=size,
        )


def _parse_backend(name: object) -> str:
    if name is None:
        return "auto"
    if not isinstance(name, str) or name not in DECODERS:
        raise ValidationError(
            f"audio_backend must be one of {sorted(DECODERS)}, got {name!r}",
            parameter="audio_backend",
            value=name,
        )
    if name == "torchcodec" and find_spec("torchcodec") is None:
        raise ValidationError(
            "audio_backend torchcodec is not installed here; leave it out, or use auto",
            parameter="audio_backend",
            value=name,
        )
    return name
