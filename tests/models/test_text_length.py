"""Texts are cut and padded as the tokenizer itself does it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lazydecode.models.text_length import fit
from tests.models.conftest import LoadFrontend

TEXTS = ("a cat", "", "a cat in a hat " * 20)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"padding": "max_length", "truncation": True, "max_length": 16},
    {"padding": "max_length", "truncation": True, "max_length": 16, "padding_side": "right"},
    {"truncation": "longest_first", "max_length": 9},
    {"padding": "longest"},
    {"padding": True, "truncation": True, "max_length": 30},
    {"padding": False, "truncation": False, "max_length": 4},
    {"padding": "max_length"},
)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["siglip2", "colqwen2", "gemma3"])
def test_ids_are_those_of_the_tokenizers_own_call(
    frontend: LoadFrontend, family: str, options: dict[str, Any]
) -> None:
    model = frontend(family)
    # A copy: the tokenizer keeps what it was told.
    own = copy.deepcopy(model.tokenizer)
    own.model_max_length = 50 if options == {"padding": "max_length"} else own.model_max_length
    ours = copy.copy(model.prompt_tokenizer)
    ours.hf_tokenizer = own
    theirs = own(list(TEXTS), **options)["input_ids"]
    rows = [model.prompt_tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    assert fit(ours, rows, TEXTS, options) == theirs


def test_a_cut_on_the_left_keeps_what_goes_around(frontend: LoadFrontend) -> None:
    model = frontend("gemma3")
    own = copy.deepcopy(model.tokenizer)
    own.truncation_side = "left"
    theirs = own(TEXTS[2], truncation=True, max_length=12)["input_ids"]
    ours = copy.copy(model.prompt_tokenizer)
    ours.hf_tokenizer = own
    whole = model.prompt_tokenizer.encode(TEXTS[2], add_special_tokens=True)
    assert fit(ours, [whole], [TEXTS[2]], {"truncation": True, "max_length": 12}) == [theirs]
    assert len(theirs) == 12
