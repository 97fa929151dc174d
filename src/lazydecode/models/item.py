"""One item through the model's processor: tensors with their join rules, and its text."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from lazydecode.errors import InvalidRequestError, LazyDecodeError
from lazydecode.inputs import MultiModalKwargsItem
from lazydecode.media.faults import describe
from lazydecode.media.raw_video import RawVideo
from lazydecode.models.expansion import ItemText
from lazydecode.models.field_inference import FieldInferenceError, FieldRules
from lazydecode.models.header_only import video_shape
from lazydecode.models.memo import Memo
from lazydecode.models.planes import planes_of
from lazydecode.models.processor_call import Media, ProcessorCall, ProcessorOutput
from lazydecode.models.replay import PartCall, WatchedPart
from lazydecode.models.tokenization import PromptTokenizer
from lazydecode.models.torch_threads import one_torch_thread

logger = logging.getLogger(__name__)

WITHOUT_TYPES: Final = {"return_mm_token_type_ids": False}
"""Option that saves the class a pass over all tokens whose result nobody reads."""

_MAX_SHARED_CALLS: Final = 16
"""Calls that differ in their options; further ones are kept per size."""


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    """What the model's processor makes of one item, independent of every other item."""

    kwargs: MultiModalKwargsItem
    text: ItemText


class ItemProcessor:
    """Runs the processor for one item at a time, on the model's own template.

    Threads share it.

    Args:
        call: The processor.
        texts: Modality -> the prompt of a conversation that holds one such item alone.
        placeholders: Modality -> the text that stands for one item in it.
        rules: Modality -> how its tensors join.
        without_types: Modalities for which the class need not mark tokens with their type: what
            it returns besides is the same.
        takes_planes: Whether pictures may be given as planes: the results are the same.
        without_text: Modalities for which the half of a call that is about the item gives what
            the whole call gives.
    """

    def __init__(
        self,
        call: ProcessorCall,
        *,
        texts: Mapping[str, str],
        placeholders: Mapping[str, str],
        rules: Mapping[str, FieldRules],
        without_types: frozenset[str] = frozenset(),
        takes_planes: bool = False,
        without_text: frozenset[str] = frozenset(),
    ) -> None:
        self.call = call
        self._without_text = without_text
        self._without_types = without_types
        self._takes_planes = takes_planes
        self.texts = dict(texts)
        self.placeholders = dict(placeholders)
        self.rules = dict(rules)
        self._seen: Memo[tuple[PartCall | None, ItemText]] = Memo()
        """By likeness of pictures; without a call, only the class itself makes their tensors."""
        self._shared_calls: list[PartCall] = []

    def process(
        self,
        modality: str,
        item: Any,
        options: Mapping[str, Any] | None = None,
    ) -> ProcessedItem:
        """Return the tensors and the text of one decoded item.

        Args:
            modality: `image`, `video` or `audio`.
            item: A picture; (frames, metadata) or a container; samples at the processor's rate.
            options: The request's processor options.

        Raises:
            InvalidRequestError: If the processor refuses the item.
        """
        output = self._run_item(modality, self._in_order(modality, item), options, None)
        return self.result(modality, item, output)

    def process_image(
        self, image: Any, options: Mapping[str, Any] | None, likeness: Hashable
    ) -> ProcessedItem:
        """As `process`, for a picture whose text follows from its size.

        Args:
            image: The picture.
            options: The request's processor options.
            likeness: Equal for pictures of the same size and form under the same options.

        Raises:
            InvalidRequestError: If the processor refuses the picture.
        """
        is_new = self._seen.peek(likeness) is None
        watched = WatchedPart.of(self.call.processor.image_processor) if is_new else None
        if watched is None:
            return self.process("image", image, options)
        given = self._in_order("image", image)
        output = self._run_item("image", given, options, {"image_processor": watched.stand_in})
        processed = self.result("image", image, output)
        part_call = self._shared(watched.call_for(given, self._tensors("image", output)))
        self._seen.get(likeness, lambda: (part_call, processed.text))
        return processed

    def process_like(self, image: Any, likeness: Hashable) -> ProcessedItem | None:
        """Return what `process_image` does, by the image processor alone; None if no picture of
        that size was processed before, or the class does more about it.

        Raises:
            InvalidRequestError: If the processor refuses the picture.
        """
        part_call, text = self._seen.peek(likeness) or (None, None)
        if part_call is None or text is None:
            return None
        given = self._in_order("image", image)
        with _refusals(), self.call.lock, one_torch_thread():
            tensors = part_call.run(given)
        return ProcessedItem(self.rules["image"].item(tensors), text)

    def _shared(self, call: PartCall | None) -> PartCall | None:
        """Return an equal call that is kept already, if there is one: sizes rarely differ in it."""
        for kept in self._shared_calls:
            if kept == call:
                return kept
        if call is not None and len(self._shared_calls) < _MAX_SHARED_CALLS:
            self._shared_calls.append(call)
        return call

    def sketch(
        self,
        modality: str,
        item: Any,
        options: Mapping[str, Any] | None = None,
        *,
        substitutes: Mapping[str, Any] | None = None,
    ) -> ProcessedItem:
        """As `process`, for an item without content: only the small tensors are kept."""
        output = self._run_item(modality, self._in_order(modality, item), options, substitutes)
        return self.result(modality, item, output, only_small=True)

    def _in_order(self, modality: str, item: Any) -> Any:
        """Return the item with its channels first, where that is cheaper or there is a doubt."""
        if modality == "image":
            if self._takes_planes and isinstance(item, Image.Image) and item.mode == "RGB":
                return planes_of(item)
        elif modality == "video" and isinstance(item, tuple):
            frames, metadata = item
            if _is_ambiguous(frames):
                first = np.ascontiguousarray(frames.transpose(0, 3, 1, 2))
                return torch.from_numpy(first), metadata
        return item

    def result(
        self, modality: str, item: Any, output: ProcessorOutput, *, only_small: bool = False
    ) -> ProcessedItem:
        """Return tensors and text of an item from what the processor returned for it.

        Raises:
            InvalidRequestError: If a tensor came that no probe had.
        """
        rules = self.rules[modality]
        try:
            kwargs = (rules.small if only_small else rules.item)(self._tensors(modality, output))
        except FieldInferenceError as exc:
            raise InvalidRequestError(str(exc)) from exc
        return ProcessedItem(kwargs, self.text_of(modality, item, output))

    def _tensors(self, modality: str, output: ProcessorOutput) -> Mapping[str, Any]:
        """Return an item's own tensors, also those that are as long as its text by chance."""
        rules = self.rules[modality].rules
        if output.text_tensors.keys().isdisjoint(rules):
            return output.tensors
        as_long = {name: value for name, value in output.text_tensors.items() if name in rules}
        return {**output.tensors, **as_long}

    def run(
        self,
        modality: str,
        item: Any,
        options: Mapping[str, Any] | None = None,
        *,
        substitutes: Mapping[str, Any] | None = None,
    ) -> ProcessorOutput:
        """Return what the processor says to one item.

        Raises:
            InvalidRequestError: If the processor refuses the item.
        """
        if modality in self._without_types:
            options = {**(options or self.call.options), **WITHOUT_TYPES}
        return self.run_text(
            self.texts[modality],
            Media.single(modality, item),
            options,
            substitutes=substitutes,
        )

    def _run_item(
        self,
        modality: str,
        item: Any,
        options: Mapping[str, Any] | None,
        substitutes: Mapping[str, Any] | None,
    ) -> ProcessorOutput:
        """As `run`, without the text's half where that changes nothing about the item."""
        if modality in self._without_text:
            media = Media.single(modality, item)
            with _refusals():
                output = self.call.media_half(
                    modality, self.texts[modality], media, options, substitutes=substitutes
                )
            if output is not None:
                return output
        return self.run(modality, item, options, substitutes=substitutes)

    def run_text(
        self,
        text: str,
        media: Media,
        options: Mapping[str, Any] | None = None,
        *,
        substitutes: Mapping[str, Any] | None = None,
    ) -> ProcessorOutput:
        """Return what the processor says to a text and its media.

        Raises:
            InvalidRequestError: If the processor refuses it.
        """
        with _refusals():
            return self.call(text, media, options, substitutes=substitutes)

    def text_of(self, modality: str, item: Any, output: ProcessorOutput) -> ItemText:
        """Return what stands in the prompt for the item that gave this output."""
        tokenizer = self.call.tokenizer
        shape = (
            _shape_read(item, output) if isinstance(item, RawVideo) else shape_of(modality, item)
        )
        if self.call.either_or:
            return ItemText(modality, None, tuple(output.input_ids), shape)
        found = [o for o in output.offsets if o["type"] == modality] or output.offsets
        if found:
            return ItemText(modality, tokenizer.collapse(found[0]["replacement"]), shape=shape)
        ids = token_difference(
            tokenizer,
            self.texts[modality],
            self.placeholders.get(modality, ""),
            output.input_ids,
            output.add_special_tokens,
        )
        return ItemText(modality, None, tuple(ids), shape)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what Hugging Face code raises about an item or its options into our error."""
    try:
        yield
    except (LazyDecodeError, MemoryError, RecursionError):
        raise
    except (Exception, SystemExit) as exc:
        # Wide: a model folder may bring its own class. `SystemExit` would end the server.
        if not isinstance(exc, ValueError | TypeError):  # which refuse, and do not fail
            logger.warning("the model's processor fails on an item: %s", type(exc).__name__)
        logger.debug("the model's processor refuses an item", exc_info=True)
        raise InvalidRequestError(f"the model's processor refuses it: {describe(exc)}") from exc


def _is_ambiguous(frames: Any) -> bool:
    """Whether transformers takes the height of these frames for their channels.

    It guesses where the channels are: of shape (frames, 3, width, 3) it believes the first.
    """
    return isinstance(frames, np.ndarray) and frames.ndim == 4 and frames.shape[1] in (1, 3)


def _shape_read(video: RawVideo, output: ProcessorOutput) -> tuple[Any, ...]:
    """Return the size of a video by what the class read of it."""
    metadata = dict(output.video_metadata[0].items())
    metadata["frames_indices"] = [int(index) for index in metadata["frames_indices"]]
    metadata |= {"width": video.header.width, "height": video.header.height}
    return video_shape(metadata)


def shape_of(modality: str, item: Any) -> tuple[Any, ...]:
    """Return the size of a decoded item: what a stand-in of the same size is made from."""
    if modality == "image":
        size = getattr(item, "size", None)
        if isinstance(size, tuple) and len(size) == 2:
            return (int(size[1]), int(size[0]))
        shape = tuple(int(n) for n in item.shape)
        return shape[:2] if shape[-1] in (1, 3, 4) else shape[-2:]
    if modality == "video":
        frames, metadata = item if isinstance(item, tuple) else (item, {})
        count, height, width = (int(n) for n in frames.shape[:3])
        if frames.shape[-1] not in (1, 3, 4):  # channels before rows, as torch likes it
            height, width = (int(n) for n in frames.shape[-2:])
        known = {**metadata, "height": height, "width": width}
        known.setdefault("frames_indices", list(range(count)))
        return (count, *video_shape(known)[1:])
    return (int(item.shape[-1]),)


def token_difference(
    tokenizer: PromptTokenizer,
    text: str,
    placeholder: str,
    expanded: list[int],
    add_special_tokens: bool,
) -> list[int]:
    """Return the ids that a processor put in place of the placeholder, by comparing ids.

    Raises:
        FieldInferenceError: If the rest of the prompt did not stay as it was.
    """
    plain = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    pattern = tokenizer.encode(placeholder, add_special_tokens=False) if placeholder else []
    at = next(
        (i for i in range(len(plain)) if pattern and plain[i : i + len(pattern)] == pattern), None
    )
    if at is None:
        if expanded[: len(plain)] == plain:
            return expanded[len(plain) :]
        if len(plain) <= len(expanded) and expanded[len(expanded) - len(plain) :] == plain:
            return expanded[: len(expanded) - len(plain)]
        raise FieldInferenceError("the processor's ids do not contain those of the prompt")
    rest = len(plain) - at - len(pattern)
    head, tail = plain[:at], plain[len(plain) - rest :]
    if expanded[:at] != head or (rest and expanded[len(expanded) - rest :] != tail):
        raise FieldInferenceError("the processor's ids do not contain those around the item")
    return expanded[at : len(expanded) - rest]
