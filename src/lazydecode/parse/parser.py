"""From what users and the fetcher give to item groups; references stay undecoded."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeGuard

import numpy as np
from PIL import Image, ImageOps

from lazydecode.inputs import MultiModalDataDict, MultiModalUUIDDict
from lazydecode.media.base import MediaRef
from lazydecode.media.image_convert import to_mode
from lazydecode.media.transforms import NORMALIZE_AUDIO, normalize_audio
from lazydecode.parse.embeddings import (
    AudioEmbeddingItems,
    ImageEmbeddingItems,
    VideoEmbeddingItems,
)
from lazydecode.parse.items import (
    AudioProcessorItems,
    ImageProcessorItems,
    ModalityDataItems,
    MultiModalDataItems,
    VideoMetadata,
    VideoProcessorItems,
    VisionChunkProcessorItems,
)

_EMBEDDING_NDIM: Final = 2
_WHITE: Final = (255, 255, 255)


def parse_mm_uuids(mm_uuids: MultiModalUUIDDict | None) -> dict[str, Sequence[str | None]]:
    """Return modality -> identities in item order; a bare string stands for one item."""
    if mm_uuids is None:
        return {}
    return {
        modality: [uuids] if isinstance(uuids, str) else uuids
        for modality, uuids in mm_uuids.items()
    }


class MultiModalDataParser:
    """Parses the media of a request into item groups.

    Args:
        target_sr: Rate in Hz to which audio is brought; None leaves it as it is.
        target_channels: Channels to which audio is brought; None leaves them.
        audio_resample_method: How audio is resampled.
        video_needs_metadata: Whether the processor takes frames with their metadata.
        expected_hidden_size: Last axis that embeddings must have; None: not checked.
        allow_missing_mm_embeddings: Whether a list of embeddings may hold None beside a uuid.
    """

    def __init__(
        self,
        target_sr: float | None = None,
        target_channels: int | None = None,
        audio_resample_method: str = "soxr",
        video_needs_metadata: bool = False,
        expected_hidden_size: int | None = None,
        allow_missing_mm_embeddings: bool = False,
    ) -> None:
        self.target_sr = target_sr
        self.target_channels = target_channels
        self.audio_resample_method = audio_resample_method
        self.video_needs_metadata = video_needs_metadata
        self.expected_hidden_size = expected_hidden_size
        self.allow_missing_mm_embeddings = allow_missing_mm_embeddings

    def parse_mm_data(self, mm_data: MultiModalDataDict) -> MultiModalDataItems:
        """Return the item groups; nothing is decoded.

        A modality whose value is None is left out, an empty list stays as zero items, a single
        item counts as a list of one, and None in a list stays (it needs a uuid).

        Raises:
            ValueError: If a modality is unknown, or an item has no usable form.
        """
        parsers = self._get_subparsers()
        groups = MultiModalDataItems()
        for modality, data in mm_data.items():
            parse = parsers.get(modality)
            if parse is None:
                raise ValueError(f"unknown modality {modality!r}; known: {sorted(parsers)}")
            if data is not None:
                groups[modality] = parse(data)
        return groups

    def _get_subparsers(self) -> Mapping[str, Callable[[Any], ModalityDataItems[Any, Any]]]:
        """Return modality -> parser of its data; a model family may add its own."""
        return {
            "audio": self._parse_audio_data,
            "image": self._parse_image_data,
            "video": self._parse_video_data,
            "vision_chunk": self._parse_vision_chunk_data,
        }

    # -- images

    def _parse_image_data(self, data: Any) -> ModalityDataItems[Any, Any]:
        if self.is_embeddings(data):
            self._check_missing_embeddings("image", data)
            return ImageEmbeddingItems(data, self.expected_hidden_size)
        if not isinstance(data, list) and (
            isinstance(data, MediaRef | Image.Image) or (_is_array(data) and data.ndim == 3)
        ):
            data = [data]
        return ImageProcessorItems(_each("image", data, self._prepare_image))

    def _prepare_image(self, image: Any) -> Any:
        if isinstance(image, MediaRef) or (_is_array(image) and image.ndim in (2, 3)):
            return image
        if not isinstance(image, Image.Image):
            raise ValueError(f"an image cannot be given as {_form(image)}")
        with suppress(Exception):  # Broken EXIF, of any kind, leaves the image as stored.
            image = ImageOps.exif_transpose(image)
        return to_mode(image, "RGB", _WHITE)

    # -- audio

    def _parse_audio_data(self, data: Any) -> ModalityDataItems[Any, Any]:
        if self.is_embeddings(data):
            self._check_missing_embeddings("audio", data)
            return AudioEmbeddingItems(data, self.expected_hidden_size)
        if (
            isinstance(data, MediaRef | tuple)
            or (_is_array(data) and data.ndim == 1)
            or (isinstance(data, list) and data and isinstance(data[0], numbers.Real))
        ):
            data = [data]
        return AudioProcessorItems(_each("audio", data, self._prepare_audio))

    def _prepare_audio(self, audio: Any) -> Any:
        if isinstance(audio, MediaRef):
            # All three always, also when None: they are what the transform depends on.
            return NORMALIZE_AUDIO.map(audio, **self._audio_settings())
        return normalize_audio(audio, **self._audio_settings())

    def _audio_settings(self) -> dict[str, Any]:
        return {
            "target_sr": self.target_sr,
            "resample_method": self.audio_resample_method,
            "target_channels": self.target_channels,
        }

    # -- video

    def _parse_video_data(self, data: Any) -> ModalityDataItems[Any, Any]:
        if self.is_embeddings(data):
            self._check_missing_embeddings("video", data)
            return VideoEmbeddingItems(data, self.expected_hidden_size)
        if (
            isinstance(data, MediaRef)
            or _is_frames_with_metadata(data)
            or (_is_array(data) and data.ndim == 4)
            or (isinstance(data, list) and data and _is_frame(data[0]))
        ):
            data = [data]
        pairs = _each("video", data, self._prepare_video)
        return VideoProcessorItems(
            [None if pair is None else pair[0] for pair in pairs],
            [None if pair is None else pair[1] for pair in pairs],
            video_needs_metadata=self.video_needs_metadata,
        )

    def _prepare_video(self, video: Any) -> tuple[Any, VideoMetadata | None]:
        """Return what is stored for a video, and its metadata if they are known."""
        frames, metadata = self._get_video_with_metadata(video)
        if isinstance(frames, MediaRef):
            return frames, metadata
        return self._split_video((frames, metadata)), metadata

    def _get_video_with_metadata(self, video: Any) -> tuple[Any, VideoMetadata | None]:
        """Return the frames, or a reference that decodes to them, and known metadata."""
        if isinstance(video, MediaRef):
            # Without settings: the media stays the same, and so does its key.
            return video.map(self._split_video), None
        if _is_frames_with_metadata(video):
            return video
        if isinstance(video, list) and video and all(map(_is_frame, video)):
            return np.stack([np.asarray(frame) for frame in video]), None
        if _is_array(video) and video.ndim == 4:
            return video, None
        raise ValueError(f"a video cannot be given as {_form(video)}")

    def _split_video(self, video: Any) -> Any:
        """Return the pair of frames and metadata, or bare frames if there is no metadata."""
        frames, metadata = video if isinstance(video, tuple) else (video, None)
        if metadata is None:
            if self.video_needs_metadata:
                raise ValueError(
                    "Video metadata is required but not found: give the video as a pair of "
                    "frames and metadata"
                )
            return frames
        return frames, metadata

    # -- unified chunks

    def _parse_vision_chunk_data(self, data: Any) -> ModalityDataItems[Any, Any]:
        if self.is_embeddings(data):
            raise ValueError("embeddings cannot be given as vision chunks")
        return VisionChunkProcessorItems([data] if isinstance(data, Mapping) else list(data))

    # -- embeddings

    @classmethod
    def is_embeddings(cls, data: object) -> bool:
        """Whether `data` is a 3-d tensor, or a list of 2-d tensors with or without None."""
        if not isinstance(data, list):
            return _is_tensor(data) and bool(data.ndim == _EMBEDDING_NDIM + 1)
        given = [item for item in data if item is not None]
        if not given or isinstance(given[0], MediaRef):
            return False
        return all(_is_tensor(item) and item.ndim == _EMBEDDING_NDIM for item in given)

    def _check_missing_embeddings(self, modality: str, data: Any) -> None:
        if self.allow_missing_mm_embeddings or not isinstance(data, list):
            return
        for index, item in enumerate(data):
            if item is None:
                raise ValueError(f"{modality} embedding at index {index} is missing")


def _is_tensor(value: object) -> TypeGuard[Any]:
    # A tensor cannot exist before torch was imported.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: object) -> TypeGuard[Any]:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _is_frame(value: object) -> bool:
    return isinstance(value, Image.Image) or (_is_array(value) and value.ndim in (2, 3))


def _is_frames_with_metadata(value: object) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | None)


def _form(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if _is_array(value) else ""
    return f"{type(value).__name__}{shape}"


def _each(modality: str, data: Any, prepare: Callable[[Any], Any]) -> list[Any]:
    """Prepare every item but None; an error says which item it is about."""
    is_list = isinstance(data, list)  # as nearly always; abstract classes are slow to answer
    if not is_list and (not isinstance(data, Iterable) or isinstance(data, str | bytes | Mapping)):
        raise ValueError(f"{modality} data cannot be given as {_form(data)}")
    prepared = []
    for index, item in enumerate(data):
        try:
            prepared.append(None if item is None else prepare(item))
        except ValueError as exc:
            raise ValueError(f"{modality} at index {index}: {exc}") from exc
    return prepared
