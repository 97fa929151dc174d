"""Items that are embeddings already: they pass the HF processor by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from lazydecode.inputs import MultiModalKwargsItem
from lazydecode.parse.items import ModalityDataItems

if TYPE_CHECKING:
    import torch


class EmbeddingItems(ModalityDataItems[Any, Any]):
    """Embeddings of one modality: a tensor (items, tokens, hidden), or one (tokens, hidden) each.

    Args:
        data: The tensor, or the list of tensors; entries may be None beside a uuid.
        modality: Their modality.
        expected_hidden_size: Length that the last axis must have; None: not checked.

    Raises:
        ValueError: If the rank or the last axis is wrong; the text names the item.
    """

    holds_embeddings = True

    def __init__(self, data: Any, modality: str, expected_hidden_size: int | None = None) -> None:
        super().__init__(data, modality)
        for index in range(self.get_count()):
            self._check(index, data[index], expected_hidden_size)

    def _check(self, index: int, item: Any, hidden_size: int | None) -> None:
        if item is None:
            return
        if len(item.shape) != 2:
            raise ValueError(
                f"{self.modality} embedding at index {index} must have the shape "
                f"(tokens, hidden size), got {tuple(item.shape)}"
            )
        if hidden_size is not None and item.shape[-1] != hidden_size:
            raise ValueError(
                f"{self.modality} embedding at index {index} has hidden size {item.shape[-1]}; "
                f"the model's is {hidden_size}"
            )

    def get_count(self) -> int:
        """Return the number of items."""
        return len(self.data)

    def get(self, index: int) -> Any:
        """Return the embedding of one item, shape (tokens, hidden)."""
        return self.data[index]

    def get_processor_data(self) -> Mapping[str, object]:
        """Return nothing: embeddings are not processed."""
        return {}

    def get_passthrough_data(self) -> Mapping[str, object]:
        """Return `{modality_embeds: data}`."""
        return {f"{self.modality}_embeds": self.data}

    def get_feature_size(self, index: int) -> int:
        """Return the number of tokens of one item."""
        return len(self.get(index))

    def _select_data(self, indices: Sequence[int]) -> Any:
        if isinstance(self.data, list | tuple):
            return [self.data[index] for index in indices]
        # A list index keeps the trailing shape of an empty selection, for arrays and tensors.
        return self.data[list(indices)] if indices else self.data[:0]


class ImageEmbeddingItems(EmbeddingItems):
    """Image embeddings."""

    def __init__(self, data: Any, expected_hidden_size: int | None = None) -> None:
        super().__init__(data, "image", expected_hidden_size)


class VideoEmbeddingItems(EmbeddingItems):
    """Video embeddings."""

    def __init__(self, data: Any, expected_hidden_size: int | None = None) -> None:
        super().__init__(data, "video", expected_hidden_size)


class AudioEmbeddingItems(EmbeddingItems):
    """Audio embeddings."""

    def __init__(self, data: Any, expected_hidden_size: int | None = None) -> None:
        super().__init__(data, "audio", expected_hidden_size)


class ItemFields(Protocol):
    """How the tensors of several items split into items and join again."""

    def split(self, data: Mapping[str, torch.Tensor]) -> Sequence[MultiModalKwargsItem]:
        """Return per item its tensors."""
        ...

    def join(self, items: Sequence[MultiModalKwargsItem]) -> Mapping[str, Any]:
        """Return the tensors of all items together: the inverse of `split`."""
        ...


class DictEmbeddingItems(ModalityDataItems[Mapping[str, Any], Mapping[str, Any]]):
    """Embeddings with the tensors that go with them, for example their grids.

    Args:
        data: Field name -> tensor over all items.
        modality: Their modality.
        required_fields: Fields that must be there.
        fields_factory: Gives the rule by which `data` splits into items.

    Raises:
        ValueError: If a required field is missing.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        modality: str,
        required_fields: set[str],
        fields_factory: Callable[[Mapping[str, Any]], ItemFields],
    ) -> None:
        missing = required_fields - set(data)
        if missing:
            raise ValueError(
                f"{modality} embeddings need the fields {sorted(required_fields)}; "
                f"missing: {sorted(missing)}"
            )
        super().__init__(data, modality)
        self.required_fields = required_fields
        self._fields = fields_factory(data)
        self._items = list(self._fields.split(data))

    def get_count(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def get(self, index: int) -> Mapping[str, Any]:
        """Return the tensors of one item by field name."""
        return self._items[index].get_data()

    def get_processor_data(self) -> Mapping[str, object]:
        """Return nothing: embeddings are not processed."""
        return {}

    def get_passthrough_data(self) -> Mapping[str, object]:
        """Return all fields of all items."""
        return self.data

    def select(self, indices: Sequence[int]) -> Self:
        """Return the items at `indices`; all their fields are picked together."""
        selected = super().select(indices)
        selected._items = [self._items[index] for index in indices]
        return selected

    def _select_data(self, indices: Sequence[int]) -> Mapping[str, Any]:
        if not indices:
            return {name: value[:0] for name, value in self.data.items()}
        return self._fields.join([self._items[index] for index in indices])
