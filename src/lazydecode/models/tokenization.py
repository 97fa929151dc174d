"""Text to token ids: marked text as text, repeated control tokens once, any thread at any time.

A prompt with a large image repeats one control token thousands of times. Added tokens split the
text before the tokenizer's model sees it, so a run of them is tokenized as one and repeated
afterwards; the ids are the same and the cost no longer grows with the image. The first use of a
tokenizer proves that on its own text, and falls back to the plain way where it does not hold.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from lazydecode.models import core_calls
from lazydecode.models.added_tokens import added_tokens, overlaps
from lazydecode.models.bare_core import Beginning, without_added_tokens
from lazydecode.models.marks import MARK_END, MARK_START, TextMarker, has_marks, leftmost_longest

_CODES = re.compile(f"{MARK_START}([0-9]+){MARK_END}")
_MIN_RUN: Final = 4
"""Shorter runs are left as they are: nothing is won below it."""
_PROBES: Final = ("a", "7", "b.", "é")
"""Texts one of which has other ids than what goes around a text."""


@dataclass(frozen=True, slots=True)
class Run:
    """One copy of a control token in a text, standing for `count` of them."""

    start: int
    """Position of its first character."""
    token: str
    count: int


@dataclass(frozen=True, slots=True)
class CollapsedText:
    """A text in which runs of control tokens are written once."""

    text: str
    runs: tuple[Run, ...] = ()

    def expand(self) -> str:
        """Return the text in full."""
        pieces: list[str] = []
        last = 0
        for run in self.runs:
            pieces.append(self.text[last : run.start])
            pieces.append(run.token * run.count)
            last = run.start + len(run.token)
        pieces.append(self.text[last:])
        return "".join(pieces)

    @staticmethod
    def join(parts: Iterable[CollapsedText]) -> tuple[CollapsedText, list[tuple[int, int]]]:
        """Return the parts as one text, and the span of characters of each."""
        texts: list[str] = []
        runs: list[Run] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for part in parts:
            texts.append(part.text)
            runs.extend(Run(run.start + at, run.token, run.count) for run in part.runs)
            spans.append((at, at + len(part.text)))
            at += len(part.text)
        return CollapsedText("".join(texts), tuple(runs)), spans


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text, and where its characters went."""

    token_ids: list[int]
    token_spans: list[tuple[int, int]]
    """First and last-but-one token of every span of characters that was asked about."""
    token_runs: Sequence[tuple[int, int]] = ()
    """First token and number of tokens of runs of one control token, in order; some may be
    left out."""


class PromptTokenizer:
    """A Hugging Face tokenizer that any number of threads may use at once.

    It owns a copy of the fast tokenizer's core, on which padding and truncation are never
    switched on (that state is shared between threads). A tokenizer without a fast core is used
    under a lock.

    Args:
        tokenizer: The model's tokenizer.
        marker: Knows the control tokens that are text when the conversation spells them.
    """

    def __init__(self, tokenizer: Any, marker: TextMarker) -> None:
        self.hf_tokenizer = tokenizer
        self.marker = marker
        self._lock = threading.Lock()
        self._core = _copy_core(tokenizer)
        self._bare: dict[Beginning, Callable[[str], list[int]]] = {}
        added = added_tokens(tokenizer)
        self.added_tokens = {t.content: t for t in added}
        """Tokens that are matched before the tokenizer's model runs."""
        self.added_ids = frozenset(
            i for i in map(self.token_id, self.added_tokens) if i is not None
        )
        """Ids of tokens that are matched before the tokenizer's model runs."""
        self._added_pattern = leftmost_longest(self.added_tokens)
        self._control_ids = frozenset(
            i for i in map(self.token_id, marker.control_tokens) if i is not None
        )
        runs = leftmost_longest(t.content for t in added if not t.single_word and t.content.strip())
        self._run = re.compile(f"({runs.pattern})(?:\\1){{{_MIN_RUN - 1},}}")
        self._collapsible: dict[str, bool] = {}
        around = self._find_around()
        self._splits_special = around is not None
        self._prefix, self._suffix = around or ([], [])

    def _find_around(self) -> tuple[list[int], list[int]] | None:
        """Return the ids that go before and behind those of a text; None if no text tells."""
        for text in _PROBES:
            whole, own = self.encode_plain(text, add_special_tokens=True), self.encode_plain(text)
            places = _places(whole, own)
            if len(places) == 1:
                return whole[: places[0]], whole[places[0] + len(own) :]
        return None

    @property
    def is_lock_free(self) -> bool:
        """Whether no thread ever waits for another one here."""
        return self._core is not None

    # -- ids of tokens

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact spelling; None if there is none."""
        if self._core is not None:
            found: int | None = self._core.token_to_id(token)
            return found
        number = self.hf_tokenizer.convert_tokens_to_ids(token)
        return number if isinstance(number, int) and number != self._unknown_id else None

    @property
    def _unknown_id(self) -> int | None:
        unknown: int | None = getattr(self.hf_tokenizer, "unk_token_id", None)
        return unknown

    def find_added(self, text: str) -> list[str]:
        """Return the added tokens in a text, in order."""
        return self._added_pattern.findall(text)

    def around(self, add_special_tokens: bool) -> tuple[list[int], list[int]] | None:
        """Return the ids before and behind those of any text; None if they depend on it."""
        if not add_special_tokens:
            return [], []
        return (self._prefix, self._suffix) if self._splits_special else None

    # -- text to ids

    def collapse(self, text: str) -> CollapsedText:
        """Write every run of one control token once."""
        pieces: list[str] = []
        runs: list[Run] = []
        last = 0
        length = 0
        for match in self._run.finditer(text):
            token = match.group(1)
            if not self._is_collapsible(token):
                continue
            pieces.append(text[last : match.start()])
            length += match.start() - last
            runs.append(Run(length, token, (match.end() - match.start()) // len(token)))
            pieces.append(token)
            length += len(token)
            last = match.end()
        if not runs:
            return CollapsedText(text)
        pieces.append(text[last:])
        return CollapsedText("".join(pieces), tuple(runs))

    def _is_collapsible(self, token: str) -> bool:
        """Whether copies of a token are found one by one: of a longer one, such as two copies in
        one, there would be other numbers in a run than in what is left of it."""
        known = self._collapsible.get(token)
        if known is None:
            known = not any(overlaps(token, other) for other in self.added_tokens)
            if known and self.added_tokens[token].normalized:
                known = self._survives_rewriting(token)
            self._collapsible[token] = known
        return known

    def _survives_rewriting(self, token: str) -> bool:
        """Whether copies of a token are found after the tokenizer has rewritten the text, and
        found where they stood: some put a space before a text, and miss all copies but one."""
        rewrite = getattr(self._core, "normalizer", None)
        several = token * _MIN_RUN
        if rewrite is not None:
            others = map(rewrite.normalize_str, self.added_tokens)
            if rewrite.normalize_str(several) != several or any(overlaps(token, t) for t in others):
                return False
        return self.encode_plain(several) == [self.token_id(token)] * _MIN_RUN

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text that may hold codes of marked tokens."""
        collapsed = self.collapse(text)
        around = self.around(add_special_tokens)
        is_plain = self.is_lock_free and not collapsed.runs and not has_marks(text)
        if is_plain and around is not None:
            # Nobody asks where the characters went, which takes up to a fifth of the time.
            return [*around[0], *self.encode_plain(text), *around[1]]
        return self.encode_collapsed(collapsed, add_special_tokens=add_special_tokens).token_ids

    def encode_collapsed(
        self,
        collapsed: CollapsedText,
        *,
        add_special_tokens: bool,
        spans: Sequence[tuple[int, int]] = (),
    ) -> EncodedText:
        """Return the ids of the text in full, and the tokens of each span of characters.

        Args:
            collapsed: The text; its marked tokens are codes.
            add_special_tokens: Whether to add what the tokenizer puts around a text.
            spans: Character spans of the collapsed text, ascending. A token that also covers
                characters outside a span belongs to it.
        """
        ids, starts, ends = self._encode_sections(collapsed.text)
        runs = self._locate_runs(collapsed, ids, starts)
        if runs is None:
            return self._encode_in_full(collapsed, add_special_tokens, spans)
        around = self.around(add_special_tokens)
        if around is None:
            return self._encode_in_full(collapsed, add_special_tokens, spans)
        prefix, suffix = around
        out: list[int] = list(prefix)
        shifts: list[tuple[int, int]] = [(0, len(prefix))]
        last = 0
        token_runs: list[tuple[int, int]] = []
        for index, count in runs:
            out.extend(ids[last:index])
            token_runs.append((len(out), count))
            out.extend([ids[index]] * count)
            last = index + 1
            shifts.append((last, len(out) - last))
        out.extend(ids[last:])
        out.extend(suffix)
        positions = [at for at, _ in shifts]

        def shifted(index: int) -> int:
            return index + shifts[bisect.bisect_right(positions, index) - 1][1]

        token_spans = []
        for start, end in spans:
            first = bisect.bisect_right(ends, start)
            stop = bisect.bisect_left(starts, end)
            token_spans.append((shifted(first), shifted(stop)))
        return EncodedText(out, token_spans, token_runs)

    def locate(self, text: str, char: int) -> int | None:
        """Return the token that holds a character, in the encoding without special tokens."""
        collapsed = self.collapse(text)
        removed = 0
        for run in collapsed.runs:
            start = run.start + removed
            length = len(run.token)
            if char < start + length:
                break
            if char < start + length * run.count:
                within = (char - start) // length
                first = self.locate(text, start)
                return None if first is None else first + within
            removed += length * (run.count - 1)
        at = char - removed
        found = self.encode_collapsed(
            collapsed, add_special_tokens=False, spans=[(at, at + 1)]
        ).token_spans[0]
        return found[0] if found[0] < found[1] else None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if self._core is not None:
            return core_calls.decode(self._core, token_ids, skip_special_tokens=skip_special_tokens)
        with self._lock:
            plain: str = self.hf_tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens
            )
            return plain

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it; empty where it has none."""
        if self._core is not None:
            return [self._core.id_to_token(number) or "" for number in token_ids]
        with self._lock:
            find = self.hf_tokenizer.convert_ids_to_tokens
            return [find(number) or "" for number in token_ids]

    # -- the parts

    def encode_plain(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return what the tokenizer itself makes of a text without codes."""
        if self._core is not None:
            return core_calls.encode(self._core, text, add_special_tokens=add_special_tokens)
        with self._lock:
            slow: list[int] = self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return slow

    def _encode_in_full(
        self, collapsed: CollapsedText, add_special_tokens: bool, spans: Sequence[tuple[int, int]]
    ) -> EncodedText:
        """Tokenize without the short cut; spans are found through the characters before them."""
        full = collapsed.expand()
        ids, starts, ends = self._encode_sections(full)
        grown: list[tuple[int, int]] = [(0, 0)]
        total = 0
        for run in collapsed.runs:
            total += (run.count - 1) * len(run.token)
            grown.append((run.start + 1, total))
        positions = [at for at, _ in grown]

        def in_full(char: int) -> int:
            return char + grown[bisect.bisect_right(positions, char) - 1][1]

        if add_special_tokens and not self._splits_special:
            ids = self.encode_plain(self.marker.unseal(full), add_special_tokens=True)
            offset = 0
        else:
            offset = len(self._prefix) if add_special_tokens else 0
            ids = [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids
        token_spans = [
            (
                offset + bisect.bisect_right(ends, in_full(start)),
                offset + bisect.bisect_left(starts, in_full(end)),
            )
            for start, end in spans
        ]
        return EncodedText(ids, token_spans)

    def _locate_runs(
        self, collapsed: CollapsedText, ids: list[int], starts: list[int]
    ) -> list[tuple[int, int]] | None:
        """Return (index, count) of every run; None if one is not the single token it must be."""
        located = []
        for run in collapsed.runs:
            index = bisect.bisect_left(starts, run.start)
            if index >= len(ids) or starts[index] != run.start:
                return None
            if ids[index] != self.token_id(run.token):
                return None
            located.append((index, run.count))
        return located

    def _encode_sections(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """Return ids and the first and end character of each token; marked sections as text."""
        if not has_marks(text):
            return self._encode_with_offsets(text, 0)
        ids: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        for start, end, as_text in self._sections(text):
            piece = text[start:end]
            if as_text:
                new = self._encode_as_text(_CODES.sub(self._spell, piece), start > 0)
                # Nobody asks about characters inside marked text; all its tokens share its span.
                places = ([start] * len(new), [end] * len(new))
            else:
                new, *places_list = self._encode_with_offsets(piece, start)
                places = (places_list[0], places_list[1])
            ids += new
            starts += places[0]
            ends += places[1]
        return ids, starts, ends

    def _encode_with_offsets(self, text: str, base: int) -> tuple[list[int], list[int], list[int]]:
        if self._core is not None:
            found, offsets = core_calls.encode_with_offsets(self._core, text)
            return found, [base + o[0] for o in offsets], [base + o[1] for o in offsets]
        ids: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        at = 0
        for match in self._added_pattern.finditer(text):
            ids, starts, ends = self._extend_slow(text, at, match.start(), base, ids, starts, ends)
            number = self.token_id(match.group())
            if number is None:
                number = self.encode_plain(match.group())[0]
            ids.append(number)
            starts.append(base + match.start())
            ends.append(base + match.end())
            at = match.end()
        return self._extend_slow(text, at, len(text), base, ids, starts, ends)

    def _extend_slow(
        self,
        text: str,
        start: int,
        end: int,
        base: int,
        ids: list[int],
        starts: list[int],
        ends: list[int],
    ) -> tuple[list[int], list[int], list[int]]:
        """Add the ids of plain text; a slow tokenizer has no offsets, so all share the span."""
        if start < end:
            new = self.encode_plain(text[start:end])
            ids += new
            starts += [base + start] * len(new)
            ends += [base + end] * len(new)
        return ids, starts, ends

    def _sections(self, text: str) -> list[tuple[int, int, bool]]:
        """Cut a text with codes at its control tokens: (start, end, holds codes)."""
        cuts: list[tuple[int, int]] = []  # the gaps between control tokens
        at = 0
        for match in self._added_pattern.finditer(text):
            token = self.added_tokens[match.group()]
            start, end = match.span()
            if token.lstrip:
                start = len(text[:start].rstrip())
            if token.rstrip:
                end += len(text[end:]) - len(text[end:].lstrip())
            cuts.append((at, max(at, start)))
            at = end
        cuts.append((at, len(text)))
        sections: list[tuple[int, int, bool]] = []
        last = 0
        for start, end in cuts:
            if has_marks(text[start:end]):
                if last < start:
                    sections.append((last, start, False))
                sections.append((start, end, True))
                last = end
        if last < len(text):
            sections.append((last, len(text), False))
        return sections

    def _spell(self, match: re.Match[str]) -> str:
        return self.marker.spelling(int(match.group(1)))

    def _encode_as_text(self, text: str, inside: bool) -> list[int]:
        """Encode without matching any added token.

        A section inside a text gets a space before it only where the tokenizer puts one before
        every section.
        """
        return self._split_until_text(text, "section" if inside else "text") if text else []

    def _split_until_text(self, text: str, begins: Beginning) -> list[int]:
        """Encode; while a control token's id comes out, cut the text smaller."""
        with self._lock:
            encode = self._bare.get(begins)
            if encode is None:
                encode = self._bare[begins] = self._build_bare(begins)
        ids = encode(text)
        if len(text) < 2 or self._control_ids.isdisjoint(ids):
            return ids
        match = self.marker._spelling.search(text)
        middle = match.start() + 1 if match else len(text) // 2
        return self._split_until_text(text[:middle], begins) + self._split_until_text(
            text[middle:], "nothing"
        )

    def _build_bare(self, begins: Beginning) -> Callable[[str], list[int]]:
        """Return an encoder that knows no added tokens, for texts at the beginning of this."""
        if self._core is None:
            tokenizer = self.hf_tokenizer

            def encode_slow(text: str) -> list[int]:
                with self._lock:
                    ids: list[int] = tokenizer.encode(
                        text, add_special_tokens=False, split_special_tokens=True
                    )
                return ids

            return encode_slow
        return partial(core_calls.encode, without_added_tokens(self._core, begins))


def _copy_core(tokenizer: Any) -> Any | None:
    """Return a private copy of the fast tokenizer's core, without padding and truncation."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return None
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(core.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy.encode_special_tokens = False
    return copy


def _places(haystack: list[int], needle: list[int]) -> list[int]:
    """Return all positions of a list in another one."""
    last = len(haystack) - len(needle)
    return [at for at in range(last + 1) if haystack[at : at + len(needle)] == needle]
