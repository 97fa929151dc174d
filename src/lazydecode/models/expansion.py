"""From the text of a prompt and the cached texts of its items to token ids and ranges."""

from __future__ import annotations

import bisect
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from PIL import Image

from lazydecode.errors import InvalidRequestError, PlaceholderMismatchError
from lazydecode.inputs import PlaceholderRange
from lazydecode.models.sections import Sections
from lazydecode.models.template import MODALITIES
from lazydecode.models.tokenization import CollapsedText, EncodedText, PromptTokenizer

_SLOT_START: Final = f"\U000f0002{secrets.token_hex(8)}:"  # no client can spell it
_SLOT_END: Final = "\U000f0003"
_FEW_TOKENS: Final = 256
"""Tokens beside a run that are looked at one by one."""
_TOO_MANY: Final = "the prompt has more media placeholders than there are media items"
_SLOT = re.compile(f"{_SLOT_START}([a-z_]+):([0-9]+){_SLOT_END}")


@dataclass(frozen=True, slots=True)
class ItemText:
    """What stands in a prompt for one item; depends on nothing but the item and its options."""

    modality: str
    replacement: CollapsedText | None
    """The text in place of the placeholder; None if only token ids are known."""
    token_ids: tuple[int, ...] | None = None
    """The ids in place of the placeholder's, where the class reports no text."""
    shape: tuple[Any, ...] = ()
    """Size of the item as a stand-in of the same size needs it (see `header_only`)."""
    holds: tuple[str, ...] = ()
    """Further modalities whose embeddings stand in the text among its own: its sound's."""


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """Token ids of a prompt with its items, and where each item stands."""

    token_ids: list[int]
    placeholders: dict[str, list[PlaceholderRange]]

    def copy(self) -> ExpandedPrompt:
        """Return a prompt whose lists are its own."""
        return ExpandedPrompt([*self.token_ids], {m: [*r] for m, r in self.placeholders.items()})

    def shifted(self, prefix: Sequence[int], suffix: Sequence[int]) -> ExpandedPrompt:
        """Return the prompt with ids put before and after it."""
        by = len(prefix)
        moved = {
            m: [PlaceholderRange(r.offset + by, r.length, r.is_embed) for r in ranges]
            for m, ranges in self.placeholders.items()
        }
        return ExpandedPrompt([*prefix, *self.token_ids, *suffix], moved)


class PromptExpander:
    """Puts items into prompts. Threads share it.

    Args:
        processor: The model's processor; its own search for placeholders is used.
        tokenizer: Ours.
        placeholders: Modality -> the text that stands for one item before expansion.
        embed_ids: Modality -> ids of tokens that take an embedding.
        prompts: Prompts without a client's words; what they have of a prompt is remembered.
        edits_layout: Whether the class changes the text before it looks for placeholders.
        uses_class_search: Whether placeholders are found by the class's own method.
        lock: What a thread must hold inside the class; None: nothing.
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: PromptTokenizer,
        *,
        placeholders: Mapping[str, str],
        embed_ids: Mapping[str, frozenset[int]],
        prompts: Iterable[str] = (),
        edits_layout: bool = False,
        uses_class_search: bool = True,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.processor = processor
        self.tokenizer = tokenizer
        self.placeholders = dict(placeholders)
        self._placeholders = {m: CollapsedText(text) for m, text in placeholders.items()}
        self._sections = Sections(tokenizer, prompts)
        self.embed_ids = dict(embed_ids)
        self.edits_layout = edits_layout
        self.uses_class_search = uses_class_search
        self._class_tokens = _tokens_of_library(processor) if uses_class_search else None
        self._searches: dict[tuple[str, ...], tuple[re.Pattern[str], dict[str, str]]] = {}
        self._lock = nullcontext() if lock is None else lock
        self.is_lock_free = isinstance(self._lock, nullcontext) and tokenizer.is_lock_free
        """Whether no thread ever waits for another one here."""

    def expand(
        self,
        text: str,
        items: Mapping[str, Sequence[ItemText]],
        *,
        add_special_tokens: bool,
        tenant: str | None = None,
    ) -> ExpandedPrompt:
        """Return ids and ranges for a prompt's text; marked tokens are codes in it.

        Args:
            text: With a placeholder per item.
            items: Modality -> texts of the items, in the order of the prompt.
            add_special_tokens: Whether to add what the tokenizer puts around a text.
            tenant: Who asks, as in `Sections.encode`.

        Raises:
            InvalidRequestError: If the text has not one placeholder per item.
        """
        if self.edits_layout:
            text = self.edit_layout(text, items)
        pieces, order = self._cut(text, items)
        self._check_counts(order, items)
        replacements = [
            items[modality][index].replacement or self._placeholders[modality]
            for modality, index in order
        ]
        encoded = self._sections.encode(
            pieces, replacements, add_special_tokens=add_special_tokens, tenant=tenant
        ) or self._encode_joined(pieces, replacements, add_special_tokens=add_special_tokens)
        ids, spans, runs = encoded.token_ids, encoded.token_spans, encoded.token_runs
        if any(items[modality][index].token_ids is not None for modality, index in order):
            ids, spans = self._insert_ids(ids, spans, order, items)
            runs = ()
        return self._place(ids, spans, order, items, runs=runs)

    def _encode_joined(
        self,
        pieces: Sequence[str],
        replacements: Sequence[CollapsedText],
        *,
        add_special_tokens: bool,
    ) -> EncodedText:
        """As `Sections.encode`, of one text and for any."""
        parts = [CollapsedText(pieces[0])]
        for replacement, piece in zip(replacements, pieces[1:], strict=True):
            parts += (replacement, CollapsedText(piece))
        joined, spans = CollapsedText.join(parts)
        return self.tokenizer.encode_collapsed(
            joined, add_special_tokens=add_special_tokens, spans=spans[1::2]
        )

    def expand_tokens(
        self, token_ids: Sequence[int], items: Mapping[str, Sequence[ItemText]]
    ) -> ExpandedPrompt:
        """Return ids and ranges for a prompt that came as token ids with placeholders.

        Exact where a replacement, or what stands around it, begins and ends with control
        tokens: the replacement is tokenized by itself.

        Raises:
            PlaceholderMismatchError: If the ids have not one placeholder per item.
        """
        ids = list(token_ids)
        hits = self.check_tokens(ids, {m: len(group) for m, group in items.items()})
        out: list[int] = []
        order: list[tuple[str, int]] = []
        spans: list[tuple[int, int]] = []
        taken: dict[str, int] = {}
        last = 0
        for start, stop, modality in hits:
            index = taken.get(modality, 0)
            taken[modality] = index + 1
            out += ids[last:start]
            new = self._ids_of(items[modality][index])
            order.append((modality, index))
            spans.append((len(out), len(out) + len(new)))
            out += new
            last = stop
        out += ids[last:]
        return self._place(out, spans, order, items)

    def check_tokens(
        self, token_ids: Sequence[int], counts: Mapping[str, int]
    ) -> list[tuple[int, int, str]]:
        """Check that token ids have one placeholder per item, and none of another modality.

        Args:
            token_ids: The prompt.
            counts: Modality -> number of items.

        Returns:
            (start, stop, modality) of every placeholder, in order.

        Raises:
            PlaceholderMismatchError: If not; it names both counts.
        """
        wanted = [m for m in self.placeholders if counts.get(m)]
        # Some families write the same text for two modalities: it stands for what came.
        spoken_for = {self.placeholders[m] for m in wanted}
        others = [m for m in self.placeholders if self.placeholders[m] not in spoken_for]
        hits = self._find_placeholders(list(token_ids), [*wanted, *others])
        found = Counter(modality for _, _, modality in hits)
        for modality in (*wanted, *others):
            count = counts.get(modality, 0)
            if found[modality] != count:
                raise PlaceholderMismatchError(
                    f"the token ids have {found[modality]} {modality} placeholders for {count} "
                    f"{modality} items; they need one per item",
                    modality=modality,
                    index=found[modality] if found[modality] < count else None,
                    parameter="prompt_token_ids",
                )
        return hits

    def _find_placeholders(
        self, ids: list[int], modalities: Sequence[str]
    ) -> list[tuple[int, int, str]]:
        """Return (start, stop, modality) of every placeholder, in order, without overlaps."""
        array = np.asarray(ids)
        found: list[tuple[int, int, str]] = []
        for modality in modalities:
            pattern = self.tokenizer.encode(self.placeholders[modality], add_special_tokens=False)
            starts = np.flatnonzero(array == pattern[0]) if pattern else ()
            found += [
                (int(at), int(at) + len(pattern), modality)
                for at in starts
                if ids[at : at + len(pattern)] == pattern
            ]
        found.sort(key=lambda hit: (hit[0], -hit[1]))
        kept: list[tuple[int, int, str]] = []
        for hit in found:
            if not kept or hit[0] >= kept[-1][1]:
                kept.append(hit)
        return kept

    def locate(
        self, token_ids: list[int], items: Mapping[str, Sequence[ItemText]]
    ) -> ExpandedPrompt:
        """Return the ranges of items in ids that somebody else expanded.

        Item after item takes as many embedding tokens as its own text has.
        """
        array = np.asarray(token_ids)
        ranges: dict[str, list[PlaceholderRange]] = {}
        for modality, group in items.items():
            counts = [self._embeds_of(item) for item in group]
            wanted = set().union(*(ids for ids, _ in counts)) if counts else set()
            places = np.flatnonzero(np.isin(array, list(wanted)))
            total = sum(count for _, count in counts)
            if len(places) != total:
                self._refuse(modality, len(places), total)
            ranges[modality] = []
            at = 0
            for _, count in counts:
                own = places[at : at + count]
                at += count
                start, stop = (int(own[0]), int(own[-1]) + 1) if count else (0, 0)
                ranges[modality].append(self.range_of(modality, start, token_ids[start:stop]))
        return ExpandedPrompt(token_ids, ranges)

    def _embeds_of(self, item: ItemText) -> tuple[set[int], int]:
        """Return which of an item's ids take an embedding, and how many there are."""
        ids = np.asarray(self._ids_of(item))
        wanted = self.embed_ids.get(item.modality, frozenset())
        if not np.isin(ids, list(wanted)).any():
            wanted = frozenset().union(*self.embed_ids.values())
        return set(wanted), int(np.isin(ids, list(wanted)).sum())

    def count_embeds(self, item: ItemText) -> int:
        """Return the number of tokens of an item that take an embedding."""
        return self._embeds_of(item)[1]

    def _ids_of(self, item: ItemText) -> list[int]:
        if item.token_ids is not None:
            return list(item.token_ids)
        assert item.replacement is not None
        return self.tokenizer.encode_collapsed(item.replacement, add_special_tokens=False).token_ids

    def edit_layout(self, text: str, items: Mapping[str, Sequence[ItemText]]) -> str:
        """Let the class change the text; it looks at the number of images only."""
        tiny = [Image.new("RGB", (32, 32))] * len(items.get("image", ()))
        with self._lock:
            prepared = self.processor.prepare_inputs_layout(images=tiny or None, text=[text])
        return str(prepared[1][0])

    def _cut(
        self, text: str, items: Mapping[str, Sequence[ItemText]]
    ) -> tuple[list[str], list[tuple[str, int]]]:
        """Cut a text at its placeholders, as the class finds them.

        Returns:
            The pieces of text, and modality and index of the item between each two of them.
        """
        if self._class_tokens is None:
            # Text, modality, index, and again.
            cut = _SLOT.split(self._fill_slots(text, items))
            return cut[::3], [
                (m, int(index)) for m, index in zip(cut[1::3], cut[2::3], strict=True)
            ]
        wanted = tuple([m for m in self._class_tokens if items.get(m)])
        if wanted not in self._searches:
            tokens = {self._class_tokens[m]: m for m in reversed(wanted)}  # the first has a token
            spelled = "|".join(re.escape(self._class_tokens[m]) for m in wanted) or "(?!)"
            self._searches[wanted] = re.compile(f"({spelled})"), tokens
        pattern, tokens = self._searches[wanted]
        cut = pattern.split(text)
        order: list[tuple[str, int]] = []
        taken = dict.fromkeys(wanted, 0)
        for token in cut[1::2]:
            modality = tokens[token]
            index = taken[modality]
            if index == len(items[modality]):
                raise InvalidRequestError(_TOO_MANY)
            order.append((modality, index))
            taken[modality] = index + 1
        return cut[::2], order

    def _fill_slots(self, text: str, items: Mapping[str, Sequence[ItemText]]) -> str:
        """Put a slot in the place of every placeholder, by the class's own search."""
        slots = {
            m: [f"{_SLOT_START}{m}:{i}{_SLOT_END}" for i in range(len(group))]
            for m, group in items.items()
        }
        if self.uses_class_search:
            find = self.processor.get_text_with_replacements
            try:
                with self._lock:
                    found, _ = find([text], *(slots.get(m, []) for m in MODALITIES))
            except (StopIteration, RuntimeError) as exc:
                raise InvalidRequestError(_TOO_MANY) from exc
            return str(found[0])
        for modality, names in slots.items():
            pieces = text.split(self.placeholders[modality])
            if len(pieces) - 1 != len(names):
                self._refuse(modality, len(pieces) - 1, len(names))
            text = "".join(
                piece + (names[i] if i < len(names) else "") for i, piece in enumerate(pieces)
            )
        return text

    def check_placeholders(self, text: str, items: Mapping[str, Sequence[ItemText]]) -> None:
        """Check that a text spells one placeholder per item, whatever the class makes of it.

        Raises:
            InvalidRequestError: If it does not; names the modality.
        """
        for modality, placeholder in self.placeholders.items():
            found, wanted = text.count(placeholder), len(items.get(modality, ()))
            if found != wanted:
                self._refuse(modality, found, wanted)

    def _check_counts(
        self, order: Sequence[tuple[str, int]], items: Mapping[str, Sequence[ItemText]]
    ) -> None:
        names = [modality for modality, _ in order]
        for modality, group in items.items():
            if names.count(modality) != len(group):
                self._refuse(modality, names.count(modality), len(group))

    def _refuse(self, modality: str, found: int, wanted: int) -> None:
        raise InvalidRequestError(
            f"the prompt has {found} {modality} placeholders for {wanted} {modality} items; the "
            "chat template must write one per item",
            modality=modality,
        )

    @staticmethod
    def _insert_ids(
        ids: list[int],
        spans: Sequence[tuple[int, int]],
        order: Sequence[tuple[str, int]],
        items: Mapping[str, Sequence[ItemText]],
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Put replacements that are known as ids in the place of their placeholders' ids.

        Returns:
            All ids, and the tokens of each item among them.
        """
        out: list[int] = []
        moved: list[tuple[int, int]] = []
        last = 0
        for (modality, index), (start, stop) in zip(order, spans, strict=True):
            new = items[modality][index].token_ids
            out += ids[last:start]
            begin = len(out)
            out += ids[start:stop] if new is None else new
            moved.append((begin, len(out)))
            last = stop
        out += ids[last:]
        return out, moved

    def _place(
        self,
        ids: list[int],
        spans: Sequence[tuple[int, int]],
        order: Sequence[tuple[str, int]],
        items: Mapping[str, Sequence[ItemText]],
        *,
        runs: Sequence[tuple[int, int]] = (),
    ) -> ExpandedPrompt:
        """Cut the range of every item to its embeddings.

        Where a run (first token, number of tokens) is all the embeddings that an item has, as
        nearly always, nothing is counted.

        The ranges of a modality are in the order of the text: an item that holds another one's
        embeddings adds a range to both modalities.
        """
        ranges: dict[str, list[PlaceholderRange]] = {m: [] for m in items}
        for (modality, index), (start, stop) in zip(order, spans, strict=True):
            holds = items[modality][index].holds
            found = None if holds else self._run_of(modality, ids, start, stop, runs)
            if found is not None:
                ranges[modality].append(found)
                continue
            content = ids[start:stop]
            ranges[modality].append(self.range_of(modality, start, content))
            for held in holds:
                ranges.setdefault(held, []).append(self._held_range(held, start, content))
        return ExpandedPrompt(ids, ranges)

    def _run_of(
        self,
        modality: str,
        ids: list[int],
        start: int,
        stop: int,
        runs: Sequence[tuple[int, int]],
    ) -> PlaceholderRange | None:
        """Return the one run that holds all embeddings of `ids[start:stop]`; None if it takes a
        closer look.
        """
        at = bisect.bisect_left(runs, (start,))
        if at == len(runs):
            return None
        first, count = runs[at]
        end = first + count
        wanted = self.embed_ids.get(modality, frozenset())
        if end > stop or ids[first] not in wanted:
            return None
        if (first - start) + (stop - end) > _FEW_TOKENS:
            return None
        if not wanted.isdisjoint(ids[start:first]) or not wanted.isdisjoint(ids[end:stop]):
            return None
        return PlaceholderRange(first, count)

    def _held_range(self, modality: str, offset: int, content: Sequence[int]) -> PlaceholderRange:
        """Return the range of another modality's embeddings; empty if there are none."""
        if self.embed_ids.get(modality, frozenset()).isdisjoint(content):
            return PlaceholderRange(offset, 0)
        return self.range_of(modality, offset, content)

    def range_of(self, modality: str, offset: int, content: Sequence[int]) -> PlaceholderRange:
        """Return the range of an item whose ids stand at an offset, cut to its embeddings."""
        if len(content) == 0:
            return PlaceholderRange(offset, 0)
        wanted = self.embed_ids.get(modality, frozenset())
        if len(wanted) == 1:
            (embed,) = wanted
            count = content.count(embed)
            first = content.index(embed) if count else 0
            # One unbroken run, as nearly always: ten times faster than a mask over all.
            if count and content[first : first + count].count(embed) == count:
                return PlaceholderRange(offset + first, count)
        array = np.asarray(content)
        mask = np.isin(array, list(wanted))
        if not mask.any():
            everywhere = frozenset().union(*self.embed_ids.values())
            mask = np.isin(array, list(everywhere))
        if not mask.any():
            return PlaceholderRange(offset, len(content))
        first = int(mask.argmax())
        stop = len(mask) - int(mask[::-1].argmax())
        inner = mask[first:stop]
        return PlaceholderRange(offset + first, stop - first, None if inner.all() else inner)


def _tokens_of_library(processor: Any) -> dict[str, str] | None:
    """Return modality -> the token that a class searches for as transformers' own classes do.

    None if it has a search of its own.
    """
    from transformers import ProcessorMixin

    plain = getattr(ProcessorMixin, "get_text_with_replacements", None)
    own = getattr(processor, "get_text_with_replacements", None)
    if plain is None or getattr(own, "__func__", None) is not plain:
        return None
    if not processor.all_special_multimodal_tokens:
        return {}
    tokens = {m: getattr(processor, f"{m}_token", None) for m in MODALITIES}
    return {m: token for m, token in tokens.items() if token is not None}
