"""Video: which decoder, with which options; frames on demand.

The frames that a decode returns, and their true times, are settled by the container's packets;
`plan_frames` says the same from a header alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

from PIL import Image

from lazydecode.errors import ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media.base import (
    EMPTY_SPEC,
    DecodeSpec,
    MediaIO,
    MediaRef,
    PayloadDigest,
    RefMaker,
    VideoHeader,
    decode_base64,
)
from lazydecode.media.jpeg_sequence import (
    SEQUENCE_OPTIONS,
    JpegSequence,
    SequenceOptions,
    is_jpeg_sequence,
)
from lazydecode.media.video_backends.base import (
    DecodedVideo,
    VideoLoader,
    VideoMetadata,
    checked_decode,
    describe,
)
from lazydecode.media.video_backends.registry import VIDEO_LOADER_REGISTRY, backend_fingerprint
from lazydecode.media.video_header import probe_video_header
from lazydecode.media.video_sampling import (
    ALL_FRAMES,
    SAMPLING_OPTIONS,
    Timeline,
    check_num_frames,
)

__all__ = [
    "DEFAULT_NUM_FRAMES",
    "DEFAULT_VIDEO_BACKEND",
    "VIDEO_DECODER",
    "VIDEO_LOADER_REGISTRY",
    "DecodedVideo",
    "VideoMediaIO",
    "VideoMetadata",
    "backend_fingerprint",
    "plan_frames",
]

VIDEO_DECODER: Final = "video/1"
"""What decodes, and the version of what it gives: part of every key, so a change of our output
changes the keys."""
DEFAULT_VIDEO_BACKEND: Final = "pyav"
DEFAULT_NUM_FRAMES: Final = 32

_EXCLUSIVE: Final = {"fps": "num_frames", "num_frames": "fps"}
"""Naming one of a pair in a request drops the server's default of the other."""
SEQUENCE_SETTING: Final = "jpeg_sequence"
"""Setting that marks the spec of a jpeg sequence; it holds the frame decoder's settings."""


class VideoMediaIO(MediaIO[DecodedVideo]):
    """Decodes the chosen frames of a video: RGB, upright, with the true time of each.

    Args:
        image_io: Decodes the frames of a jpeg sequence.
        num_frames: At most so many frames, evenly spread; -1 for all. None is 32, or -1 if
            `fps` is given. With `fps` too, the smaller count wins.
        limits: How much one video may yield.
        default_backend: What decodes if `video_backend` is not given.
        kwargs: `video_backend` names the decoder; the sampling options are `fps`,
            `max_frames`, `start_time` and `end_time` (seconds), `timestamps` (seconds) or
            `frame_indices`, and `frame_recovery`. Options of a backend, and those that describe
            a jpeg sequence (`frames_indices`, `total_num_frames`, `duration`, `fps`,
            `do_sample_frames`), are passed on. All of them are part of the key.

    Raises:
        ValidationError: If an option is wrong, or the backend is unknown or not installed.
    """

    def __init__(
        self,
        image_io: MediaIO[Image.Image],
        num_frames: int | None = None,
        *,
        limits: DecodeLimits = DecodeLimits(),  # noqa: B008  # frozen
        default_backend: str = DEFAULT_VIDEO_BACKEND,
        **kwargs: Any,
    ) -> None:
        backend = kwargs.pop("video_backend", None)
        if backend is None:
            backend = default_backend
        if not isinstance(backend, str):
            raise ValidationError(
                f"video_backend must be a name, got {backend!r}",
                parameter="video_backend",
                value=backend,
            )
        if num_frames is None:
            num_frames = DEFAULT_NUM_FRAMES if kwargs.get("fps") is None else ALL_FRAMES
        self.image_io = image_io
        self.num_frames = num_frames
        self.limits = limits
        self.kwargs = kwargs
        self.video_loader_backend: str = backend
        self.video_loader = VIDEO_LOADER_REGISTRY.load(backend)
        if isinstance(self.video_loader, VideoLoader):
            self.video_loader.limits = limits
        settings = {
            **kwargs,
            "decoder": VIDEO_DECODER,
            "num_frames": num_frames,
            "video_backend": backend,
        }
        try:
            self._spec = DecodeSpec(settings)
        except (TypeError, ValueError) as exc:
            raise ValidationError(f"video options: {exc}", parameter="media_io_kwargs") from exc

    @classmethod
    def merge_kwargs(
        cls,
        defaults: Mapping[str, Any] | None,
        runtime: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Merge a request's options over the server's.

        The request wins. Naming one of `fps` and `num_frames` drops the server's other one;
        naming another backend drops what only the server's backend understands.

        Raises:
            ValidationError: If the request sets what only the server may (device, pools).
        """
        server, request = dict(defaults or {}), dict(runtime or {})
        for name, other in _EXCLUSIVE.items():
            if name in request and other not in request:
                server.pop(other, None)
        for option in ("video_backend", "backend"):
            old, new = server.get(option), request.get(option)
            if new is not None and old is not None and new != old:
                for name in _options_of(old, "own_options") | _options_of(old, "startup_options"):
                    server.pop(name, None)
        backend = request.get("video_backend") or server.get("video_backend")
        forbidden = _STARTUP_ONLY | _options_of(backend, "startup_options")
        for name in sorted(forbidden & request.keys()):
            if name not in server or request[name] != server[name]:
                raise ValidationError(
                    f"{name} can only be set when the server starts",
                    parameter=name,
                    value=request[name],
                )
        return {**server, **request}

    def get_decode_spec(self) -> DecodeSpec:
        """All options, with the frame count and the backend as they are used."""
        return self._spec

    def option_names(self) -> frozenset[str] | None:
        """Names of all options that mean something to this backend, or for a jpeg sequence.

        None for a backend from elsewhere that does not list its own options.
        """
        if not hasattr(self.video_loader, "own_options"):
            return None
        own = self.video_loader.own_options | getattr(self.video_loader, "startup_options", set())
        return frozenset({"video_backend"} | SAMPLING_OPTIONS | SEQUENCE_OPTIONS | own)

    def identity_scope(self) -> Hashable | None:
        """The options, what checks them, and the limits."""
        if type(self) is not VideoMediaIO:
            return None  # a subclass may go by more
        return (VideoMediaIO, type(self.video_loader), self._spec, self.limits)

    def probe_header(self, data: bytes) -> VideoHeader | None:
        """Size after rotation, rate, duration and frames; None if it does not parse."""
        return probe_video_header(data)

    def load_bytes(self, data: bytes) -> DecodedVideo:
        """Decode the chosen frames of `data`.

        Raises:
            CorruptMediaError: If it is damaged, cut off, or has no video stream.
            MediaTooLargeError: If the chosen frames are over a limit.
            PluginFailedError: If a backend from elsewhere fails in any other way.
            ValidationError: If an option is wrong, or does not fit this video.
        """
        check_num_frames(self.num_frames)
        with self._contained():
            decoded = self.video_loader.load_bytes(data, num_frames=self.num_frames, **self.kwargs)
            return checked_decode(decoded)

    def load_base64(self, media_type: str, data: str) -> DecodedVideo:
        """Decode base64 text: a jpeg sequence for `video/jpeg`, else a file."""
        if is_jpeg_sequence(media_type):
            return self._parse_sequence(data).decode(self.image_io, self.limits)
        return self.load_bytes(decode_base64(data))

    def load_file(self, filepath: Path) -> DecodedVideo:
        """Decode a file."""
        return self.load_bytes(filepath.read_bytes())

    def ref_at_once(self, data: bytes) -> RefMaker[DecodedVideo] | None:
        """Not None: nothing in it is looked at."""
        if type(self) is not VideoMediaIO or not isinstance(self.video_loader, VideoLoader):
            return None
        return lambda digest: self.load_bytes_ref(data, digest=digest)

    def load_bytes_ref(
        self, data: bytes, *, digest: PayloadDigest | None = None
    ) -> MediaRef[DecodedVideo]:
        """Return a ref over `data`; the sampling options are checked now.

        Raises:
            ValidationError: If one is wrong.
        """
        if isinstance(self.video_loader, VideoLoader):
            with self._contained():
                self.video_loader.options(self.num_frames, self.kwargs)
        else:
            check_num_frames(self.num_frames)
        return super().load_bytes_ref(data, digest=digest)

    def load_base64_ref(
        self, media_type: str, data: str | bytes | memoryview
    ) -> MediaRef[DecodedVideo]:
        """Return a ref over a jpeg sequence (`video/jpeg`), or over decoded base64.

        The ref of a sequence holds the text of the frames in use; its options are checked
        now, its frames are decoded later.

        Raises:
            CorruptMediaError: If the text of a file is not base64.
            MediaTooLargeError: If a sequence has more frames than the limit.
            ValidationError: If an option is wrong.
        """
        if not is_jpeg_sequence(media_type):
            return self.load_bytes_ref(decode_base64(data))
        sequence = self._parse_sequence(data)
        frame_spec = self.image_io.get_decode_spec() or EMPTY_SPEC
        spec = self._spec.extend(**{SEQUENCE_SETTING: frame_spec.settings})
        return MediaRef(
            partial(sequence.decode, self.image_io, self.limits),
            sequence.text,
            spec,
            header_probe=partial(sequence.probe_header, self.image_io),
            recipe=None if self.image_io.recipe(frame_spec) is None else self.recipe(spec),
        )

    def _contained(self) -> AbstractContextManager[None]:
        """What a backend from elsewhere raises in the block becomes an error with its name."""
        return VIDEO_LOADER_REGISTRY.contained(self.video_loader_backend, type(self.video_loader))

    def _parse_sequence(self, data: str | bytes | memoryview) -> JpegSequence:
        return JpegSequence.parse(data, self.num_frames, self.kwargs, self.limits)


_STARTUP_ONLY: Final = frozenset({"device", "gpu_decoder", "decoder_pool_size"})
"""Options that choose hardware and pools: the server's alone, whatever the backend."""


def _options_of(backend: object, kind: str) -> frozenset[str]:
    if not isinstance(backend, str):
        return frozenset()
    try:
        loader_class = VIDEO_LOADER_REGISTRY.loader_class(backend)
    except ValidationError:
        return frozenset()  # the constructor says what is wrong with it
    return frozenset(getattr(loader_class, kind, ()))


def plan_frames(spec: DecodeSpec, header: VideoHeader) -> VideoMetadata | None:
    """Return the metadata that a decode with `spec` gives, if `header` is true.

    None if that cannot be known from the header: a backend from elsewhere, or a header without
    frame count and rate.

    Raises:
        ValidationError: If an option of `spec` is wrong, or does not fit this video.
    """
    options = spec.settings
    num_frames, backend = options.pop("num_frames", ALL_FRAMES), options.pop("video_backend", None)
    if header.num_frames is None or header.num_frames < 1:
        return None
    if SEQUENCE_SETTING in options:
        return SequenceOptions.parse(header.num_frames, options).describe(
            header.width, header.height
        )
    if not header.fps or header.fps <= 0 or not isinstance(backend, str):
        return None
    loader_class = VIDEO_LOADER_REGISTRY.loader_class(backend)
    if not issubclass(loader_class, VideoLoader):
        return None
    timeline = Timeline.at_constant_rate(header.num_frames, header.fps)
    if header.frame_times_s is not None and header.duration_s:
        timeline = Timeline(header.frame_times_s, header.fps, header.duration_s)
    with VIDEO_LOADER_REGISTRY.contained(backend, loader_class):
        indices = loader_class.select(num_frames, options, timeline)
    metadata = describe(timeline, indices, loader_class.name)
    metadata["width"], metadata["height"] = header.width, header.height
    return metadata
