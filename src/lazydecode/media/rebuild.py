"""A decoder from its spec alone: in another process, or on another machine.

The spec of a ref names what decodes, with every setting that changes the result, and the
parameters of the transforms that came after it. Payload and spec therefore decode to the same
media wherever they are taken to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from lazydecode.errors import ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media.audio import AUDIO_DECODER, AudioMediaIO
from lazydecode.media.base import DecodeSpec, MediaHeader, MediaIO, MediaRef, derive_media_key
from lazydecode.media.embeddings import EMBEDDING_DECODER, EmbeddingMediaIO
from lazydecode.media.image import IMAGE_DECODER, ImageMediaIO
from lazydecode.media.jpeg_sequence import MEDIA_TYPE as JPEG_SEQUENCE
from lazydecode.media.raw_video import RAW_VIDEO_DECODER, RawVideoMediaIO
from lazydecode.media.transforms import MEDIA_TRANSFORMS, MediaTransform, TransformTable
from lazydecode.media.video import SEQUENCE_SETTING, VIDEO_DECODER, VideoMediaIO
from lazydecode.media.video_backends.registry import VIDEO_LOADER_REGISTRY

Settings: TypeAlias = dict[str, Any]
DecoderBuilder: TypeAlias = Callable[[Settings, DecodeLimits], MediaIO[Any]]
"""(settings without the decoder's name, limits) -> the decoder with that spec."""


@dataclass(frozen=True, slots=True)
class RebuiltDecoder:
    """What one spec says how to decode. Threads share it."""

    spec: DecodeSpec
    media_io: MediaIO[Any]
    """Decodes what comes before the transforms."""
    base_spec: DecodeSpec
    """The spec without the parameters of the transforms."""
    transforms: tuple[MediaTransform, ...] = ()
    media_type: str | None = None
    """Of payloads that are text and no file; None: they are files."""

    def decode(self, data: bytes) -> Any:
        """Decode a payload as the spec says.

        Raises:
            LazyDecodeError: As the decoder.
        """
        if self.media_type is None:
            media = self.media_io.load_bytes(data)
        else:
            media = self.media_io.load_base64(self.media_type, data.decode("ascii", "replace"))
        settings = self.spec.settings
        for transform in self.transforms:
            parameters = {name: settings[name] for name in transform.parameters}
            media = transform.function(media, **parameters)
        return media

    def key(self, data: bytes) -> bytes:
        """Return the identity of a payload under the spec; linear in the payload."""
        spec, settings = self.base_spec, self.spec.settings
        key = derive_media_key(data, spec)
        for transform in self.transforms:
            spec = spec.extend(**{name: settings[name] for name in transform.parameters})
            key = derive_media_key(key, spec)
        return key

    def header(self, data: bytes) -> MediaHeader | None:
        """Return what a payload says about itself."""
        if self.media_type is None:
            return self.media_io.probe_header(data)
        return self.media_io.load_base64_ref(
            self.media_type, data.decode("ascii", "replace")
        ).header

    def ref(
        self, data: bytes, *, key: bytes | None = None, key_covers_spec: bool = True
    ) -> MediaRef[Any]:
        """Return a ref over a payload.

        Args:
            data: The payload.
            key: Its identity, as the ref that is rebuilt has it; it is not derived again.
            key_covers_spec: As that ref has it.
        """
        return MediaRef(
            partial(self.decode, data),
            data,
            self.spec,
            key=self.key(data) if key is None else key,
            header_probe=partial(self.header, data),
            key_covers_spec=key_covers_spec,
        )


def rebuild_decoder(
    spec: DecodeSpec,
    *,
    limits: DecodeLimits = DecodeLimits(),  # noqa: B008  # frozen
    transforms: TransformTable = MEDIA_TRANSFORMS,
) -> RebuiltDecoder:
    """Return what decodes as `spec` says.

    Args:
        spec: Of a ref, mapped or not. Transforms without settings are not in it: they leave
            the media what it is, and are up to whoever wants that form.
        limits: What one decode may produce.
        transforms: Those that may have been applied.

    Raises:
        ValidationError: If the spec names no decoder that is known here, or one of another
            version, or a setting is not valid.
    """
    settings = spec.settings
    name = settings.pop("decoder", None)
    builder = _BUILDERS.get(name) if isinstance(name, str) else None
    if builder is None:
        raise ValidationError(
            f"no decoder {name!r} is known here; known are: {', '.join(sorted(_BUILDERS))}",
            parameter="decoder",
            value=name,
        )
    assert isinstance(name, str)
    applied = transforms.applied(name.partition("/")[0], spec)
    for transform in applied:
        for parameter in transform.parameters:
            del settings[parameter]
    base_spec = DecodeSpec({**settings, "decoder": name})
    is_sequence = SEQUENCE_SETTING in settings
    return RebuiltDecoder(
        spec,
        builder(settings, limits),
        base_spec,
        tuple(applied),
        JPEG_SEQUENCE if is_sequence else None,
    )


def can_rebuild(spec: DecodeSpec) -> bool:
    """Whether another process here may decode as `spec` says.

    Not with a video backend that holds a device: each process would take its own share of it.
    """
    settings = spec.settings
    if settings.get("decoder") not in _BUILDERS:
        return False
    backend = settings.get("video_backend")
    if backend is None:
        return True
    try:
        loader = VIDEO_LOADER_REGISTRY.loader_class(backend)
    except ValidationError:
        return False
    return not getattr(loader, "startup_options", None)


def register_decoder(name: str, builder: DecoderBuilder) -> None:
    """Make known who decodes specs that name `name`; the same once more is no error.

    Raises:
        ValueError: If the name belongs to another builder.
    """
    if _BUILDERS.setdefault(name, builder) is not builder:
        raise ValueError(f"a decoder named {name!r} exists already")


def _build_image(settings: Settings, limits: DecodeLimits) -> MediaIO[Any]:
    settings.pop("decoder", None)  # of a sequence's frames
    return ImageMediaIO(limits=limits, **settings)


def _build_audio(settings: Settings, limits: DecodeLimits) -> MediaIO[Any]:
    return AudioMediaIO(limits=limits, **settings)


def _build_video(settings: Settings, limits: DecodeLimits) -> MediaIO[Any]:
    frame_settings = settings.pop(SEQUENCE_SETTING, {})
    return VideoMediaIO(_build_image(frame_settings, limits), limits=limits, **settings)


def _build_raw_video(settings: Settings, limits: DecodeLimits) -> MediaIO[Any]:
    # A jpeg sequence has the spec of the frames' own decoder, so that none comes here.
    frames_io = VideoMediaIO(ImageMediaIO(limits=limits), limits=limits)
    return RawVideoMediaIO(frames_io, limits=limits)


def _build_embeddings(settings: Settings, limits: DecodeLimits) -> MediaIO[Any]:
    return EmbeddingMediaIO(limits=limits, **settings)


_BUILDERS: Final[dict[str, DecoderBuilder]] = {
    AUDIO_DECODER: _build_audio,
    EMBEDDING_DECODER: _build_embeddings,
    IMAGE_DECODER: _build_image,
    RAW_VIDEO_DECODER: _build_raw_video,
    VIDEO_DECODER: _build_video,
}
