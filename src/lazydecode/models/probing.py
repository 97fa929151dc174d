"""What is learnt about a family when its model is loaded, by running its processor on probes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from lazydecode.errors import InvalidRequestError
from lazydecode.models.field_inference import FieldInferenceError, FieldRules, infer_rules
from lazydecode.models.item import ItemProcessor, refusal
from lazydecode.models.processor_call import Media, ProcessorCall, processor_modalities
from lazydecode.models.registry import FamilyRecord, ModelLoadError
from lazydecode.models.template import MODALITIES, ChatTemplate

logger = logging.getLogger(__name__)


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
    add_special_tokens: bool
    """Whether the class has its tokenizer add what goes around a text."""


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What the probes showed about a family."""

    modalities: Mapping[str, ModalityFacts]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Modality -> why the family's processor cannot be used for it."""


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


def probe_family(call: ProcessorCall, template: ChatTemplate, record: FamilyRecord) -> FamilyFacts:
    """Run the processor on one and two items of each modality; return what that showed."""
    facts: dict[str, ModalityFacts] = {}
    refused: dict[str, str] = {}
    for modality in processor_modalities(call.processor):
        try:
            facts[modality] = _probe_modality(call, template, record, modality)
        except (FieldInferenceError, InvalidRequestError, ModelLoadError) as exc:
            refused[modality] = str(exc)
            logger.warning("%s input is off: %s", modality, exc)
    ordered: dict[str, ModalityFacts] = {m: facts[m] for m in MODALITIES if m in facts}
    return FamilyFacts(ordered, refused)


def _probe_modality(
    call: ProcessorCall, template: ChatTemplate, record: FamilyRecord, modality: str
) -> ModalityFacts:
    text = record.item_text.get(modality) or template.render_items([modality])
    processor = ItemProcessor(call, texts={modality: text}, placeholders={}, rules={})
    rate = call.sampling_rate
    a, b = (probe_item(modality, n, rate=rate) for n in (0, 1))
    first = processor.run(modality, a)
    second = processor.run(modality, b)
    both, max_items = _run_both(call, template, record, modality, a, b)
    if both is None:
        rules = infer_rules(first.tensors, second.tensors, None)
    else:
        pair_a, pair_b, joined = both
        if pair_b is not b:
            first = processor.run(modality, pair_a)
            second_tensors = processor.run(modality, pair_b).tensors
        else:
            second_tensors = second.tensors
        rules = infer_rules(first.tensors, second_tensors, joined)
    if record.max_items.get(modality) is not None:
        max_items = record.max_items[modality]
    placeholder = str(first.offsets[0]["text"]) if first.offsets else ""
    if not placeholder:
        placeholder = str(getattr(call.processor, f"{modality}_token", "") or "")
    return ModalityFacts(
        text=text,
        placeholder=placeholder,
        rules=rules,
        max_items=max_items,
        text_tensors=tuple(n for n in first.text_tensors if n != "attention_mask"),
        reports_offsets=bool(first.offsets),
        add_special_tokens=first.add_special_tokens,
    )


def _run_both(
    call: ProcessorCall,
    template: ChatTemplate,
    record: FamilyRecord,
    modality: str,
    a: Any,
    b: Any,
) -> tuple[tuple[Any, Any, dict[str, Any]] | None, int | None]:
    """Run two items in one prompt; (items and joined tensors or None, most items)."""
    text = record.item_text.get(modality)
    both_text = text + text if text else template.render_items([modality, modality])
    same = probe_item(modality, 2, rate=call.sampling_rate)
    reason = ""
    for second in (b, same):  # some classes only stack items of one size
        try:
            output = call(both_text, Media.of({modality: [a, second]}))
        except Exception as exc:
            # Whatever it is, it says that the class does not take this pair.
            reason = refusal(exc)
        else:
            return (a, second, output.tensors), None
    logger.info("one %s per prompt: two are refused (%s)", modality, reason)
    return None, 1
