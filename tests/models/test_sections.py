"""Texts put together of sections have the ids that the tokenizer gives the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lazydecode.models.marks import TextMarker
from lazydecode.models.sections import Sections, find_fences
from lazydecode.models.tokenization import CollapsedText, PromptTokenizer
from lazydecode.tiny_models.tokenizer import trained_bpe, trained_sentencepiece

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
PAD = "<|image_pad|>"
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    f"<|vision_start|>{PAD}<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
)
TEXTS = st.lists(
    st.sampled_from(
        [
            "<|im_start|>user\n",
            "<|im_end|>",
            "\n",
            " two words",
            "é漢",
            "  ",
            "<|im",
            "_end|>",
            "'s",
            "<tool_call>",
        ]
    ),
    max_size=6,
).map("".join)


def _qwen() -> PromptTokenizer:
    hf_tokenizer = AutoTokenizer.from_pretrained(str(GOLDEN / "qwen2_5_vl"))
    return PromptTokenizer(hf_tokenizer, TextMarker([PAD, "<|im_end|>"]))


QWEN = _qwen()
SECTIONS = Sections(QWEN, [PROMPT])


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.sampled_from([1, 3, 4, 40])), min_size=1, max_size=4), TEXTS)
def test_the_ids_are_those_of_the_whole_text(items: list[tuple[str, int]], last: str) -> None:
    pieces = [*(text for text, _ in items), last]
    replacements = [QWEN.collapse(PAD * count) for _, count in items]
    encoded = SECTIONS.encode(pieces, replacements, add_special_tokens=True)
    assert encoded is not None
    whole = "".join(text + PAD * count for text, count in items) + last
    assert encoded.token_ids == QWEN.hf_tokenizer.encode(whole)
    pad = QWEN.token_id(PAD)
    for (start, stop), (_, count) in zip(encoded.token_spans, items, strict=True):
        assert encoded.token_ids[start:stop] == [pad] * count
    assert encoded.token_runs == [
        (start, count)
        for (start, _), (_, count) in zip(encoded.token_spans, items, strict=True)
        if count > 3
    ]


def test_what_a_client_wrote_is_all_that_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = Sections(QWEN, [PROMPT])
    seen: list[str] = []
    encode = QWEN.encode_plain

    def counting(text: str, **options: Any) -> list[int]:
        seen.append(text)
        return encode(text, **options)

    monkeypatch.setattr(QWEN, "encode_plain", counting)
    before, after = PROMPT.split(PAD)
    asked = after.replace("<|im_end|>", "What is this?<|im_end|>", 1)
    for tenant in ("a", "a", None, None, "b"):
        sections.encode(
            [before, asked], [CollapsedText(PAD)], add_special_tokens=False, tenant=tenant
        )
    assert seen == ["<|vision_end|>What is this?"] * 3


@pytest.mark.parametrize(
    ("pieces", "replacement"),
    [
        ([PAD, "x"], f"{PAD}text"),  # the border after it is at no fence
        (["", ""], f"text{PAD}"),
        (["", ""], "text"),
        (["", ""], "<tool_call>"),  # never seen in a prompt
        ([QWEN.marker.protect(f"a {PAD}"), ""], PAD),
    ],
)
def test_what_is_not_known_takes_a_look_at_the_whole(pieces: list[str], replacement: str) -> None:
    sections = Sections(QWEN, [PROMPT])
    collapsed = QWEN.collapse(replacement)
    assert sections.encode(pieces, [collapsed], add_special_tokens=False) is None


FENCE = AddedToken("<x>", normalized=False)


def _with_tokens(spec: str, *added: AddedToken, **parts: Any) -> PromptTokenizer:
    core = Tokenizer.from_str(json.dumps({**json.loads(spec), **parts}))
    core.add_tokens(list(added))
    return PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=core), TextMarker([]))


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "split": False}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "first"}},
        {"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "always"}},
    ],
)
def test_words_behind_a_placeholder_keep_their_space(parts: dict[str, Any]) -> None:
    """Some vocabularies mark a space before each section, some before a text alone."""
    tokenizer = _with_tokens(trained_sentencepiece(("|",)), FENCE, **parts)
    sections = Sections(tokenizer, ["a<x>b"])
    for texts in (["see", "what is it?"], ["", " two words"], ["<x>the", "\nx<x>"], ["a ", ""]):
        encoded = sections.encode(texts, [CollapsedText("<x>")], add_special_tokens=False)
        assert encoded is not None
        assert encoded.token_ids == tokenizer.encode_plain(f"{texts[0]}<x>{texts[1]}")


@pytest.mark.parametrize(
    ("added", "fences"),
    [
        ([FENCE], ["<x>"]),
        ([AddedToken("<x>", normalized=False, lstrip=True)], []),
        ([AddedToken("<x>", normalized=False, rstrip=True)], []),
        ([AddedToken("<x>", normalized=True)], []),
        ([FENCE, AddedToken("word", normalized=False, single_word=True)], []),
        ([FENCE, AddedToken("<x>>", normalized=False)], []),
        ([FENCE, AddedToken("a<x", normalized=False)], ["a<x"]),
        ([FENCE, AddedToken("a<x>b", normalized=False)], ["a<x>b"]),
        ([AddedToken("|x|", normalized=False)], []),  # of `|x|x|`
        ([FENCE, AddedToken("<y>", normalized=False)], ["<x>"]),
    ],
)
def test_a_fence_loses_nothing_to_what_is_beside_it(
    added: list[AddedToken], fences: list[str]
) -> None:
    assert find_fences(_with_tokens(trained_bpe(), *added), ["a<x>b|x|"]) == fences


def test_a_fence_is_tried_on_texts() -> None:
    """Whatever a tokenizer of another kind does: these ids are not those of the pieces."""
    tokenizer = _with_tokens(trained_bpe(), FENCE)
    encode = tokenizer.encode_plain

    def odd(text: str, **options: Any) -> list[int]:
        return encode(text.replace("<x>\n", "<x>"), **options)

    tokenizer.encode_plain = odd  # type: ignore[method-assign]
    assert find_fences(tokenizer, ["a<x>b"]) == ["<x>"]
    tokenizer.encode_plain = lambda text, **_: encode(text.replace("a<x>", "<x>"))  # type: ignore[method-assign]
    assert find_fences(tokenizer, ["a<x>b"]) == []
