"""Tokenizing a prompt section by section: only what a client wrote is given to the tokenizer.

Control tokens are matched before a tokenizer's model runs, and split the text for all that
follows. So the ids of a text are those of its sections, each of which begins at a control token,
one after the other. What a template writes around a question is the same each time: such
sections are tokenized once, when the model is loaded, and the question alone is left. One that is
asked about many items, as captions are, is remembered too.

That is so for a control token that nothing else can swallow a part of, and that takes no part of
what is beside it: a fence. Which tokens are fences is read off the tokenizer, and then tried. The
proof of a family's prompts goes through here as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from lazydecode.models.added_tokens import overlaps
from lazydecode.models.marks import has_marks, leftmost_longest
from lazydecode.models.memo import Memo
from lazydecode.models.tokenization import CollapsedText, EncodedText, PromptTokenizer

_SAMPLES: Final = ("", "a", " a", "a ", "\n", "\n\n", " ", "7", "'s", ".\n\n", "é漢", "\u0301", "_")
"""Texts beside a control token, of which a tokenizer could make something else there."""
_REMEMBERED: Final = 1024
"""Texts of clients that are remembered: 10 MB at most."""
_SHORT_CHARS: Final = 1024
"""Longest text of a client that is remembered; a longer one is too seldom the same."""


class Sections:
    """Tokenizes texts whose parts meet at fences. Immutable; threads share it.

    Args:
        tokenizer: The model's.
        prompts: Texts of which every section is remembered: prompts without a client's words.
    """

    def __init__(self, tokenizer: PromptTokenizer, prompts: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}
        self._asked: Memo[tuple[int, ...]] = Memo(_REMEMBERED)
        prompts = list(prompts)
        fences = find_fences(tokenizer, prompts)
        self._fences = re.compile(f"({leftmost_longest(fences).pattern})")
        sections = list(fences)
        for prompt in prompts if fences else ():
            first, *cut = self._fences.split(prompt)
            sections += (first, *_join(cut))
        for section in sections:
            self._known[section] = tuple(tokenizer.encode_plain(section))
        for prompt in prompts if fences else ():
            self._remember_beginnings(prompt)

    def _remember_beginnings(self, prompt: str) -> None:
        """Remember all that a prompt can begin with, up to an item, as one text."""
        first, *cut = self._fences.split(prompt)
        text, ids = first, self._known[first]
        for section in _join(cut):
            text, ids = text + section, ids + self._known[section]
            self._known[text] = ids

    def encode(
        self,
        pieces: Sequence[str],
        replacements: Sequence[CollapsedText],
        *,
        add_special_tokens: bool,
        tenant: str | None = None,
    ) -> EncodedText | None:
        """Return the ids of pieces of text with a replacement between each two of them.

        Args:
            pieces: What stands before, between and behind the replacements.
            replacements: What stands for items.
            add_special_tokens: Whether to add what the tokenizer puts around a text.
            tenant: Who asks: nobody can tell from the time it takes what others have asked.

        Returns:
            The ids, and the tokens of every replacement; None if it takes a look at the whole
            text: it holds marked tokens, or a replacement does not begin and end at fences, or
            has a section that is not remembered.
        """
        around = self._tokenizer.around(add_special_tokens) if self._known else None
        if around is None or any(map(has_marks, pieces)):
            return None
        ids = [*around[0]]
        spans: list[tuple[int, int]] = []
        runs: list[tuple[int, int]] = []
        self._add_text(ids, pieces[0], tenant)
        for replacement, piece in zip(replacements, pieces[1:], strict=True):
            first, *cut = self._fences.split(replacement.text)
            start = len(ids)
            if first or not cut or not self._add_replacement(ids, replacement, _join(cut), runs):
                return None
            spans.append((start, len(ids)))
            if not cut[-1]:
                self._add_text(ids, piece, tenant, behind=cut[-2])
            elif not piece or self._fences.match(piece):
                self._add_text(ids, piece, tenant)
            else:
                return None
        ids += around[1]
        return EncodedText(ids, spans, runs)

    def _add_text(
        self, ids: list[int], piece: str, tenant: str | None, *, behind: str = ""
    ) -> None:
        """Add the ids of a piece of text.

        Args:
            ids: Those of the text before it.
            piece: Begins with a fence or is empty, except at the beginning of all text.
            tenant: Who asks.
            behind: The fence that is before it; the piece may then begin with anything.
        """
        known = self._known
        whole = known.get(piece) if not behind else None
        if whole is not None:
            ids += whole
            return
        first, *cut = self._fences.split(piece)
        if first:
            section = behind + first
            own = known.get(section) or self._encode(section, tenant)
            ids += own[1:] if behind else own
        sections = _join(cut)
        start, stop = 0, len(sections)
        while start < stop and sections[start] in known:
            ids += known[sections[start]]
            start += 1
        while start < stop and sections[stop - 1] in known:
            stop -= 1
        if start < stop:
            # All between is encoded at once: a call costs as much as ten tokens.
            ids += self._encode("".join(sections[start:stop]), tenant)
        for section in sections[stop:]:
            ids += known[section]

    def _encode(self, text: str, tenant: str | None) -> Sequence[int]:
        """Return the ids of something that a client wrote."""
        encode = self._tokenizer.encode_plain
        if len(text) > _SHORT_CHARS:
            return encode(text)
        return self._asked.get((tenant, text), lambda: tuple(encode(text)))

    def _add_replacement(
        self,
        ids: list[int],
        replacement: CollapsedText,
        sections: Sequence[str],
        runs: list[tuple[int, int]],
    ) -> bool:
        """Add the ids of what stands for an item, and where its runs are; False if one of its
        sections is not known, or a run is not at the beginning of one.
        """
        begun = {run.start: run for run in replacement.runs}
        at = 0
        for section in sections:
            own = self._known.get(section)
            run = begun.pop(at, None)
            if own is None or (run is not None and not section.startswith(run.token)):
                return False
            if run is not None:
                runs.append((len(ids), run.count))
                ids += own[:1] * (run.count - 1)
            ids += own
            at += len(section)
        return not begun


def find_fences(tokenizer: PromptTokenizer, prompts: Iterable[str]) -> list[str]:
    """Return those control tokens in some texts that keep apart what is before and behind them.

    Args:
        tokenizer: Of which kind it is decides: one without a fast core has none.
        prompts: The texts.
    """
    added = tokenizer.added_tokens
    if not tokenizer.is_lock_free or any(token.single_word for token in added.values()):
        # Such a token is one only beside certain characters, so that a section is not enough.
        return []
    found = {text for prompt in prompts for text in tokenizer.find_added(prompt)}
    return [
        text
        for text in sorted(found)
        if not (added[text].lstrip or added[text].rstrip or added[text].normalized)
        and text[0].strip()
        and text[-1].strip()
        and not any(overlaps(text, other) for other in added)
        and _keeps_apart(tokenizer, text)
    ]


def _keeps_apart(tokenizer: PromptTokenizer, fence: str) -> bool:
    """Whether it does, between texts of several kinds."""
    encode = tokenizer.encode_plain
    own = [tokenizer.token_id(fence)]
    behind = [encode(fence + text) for text in _SAMPLES]
    if any(ids[:1] != own for ids in behind):
        return False
    return all(
        encode(before + fence + text) == [*encode(before), *ids]
        for before in _SAMPLES
        for text, ids in zip(_SAMPLES, behind, strict=True)
    )


def _join(cut: Sequence[str]) -> list[str]:
    """Return sections of fences and the texts behind them, which take turns."""
    return [fence + text for fence, text in zip(cut[::2], cut[1::2], strict=True)]
