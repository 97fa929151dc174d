"""The value types that cross the house: items, their tensors, placeholder ranges, engine input.

torch appears in annotations only, so that `lazydecode.media` users can import the aliases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lazydecode.media.base import MediaRef

if TYPE_CHECKING:
    import torch

ImageItem: TypeAlias = "Image.Image | NDArray[Any] | torch.Tensor | MediaRef[Any]"
"""One image: decoded, an array or tensor, embeddings, or a reference."""
VideoItem: TypeAlias = (
    "list[Image.Image] | NDArray[Any] | torch.Tensor"
    " | tuple[NDArray[Any], dict[str, Any]] | MediaRef[Any]"
)
"""One video: frames, frames with metadata, embeddings, or a reference."""
AudioItem: TypeAlias = (
    "NDArray[Any] | torch.Tensor | list[float] | tuple[NDArray[Any], float] | MediaRef[Any]"
)
"""One audio clip: samples, samples with a rate in Hz, embeddings, or a reference."""

Modality: TypeAlias = Literal["image", "video", "audio", "vision_chunk"]
MultiModalDataDict: TypeAlias = Mapping[str, Any]
"""Modality -> one item, a list of items (each may be None beside a uuid), or embeddings."""
MultiModalUUIDDict: TypeAlias = Mapping[str, Sequence[str | None] | str]
"""Modality -> the caller's identity of each item, in the order of the data."""

NestedTensors: TypeAlias = "torch.Tensor | list[NestedTensors] | int | float | None"
"""A tensor, a list of tensors that do not stack, a plain number, or no data."""


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Where an item's placeholder tokens stand in the prompt."""

    offset: int
    """First position, from 0."""
    length: int
    """Number of tokens."""
    is_embed: NDArray[np.bool_] | None = None
    """Shape (length,), bool: which of them take an embedding; None if all do."""

    @property
    def num_embeds(self) -> int:
        """Number of positions that take an embedding."""
        return self.length if self.is_embed is None else int(self.is_embed.sum())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        if (self.offset, self.length) != (other.offset, other.length):
            return False
        if self.is_embed is None or other.is_embed is None:
            return self.is_embed is other.is_embed
        return bool(np.array_equal(self.is_embed, other.is_embed))

    __hash__ = None  # type: ignore[assignment]  # holds an array


@dataclass(frozen=True, slots=True)
class BatchedField:
    """Items are stacked along a new first dimension; an item has no batch dimension."""

    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class FlatField:
    """Items are concatenated along `dim`."""

    dim: int = 0
    keep_on_cpu: bool = False
    step: int = 0
    """For a tensor of row numbers: added to those (not the negative ones) of every later item."""


@dataclass(frozen=True, slots=True)
class SharedField:
    """One value stands for all items of the request."""

    batch_size: int = 1
    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class PaddedField:
    """Items are zero-padded to the largest on every differing dimension, then stacked or joined."""

    dim: int = 0
    """Dimension along which the padded items are concatenated."""
    keep_on_cpu: bool = False


ItemField: TypeAlias = BatchedField | FlatField | SharedField | PaddedField
"""How the tensors of several items join into the batch that a model takes."""


@dataclass(frozen=True, slots=True)
class MultiModalFieldElem:
    """One named tensor of one item, with the rule by which items join."""

    data: NestedTensors
    field: ItemField
    _numbers: Any = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return MultiModalFieldElem, (self.data, self.field)  # nothing that can be made anew

    def numbers(self) -> Any:
        """Return `data` as numbers and nested lists of them, for reading only; made once."""
        if self._numbers is None:
            object.__setattr__(self, "_numbers", _as_numbers(self.data))
        return self._numbers


class MultiModalKwargsItem(dict[str, MultiModalFieldElem]):
    """Everything a model takes for one item: field name -> tensor and rule.

    Treated as immutable once it is in a cache: consumers that change tensors in place copy.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: the unit in which both mirrored caches count."""
        return sum(nested_nbytes(elem.data) for elem in self.values())

    def get_data(self) -> dict[str, NestedTensors]:
        """Field name -> tensor, without the rules."""
        return {name: elem.data for name, elem in self.items()}

    def __repr__(self) -> str:
        return f"<MultiModalKwargsItem {sorted(self)}, {self.nbytes} bytes>"


def _as_numbers(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_numbers(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def nested_nbytes(value: NestedTensors) -> int:
    """Bytes held by a tensor or a nest of tensors; plain numbers count 8."""
    if value is None:
        return 0
    if isinstance(value, list):
        return sum(nested_nbytes(item) for item in value)
    nbytes = getattr(value, "nbytes", None)
    return 8 if nbytes is None else int(nbytes)


class MultiModalInput(TypedDict):
    """What the processor hands to an engine for one prompt."""

    type: Literal["multimodal"]
    prompt_token_ids: list[int]
    mm_kwargs: dict[str, list[MultiModalKwargsItem | None]]
    """Modality -> per item its tensors, or None when the receiver cache holds them."""
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[PlaceholderRange]]
    mm_origins: NotRequired[dict[str, list[tuple[str, int]]]]
    """Modality -> per item modality and number of what the client sent; absent where they are
    those of the item."""
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
