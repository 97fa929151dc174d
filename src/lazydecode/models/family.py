"""One loaded model family: how its items are processed and put into prompts, and the proof."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from lazydecode.errors import InvalidRequestError
from lazydecode.inputs import MultiModalKwargsItem
from lazydecode.media.raw_video import RawVideo
from lazydecode.models.enlargement import ResultLimit, check_enlargement, is_strip
from lazydecode.models.expansion import ExpandedPrompt, ItemText, PromptExpander
from lazydecode.models.header_only import Way, stand_in, substitutes
from lazydecode.models.item import ItemProcessor, ProcessedItem, shape_of
from lazydecode.models.memo import Memo
from lazydecode.models.options import ProcessorOptions
from lazydecode.models.pairing import Pair, SoundPairing
from lazydecode.models.pixels import PixelPlan, raw_options
from lazydecode.models.probing import FamilyFacts
from lazydecode.models.processor_call import Media, ProcessorCall
from lazydecode.models.proof import BeforeText, PromptEdit, Proof, TextRule
from lazydecode.models.randomness import Random, random_options
from lazydecode.models.registry import FamilyRecord
from lazydecode.models.tokenization import PromptTokenizer

logger = logging.getLogger(__name__)

_SHORT_CHARS: Final = 8192
"""Longest text whose ids, as the class wrote them, are remembered with its items."""
_REMEMBERED_TOKENS: Final = 500_000
"""Token ids of all such prompts: some 15 MB at most."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """What the header of an item is enough for."""

    text: ItemText
    metadata: MultiModalKwargsItem
    """The small tensors: grids and sizes."""


class Family:
    """Processes items and builds prompts for one model. Threads share it.

    Args:
        facts: What the probes showed.
        record: How the family differs from the generic way.
        call: The processor.
        options: Checks and merges processor options.
        items: Runs the processor for one item.
        expander: Puts items into prompts.
        proof: What was proven.
        pixel_plan: Fields that are handed over as uint8.
        raw_modalities: Modalities whose pixels are handed over as uint8.
    """

    def __init__(
        self,
        *,
        facts: FamilyFacts,
        record: FamilyRecord,
        call: ProcessorCall,
        options: ProcessorOptions,
        items: ItemProcessor,
        expander: PromptExpander,
        proof: Proof,
        pixel_plan: PixelPlan,
        raw_modalities: frozenset[str],
    ) -> None:
        self.facts = facts
        self.record = record
        self.call = call
        self.options = options
        self.items = items
        self.expander = expander
        self.proof = proof
        self.pixel_plan = pixel_plan
        self.raw_modalities = raw_modalities
        self._substitutes = substitutes(call.processor)
        self._resizing = {
            m: part
            for m in ("image", "video")
            if (part := getattr(call.processor, f"{m}_processor", None)) is not None
        }
        self._sketches: Memo[Sketch] = Memo()
        self._too_large: Memo[int] = Memo()
        self._written: Memo[ExpandedPrompt] = Memo(
            cost=lambda written: len(written.token_ids), max_cost=_REMEMBERED_TOKENS
        )
        self._before: Memo[list[int]] = Memo()
        self._default_name = _name(options.defaults)
        self._follows_from_size = (
            "image" in self._resizing and proof.headers.get("image", "content") != "content"
        )
        """Whether the text of a picture follows from its size."""
        self.pairing: SoundPairing | None = None
        """How videos are written with their sound; None: the family has no such pairs."""
        if proof.pairs_sound:
            self.pairing = SoundPairing(
                items,
                expander,
                count_name=record.sound_count,
                way=proof.headers.get("video", "blank"),
            )
        bos = call.bos_token
        self._special_default = next(
            (
                known.add_special_tokens
                for known in facts.modalities.values()
                if bos is None or not known.text.startswith(bos)
            ),
            True,
        )

    @property
    def tokenizer(self) -> PromptTokenizer:
        """Our tokenizer."""
        return self.call.tokenizer

    @property
    def items_in_prompt(self) -> bool:
        """Whether an item stands for tokens of the prompt."""
        return True

    # -- items

    def process(
        self, modality: str, item: Any, options: Mapping[str, Any] | None = None
    ) -> ProcessedItem:
        """Return the tensors and the text of one decoded item.

        Raises:
            InvalidRequestError: If the processor refuses the item or the options.
        """
        self.check_modality(modality)
        merged = self.options.merge(options)
        likeness: Hashable = None
        if modality == "image" and self._follows_from_size:
            likeness = (shape_of("image", item), _form(item), self._name(merged))
            processed = self.items.process_like(item, likeness)
            if processed is not None:
                return processed
        if modality in self._resizing and not isinstance(item, RawVideo):
            self._check_size(modality, shape_of(modality, item), merged)
        if modality in self.raw_modalities:
            merged = raw_options(modality, merged) or merged
        if likeness is not None:
            return self.items.process_image(item, merged, likeness)
        return self.items.process(modality, item, merged)

    def random(self, options: Mapping[str, Any]) -> Random:
        """Return which modalities give other tensors each time under a request's options, and
        why."""
        if not options:
            return self.proof.random
        return {**self.proof.random, **random_options(self.call.processor, options)}

    def check_modality(self, modality: str) -> None:
        """Check that the family takes items of a modality.

        Raises:
            InvalidRequestError: If it does not; it says why.
        """
        if modality not in self.facts.modalities:
            why = self.facts.refused.get(modality, "its processor has no part for it")
            raise InvalidRequestError(f"the model takes no {modality}: {why}", modality=modality)

    def sketch(
        self, modality: str, shape: tuple[Any, ...], options: Mapping[str, Any] | None = None
    ) -> Sketch | None:
        """Return what follows from an item's size alone; None if that is not all it takes.

        Memoized by size and options, which it is a pure function of.

        Raises:
            InvalidRequestError: If the processor refuses the size or the options.
        """
        self.check_modality(modality)
        way = self.proof.headers.get(modality, "content")
        if way == "content":
            return None
        merged = self.options.merge(options)
        key = (modality, shape, self._name(merged))
        return self._sketches.get(key, lambda: self._sketch(modality, shape, way, merged))

    def known_sketch(
        self, modality: str, shape: tuple[Any, ...], options: Mapping[str, Any] | None = None
    ) -> Sketch | None:
        """Return what `sketch` found before for this size and these options; None if nothing."""
        return self._sketches.peek((modality, shape, self._name(self.options.merge(options))))

    def _name(self, options: Mapping[str, Any]) -> str:
        return self._default_name if options is self.options.defaults else _name(options)

    def _sketch(
        self, modality: str, shape: tuple[Any, ...], way: Way, options: Mapping[str, Any]
    ) -> Sketch:
        if modality in self._resizing:
            self._check_size(modality, shape, options)
        if modality in self.raw_modalities:
            options = raw_options(modality, options) or options
        sketched = self.items.sketch(
            modality,
            stand_in(modality, shape, way),
            options,
            substitutes=self._substitutes if way == "meta" else None,
        )
        return Sketch(sketched.text, sketched.kwargs)

    def _check_size(
        self, modality: str, shape: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        """Refuse an item of which the processor would make something huge.

        Raises:
            InvalidRequestError: If it would.
        """
        check_enlargement(modality, shape, self._resizing[modality], options)
        if not is_strip(modality, shape):
            return
        key = (modality, shape, self._name(options))
        num_bytes = self._too_large.get(key, lambda: self._huge_result(modality, shape, options))
        if num_bytes:
            height, width = shape[-2:] if modality == "image" else shape[1:3]
            raise InvalidRequestError(
                f"{width} x {height} pixels are too narrow: the model's processor makes "
                f"{num_bytes >> 20} MiB of them",
                modality=modality,
            )

    def _huge_result(
        self, modality: str, shape: tuple[Any, ...], options: Mapping[str, Any]
    ) -> int:
        """Return the bytes of what a processor makes on the way that is too large; 0: nothing."""
        item = stand_in(modality, shape, "meta")
        pixels = item[0] if modality == "video" else item
        limit = ResultLimit(pixels.numel() // 3)
        with limit, suppress(InvalidRequestError):
            # A class that does not run without content is not known in advance.
            self.items.sketch(modality, item, options, substitutes=self._substitutes)
        return limit.num_bytes

    # -- prompts

    @property
    def builds_unlocked(self) -> bool:
        """Whether prompts are built from texts alone, and no thread waits for another one."""
        return (
            type(self) is Family
            and self.proof.mode != "whole_request"
            and not self.record.whole_request
            and not self.expander.edits_layout
            and self.expander.is_lock_free
        )

    @property
    def edits_text_layout(self) -> bool:
        """Whether the class changes prompts without media, under its lock."""
        return self.proof.text_rule is not None and self.proof.text_rule.edits_layout

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a prompt without media; marked tokens are codes in it."""
        rule = self.proof.text_rule or TextRule(self._special_default)
        return text_only_ids(self.expander, text, rule, self.proof.edit, self.call.bos_token)

    def build_prompt(
        self,
        prompt: str | Sequence[int],
        items: Mapping[str, Sequence[ItemText]],
        options: Mapping[str, Any] | None = None,
        *,
        pairs: Sequence[Pair] = (),
        tenant: str | None = None,
    ) -> ExpandedPrompt:
        """Return the ids of a prompt with its items, and where each item stands.

        Args:
            prompt: Text, or token ids with placeholders.
            items: Modality -> texts of the items, in the order of the prompt.
            options: The request's processor options.
            pairs: Videos with their sound, which has no placeholder of its own.
            tenant: Who asks: nobody can tell from the time it takes what others have asked.

        Raises:
            InvalidRequestError: If the prompt has not one placeholder per item, or the family
                has no such pairs.
        """
        if pairs:
            if self.pairing is None:
                raise InvalidRequestError("the model takes no video with its sound as one")
            items = self.pairing.join(items, pairs, self.options.merge(options))
        if not isinstance(prompt, str):
            return self.expander.expand_tokens(prompt, items)
        try:
            return self._build_from_text(prompt, items, options, tenant)
        except InvalidRequestError as exc:
            if exc.modality is None and not self.expander.edits_layout:
                self.expander.check_placeholders(prompt, items)
            raise

    def check_tokens(self, token_ids: Sequence[int], counts: Mapping[str, int]) -> None:
        """Check a prompt that came as token ids, before its items are fetched.

        Raises:
            InvalidRequestError: If it has not one placeholder per item, or the model's class
                writes prompts in a way that only a text can follow.
        """
        if any(counts.values()) and (
            self.proof.mode == "whole_request" or any(map(counts.get, self.record.whole_request))
        ):
            raise InvalidRequestError(
                "the model takes token ids without media only: its processor writes the prompt "
                "from the text of all messages",
                parameter="prompt_token_ids",
            )
        self.expander.check_tokens(token_ids, counts)

    def _build_from_text(
        self,
        prompt: str,
        items: Mapping[str, Sequence[ItemText]],
        options: Mapping[str, Any] | None,
        tenant: str | None,
    ) -> ExpandedPrompt:
        if self.proof.mode == "whole_request" or any(
            items.get(m) for m in self.record.whole_request
        ):
            if self.proof.before_text is not None:
                return self._put_before(prompt, items, options, self.proof.before_text)
            return self._write_whole(prompt, items, self.options.merge(options), tenant)
        expanded = self.expander.expand(
            prompt, items, add_special_tokens=self._adds_special(prompt), tenant=tenant
        )
        edit = self.proof.edit
        if not (edit.prefix or edit.suffix):
            return expanded
        return expanded.shifted(edit.prefix, edit.suffix)

    def _adds_special(self, text: str) -> bool:
        """Whether the tokenizer adds what goes around a text: not if the template wrote it."""
        bos = self.call.bos_token
        return self._special_default and not (bos is not None and text.startswith(bos))

    def _write_whole(
        self,
        prompt: str,
        items: Mapping[str, Sequence[ItemText]],
        options: Mapping[str, Any],
        tenant: str | None,
    ) -> ExpandedPrompt:
        """Let the class itself write the prompt, over stand-ins for all items.

        Where many items come with the same words, as captions are asked for, the prompt is the
        same whenever their sizes are, and is written once.
        """

        def write() -> ExpandedPrompt:
            media, parts = self.stand_ins(items)
            output = self.items.run_text(prompt, media, options, substitutes=parts)
            return self.expander.locate(output.input_ids, items)

        if len(prompt) > _SHORT_CHARS:
            return write()
        groups = tuple((modality, *group) for modality, group in items.items())
        return self._written.get((tenant, prompt, groups, _name(options)), write).copy()

    def _put_before(
        self,
        prompt: str,
        items: Mapping[str, Sequence[ItemText]],
        options: Mapping[str, Any] | None,
        rule: BeforeText,
    ) -> ExpandedPrompt:
        """Return the ids that the class writes for the item, then those of the text.

        The first come from one run of the class over a stand-in, for each size of item.
        """
        ((modality, (item,)),) = ((m, group) for m, group in items.items() if group)
        alone = self.facts.modalities[modality].text
        merged = self.options.merge(options)

        def run() -> list[int]:
            media, parts = self.stand_ins({modality: [item]})
            ids = self.items.run_text(alone, media, merged, substitutes=parts).input_ids
            return ids[: len(ids) - len(text_behind(self.call, alone, rule))]

        first = self._before.get((modality, item.shape, _name(merged)), run)
        ids = [*first, *text_behind(self.call, prompt, rule)]
        return ExpandedPrompt(ids, {modality: [self.expander.range_of(modality, 0, first)]})

    def stand_ins(
        self, items: Mapping[str, Sequence[ItemText]]
    ) -> tuple[Media, Mapping[str, Any] | None]:
        """Return media of the same sizes, and the parts of the processor they need."""
        ways = self.proof.headers
        media = {
            m: [stand_in(m, item.shape, ways.get(m, "blank")) for item in group]
            for m, group in items.items()
        }
        meta = any(ways.get(m) == "meta" and group for m, group in items.items())
        return Media.of(media), self._substitutes if meta else None


def _name(options: Mapping[str, Any]) -> str:
    """Return a text that is the same for the same options."""
    return json.dumps(options, sort_keys=True, default=str)


def text_behind(call: ProcessorCall, text: str, rule: BeforeText) -> list[int]:
    """Return the ids of a text that an item's are put before."""
    bos = call.bos_token
    special = rule.add_special_tokens and not (bos is not None and text.startswith(bos))
    return [*call.tokenizer.encode(text, add_special_tokens=special), *rule.suffix]


def _form(image: Any) -> Hashable:
    """Return what a processor could go by in a picture besides its size."""
    return getattr(image, "mode", None) or (type(image), image.dtype, tuple(image.shape))


def text_only_ids(
    expander: PromptExpander, text: str, rule: TextRule, edit: PromptEdit, bos: str | None
) -> list[int]:
    """Return the ids of a prompt without media, by a rule."""
    special = rule.add_special_tokens and not (bos is not None and text.startswith(bos))
    if rule.edits_layout:
        text = expander.edit_layout(text, {})
    ids = expander.tokenizer.encode(text, add_special_tokens=special)
    return [*edit.prefix, *ids, *edit.suffix] if rule.has_edit else ids


def describe_difference(
    tokenizer: PromptTokenizer, ours: Sequence[int], theirs: Sequence[int]
) -> str:
    """Return where two id sequences part, in words."""
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    window = slice(max(0, at - 3), at + 6)
    shown = [tokenizer.decode(ids[window], skip_special_tokens=False) for ids in (ours, theirs)]
    return (
        f"at token {at} of {len(theirs)}: expansion gives {len(ours)} tokens and {shown[0]!r}, "
        f"the class {shown[1]!r}"
    )
