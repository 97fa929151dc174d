"""Texts of a fixed length: cut and padded as a tokenizer does it, without its state.

A tokenizer keeps padding and truncation as settings of the object that threads share; here they
are functions of the texts' ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lazydecode.models.tokenization import PromptTokenizer

_NO_LIMIT: Final = 10**9
"""Tokenizers without a longest text state a number far beyond this."""


def fit(
    tokenizer: PromptTokenizer,
    rows: Sequence[list[int]],
    texts: Sequence[str],
    options: Mapping[str, Any],
) -> list[list[int]]:
    """Return the ids of texts as long as a call of the tokenizer with these options makes them.

    Args:
        tokenizer: Ours.
        rows: All ids of each text, with what goes around it.
        texts: The texts; marked tokens are codes.
        options: `padding`, `truncation`, `max_length`, `padding_side` and `truncation_side`, as
            Hugging Face tokenizers take them.
    """
    known = tokenizer.hf_tokenizer
    limit = options.get("max_length") or known.model_max_length
    fitted = list(rows)
    if limit < _NO_LIMIT and options.get("truncation") not in (None, False, "do_not_truncate"):
        side = options.get("truncation_side") or known.truncation_side
        for number, text in enumerate(texts):
            if len(fitted[number]) > limit:
                content = tokenizer.encode(text, add_special_tokens=False)
                fitted[number] = _cut(fitted[number], content, limit, side)
    padding = options.get("padding")
    if padding == "max_length" and limit < _NO_LIMIT:
        length = limit
    elif padding in (True, "longest"):
        length = max(map(len, fitted), default=0)
    else:
        return fitted
    side = options.get("padding_side") or known.padding_side
    return [_pad(row, [known.pad_token_id] * (length - len(row)), side) for row in fitted]


def _pad(row: list[int], fill: list[int], side: str) -> list[int]:
    return [*fill, *row] if side == "left" else [*row, *fill]


def _cut(ids: list[int], content: list[int], length: int, side: str) -> list[int]:
    """Cut the content; what goes around it stays."""
    around = len(ids) - len(content)
    before = next((n for n in range(around + 1) if ids[n : n + len(content)] == content), 0)
    room = max(0, length - around)
    kept = content[len(content) - room :] if side == "left" else content[:room]
    return [*ids[:before], *kept, *ids[before + len(content) :]]
