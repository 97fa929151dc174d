"""How much text a request may bring, measured before any of it is written or tokenized.

A template and a tokenizer take seconds for every few MB, and a hundred times the memory. A body
may be far larger, as it has media in it.
"""

from __future__ import annotations

from typing import Any, Final

from lazydecode.errors import ValidationError

_NODE_CHARS: Final = 128
"""What a message, a part or any other object or list counts for: a template takes about as long
for an empty message as a tokenizer for so many characters."""
_SCALAR_CHARS: Final = 8


def text_size(value: Any, *, limit: int) -> int:
    """Return how many characters are in a JSON value, with what stands for its structure.

    Args:
        value: As a JSON parser returns it.
        limit: Beyond it, it is not counted any further.
    """
    size = 0
    stack: list[Any] = [value]
    while stack and size <= limit:
        value = stack.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            size += _NODE_CHARS + sum(map(len, value))
            stack.extend(value.values())
        elif isinstance(value, list):
            size += _NODE_CHARS
            stack.extend(value)
        else:
            size += _SCALAR_CHARS
    return size


def check_text_size(size: int, limit: int, *, parameter: str, unit: str = "characters") -> None:
    """Refuse more text than a request may have.

    Args:
        size: See `text_size`; or a number of token ids.
        limit: The largest that is taken.
        parameter: Where the text stands in the request.
        unit: What is counted.

    Raises:
        ValidationError: If it is more.
    """
    if size > limit:
        raise ValidationError(
            f"{parameter} is too long: it counts for more than the {limit} {unit} that the server "
            "takes",
            parameter=parameter,
        )
