"""The record of one model family: what makes its folder different from another's.

Records hold names, parameters and texts as published; nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

from lazydecode.tiny_models.turns import CHATML, Slot, Turns

Modality: TypeAlias = Literal["image", "video", "audio"]


@dataclass(frozen=True, slots=True)
class Part:
    """One sub-processor: its transformers class and the parameters of published checkpoints."""

    cls: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor; what is not given keeps the class's default."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Set after construction, where the constructor does not take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family: published classes, parameters and tokens, and how small we make it."""

    name: str
    model_type: str
    """`model_type` of the configuration class."""
    processor: str | None
    """Class name of the processor; None for a model without media."""
    turns: Turns = CHATML
    image: Part | None = None
    video: Part | None = None
    audio: Part | None = None
    audio_argument: str = "feature_extractor"
    """Name under which the processor takes its audio part."""
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    """Control tokens, in the order of their ids, after those of the turns."""
    pieces: tuple[str, ...] = ()
    """Control tokens that are entries of a SentencePiece vocabulary, where the family has one;
    empty: it has a byte-level one."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """Control tokens that the tokenizer must know by a name (`image_token`)."""
    slots: Mapping[str, Slot] = field(default_factory=dict)
    """What the template writes for an item, by modality."""
    bos: str | None = None
    eos: str = "<|endoftext|>"
    pad: str = "<|pad|>"
    config: Mapping[str, Any] = field(default_factory=dict)
    """Merged over the shrunk default configuration; nested like it."""
    token_settings: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Configuration settings that hold ids of tokens, by the tokens' texts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    architecture: str | None = None
    """Model class, where transformers' auto classes do not name the right one."""
    voices_file: str = ""
    """Name of a file of speaker voices that loading the weights wants; ours has none in it."""
    weights_need: tuple[str, ...] = ()
    """Packages that the model itself imports; without them the folder has no weights."""
    needs: tuple[str, ...] = ()
    """Packages that the processor imports beyond the extra `processing`."""
    mistral_tokenizer: bool = False
    """The tokenizer is mistral-common's: `tekken.json`, and no chat template."""
    has_template: bool = True
    """Whether the folder has a chat template."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the folder's generation configuration."""
    generation_tokens: Mapping[str, str | tuple[str, ...] | Mapping[str, str]] = field(
        default_factory=dict
    )
    """The same for settings that hold ids of tokens, by the tokens' texts."""
    note: str = ""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """The modalities that the family takes, in the order image, video, audio."""
        parts: tuple[tuple[Modality, Part | None], ...] = (
            ("image", self.image),
            ("video", self.video),
            ("audio", self.audio),
        )
        return tuple(modality for modality, part in parts if part is not None)

    @property
    def no_weights(self) -> str:
        """Why the folder gets no weights here; empty: it gets them."""
        missing = [name for name in self.weights_need if find_spec(name) is None]
        return f"the model needs the package {', '.join(missing)}" if missing else ""
