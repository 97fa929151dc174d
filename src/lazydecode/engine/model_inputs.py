"""From token ids and per-item tensors to the keyword arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from lazydecode.engine import token_types
from lazydecode.engine.generation import Generation, PlacedItem
from lazydecode.engine.token_types import TokenTypes
from lazydecode.inputs import (
    BatchedField,
    FlatField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    NestedTensors,
    PaddedField,
    SharedField,
)
from lazydecode.models.joining import join_items
from lazydecode.models.pixels import PixelPlan, finish_pixels

_SOUND_OPTION: Final = "use_audio_in_video"
"""Argument of omni models: the positions of a video's tokens and of its sound's go by time."""


@dataclass(frozen=True, slots=True)
class InputBuilder:
    """Builds the inputs of a batch, as the model's own processor would have.

    Prompts are padded on the left.
    """

    parameters: frozenset[str]
    """Names that the model's forward takes."""
    model_type: str
    pad_token_id: int
    dtype: torch.dtype
    device: torch.device
    decoder_start: int | None = None
    """First token of the decoder, of a model that has an encoder as well; else None."""
    encoder_reads_text: bool = True
    token_types: TokenTypes = field(default_factory=TokenTypes)
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The model's embeddings of token ids."""
    pixel_plan: PixelPlan | None = None

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        pad_token_id: int,
        token_types: TokenTypes | None = None,
        pixel_plan: PixelPlan | None = None,
    ) -> InputBuilder:
        """Return the builder for a loaded Transformers model."""
        return cls(
            parameters=frozenset(inspect.signature(model.forward).parameters),
            model_type=model.config.model_type,
            pad_token_id=pad_token_id,
            dtype=model.dtype,
            device=model.device,
            decoder_start=_decoder_start(model),
            encoder_reads_text=model.main_input_name == "input_ids",
            token_types=token_types or TokenTypes(),
            embed=model.get_input_embeddings(),
            pixel_plan=pixel_plan,
        )

    def build(self, batch: Sequence[Generation]) -> dict[str, Any]:
        """Return the inputs for the batch's prompts and outputs so far, on the device."""
        inputs = self._text(batch) if self.decoder_start is None else self._two_texts(batch)
        items = [item for generation in batch for item in generation.items]
        inputs |= self._join([item for item in items if not _embeds_of(item)])
        if any(map(has_embeddings, batch)):
            inputs |= self._given(batch, inputs["input_ids"])
        if _SOUND_OPTION in self.parameters:
            inputs[_SOUND_OPTION] = any(map(has_sound_in_video, batch))
        return {name: self._place(value) for name, value in inputs.items()}

    def _text(self, batch: Sequence[Generation]) -> dict[str, Any]:
        length = max(len(generation.token_ids) for generation in batch)
        shape = (len(batch), length)
        input_ids = torch.full(shape, self.pad_token_id, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        names = [name for name in token_types.NAMES if name in self.parameters]
        numbers = {name: torch.zeros(shape, dtype=torch.long) for name in names}
        for row, generation in enumerate(batch):
            start = length - len(generation.token_ids)
            input_ids[row, start:] = torch.tensor(generation.token_ids)
            mask[row, start:] = 1
            for name in names:
                row_numbers = self.token_types.number(name, self.model_type, generation)
                numbers[name][row, start:] = torch.from_numpy(row_numbers)
        return {"input_ids": input_ids, "attention_mask": mask, **numbers}

    def _two_texts(self, batch: Sequence[Generation]) -> dict[str, Any]:
        """Return what encoder and decoder of a model that has both read.

        The prompt belongs to the encoder if it reads text, else to the decoder: those of one
        batch are of one length. An encoder that reads text gets one request.
        """
        if not self.encoder_reads_text:
            rows = [generation.token_ids for generation in batch]
            return {"decoder_input_ids": torch.tensor(rows)}
        (generation,) = batch
        prompt = torch.tensor([generation.token_ids[: generation.num_prompt_tokens]])
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        if generation.output_token_ids:
            started = [self.decoder_start, *generation.output_token_ids]
            inputs["decoder_input_ids"] = torch.tensor([started])
        return inputs

    def _join(self, items: Sequence[PlacedItem]) -> dict[str, NestedTensors]:
        """Join field by field, in prompt order: two modalities may feed the same field."""
        tensors = [
            item.tensors
            if self.pixel_plan is None
            else finish_pixels(item.tensors, self.pixel_plan)
            for item in items
        ]
        names = dict.fromkeys(name for item in tensors for name in item)
        joined: dict[str, NestedTensors] = {}
        for name in names:
            parts = [
                MultiModalKwargsItem({name: self._cast(item[name])})
                for item in tensors
                if name in item
            ]
            joined |= join_items(parts)
        return joined

    def _given(
        self, batch: Sequence[Generation], input_ids: torch.Tensor
    ) -> dict[str, NestedTensors]:
        """Return the embeddings of all tokens, with those that requests brought at their places."""
        assert self.embed is not None
        with torch.no_grad():
            rows = self.embed(input_ids.to(self.device)).clone()
        grids: list[PlacedItem] = []
        for row, generation in zip(rows, batch, strict=True):
            start = len(row) - len(generation.token_ids)
            for item in generation.items:
                name = _embeds_of(item)
                if not name:
                    continue
                place = item.place
                span = row[start + place.offset : start + place.offset + place.length]
                given = item.tensors[name].data
                assert isinstance(given, torch.Tensor)
                mask = slice(None) if place.is_embed is None else torch.from_numpy(place.is_embed)
                span[mask] = given.to(self.device, self.dtype)
                rest = {key: elem for key, elem in item.tensors.items() if key != name}
                grids.append(PlacedItem(item.modality, MultiModalKwargsItem(rest), place))
        return {"inputs_embeds": rows, **self._join(grids)}

    def _cast(self, elem: MultiModalFieldElem) -> MultiModalFieldElem:
        """Give floating-point tensors the model's dtype; what stays on the CPU is metadata."""
        if elem.field.keep_on_cpu:
            return elem
        return MultiModalFieldElem(_cast_nested(elem.data, self.dtype), elem.field)

    def _place(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        if isinstance(value, list):
            return [self._place(part) for part in value]
        return value


def _embeds_of(item: PlacedItem) -> str:
    """Return the name of the embeddings that an item came as; empty if it did not."""
    name = f"{item.modality}_embeds"
    return name if name in item.tensors else ""


def has_embeddings(generation: Generation) -> bool:
    """Whether an item of the prompt came as embeddings."""
    return any(map(_embeds_of, generation.items))


def has_sound_in_video(generation: Generation) -> bool:
    """Whether a video of the prompt was given with its sound: their tokens touch or mix.

    Items of their own always have control tokens between them.
    """
    places = [(item.modality, item.place) for item in generation.items]
    videos = [place for modality, place in places if modality == "video"]
    sounds = [place for modality, place in places if modality == "audio"]
    return any(
        sound.offset <= video.offset + video.length and video.offset <= sound.offset + sound.length
        for video in videos
        for sound in sounds
    )


def joins_across_requests(generation: Generation) -> bool:
    """Whether the items may share a batch with other requests'.

    They may where joining does not say which prompt an item belongs to: one after the other
    along the first dimension. Other rules build one request's batch dimension.
    """
    for item in generation.items:
        for elem in item.tensors.values():
            match elem.field:
                case SharedField():
                    return False
                case FlatField(dim=dim) | PaddedField(dim=dim) if dim != 0:
                    return False
    return True


def item_shapes(generation: Generation) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Return the shapes of what a batch stacks: unequal ones cannot be."""
    return frozenset(
        (name, tuple(elem.data.shape))
        for item in generation.items
        for name, elem in item.tensors.items()
        if isinstance(elem.field, BatchedField) and isinstance(elem.data, torch.Tensor)
    )


def padded_sound_shapes(generation: Generation) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Return the shapes of recordings that a batch would pad to the longest.

    Encoders of sound convolve over the padding without a mask: with a longer recording beside
    it, Granite Speech wrote other words to a short one. Pictures are masked, and may be padded.
    """
    return frozenset(
        (name, tuple(elem.data.shape))
        for item in generation.items
        if item.modality == "audio"
        for name, elem in item.tensors.items()
        if isinstance(elem.field, PaddedField) and isinstance(elem.data, torch.Tensor)
    )


def _decoder_start(model: Any) -> int | None:
    if not model.config.is_encoder_decoder:
        return None
    start = model.generation_config.decoder_start_token_id
    return int(model.generation_config.bos_token_id if start is None else start)


def _cast_nested(value: NestedTensors, dtype: torch.dtype) -> NestedTensors:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list):
        return [_cast_nested(part, dtype) for part in value]
    return value
