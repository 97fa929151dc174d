"""Tokens that are matched before a tokenizer's model runs, and which of them get in the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AddedToken:
    """What matters of a token that is matched before the tokenizer's model runs."""

    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool
    """Whether it is looked for in the text as the tokenizer rewrites it."""


def added_tokens(tokenizer: Any) -> list[AddedToken]:
    """Return the tokenizer's added tokens."""
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    if not isinstance(decoder, Mapping):  # a tokenizer of another library
        special = getattr(tokenizer, "all_special_tokens", ())
        return [AddedToken(content, True, False, False, False, False) for content in special]
    return [
        AddedToken(
            token.content,
            bool(token.special),
            bool(token.lstrip),
            bool(token.rstrip),
            bool(token.single_word),
            bool(token.normalized),
        )
        for token in decoder.values()
    ]


def overlaps(token: str, other: str) -> bool:
    """Whether a token, `token` or another one, can be found in a text at the cost of part of a
    `token` that begins in it or later."""
    if other != token and other.startswith(token):
        return True
    # Looked at only where the token can begin: there are thousands of them.
    return token[0] in other[1:] and (
        token in other[1:] or any(token.startswith(other[at:]) for at in range(1, len(other)))
    )
