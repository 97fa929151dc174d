"""Tiny local models of real families, for tests, the demo and trying things out.

In: a family's name. Out: a folder that transformers loads: the family's real configuration and
processor classes with published parameters, a tokenizer trained on local text, random weights.
Importing this package imports neither torch nor transformers; building does.
"""

from lazydecode.tiny_models.builder import BuildError, build
from lazydecode.tiny_models.families import FAMILIES, TEXT_FAMILIES, get_family
from lazydecode.tiny_models.records import Family

__all__ = ["FAMILIES", "TEXT_FAMILIES", "BuildError", "Family", "build", "get_family"]
