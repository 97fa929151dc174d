"""The families, one module per group; each holds records and no code."""

from __future__ import annotations

from collections.abc import Mapping

from lazydecode.tiny_models.families import (
    audio,
    cohere,
    documents,
    gemma,
    glm,
    idefics,
    llama,
    llava,
    mistral,
    omni,
    qwen,
    retrieval,
    text,
    tiles,
    vision,
)
from lazydecode.tiny_models.records import Family

_GROUPS = (
    qwen,
    glm,
    llava,
    idefics,
    gemma,
    mistral,
    llama,
    cohere,
    tiles,
    documents,
    vision,
    omni,
    audio,
    retrieval,
)
FAMILIES: Mapping[str, Family] = {
    family.name: family for group in _GROUPS for family in group.FAMILIES
}
"""Families that take media, by name."""

TEXT_FAMILIES: Mapping[str, Family] = {family.name: family for family in text.FAMILIES}
"""Families that take text only, by name."""


def get_family(name: str) -> Family:
    """Return the record of a family.

    Raises:
        ValueError: No family has this name; the text lists those that exist.
    """
    known = {**FAMILIES, **TEXT_FAMILIES}
    if name not in known:
        raise ValueError(f"unknown family {name!r}; known are: {', '.join(sorted(known))}")
    return known[name]
