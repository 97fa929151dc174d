"""Applying prompt updates to a prompt, and finding where the items ended up.

One pass over the prompt, whatever the number of items: positions of all targets come from one
look at the tokens, and content is copied in whole slices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lazydecode.errors import PlaceholderMismatchError
from lazydecode.inputs import PlaceholderRange
from lazydecode.processing.prompt_updates import (
    PromptIndexTarget,
    ResolvedPromptUpdate,
    Tokenizer,
    find_ids,
    seq_to_text,
)

ItemUpdates = Mapping[str, Sequence[Sequence[ResolvedPromptUpdate]]]
"""Modality -> per item its updates: alternatives, of which the first that matches is taken."""
Placeholders = dict[str, list[PlaceholderRange]]


@dataclass(frozen=True, slots=True)
class _Match:
    """Where the next update of a modality goes."""

    start: int
    end: int
    update: ResolvedPromptUpdate

    @property
    def cut(self) -> int:
        """How far the prompt is copied before the content."""
        return self.end if self.update.mode == "insert" else self.start


def apply_updates_to_ids(
    prompt_ids: Sequence[int], updates: ItemUpdates, tokenizer: Tokenizer | None
) -> tuple[list[int], Placeholders]:
    """Return the prompt with every update applied, and the range of every item.

    Each modality's items are placed in order. A replaced target is gone for later items; an
    inserted content leaves its target, so that all items may stand behind the same one.

    Raises:
        PlaceholderMismatchError: If an item has no target left; names the first such item.
    """
    prompt = list(prompt_ids)
    targets = _TokenTargets(prompt, updates, tokenizer)
    out: list[int] = []
    placeholders: Placeholders = {modality: [] for modality in updates}

    def emit(start: int, end: int, update: ResolvedPromptUpdate) -> None:
        out.extend(prompt[start:end])
        content = update.content_ids(tokenizer)
        placeholders[update.modality].append(
            PlaceholderRange(len(out), len(content), update.embed_mask(tokenizer))
        )
        out.extend(content)

    rest = _walk(updates, targets.find, emit)
    out.extend(prompt[rest:])
    return out, placeholders


def apply_updates_to_text(prompt: str, updates: ItemUpdates, tokenizer: Tokenizer | None) -> str:
    """Return the text prompt with every update applied, contents as text.

    Raises:
        PlaceholderMismatchError: If an item has no target left; names the first such item.
    """
    targets = _TextTargets(prompt, tokenizer)
    out: list[str] = []

    def emit(start: int, end: int, update: ResolvedPromptUpdate) -> None:
        out.append(prompt[start:end])
        out.append(seq_to_text(tokenizer, update.content.full))

    rest = _walk(updates, targets.find, emit)
    out.append(prompt[rest:])
    return "".join(out)


def find_placeholders(
    prompt_ids: Sequence[int], updates: ItemUpdates, tokenizer: Tokenizer | None
) -> Placeholders:
    """Find the contents in a prompt into which something else put them.

    Raises:
        PlaceholderMismatchError: If an item's content is not there; names the first such item.
    """
    prompt = list(prompt_ids)
    placeholders: Placeholders = {modality: [] for modality in updates}
    position = dict.fromkeys(updates, 0)
    taken: list[tuple[int, int]] = []
    for modality, items in updates.items():
        for index, alternatives in enumerate(items):
            found = _find_content(prompt, alternatives, tokenizer, position[modality], taken)
            if found is None:
                raise _mismatch(modality, index)
            start, length, mask = found
            placeholders[modality].append(PlaceholderRange(start, length, mask))
            position[modality] = start + length
            taken.append((start, start + length))
    return placeholders


def _find_content(
    prompt: list[int],
    alternatives: Sequence[ResolvedPromptUpdate],
    tokenizer: Tokenizer | None,
    start: int,
    taken: list[tuple[int, int]],
) -> tuple[int, int, NDArray[np.bool_] | None] | None:
    best: tuple[int, int, NDArray[np.bool_] | None] | None = None
    for update in alternatives:
        content = update.content_ids(tokenizer)
        if not content:
            return start, 0, None
        at = find_ids(prompt, content, start)
        while at >= 0 and any(low < at + len(content) and at < high for low, high in taken):
            at = find_ids(prompt, content, at + 1)
        if at >= 0 and (best is None or at < best[0]):
            best = at, len(content), update.embed_mask(tokenizer)
    return best


def _walk(
    updates: ItemUpdates,
    find: Callable[[ResolvedPromptUpdate, int, int], tuple[int, int] | None],
    emit: Callable[[int, int, ResolvedPromptUpdate], None],
) -> int:
    """Place all items, earliest first; return up to where the prompt was copied.

    `find(update, start, end)` gives the next place of an update's target that begins at or
    after `start` and ends at or after `end`.
    """
    copied = replaced = 0
    next_item = {modality: 0 for modality, items in updates.items() if items}
    pending: dict[str, _Match] = {}

    def search(modality: str) -> _Match:
        index = next_item[modality]
        best: _Match | None = None
        for update in updates[modality][index]:
            # An insertion may stand behind a target that an earlier one stands behind.
            start = replaced if update.mode == "insert" else copied
            place = find(update, start, copied)
            if place is not None and (best is None or place < (best.start, best.end)):
                best = _Match(*place, update)
        if best is None:
            raise _mismatch(modality, index)
        return best

    while next_item:
        for modality in next_item:
            match = pending.get(modality)
            if match is None or match.cut < copied or match.start < replaced:
                pending[modality] = search(modality)
        # Insertions first: a replacement at the same place would take their target away.
        modality = min(
            next_item, key=lambda name: (pending[name].cut, pending[name].update.mode == "replace")
        )
        match = pending.pop(modality)
        emit(copied, match.cut, match.update)
        copied = match.end
        if match.update.mode == "replace":
            replaced = match.end
        next_item[modality] += 1
        if next_item[modality] == len(updates[modality]):
            del next_item[modality]
    return copied


def _mismatch(modality: str, index: int) -> PlaceholderMismatchError:
    return PlaceholderMismatchError(
        f"The prompt has no placeholder for the {modality} at index {index}; "
        f"it needs one for each {modality} of the request",
        modality=modality,
        index=index,
    )


class _TokenTargets:
    """Finds targets in a prompt of token ids; every look-up is a bisection."""

    def __init__(
        self, prompt: list[int], updates: ItemUpdates, tokenizer: Tokenizer | None
    ) -> None:
        self._prompt = prompt
        self._tokenizer = tokenizer
        firsts = {
            ids[0]
            for items in updates.values()
            for alternatives in items
            for update in alternatives
            if (ids := update.target_ids(tokenizer))
        }
        self._positions: dict[int, list[int]] = {}
        if firsts:
            array = np.asarray(prompt, dtype=np.int64)
            hits = array == firsts.pop() if len(firsts) == 1 else np.isin(array, list(firsts))
            for at in np.flatnonzero(hits).tolist():
                self._positions.setdefault(prompt[at], []).append(at)

    def find(self, update: ResolvedPromptUpdate, start: int, end: int) -> tuple[int, int] | None:
        """Return the next match that begins at or after `start` and ends at or after `end`."""
        if isinstance(update.target, PromptIndexTarget):
            at = update.target.token_index(self._tokenizer, self._prompt)
            return None if at is None or at < end else (at, at)
        ids = update.target_ids(self._tokenizer)
        if not ids:
            return None
        length = len(ids)
        candidates = self._positions.get(ids[0], [])
        first = bisect_left(candidates, max(start, end - length))
        for where in range(first, len(candidates)):
            at = candidates[where]
            if length == 1 or self._prompt[at : at + length] == ids:
                return at, at + length
        return None


class _TextTargets:
    """Finds targets in a text prompt."""

    def __init__(self, prompt: str, tokenizer: Tokenizer | None) -> None:
        self._prompt = prompt
        self._tokenizer = tokenizer

    def find(self, update: ResolvedPromptUpdate, start: int, end: int) -> tuple[int, int] | None:
        """Return the next match that begins at or after `start` and ends at or after `end`."""
        if isinstance(update.target, PromptIndexTarget):
            at = update.target.text_index(self._tokenizer, self._prompt)
            return None if at is None or at < end else (at, at)
        text = seq_to_text(self._tokenizer, update.target)
        if not text:
            return None
        at = self._prompt.find(text, max(start, end - len(text)))
        return None if at < 0 else (at, at + len(text))
