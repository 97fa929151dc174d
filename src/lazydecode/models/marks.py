"""Telling the text of a conversation from the control tokens that a chat template writes.

User text may spell a placeholder or a control token. Before a template is rendered, every such
spelling in the conversation is wrapped in two private-use characters; after it, each wrapped
spelling becomes a short code without any spelling in it, so that no later step (a processor's
search for placeholders, the tokenizer's search for added tokens) can see it. Only the tokenizer
of this package turns a code back into its characters, and encodes them as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

MARK_START: Final = "\U000f0000"
MARK_END: Final = "\U000f0001"
"""The same two characters as transformers uses, so that its own code skips what we marked."""

_CODE = re.compile(f"{MARK_START}([0-9]+){MARK_END}")
_LONE = re.compile(f"[{MARK_START}{MARK_END}]")
_USUAL_KEYS: Final = frozenset({"role", "content", "type", "text"})
"""Words that are the keys of nearly every message and part."""
_NAMING_KEYS: Final = frozenset({"role", "type"})
"""Keys whose values templates compare with: a word there is left alone."""
_NUMBERS: Final = (bool, int, float)


def leftmost_longest(spellings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the spellings as the tokenizer does: the longest first."""
    ordered = sorted({s for s in spellings if s}, key=lambda s: (-len(s), s))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class TextMarker:
    """Marks the spellings of `control_tokens` in conversation text. Immutable; threads share it.

    Args:
        control_tokens: Spellings that stay text when a conversation contains them.
    """

    def __init__(self, control_tokens: Iterable[str]) -> None:
        self.control_tokens: tuple[str, ...] = tuple(dict.fromkeys(t for t in control_tokens if t))
        self._numbers = {token: number for number, token in enumerate(self.control_tokens)}
        self._spelling = leftmost_longest(self.control_tokens)
        self._wrapped = re.compile(f"{MARK_START}({self._spelling.pattern}){MARK_END}")
        self._beginnings = frozenset(t[:n] for t in self.control_tokens for n in range(1, len(t)))
        self._last_of_beginnings = frozenset(beginning[-1] for beginning in self._beginnings)
        self._longest = max(map(len, self._beginnings), default=0)
        self._break = f"{MARK_START}{len(self.control_tokens)}{MARK_END}"

    def mark(self, value: Any) -> Any:
        """Return a copy of `value` in which every control token within strings is wrapped.

        Lists and mappings are walked. Keys are text too, as those of a tool's parameters are the
        client's; a word (`role`, `image`) stays as it is where it is a key, a role or a type,
        since templates look for it there, and no control token is a plain word. Marks that are
        already in a string are dropped, so that nobody can forge one.

        The copy has nothing but JSON's types in it, so that no template can call what an object
        of another class can do.
        """
        if isinstance(value, str):
            text = value if type(value) is str else str.__str__(value)
            if MARK_START in text or MARK_END in text:
                text = _LONE.sub("", text)
            marked = text
            if self._spelling.search(text):
                marked = self._spelling.sub(f"{MARK_START}\\g<0>{MARK_END}", text)
            # Two parts of one message must not spell together what neither spells alone.
            return f"{marked}{MARK_START}" if self._ends_in_beginning(text) else marked
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        # A dict, as nearly always, is found to be one without asking the abstract class.
        if isinstance(value, (dict, Mapping)):
            return {
                key if key in _USUAL_KEYS or _is_word(key) else self.mark(key): item
                if key in _NAMING_KEYS and _is_word(item)
                else self.mark(item)
                for key, item in value.items()
            }
        return value if value is None or type(value) in _NUMBERS else _plain(value)

    def seal(self, rendered: str) -> str:
        """Replace every wrapped spelling of a rendered template by its code.

        A template that cuts a message apart (at `</think>`, say) leaves single marks behind. They
        become a code that stands for nothing and still keeps its two sides apart; what the
        template itself writes at the cut counts as the template's.
        """
        if MARK_START not in rendered and MARK_END not in rendered:
            return rendered
        pieces: list[str] = []
        last = 0
        for match in self._wrapped.finditer(rendered):
            pieces.append(_LONE.sub(self._break, rendered[last : match.start()]))
            pieces.append(f"{MARK_START}{self._numbers[match.group(1)]}{MARK_END}")
            last = match.end()
        pieces.append(_LONE.sub(self._break, rendered[last:]))
        return "".join(pieces)

    def protect(self, text: str) -> str:
        """Return sealed text for a plain string whose control tokens are to stay text."""
        return self.seal(self.mark(text))

    def unseal(self, sealed: str) -> str:
        """Return the text as a reader expects to see it, without codes."""
        if MARK_START not in sealed:
            return sealed
        return _CODE.sub(lambda match: self.spelling(int(match.group(1))), sealed)

    def spelling(self, number: int) -> str:
        """Return the characters behind a code; none for the code that only separates."""
        return self.control_tokens[number] if number < len(self.control_tokens) else ""

    def _ends_in_beginning(self, text: str) -> bool:
        """Whether `text` ends in the beginning of a control token."""
        if text[-1:] not in self._last_of_beginnings:
            return False
        longest = min(self._longest, len(text))
        return any(text[-n:] in self._beginnings for n in range(1, longest + 1))


def _is_word(value: Any) -> bool:
    """Whether `value` is a plain word: letters, digits and underscores."""
    return type(value) is str and value.isidentifier()


def _plain(value: Any) -> Any:
    """Return an object as templates see it: a number, or no more than the name of its class."""
    if isinstance(value, np.generic):
        value = value.item()
    for kind in _NUMBERS:
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def has_marks(sealed: str) -> bool:
    """Whether any control token of the conversation stands in this text as a code."""
    return MARK_START in sealed
