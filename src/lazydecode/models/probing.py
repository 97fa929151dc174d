"""What is learnt about a family when its model is loaded, by running its processor on probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from lazydecode.errors import InvalidRequestError
from lazydecode.media.faults import describe
from lazydecode.models.field_inference import (
    FieldInferenceError,
    FieldRules,
    infer_rules,
    same_values,
)
from lazydecode.models.item import WITHOUT_TYPES, ItemProcessor
from lazydecode.models.planes import planes_of
from lazydecode.models.processor_call import (
    Media,
    ProcessorCall,
    ProcessorOutput,
    processor_modalities,
)
from lazydecode.models.registry import FamilyRecord, ModelLoadError
from lazydecode.models.template import MODALITIES, Chat


@dataclass(frozen=True, slots=True)
class ModalityFacts:
    """What the probes showed about one modality."""

    text: str
    """Prompt of one item alone."""
    placeholder: str
    """What stands for one item before expansion."""
    rules: FieldRules
    max_items: int | None
    """Items per prompt that the class takes; None: any number."""
    text_tensors: tuple[str, ...]
    """Outputs that belong to the text, besides ids and attention mask."""
    reports_offsets: bool
    """Whether the class says what it put in place of a placeholder."""
    can_skip_types: bool
    """Whether the class gives the same without marking tokens with their type."""
    takes_planes: bool
    """Whether the class gives the same for a picture as a tensor of planes."""
    can_skip_text: bool
    """Whether the half of a call that is about the item gives the same as the whole."""
    add_special_tokens: bool
    """Whether the class has its tokenizer add what goes around a text."""


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What the probes showed about a family."""

    modalities: Mapping[str, ModalityFacts]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Modality -> why the family's processor cannot be used for it."""
    alone: Mapping[str, str] = field(default_factory=dict)
    """Modality -> why a prompt takes one item of it and no second."""


def probe_item(modality: str, number: int, *, rate: int | None = None) -> Any:
    """Return a decoded item made of noise, always the same; numbers 0 and 1 differ in size."""
    noise = np.random.default_rng(1000 + number)
    if modality == "image":
        width, height = ((900, 600), (224, 336))[number % 2]
        return Image.fromarray(noise.integers(1, 256, (height, width, 3), dtype=np.uint8))
    if modality == "video":
        frames, width, height = ((8, 168, 112), (4, 112, 168))[number % 2]
        return probe_video(noise, frames, width, height)
    seconds = (1.9, 0.8)[number % 2]
    samples = noise.standard_normal(int(seconds * (rate or 16000))) * 0.1
    return samples.astype(np.float32)


def probe_video(noise: np.random.Generator, frames: int, width: int, height: int) -> Any:
    """Return frames of noise, two a second, of a video with 12 frames a second."""
    pixels = noise.integers(1, 256, (frames, height, width, 3), dtype=np.uint8)
    metadata = {
        "fps": 12.0,
        "duration": frames / 2,
        "total_num_frames": frames * 6,
        "frames_indices": [6 * i for i in range(frames)],
        "video_backend": "pyav",
        "width": width,
        "height": height,
        "do_sample_frames": False,
    }
    return pixels, metadata


class Probes:
    """The probes of a family and the processor's outputs for them, each run once.

    Args:
        call: The processor.
        template: The model's chat template.
        record: How the family differs from the generic way.
    """

    def __init__(self, call: ProcessorCall, template: Chat, record: FamilyRecord) -> None:
        self.call = call
        self.template = template
        self.record = record
        self._outputs: dict[tuple[str, int], ProcessorOutput] = {}

    def text(self, modality: str) -> str:
        """Return the prompt of one item alone."""
        return self.record.item_text.get(modality) or self.template.render_items([modality])

    def item(self, modality: str, number: int) -> Any:
        """Return a decoded probe."""
        return probe_item(modality, number, rate=self.call.sampling_rate)

    def output(self, modality: str, number: int) -> ProcessorOutput:
        """Return what the processor says to a probe.

        Raises:
            InvalidRequestError: If it refuses it.
        """
        key = (modality, number)
        if key not in self._outputs:
            processor = ItemProcessor(
                self.call, texts={modality: self.text(modality)}, placeholders={}, rules={}
            )
            self._outputs[key] = processor.run(modality, self.item(modality, number))
        return self._outputs[key]


def probe_family(probes: Probes) -> FamilyFacts:
    """Run the processor on one and two items of each modality; return what that showed."""
    facts: dict[str, ModalityFacts] = {}
    refused: dict[str, str] = {}
    alone: dict[str, str] = {}
    for modality in processor_modalities(probes.call.processor):
        try:
            facts[modality] = _probe_modality(probes, modality, alone)
        except (FieldInferenceError, InvalidRequestError, ModelLoadError) as exc:
            refused[modality] = str(exc)
    ordered: dict[str, ModalityFacts] = {m: facts[m] for m in MODALITIES if m in facts}
    return FamilyFacts(ordered, refused, {m: why for m, why in alone.items() if m in facts})


def _probe_modality(probes: Probes, modality: str, alone: dict[str, str]) -> ModalityFacts:
    first, second = probes.output(modality, 0), probes.output(modality, 1)
    placeholder = str(first.offsets[0]["text"]) if first.offsets else ""
    if not placeholder:
        placeholder = str(getattr(probes.call.processor, f"{modality}_token", None) or "")
    either_or = probes.call.either_or
    if not (placeholder or either_or):
        raise ModelLoadError(f"the model's processor puts no {modality} items into text")
    other, joined, why = _run_both(probes, modality)
    if joined is None:
        alone[modality] = why
    if joined is not None and other != 1:
        second = probes.output(modality, other)
    rules = infer_rules(first.tensors, second.tensors, joined)
    stated = probes.record.max_items.get(modality)
    return ModalityFacts(
        text=probes.text(modality),
        placeholder=placeholder,
        rules=rules,
        max_items=stated if stated is not None else 1 if joined is None or either_or else None,
        text_tensors=tuple(n for n in first.text_tensors if n != "attention_mask"),
        reports_offsets=bool(first.offsets),
        can_skip_types=_can_skip_types(probes, modality),
        takes_planes=modality == "image" and _takes_planes(probes),
        can_skip_text=all(_can_skip_text(probes, modality, number) for number in (1, 0)),
        add_special_tokens=first.add_special_tokens,
    )


def _can_skip_types(probes: Probes, modality: str) -> bool:
    if "mm_token_type_ids" not in probes.output(modality, 1).text_tensors:
        return False
    return _gives_the_same(probes, modality, 1, probes.item(modality, 1), WITHOUT_TYPES)


def _can_skip_text(probes: Probes, modality: str, number: int) -> bool:
    usual = probes.output(modality, number)
    media = Media.single(modality, probes.item(modality, number))
    try:
        half = probes.call.media_half(modality, probes.text(modality), media)
    except Exception:
        # The class's own methods want more than the mixin's call gives them.
        return False
    if half is None or len(usual.offsets) != 1:
        return False
    said = [(o["type"], o["replacement"]) for o in (*usual.offsets, *half.offsets)]
    return said[0] == said[1] and _same_tensors(usual, half)


def _takes_planes(probes: Probes) -> bool:
    return all(
        _gives_the_same(probes, "image", number, planes_of(probes.item("image", number)))
        for number in (1, 0)
    )


def _gives_the_same(
    probes: Probes,
    modality: str,
    number: int,
    item: Any,
    options: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the class makes the same of another form of a probe, or under these options."""
    usual = probes.output(modality, number)
    try:
        other = probes.call(probes.text(modality), Media.single(modality, item), options)
    except Exception:
        # The class does not know the form or the option.
        return False
    same_text = (usual.input_ids, usual.offsets) == (other.input_ids, other.offsets)
    return same_text and _same_tensors(usual, other)


def _same_tensors(usual: ProcessorOutput, other: ProcessorOutput) -> bool:
    return usual.tensors.keys() == other.tensors.keys() and all(
        same_values(usual.tensors[name], other.tensors[name]) for name in usual.tensors
    )


def _run_both(probes: Probes, modality: str) -> tuple[int, dict[str, Any] | None, str]:
    """Run probe 0 with a second one in one prompt; return its number and the joined tensors.

    The tensors are None if the class takes no second item at all; then the last says why.
    """
    text = probes.record.item_text.get(modality)
    text = text + text if text else probes.template.render_items([modality, modality])
    reason = ""
    for number in (1, 2):  # some classes only stack items of one size
        items = [probes.item(modality, 0), probes.item(modality, number)]
        try:
            return number, probes.call(text, Media.of({modality: items})).tensors, ""
        except Exception as exc:
            # Whatever it is, it says that the class does not take this pair.
            reason = describe(exc)
    return 1, None, reason
