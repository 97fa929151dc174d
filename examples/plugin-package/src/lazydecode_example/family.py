"""A record of a model family: what the generic way cannot know about it."""

from __future__ import annotations

from lazydecode.models.registry import FamilyRecord

RECORD = FamilyRecord(
    max_items={"image": 2},
    reason="stands for a family of your own, whose processor takes two images at most",
)
