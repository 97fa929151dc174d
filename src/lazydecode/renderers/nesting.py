"""How deep free-form JSON of a request may be nested."""

from __future__ import annotations

from typing import Any, Final

from lazydecode.errors import InvalidRequestError

MAX_NESTING: Final = 64
"""The parser takes about a thousand levels; templates, marks and digests walk values recursively,
with several stack frames per level. JSON schemas of tools have a dozen."""


def check_nesting(value: Any, *, where: str) -> None:
    """Refuse lists and mappings within one another beyond any use.

    Raises:
        InvalidRequestError: If they are nested more than `MAX_NESTING` levels deep.
    """
    if is_nested_too_deeply(value):
        raise InvalidRequestError(
            f"{where} is nested more than {MAX_NESTING} levels deep", parameter=where
        )


def is_nested_too_deeply(value: Any) -> bool:
    """Whether lists and mappings are nested more than `MAX_NESTING` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return any(level)  # not if all there are empty
