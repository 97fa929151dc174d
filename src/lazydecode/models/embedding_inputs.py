"""Embeddings that a client computed itself, in the place of media: what each family takes.

An item is one tensor (tokens, hidden size), or that tensor with those that say how its tokens
lie in space and time. It passes the model's processor by: its text is the family's own with as
many placeholders as it has tokens, and the engine puts it at their positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from lazydecode.errors import InvalidRequestError
from lazydecode.inputs import BatchedField, FlatField, MultiModalFieldElem, MultiModalKwargsItem
from lazydecode.media.embeddings import Embeddings
from lazydecode.parse.embeddings import DictEmbeddingItems

_MAX_SIDE: Final = 2**20
"""Of a grid, per axis."""


@dataclass(frozen=True, slots=True)
class EmbeddingRule:
    """How one family takes the embeddings of one modality."""

    grid: str = ""
    """Tensor that must come with them: their grid (time, height, width); empty: none."""
    optional: tuple[str, ...] = ()
    """Tensors of one number that may come with them."""


_QWEN_VISION: Final = {
    "image": EmbeddingRule("image_grid_thw"),
    "video": EmbeddingRule("video_grid_thw", ("second_per_grid_ts",)),
}
RULES: Final[Mapping[str, Mapping[str, EmbeddingRule]]] = {
    "Qwen2VLProcessor": _QWEN_VISION,
    "Qwen2_5_VLProcessor": _QWEN_VISION,
    "Qwen2AudioProcessor": {"audio": EmbeddingRule()},
}
"""Class of the processor -> modality -> rule. Only families for which the embedded engine was
shown to generate the same from embeddings of the model's own encoder are here."""


class ItemEmbeddings:
    """Checks the embeddings of a model's requests, one item at a time. Immutable.

    Args:
        processor: The model's Hugging Face processor.
        config: The model's configuration.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        self.rules = RULES.get(type(processor).__name__, {})
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.hidden_size: int | None = getattr(text_config, "hidden_size", None)
        parts = {"image": "image_processor", "video": "video_processor"}
        self._merges = {
            modality: int(getattr(getattr(processor, part, None), "merge_size", 1))
            for modality, part in parts.items()
        }

    def item(self, modality: str, loaded: Embeddings, *, index: int) -> dict[str, torch.Tensor]:
        """Return the checked tensors of one item, by the names that the model's inputs have.

        Args:
            modality: `image`, `video` or `audio`.
            loaded: One array, which is the embedding; or arrays by name.
            index: The item's position as the client counts; for errors.

        Raises:
            InvalidRequestError: If the model takes no such embeddings, a tensor is missing or
                unknown, or a shape or type is wrong.
        """
        try:
            return self._item(modality, loaded)
        except InvalidRequestError as exc:
            raise exc.at(modality, index) from None

    def _item(self, modality: str, loaded: Embeddings) -> dict[str, torch.Tensor]:
        rule = self.rules.get(modality)
        name = embeds_name(modality)
        if rule is None:
            raise InvalidRequestError(f"the model takes no {name}")
        arrays = loaded if isinstance(loaded, dict) else {name: loaded}
        required = {name, rule.grid} - {""}
        known = required | set(rule.optional)
        missing, unknown = required - arrays.keys(), arrays.keys() - known
        if missing or unknown:
            raise InvalidRequestError(
                f"{name} must come with the tensors {sorted(required)}"
                + (f"; missing: {sorted(missing)}" if missing else "")
                + (f"; not known: {sorted(unknown)}" if unknown else "")
            )
        tensors = {name: self._embedding(name, arrays[name])}
        if rule.grid:
            tensors[rule.grid] = self._grid(modality, rule.grid, arrays, len(tensors[name]))
        for extra in sorted(set(rule.optional) & arrays.keys()):
            tensors[extra] = _number(extra, arrays[extra])
        return tensors

    def _embedding(self, name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
        if array.dtype.kind != "f":
            raise InvalidRequestError(f"{name} must be floating-point numbers, not {array.dtype}")
        if array.ndim == 3 and len(array) == 1:
            array = array[0]
        if array.ndim != 2 or not len(array):
            raise InvalidRequestError(
                f"{name} must have the shape (tokens, hidden size), not {array.shape}"
            )
        if self.hidden_size is not None and array.shape[1] != self.hidden_size:
            raise InvalidRequestError(
                f"{name} have the hidden size {array.shape[1]}; the model's is {self.hidden_size}"
            )
        return torch.from_numpy(np.ascontiguousarray(array))

    def _grid(
        self, modality: str, name: str, arrays: Mapping[str, Any], num_tokens: int
    ) -> torch.Tensor:
        array = arrays[name]
        if array.dtype.kind not in "iu" or array.shape not in ((3,), (1, 3)):
            raise InvalidRequestError(
                f"{name} must be 3 whole numbers (time, height, width), not {array.dtype} of "
                f"shape {array.shape}"
            )
        time, height, width = (int(n) for n in array.reshape(3))
        merge = self._merges[modality]
        if not all(1 <= n <= _MAX_SIDE for n in (time, height, width)):
            raise InvalidRequestError(f"{name} has sides that cannot be: {[time, height, width]}")
        if height % merge or width % merge:
            raise InvalidRequestError(
                f"height and width of {name} must be multiples of {merge}: {[time, height, width]}"
            )
        wanted = time * height * width // merge**2
        if num_tokens != wanted:
            raise InvalidRequestError(
                f"{name} {[time, height, width]} stands for {wanted} tokens; "
                f"{embeds_name(modality)} has {num_tokens}"
            )
        return torch.tensor([time, height, width])

    def join(
        self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> list[torch.Tensor] | dict[str, torch.Tensor]:
        """Return the items of a request in the form that the data parser takes.

        Args:
            modality: Their modality.
            items: Each as `item` returned it, in the client's order.

        Raises:
            InvalidRequestError: If an item came with other tensors than the first one.
        """
        name = embeds_name(modality)
        if not self.rules[modality].grid:
            return [item[name] for item in items]
        for index, item in enumerate(items):
            if item.keys() != items[0].keys():
                raise InvalidRequestError(
                    f"{name} of one request must come with the same tensors: {sorted(item)} here, "
                    f"{sorted(items[0])} with the first",
                    modality=modality,
                    index=index,
                )
        fields = EmbeddingFields(modality, [len(item[name]) for item in items])
        return fields.join([kwargs_item(modality, item) for item in items])

    def check_alone(self, modality: str) -> None:
        """Check that the embeddings of a modality need no further tensor.

        Raises:
            ValueError: If they do, or the model takes none.
        """
        rule, name = self.rules.get(modality), embeds_name(modality)
        if rule is None:
            raise ValueError(f"the model takes no {name}")
        if rule.grid:
            raise ValueError(f"{name} need their {rule.grid}: give both by name")

    def group(self, modality: str, data: Mapping[str, torch.Tensor]) -> DictEmbeddingItems:
        """Return the item group of embeddings that come with a grid, all items in one tensor each.

        Raises:
            ValueError: If a tensor is missing, or the grids do not stand for the tokens.
        """
        rule, name = self.rules.get(modality), embeds_name(modality)
        if rule is None or not rule.grid:
            raise ValueError(f"the model takes no {name} with further tensors")

        def fields(data: Mapping[str, torch.Tensor]) -> EmbeddingFields:
            counts = (data[rule.grid].prod(-1) // self._merges[modality] ** 2).tolist()
            if sum(counts) != len(data[name]):
                raise ValueError(
                    f"{rule.grid} stands for {sum(counts)} tokens, {name} has {len(data[name])}"
                )
            return EmbeddingFields(modality, counts)

        return DictEmbeddingItems(data, modality, {name, rule.grid}, fields)


def embeds_name(modality: str) -> str:
    """Return the name of a modality's embeddings: of the content part, and of the tensor."""
    return f"{modality}_embeds"


def kwargs_item(modality: str, tensors: Mapping[str, torch.Tensor]) -> MultiModalKwargsItem:
    """Return one item's tensors with the rules by which items join: one after the other."""
    name = embeds_name(modality)
    return MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(
                value, FlatField() if key == name else BatchedField(keep_on_cpu=True)
            )
            for key, value in tensors.items()
        }
    )


class EmbeddingFields:
    """How the tensors of several items split into items and join again, for one modality.

    Items are told apart by the number of their tokens.

    Args:
        modality: Their modality.
        counts: Tokens of each item, in order.
    """

    def __init__(self, modality: str, counts: Sequence[int]) -> None:
        self._modality = modality
        self._name = embeds_name(modality)
        self._counts = list(counts)

    def split(self, data: Mapping[str, torch.Tensor]) -> list[MultiModalKwargsItem]:
        """Return per item its tensors; they share memory with `data`."""
        pieces = torch.split(data[self._name], self._counts)
        rest = {name: value for name, value in data.items() if name != self._name}
        return [
            kwargs_item(
                self._modality,
                {self._name: piece, **{name: value[at] for name, value in rest.items()}},
            )
            for at, piece in enumerate(pieces)
        ]

    def join(self, items: Sequence[MultiModalKwargsItem]) -> dict[str, torch.Tensor]:
        """Return the tensors of all items together: the inverse of `split`."""
        joined: dict[str, torch.Tensor] = {}
        for name in items[0]:
            parts: list[Any] = [item[name].data for item in items]
            joined[name] = torch.cat(parts) if name == self._name else torch.stack(parts)
        return joined


def _number(name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype.kind not in "fiu" or array.size != 1 or not float(array.reshape(())) > 0:
        raise InvalidRequestError(f"{name} must be one positive number")
    return torch.tensor(float(array.reshape(())))
