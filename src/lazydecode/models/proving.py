"""Whether what we make of prompts is what the family's own processor makes of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lazydecode.errors import InvalidRequestError, LazyDecodeError
from lazydecode.models.either_or import difference_from_class
from lazydecode.models.expansion import ItemText, PromptExpander
from lazydecode.models.family import describe_difference, text_behind, text_only_ids
from lazydecode.models.field_inference import same_values
from lazydecode.models.header_only import Way, stand_in, substitutes
from lazydecode.models.item import ItemProcessor
from lazydecode.models.pairing import SoundPairing
from lazydecode.models.probing import FamilyFacts, Probes
from lazydecode.models.processor_call import Media
from lazydecode.models.proof import BeforeText, PromptEdit, Proof, TextRule
from lazydecode.models.randomness import random_options

logger = logging.getLogger(__name__)

_LONGEST_SUFFIX: Final = 4
"""Ids that a class may put behind a text with an item before it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt with media, and the ids that the class gives for it."""

    text: str
    texts: Mapping[str, list[ItemText]]
    theirs: list[int]
    ours: list[int] | None
    """None if the prompt could not be expanded."""
    problem: str = ""


class Prover:
    """Compares, on probes, our prompts and header texts with those of the family's class."""

    def __init__(
        self, probes: Probes, facts: FamilyFacts, items: ItemProcessor, expander: PromptExpander
    ) -> None:
        self.probes = probes
        self.call = probes.call
        self.facts = facts
        self.items = items
        self.expander = expander
        self._substitutes = substitutes(self.call.processor)
        self._remarks: list[str] = []

    def prove(self) -> Proof:
        """Return the way in which prompts come out right, or the difference that remains."""
        headers = {m: self._header_way(m) for m in self.facts.modalities}
        random = {m: why for m in self.facts.modalities if (why := self._why_random(m))}
        trials = [] if self.call.either_or else self._trials()
        proof = self._either_or() if self.call.either_or else self._prompt_proof(trials, headers)
        return replace(
            proof,
            headers=headers,
            random=random,
            pairs_sound=proof.mode == "expand" and self._pairs_sound(headers),
            text_rule=self._text_rule(proof.edit) if trials else None,
            remarks=tuple(self._remarks),
        )

    def _prompt_proof(self, trials: Sequence[Trial], headers: Mapping[str, Way]) -> Proof:
        """Return how prompts with media come out right."""
        if not trials:
            return Proof("unproven", difference="the class takes none of the probes")
        difference = next((d for d in map(self._difference, trials) if d), "")
        if not difference:
            return Proof("expand")
        edit = self._edit(trials)
        if edit is not None:
            return Proof("expand", edit=edit, difference=difference)
        failure = next((f for f in (self._whole_failure(t, headers) for t in trials) if f), "")
        if failure:
            return Proof("unproven", difference=f"{difference}; {failure}")
        before = self._before_text(trials)
        return Proof("whole_request", difference=difference, before_text=before)

    def _either_or(self) -> Proof:
        """Return whether a text alone and an item alone come out right."""
        try:
            difference = difference_from_class(self.probes, self.items)
        except InvalidRequestError as exc:
            difference = exc.message
        return Proof("unproven" if difference else "either_or", difference=difference)

    # -- prompts

    def _trials(self) -> list[Trial]:
        """Prompts with one and with two items of each modality; each alone if not together."""
        modalities = list(self.facts.modalities)
        once = dict.fromkeys(modalities, (0,))
        twice = {m: (0, 2) for m, known in self.facts.modalities.items() if known.max_items != 1}
        trials: list[Trial] = []
        for group in (once, twice):
            trial = self._trial(group) if group else None
            if trial is not None:
                trials.append(trial)
                continue
            for modality, numbers in group.items():
                trial = self._trial({modality: numbers})
                if trial is not None:
                    trials.append(trial)
        return trials

    def _trial(self, numbers: Mapping[str, Sequence[int]]) -> Trial | None:
        """Run the class on a prompt with these probes; None if it refuses them together."""
        items = {m: [self.probes.item(m, n) for n in group] for m, group in numbers.items()}
        text = self._prompt({m: len(group) for m, group in items.items()})
        try:
            output = self.items.run_text(text, Media.of(items))
        except InvalidRequestError as exc:
            logger.debug("a probe was refused: %s", exc)
            return None
        texts = {m: [self._text(m, n) for n in group] for m, group in numbers.items()}
        try:
            ours = self.expander.expand(
                text, texts, add_special_tokens=output.add_special_tokens
            ).token_ids
        except LazyDecodeError as exc:
            return Trial(text, texts, output.input_ids, None, str(exc))
        return Trial(text, texts, output.input_ids, ours)

    def _prompt(self, counts: Mapping[str, int]) -> str:
        """Return a conversation of two turns with text before, between and after the items."""
        content: list[dict[str, str]] = []
        rounds = max(counts.values())
        for number in range(rounds):
            for modality, count in counts.items():
                if number < count:
                    content += [
                        {"type": "text", "text": f"part {number}\n"},
                        {"type": modality},
                    ]
        content.append({"type": "text", "text": " What is it?"})
        return self.probes.template.render([{"role": "user", "content": content}]).text

    def _difference(self, trial: Trial) -> str:
        if trial.ours is None:
            return trial.problem
        if trial.ours == trial.theirs:
            return ""
        return describe_difference(self.call.tokenizer, trial.ours, trial.theirs)

    def _edit(self, trials: Sequence[Trial]) -> PromptEdit | None:
        """Return the ids that the class puts around every prompt, if that is the difference."""
        found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for trial in trials:
            if trial.ours is None:
                return None
            size, total = len(trial.ours), len(trial.theirs)
            at = next(
                (i for i in range(total - size + 1) if trial.theirs[i : i + size] == trial.ours),
                None,
            )
            if at is None:
                return None
            found.add((tuple(trial.theirs[:at]), tuple(trial.theirs[at + size :])))
        return PromptEdit(*found.pop()) if len(found) == 1 else None

    def _before_text(self, trials: Sequence[Trial]) -> BeforeText | None:
        """Return what the class does if it writes its one item first, and then the text."""
        known = [(m, facts.text) for m, facts in self.facts.modalities.items()]
        if len(known) != 1 or self.facts.modalities[known[0][0]].max_items != 1:
            return None
        ((modality, alone),) = known
        second = self._trial({modality: (1,)})
        if second is None:
            return None
        compared = [*((trial, 0) for trial in trials), (second, 1)]
        for special in (False, True):
            rules = {
                self._behind(trial, self.probes.output(modality, number).input_ids, alone, special)
                for trial, number in compared
            }
            if len(rules) == 1 and (rule := rules.pop()) is not None:
                return rule
        return None

    def _behind(
        self, trial: Trial, theirs_alone: list[int], alone: str, special: bool
    ) -> BeforeText | None:
        """Return the rule by which the same ids stand before the text of a trial as before the
        item's own."""
        bare = BeforeText(special)
        text, own = (text_behind(self.call, t, bare) for t in (trial.text, alone))
        for size in range(_LONGEST_SUFFIX + 1):
            suffix = tuple(trial.theirs[len(trial.theirs) - size :])
            first = len(trial.theirs) - size - len(text)
            item = trial.theirs[: max(0, first)]
            if item and (trial.theirs, theirs_alone) == (
                [*item, *text, *suffix],
                [*item, *own, *suffix],
            ):
                return BeforeText(special, suffix)
        return None

    def _text_rule(self, edit: PromptEdit) -> TextRule | None:
        """Return what the class does to a prompt without media."""
        text = self.probes.template.render([{"role": "user", "content": "What is it?"}]).text
        try:
            output = self.items.run_text(text, Media())
        except InvalidRequestError:
            return None
        bos = self.call.bos_token
        layouts = (False, True) if self.expander.edits_layout else (False,)
        edits = (False, True) if edit.prefix or edit.suffix else (False,)
        for special, layout, has_edit in itertools.product((True, False), layouts, edits):
            rule = TextRule(special, layout, has_edit)
            if text_only_ids(self.expander, text, rule, edit, bos) == output.input_ids:
                return rule
        self._remarks.append("prompts without media are not what the model's own processor makes")
        return None

    def _whole_failure(self, trial: Trial, headers: Mapping[str, Way]) -> str:
        """Return why the class over stand-ins does not give its own ids; empty if it does."""
        media = {
            m: [stand_in(m, item.shape, headers.get(m, "blank")) for item in group]
            for m, group in trial.texts.items()
        }
        meta = any(headers.get(m) == "meta" for m in media)
        try:
            output = self.items.run_text(
                trial.text, Media.of(media), substitutes=self._substitutes if meta else None
            )
            self.expander.locate(output.input_ids, trial.texts)
        except InvalidRequestError as exc:
            return f"over stand-ins: {exc}"
        if output.input_ids == trial.theirs:
            return ""
        return "over stand-ins " + describe_difference(
            self.call.tokenizer, output.input_ids, trial.theirs
        )

    # -- single items

    def _text(self, modality: str, number: int) -> ItemText:
        output = self.probes.output(modality, number)
        return self.items.text_of(modality, self.probes.item(modality, number), output)

    def _header_way(self, modality: str) -> Way:
        """Return the cheapest stand-in that gives the text of the real item."""
        stated = self.probes.record.header.get(modality)
        if stated is not None:
            return stated
        real = [self._text(modality, n) for n in (0, 1)]
        ways: tuple[Way, ...] = ("silence",) if modality == "audio" else ("meta", "blank")
        for way in ways:
            if all(self._stands_in(modality, text, way) for text in real):
                return way
        return "content"

    def _stands_in(self, modality: str, real: ItemText, way: Way) -> bool:
        try:
            text = self.items.sketch(
                modality,
                stand_in(modality, real.shape, way),
                substitutes=self._substitutes if way == "meta" else None,
            ).text
        except InvalidRequestError:
            return False
        return (text.replacement, text.token_ids) == (real.replacement, real.token_ids)

    def _pairs_sound(self, headers: Mapping[str, Way]) -> bool:
        """Whether a video with its sound gets the ids that the class gives it."""
        count_name = self.probes.record.sound_count
        if not count_name or not {"video", "audio"} <= self.facts.modalities.keys():
            return False
        pairing = SoundPairing(
            self.items, self.expander, count_name=count_name, way=headers.get("video", "blank")
        )
        items = {m: [self.probes.item(m, 1)] for m in ("video", "audio")}
        texts = {m: [self._text(m, 1)] for m in items}
        options = {"load_audio_from_video": True, "audio_from_video_indices": [0]}
        prompt = self._prompt({"video": 1})
        try:
            theirs = self.items.run_text(prompt, Media.of(items), {**self.call.options, **options})
            ours = self.expander.expand(
                prompt,
                pairing.join(texts, [(0, 0)], self.call.options),
                add_special_tokens=theirs.add_special_tokens,
            )
        except InvalidRequestError as exc:
            self._remarks.append(f"videos are taken without their sound: {exc}")
            return False
        if ours.token_ids == theirs.input_ids:
            return True
        why = describe_difference(self.call.tokenizer, ours.token_ids, theirs.input_ids)
        self._remarks.append(f"videos are taken without their sound: {why}")
        return False

    def _why_random(self, modality: str) -> str:
        """Return why the same item gives other tensors each time; empty if it does not."""
        why = random_options(self.call.processor, self.call.options).get(modality)
        if why is not None:
            return why
        first = self.probes.output(modality, 1).tensors
        second = self.items.run(modality, self.probes.item(modality, 1)).tensors
        if all(same_values(first[name], second[name]) for name in first):
            return ""
        return f"its {modality} processor gave two results for one probe"
