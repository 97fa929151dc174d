"""Classes that take a video's container: their own reader and frame choice, over our bytes.

Such a class is given names of files, opens them, and picks frames by what it finds. Here it is
given names that stand for payloads in memory, and its reader gets those bytes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from lazydecode.errors import InvalidRequestError, LazyDecodeError, UnprocessableMediaError
from lazydecode.limits import DecodeLimits
from lazydecode.media.faults import describe
from lazydecode.media.headers import VideoHeader
from lazydecode.media.raw_video import RawVideo
from lazydecode.media.video import VIDEO_LOADER_REGISTRY, backend_fingerprint
from lazydecode.media.video_backends.base import check_frame_bytes, check_frame_count
from lazydecode.models.registry import FamilyRecord

logger = logging.getLogger(__name__)

_TORCHCODEC: Final = "torchcodec"
"""What transformers opens videos with."""
_PYAV: Final = "pyav"
"""What stands in for it where its libraries cannot be loaded."""
_MAX_JITTER: Final = 0.01
"""Part of a frame's duration by which frames of a constant rate may be early or late."""


class ContainerReader:
    """Lets the video part of one processor read payloads. Threads share it.

    Args:
        part: The processor's video part.
        limits: What one video may yield.
        reader: What decodes the frames that the class chooses: `torchcodec` as in transformers,
            or `pyav`.
    """

    def __init__(self, part: Any, limits: DecodeLimits, reader: str) -> None:
        self.part = part
        self.limits = limits
        self.reader = reader

    @property
    def fingerprint(self) -> str:
        """The library that decodes, and its version."""
        return backend_fingerprint(self.reader)

    def open(self, videos: Sequence[RawVideo]) -> tuple[Any, list[str]]:
        """Return a copy of the part that reads these videos, and their names for it."""
        named = {f"video-{number}": video for number, video in enumerate(videos)}
        part = copy.copy(self.part)

        def fetch_videos(names: Any, sample_indices_fn: Any = None) -> Any:
            # As the class's own, which returns ([frames, ...], [metadata, ...]) for a list.
            if isinstance(names, list):
                return list(zip(*[fetch_videos(n, sample_indices_fn) for n in names], strict=True))
            return self._read(named[names], sample_indices_fn)

        part.fetch_videos = fetch_videos
        return part, list(named)

    def plan(self, header: VideoHeader, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the metadata that reading a video with this header gives.

        None if the header does not say enough: the class counts on an average rate, which for
        frames at uneven times is not the one that we would state.

        Raises:
            InvalidRequestError: If the class refuses the options.
        """
        from transformers.video_utils import VideoMetadata

        if not header.num_frames or not header.fps or not _is_even(header):
            return None
        facts = {
            "total_num_frames": header.num_frames,
            "fps": header.fps,
            "duration": header.duration_s,
            "width": header.width,
            "height": header.height,
            "video_backend": self.reader,
        }
        scoped = options.get("videos_kwargs") or {}
        known = getattr(getattr(self.part, "valid_kwargs", None), "__annotations__", {})
        chosen = {
            name: scoped.get(name, options.get(name, getattr(self.part, name, None)))
            for name in known
        }
        if not chosen.pop("do_sample_frames", True):
            indices: Any = range(header.num_frames)
        else:
            indices = _choose(self.part.sample_frames, VideoMetadata(**facts), chosen)
        return {**facts, "frames_indices": [int(i) for i in indices], "do_sample_frames": False}

    def _read(self, video: RawVideo, sample_indices_fn: Callable[..., Any] | None) -> Any:
        """Return frames and metadata of one video, as the class's reader does.

        Raises:
            MediaTooLargeError: If the frames are over a limit; nothing was decoded then.
            UnprocessableMediaError: If the reader cannot read the video.
        """
        from transformers.video_utils import VIDEO_DECODERS

        def sample(metadata: Any, **kwargs: Any) -> Any:
            if sample_indices_fn is None:
                indices: Any = np.arange(metadata.total_num_frames)
            else:
                indices = _choose(sample_indices_fn, metadata, kwargs)
            check_frame_count(len(indices), self.limits)
            check_frame_bytes(len(indices), metadata.width, metadata.height, self.limits)
            return indices

        try:
            if self.reader == _PYAV:
                return _read_with_pyav(video, sample, self.limits)
            return VIDEO_DECODERS[_TORCHCODEC](video.data, sample)
        except (LazyDecodeError, MemoryError):
            raise
        except Exception as exc:
            logger.debug("the model's reader cannot read a video", exc_info=True)
            raise UnprocessableMediaError(
                f"the model's own reader cannot decode the video ({type(exc).__name__})"
            ) from exc


def _read_with_pyav(
    video: RawVideo, sample: Callable[[Any], Any], limits: DecodeLimits
) -> tuple[Any, Any]:
    """Return what transformers' reader does: uint8 frames (frames, 3, height, width), metadata.

    Raises:
        UnprocessableMediaError: If a chosen frame does not decode.
        MediaTooLargeError: If the frames are over a limit.
    """
    import torch
    from transformers.video_utils import VideoMetadata

    header = video.header
    if not header.num_frames or not header.fps:
        raise UnprocessableMediaError(
            "the model's own reader needs to know how many frames the video has, and how fast"
        )
    metadata = VideoMetadata(
        total_num_frames=header.num_frames,
        fps=header.fps,
        duration=header.duration_s,
        width=header.width,
        height=header.height,
        video_backend=_PYAV,
    )
    indices = [int(index) for index in sample(metadata)]
    loader = VIDEO_LOADER_REGISTRY.load(_PYAV)
    loader.limits = limits
    frames, found = loader.load_bytes(video.data, frame_indices=indices)
    if found["frames_indices"] != indices:
        raise UnprocessableMediaError(
            "the model's own reader cannot decode the video (some of its frames are damaged)"
        )
    metadata.frames_indices = indices
    return torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous(), metadata


def _choose(sample_frames: Callable[..., Any], metadata: Any, options: Mapping[str, Any]) -> Any:
    """Return the numbers of the frames that a class chooses.

    Raises:
        InvalidRequestError: If it refuses the options.
    """
    try:
        return sample_frames(metadata=metadata, **options)
    except Exception as exc:
        # Hugging Face code over the request's options.
        raise InvalidRequestError(
            f"the model's processor refuses it: {describe(exc)}", parameter="mm_processor_kwargs"
        ) from exc


def container_reader(
    processor: Any, record: FamilyRecord, limits: DecodeLimits
) -> ContainerReader | None:
    """Return what reads a family's videos, if it wants the containers."""
    part = getattr(processor, "video_processor", None)
    if "video" not in record.raw_media or part is None:
        return None
    from transformers.utils.import_utils import is_torchcodec_usable

    if is_torchcodec_usable(decode="video"):
        return ContainerReader(part, limits, _TORCHCODEC)
    logger.info(
        "%s opens videos itself, with torchcodec, which cannot be loaded here: PyAV reads the "
        "frames that it chooses",
        type(processor).__name__,
    )
    return ContainerReader(part, limits, _PYAV)


def _is_even(header: VideoHeader) -> bool:
    """Whether the frames follow each other at the header's rate."""
    times = header.frame_times_s
    if times is None or header.fps is None or len(times) < 2:
        return True
    gaps = np.diff(times) * header.fps
    return bool(np.all(np.abs(gaps - 1.0) <= _MAX_JITTER))
