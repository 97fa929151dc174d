"""Calls of a tokenizer's core that let other threads run while it works on something long.

The library's `encode` and `decode` keep the interpreter's lock from beginning to end, seconds per
MB: nothing else of the process runs meanwhile, its event loop neither. Its forms for several
texts work without the lock. Handing over costs them some 20 µs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_LONG_CHARS: Final = 4096
_LONG_IDS: Final = 4096


def encode(core: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of a text.

    Args:
        core: A `tokenizers.Tokenizer`.
        text: Of any length.
        add_special_tokens: Whether to add what the tokenizer puts around a text.
    """
    if len(text) < _LONG_CHARS:
        encoding = core.encode(text, add_special_tokens=add_special_tokens)
    else:
        encoding = core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    ids: list[int] = encoding.ids
    return ids


def encode_with_offsets(core: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a text, without what goes around it, and each one's characters.

    Args:
        core: A `tokenizers.Tokenizer`.
        text: Of any length.
    """
    if len(text) < _LONG_CHARS:
        encoding = core.encode(text, add_special_tokens=False)
    else:
        encoding = core.encode_batch([text], add_special_tokens=False)[0]
    return encoding.ids, encoding.offsets


def decode(core: Any, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of token ids.

    Args:
        core: A `tokenizers.Tokenizer`.
        token_ids: Any number of them.
        skip_special_tokens: Whether special tokens are left out.
    """
    ids = list(token_ids)
    text: str
    if len(ids) < _LONG_IDS:
        text = core.decode(ids, skip_special_tokens=skip_special_tokens)
    else:
        (text,) = core.decode_batch([ids], skip_special_tokens=skip_special_tokens)
    return text
