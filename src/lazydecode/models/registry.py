"""Records for the model families that the generic way does not serve alone.

Every field is optional and its default is the generic way; a family without a record needs
none. A record is found by the name of the processor's class.

What loading finds out by itself has no field, for there would be two truths about it:

- how tensors join, and which a batch pads or changes: from a probe of two items;
- text that depends on an item's number (MiniCPM-V 4.6): the plain expansion fails on the probe of
  two items, and the class writes the prompt over stand-ins; numbers that a chat template writes
  need nothing;
- chance in the results: from a probe that is processed twice, and from the processor's options
  (`models/randomness.py`).

Two more that other front ends need are for nobody here. No class of Transformers processes an item
otherwise for how many there are in its request; one that did would fail the probe of two items, and
the modality would be refused. And a recording need not be padded to whole frames to come out of a
batch as it does alone, since every item is processed alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from lazydecode.errors import LazyDecodeError
from lazydecode.plugins import Registry

_MODALITIES: Final = frozenset({"image", "video", "audio"})
_HEADERS: Final = frozenset({"meta", "blank", "silence", "content"})
_PLACEMENTS: Final = frozenset({"in_text", "either_or"})


@dataclass(frozen=True, slots=True)
class FamilyRecord:
    """How a family differs from the generic way."""

    placement: Literal["in_text", "either_or"] = "in_text"
    """Where items stand: in the text, or in its place (`models/either_or.py`): then a request is
    one text or one item."""
    item_text: Mapping[str, str] = field(default_factory=dict)
    """Modality -> prompt of one item alone, where the template cannot give it."""
    whole_request: tuple[str, ...] = ()
    """Modalities whose prompts come from one run of the processor over stand-ins of all items,
    although the plain expansion agrees on the probes."""
    header: Mapping[str, Literal["meta", "blank", "silence", "content"]] = field(
        default_factory=dict
    )
    """Modality -> how an item's text follows from its header; `content`: not at all."""
    max_items: Mapping[str, int] = field(default_factory=dict)
    """Modality -> items per request that the class takes."""
    reentrant: bool = True
    """Whether several threads may be inside the processor."""
    raw_media: tuple[str, ...] = ()
    """Modalities whose files the class opens itself: it is given them undecoded."""
    scalar_metadata: bool = False
    """The class takes one video's metadata, not a list."""
    sound_count: str = ""
    """Pairing: the name under which the class counts the tokens of a sound. It then writes a video
    with the sound that came in the same file as one text. Empty: it has no such pairs."""
    reason: str = ""
    """Why there is a record."""

    def __post_init__(self) -> None:
        """Refuse what would fail later, while a request uses it.

        Raises:
            TypeError: If a field holds something of another kind.
            ValueError: If it names what does not exist.
        """
        for name, kind in (("item_text", str), ("header", str), ("max_items", int)):
            values = getattr(self, name)
            if not isinstance(values, Mapping):
                raise TypeError(f"{name} must be a mapping by modality")
            values = dict(values)
            object.__setattr__(self, name, values)
            if any(type(value) is not kind for value in values.values()):
                raise TypeError(f"{name} must hold {kind.__name__} values")
        for name in ("whole_request", "raw_media"):
            if not isinstance(getattr(self, name), tuple):
                raise TypeError(f"{name} must be a tuple of modalities")
        for name in ("item_text", "header", "max_items", "whole_request", "raw_media"):
            if unknown := set(getattr(self, name)) - _MODALITIES:
                raise ValueError(f"{name} names no modality with {min(map(str, unknown))!r}")
        if unknown := set(self.header.values()) - _HEADERS:
            raise ValueError(f"header knows no way named {min(unknown)!r}")
        if any(count < 1 for count in self.max_items.values()):
            raise ValueError("max_items must be positive")
        if self.placement not in _PLACEMENTS:
            raise ValueError(f"placement must be one of {', '.join(sorted(_PLACEMENTS))}")


_DEFAULT = FamilyRecord()


def _check_record(value: object) -> None:
    if not isinstance(value, FamilyRecord):
        raise TypeError("it is not a lazydecode.models.registry.FamilyRecord")


MODEL_FAMILY_REGISTRY: Final = Registry[FamilyRecord](
    "model family",
    group="lazydecode.model_families",
    check=_check_record,
    parameter="model",
)
"""Records by the name of the processor's class."""


def register(processor_class: str, record: FamilyRecord) -> None:
    """Add the record of a family, under the name of its processor's class.

    Raises:
        ValueError: If the family has another record.
    """
    MODEL_FAMILY_REGISTRY.add(processor_class, record)


def record_for(processor: object) -> FamilyRecord:
    """Return the record of a processor's class, or the one that changes nothing.

    Raises:
        PluginError: If another package offers a record for it that cannot be used.
    """
    return MODEL_FAMILY_REGISTRY.find(type(processor).__name__) or _DEFAULT


def has_record(processor: object) -> bool:
    """Whether the family has a record of its own."""
    return MODEL_FAMILY_REGISTRY.find(type(processor).__name__) is not None


class ModelLoadError(LazyDecodeError):
    """The model cannot be served as it is; the message says what is missing."""


register(
    "HyperCLOVAXVisionV2Processor",
    FamilyRecord(
        reentrant=False,
        whole_request=("video",),
        reason="writes durations outside the placeholder, and keeps those of pending videos on "
        "itself between two of its methods",
    ),
)

register(
    "Dots3NoteProcessor",
    FamilyRecord(
        raw_media=("video",),
        reason="opens videos itself: it chooses frames by what it finds in the container",
    ),
)

register(
    "Blip2Processor",
    FamilyRecord(
        max_items={"image": 1},
        reason="writes the tokens of one image before the text, whatever the text says",
    ),
)

for _embedder in ("CLIPProcessor", "SiglipProcessor", "Siglip2Processor"):
    register(
        _embedder,
        FamilyRecord(placement="either_or", reason="embeds one text or one image, by two encoders"),
    )

register(
    "ClapProcessor",
    FamilyRecord(placement="either_or", reason="embeds one text or one sound, by two encoders"),
)

for _retriever in ("ColPaliProcessor", "ColQwen2Processor"):
    register(
        _retriever,
        FamilyRecord(
            placement="either_or",
            reason="embeds one query or one page, and writes its own prompt around each",
        ),
    )

for _omni in ("Qwen2_5OmniProcessor", "Qwen3OmniMoeProcessor"):
    register(
        _omni,
        FamilyRecord(
            sound_count="num_audio_tokens",
            reason="can take a video with its sound as one item of the text",
        ),
    )

register(
    "NemotronH_Omni_Reasoning_V3Processor",
    FamilyRecord(
        max_items={"video": 1},
        scalar_metadata=True,
        reason="takes the metadata of one video, not of a list",
    ),
)

register(
    "VoxtralProcessor",
    FamilyRecord(
        reason="has no template: Mistral's own library writes the prompt (models/voxtral.py)",
    ),
)
