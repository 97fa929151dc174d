"""Groups of items of one modality: `get` gives what a processor sees, `get_raw` what is stored."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
from PIL import Image

from lazydecode.media.base import MediaRef

_D = TypeVar("_D")
_I = TypeVar("_I")
_G = TypeVar("_G", bound="ModalityDataItems[Any, Any]")

VideoMetadata = dict[str, Any]


class ModalityDataItems(ABC, Generic[_D, _I]):
    """The items of one modality in a request, in the client's order.

    Args:
        data: The items as stored.
        modality: Their modality, for example `image`.
    """

    holds_embeddings: ClassVar[bool] = False
    """Whether they came as embeddings in the place of media."""

    def __init__(self, data: _D, modality: str) -> None:
        self.data = data
        self.modality = modality
        self._original_indices: list[int] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.modality}, {len(self)} items>"

    def __copy__(self) -> Self:
        # What `copy` does by itself, at a tenth of the cost: each request selects several times.
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __len__(self) -> int:
        return self.get_count()

    def __getitem__(self, index: int) -> _I:
        return self.get(index)

    def __iter__(self) -> Iterator[_I]:
        # By count: without this, iteration would end at the first IndexError of a decoder.
        return (self.get(index) for index in range(self.get_count()))

    @abstractmethod
    def get_count(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def get(self, index: int) -> _I:
        """Return the item as the processor sees it; decodes a reference."""

    def get_raw(self, index: int) -> object:
        """Return the item as stored; never decodes."""
        return self.get(index)

    def get_all(self) -> list[_I]:
        """Return all items as the processor sees them."""
        return [self.get(index) for index in range(self.get_count())]

    def get_all_raw(self) -> list[object]:
        """Return all items as stored."""
        return [self.get_raw(index) for index in range(self.get_count())]

    @abstractmethod
    def get_processor_data(self) -> Mapping[str, object]:
        """Return the keyword arguments that carry these items into the HF processor."""

    @abstractmethod
    def get_passthrough_data(self) -> Mapping[str, object]:
        """Return what goes to the model without the HF processor."""

    def get_original_index(self, index: int) -> int:
        """Return the position in the request of the item that is at `index` here."""
        if self._original_indices is None:
            if not 0 <= index < self.get_count():
                raise IndexError(f"{self.modality} index {index} is out of range")
            return index
        return self._original_indices[index]

    def numbered(self, indices: Sequence[int]) -> Self:
        """Return the same items under other positions in the request, one for each."""
        if len(indices) != self.get_count():
            raise ValueError(f"{len(indices)} numbers do not name {self.get_count()} items")
        if self._original_indices is None and [*indices] == [*range(len(indices))]:
            return self
        numbered = copy.copy(self)
        numbered._original_indices = list(indices)
        return numbered

    def get_client_position(self, index: int) -> tuple[str, int]:
        """Return modality and position, as the client counts, of the item at `index` here."""
        return self.modality, self.get_original_index(index)

    def select(self, indices: Sequence[int]) -> Self:
        """Return the items at `indices`, as the same class, without parsing them again.

        Raw items stay the same objects, and original positions compose.
        """
        selected = copy.copy(self)
        selected._original_indices = [self.get_original_index(index) for index in indices]
        selected.data = self._select_data(indices)
        return selected

    @abstractmethod
    def _select_data(self, indices: Sequence[int]) -> _D:
        """Return the part of `data` that holds the items at `indices`."""


class ProcessorBatchItems(ModalityDataItems[Sequence[Any], Any]):
    """Items that go through the HF processor, one entry of `data` each."""

    data: Sequence[Any]

    def get_count(self) -> int:
        """Return the number of items."""
        return len(self.data)

    def get_raw(self, index: int) -> Any:
        """Return the entry itself: a reference, decoded media, or None."""
        return self.data[index]

    def get(self, index: int) -> Any:
        """Return the decoded item; a reference is decoded here if nothing did before."""
        item = self.data[index]
        return item.decode() if isinstance(item, MediaRef) else item

    def get_processor_data(self) -> Mapping[str, object]:
        """Return `{modality + "s": decoded items}`."""
        return {f"{self.modality}s": self.get_all()}

    def get_passthrough_data(self) -> Mapping[str, object]:
        """Return nothing: everything goes through the processor."""
        return {}

    def _select_data(self, indices: Sequence[int]) -> Sequence[Any]:
        return [self.get_raw(index) for index in indices]


class ImageSize(NamedTuple):
    """Size of an image in pixels."""

    width: int
    height: int


def array_image_size(shape: Sequence[int]) -> ImageSize:
    """Return the size of an array image: HWC if the last axis is 1, 3 or 4 long, else CHW."""
    if shape[-1] in (1, 3, 4):
        height, width = shape[-3], shape[-2]
    else:
        height, width = shape[-2], shape[-1]
    return ImageSize(int(width), int(height))


def _frame_size(frame: Any) -> ImageSize:
    if isinstance(frame, Image.Image):
        return ImageSize(*frame.size)
    if len(frame.shape) < 3:
        height, width = frame.shape
        return ImageSize(int(width), int(height))
    return array_image_size(frame.shape)


class AudioProcessorItems(ProcessorBatchItems):
    """Audio clips as sample arrays."""

    def __init__(self, data: Sequence[Any]) -> None:
        super().__init__(data, "audio")

    def get_audio_length(self, index: int) -> int:
        """Return the number of samples of one clip."""
        return len(self.get(index))


class ImageProcessorItems(ProcessorBatchItems):
    """Images: PIL images, arrays or tensors."""

    def __init__(self, data: Sequence[Any]) -> None:
        super().__init__(data, "image")

    def get_image_size(self, index: int) -> ImageSize:
        """Return width and height of one image."""
        return _frame_size(self.get(index))


class VideoProcessorItems(ProcessorBatchItems):
    """Videos: frames, or pairs of frames and metadata, as stored.

    Args:
        data: Per video frames, a pair `(frames, metadata)`, a reference to either, or None.
        metadata: Per video its metadata, None where it is not known yet; or one mapping that
            all videos share.
        video_needs_metadata: Whether the processor takes pairs.
    """

    def __init__(
        self,
        data: Sequence[Any],
        metadata: list[VideoMetadata | None] | VideoMetadata | None = None,
        *,
        video_needs_metadata: bool = True,
    ) -> None:
        super().__init__(data, "video")
        self._metadata: list[VideoMetadata | None] | VideoMetadata = (
            [None] * len(data) if metadata is None else metadata
        )
        self.video_needs_metadata = video_needs_metadata

    def get(self, index: int) -> Any:
        """Return what the processor takes: frames, or `(frames, metadata)` if it needs both."""
        frames, metadata = self._resolve(index)
        if self.video_needs_metadata and metadata is not None:
            return frames, metadata
        return frames

    def get_frames(self, index: int) -> Any:
        """Return the frames of one video, whatever the processor takes."""
        return self._resolve(index)[0]

    def get_metadata(self, index: int) -> VideoMetadata | None:
        """Return the metadata of one video; decodes that video at most, not its neighbours."""
        if isinstance(self._metadata, dict):
            return self._metadata
        known = self._metadata[index]
        return known if known is not None else self._resolve(index)[1]

    @property
    def metadata(self) -> list[VideoMetadata | None] | VideoMetadata:
        """The metadata of all videos; decodes those whose metadata is not known yet."""
        if isinstance(self._metadata, list):
            for index in range(len(self._metadata)):
                self.get_metadata(index)
        return self._metadata

    def get_num_frames(self, index: int) -> int:
        """Return the number of frames of one video."""
        return len(self.get_frames(index))

    def get_frame_size(self, index: int) -> ImageSize:
        """Return width and height of one video's frames."""
        frames = self.get_frames(index)
        if isinstance(frames, np.ndarray) and frames.ndim == 4:
            return array_image_size(frames.shape[1:])
        return _frame_size(frames[0])

    def select(self, indices: Sequence[int]) -> Self:
        """Return the videos at `indices` with their metadata."""
        selected = super().select(indices)
        if isinstance(self._metadata, list):
            selected._metadata = [self._metadata[index] for index in indices]
        return selected

    def _resolve(self, index: int) -> tuple[Any, VideoMetadata | None]:
        """Return frames and metadata, and note the metadata for `metadata`."""
        item = super().get(index)
        frames, metadata = item if isinstance(item, tuple) else (item, None)
        if isinstance(self._metadata, dict):
            return frames, self._metadata if metadata is None else metadata
        if metadata is None:
            metadata = self._metadata[index]
        self._metadata[index] = metadata
        return frames, metadata


class VisionChunkProcessorItems(ProcessorBatchItems):
    """Images and video chunks of the unified modality, in request order.

    Args:
        data: Per chunk a picture, a pair of frames and metadata, a reference to either, or None.
        origins: Per chunk the modality and position of the client's item that it is or is cut
            from; chunks of one video follow each other.
        metadata: Per video chunk its metadata where they are known before it is decoded.
    """

    def __init__(
        self,
        data: Sequence[Any],
        origins: Sequence[tuple[str, int]] | None = None,
        metadata: Sequence[VideoMetadata | None] | None = None,
    ) -> None:
        super().__init__(data, "vision_chunk")
        if origins is None:
            origins = [(self.modality, index) for index in range(len(data))]
        self.origins = list(origins)
        self.metadata = list(metadata or [None] * len(data))

    def get_client_position(self, index: int) -> tuple[str, int]:
        """Return modality and position, as the client counts, of what the chunk is cut from."""
        return self.origins[index]

    def select(self, indices: Sequence[int]) -> Self:
        """Return the chunks at `indices`, which stay parts of the same items."""
        selected = super().select(indices)
        selected.origins = [self.origins[index] for index in indices]
        selected.metadata = [self.metadata[index] for index in indices]
        return selected


class MultiModalDataItems(dict[str, ModalityDataItems[Any, Any]]):
    """Modality -> its items."""

    def select(self, modalities: set[str]) -> MultiModalDataItems:
        """Return the groups of some modalities only; the items themselves stay."""
        return MultiModalDataItems(
            {modality: items for modality, items in self.items() if modality in modalities}
        )

    def get_count(self, modality: str, *, strict: bool = True) -> int:
        """Return the number of items of a modality; 0 if absent and not `strict`."""
        if modality not in self:
            if strict:
                raise KeyError(f"modality {modality!r} is not among {sorted(self)}")
            return 0
        return self[modality].get_count()

    def get_all_counts(self) -> dict[str, int]:
        """Return the number of items of every modality."""
        return {modality: items.get_count() for modality, items in self.items()}

    def get_items(self, modality: str, kind: type[_G] | tuple[type[_G], ...]) -> _G:
        """Return the group of a modality, which must be of the given class."""
        if modality not in self:
            raise KeyError(f"modality {modality!r} is not among {sorted(self)}")
        items = self[modality]
        if not isinstance(items, kind):
            raise TypeError(f"{modality} items are {type(items).__name__}, not {kind}")
        return items
