"""Token ids that come from outside: which numbers are ids of a model at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazydecode.errors import ValidationError


def vocabulary_size(config: Any, tokenizer: Any) -> int:
    """Return how many ids the model or its tokenizer knows: whichever knows more.

    Models have rows for ids that their tokenizer leaves free, and some tokenizers have tokens
    for media that never reach the embedding.
    """
    get_text_config = getattr(config, "get_text_config", None)
    text_config = config if get_text_config is None else get_text_config()
    stated = getattr(text_config, "vocab_size", None)
    return max(len(tokenizer), stated if isinstance(stated, int) else 0)


def check_token_ids(token_ids: Sequence[int], size: int, *, parameter: str) -> None:
    """Check that every number is an id of a vocabulary.

    Args:
        token_ids: The numbers.
        size: Ids are less than this.
        parameter: The field that they came in.

    Raises:
        ValidationError: For the first that is not; it names its position.
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
        return
    at = next(at for at, number in enumerate(token_ids) if not 0 <= number < size)
    raise ValidationError(
        f"{parameter}[{at}] is no token id of the model: it knows 0 to {size - 1}",
        parameter=parameter,
        value=token_ids[at],
    )
