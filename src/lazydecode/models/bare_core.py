"""A tokenizer's core that matches no added tokens: for text that spells some and stays text."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias

Beginning: TypeAlias = Literal["text", "section", "nothing"]
"""What begins where a piece of text does: all text, a section after a control token, or nothing
(the piece is the rest of a section that was cut)."""


def without_added_tokens(core: Any, begins: Beginning) -> Any:
    """Return a copy of a `tokenizers.Tokenizer` that knows the entries of its model alone.

    Args:
        core: The tokenizer.
        begins: Where the texts stand that it is given: SentencePiece vocabularies put a space
            before a text, or before each section of one, and not before the rest of a section.
    """
    from tokenizers import Tokenizer

    content = json.loads(core.to_str())
    content["added_tokens"] = []
    content["post_processor"] = None
    if begins != "text":
        schemes = {"first"} if begins == "section" else {"first", "always"}
        _leave_first_word_alone(content, schemes)
    return Tokenizer.from_str(json.dumps(content))


def _leave_first_word_alone(node: Any, schemes: set[str]) -> None:
    """Make a serialized tokenizer leave the first word alone.

    Args:
        node: The tokenizer, or a part of it.
        schemes: Which spaces to leave out: `first`, those before a text; `always`, those before
            each section of one.
    """
    if isinstance(node, list):
        for child in node:
            _leave_first_word_alone(child, schemes)
    elif isinstance(node, dict):
        if node.get("type") == "Metaspace" and node.get("prepend_scheme") in schemes:
            node["prepend_scheme"] = "never"
        if node.get("type") == "Prepend" and "always" in schemes:
            node["prepend"] = ""
        for part in ("normalizer", "normalizers", "pre_tokenizer", "pretokenizers"):
            _leave_first_word_alone(node.get(part), schemes)
