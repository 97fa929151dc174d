"""How a family's prompts get their ids, and what else was found out when it was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lazydecode.models.header_only import Way
from lazydecode.models.randomness import Random

PromptMode = Literal["expand", "whole_request", "either_or", "unproven"]


@dataclass(frozen=True, slots=True)
class PromptEdit:
    """Ids that the class puts around every prompt with media, beside those of its template."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TextRule:
    """What a class does to a prompt without media."""

    add_special_tokens: bool = True
    """Whether its tokenizer adds what goes around a text that does not begin with it."""
    edits_layout: bool = False
    """Whether the class changes the text first."""
    has_edit: bool = False
    """Whether it puts the same ids around it as around a prompt with media."""


@dataclass(frozen=True, slots=True)
class BeforeText:
    """What a class does that writes the ids of its one item before those of the text."""

    add_special_tokens: bool
    """Whether its tokenizer adds what goes around the text."""
    suffix: tuple[int, ...] = ()
    """What it puts behind the text."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared when the family was loaded, and how it came out."""

    mode: PromptMode
    """How prompts get their ids."""
    edit: PromptEdit = PromptEdit()
    text_rule: TextRule | None = None
    """What happens to prompts without media; None: the class takes none, or does more than we
    know."""
    difference: str = ""
    """Where the class's own ids differ from the plain expansion; empty if nowhere."""
    before_text: BeforeText | None = None
    """How the class's run is spared for another text: it wrote the item's ids first; None: they
    are not known apart from the text's."""
    headers: Mapping[str, Way] = field(default_factory=dict)
    """Modality -> how its items' texts follow from their headers."""
    random: Random = field(default_factory=dict)
    """Modality -> why the same item gives other tensors each time; absent: it does not."""
    pairs_sound: bool = False
    """Whether a video with its sound gets the class's own ids."""
    remarks: tuple[str, ...] = ()
    """What else does not come out as the class has it."""
