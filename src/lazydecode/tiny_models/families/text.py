"""Families without media."""

from lazydecode.tiny_models.records import Family
from lazydecode.tiny_models.turns import QWEN

FAMILIES = (
    Family(
        name="qwen2",
        model_type="qwen2",
        processor=None,
        turns=QWEN,
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
)
