"""Runs once, marked text as text, spans of characters, and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from lazydecode.models.marks import TextMarker
from lazydecode.models.template import control_tokens
from lazydecode.models.tokenization import CollapsedText, PromptTokenizer, Run
from lazydecode.tiny_models import get_family
from lazydecode.tiny_models.tokenizer import make_tokenizer, trained_bpe
from tests.models.conftest import LoadFrontend

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(GOLDEN / "qwen2_5_vl"))


@pytest.fixture(scope="module")
def tokenizer(hf_tokenizer: Any) -> PromptTokenizer:
    return PromptTokenizer(hf_tokenizer, TextMarker(control_tokens(hf_tokenizer, None, [])))


def test_a_run_is_written_once_and_expands_again(tokenizer: PromptTokenizer) -> None:
    text = f"a{PAD * 9}b{PAD * 2}\n{PAD * 5}"
    collapsed = tokenizer.collapse(text)
    assert collapsed.text == f"a{PAD}b{PAD * 2}\n{PAD}"
    assert [(run.start, run.count) for run in collapsed.runs] == [(1, 9), (42, 5)]
    assert collapsed.expand() == text


def test_joined_texts_keep_their_runs() -> None:
    part = CollapsedText(f"x{PAD}", (Run(1, PAD, 7),))
    joined, spans = CollapsedText.join([part, CollapsedText("--"), part])
    assert joined.expand() == f"x{PAD * 7}--x{PAD * 7}"
    assert [joined.text[start:end] for start, end in spans] == [f"x{PAD}", "--", f"x{PAD}"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [PAD * 40, PAD * 4, PAD, "<|im_start|>user\n", "\n", "\n\n", " two words", "é漢", "  "]
        ),
        max_size=12,
    )
)
def test_collapsed_tokenizing_gives_the_full_texts_ids(pieces: list[str]) -> None:
    from transformers import AutoTokenizer

    hf = _cached(AutoTokenizer)
    ours = PromptTokenizer(hf, TextMarker([]))
    text = "".join(pieces)
    assert ours.encode(text, add_special_tokens=False) == hf.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("longer", ["<x><x>", "<x><x>b", "<x>b", "a<x", "a<x><x>"])
@pytest.mark.parametrize("normalized", [False, True])
def test_runs_that_a_longer_token_reaches_into_are_left_alone(
    longer: str, normalized: bool
) -> None:
    core = Tokenizer.from_str(trained_bpe())
    core.add_tokens([AddedToken(t, normalized=normalized) for t in ("<x>", longer)])
    ours = PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=core), TextMarker([]))
    for count in range(4, 20):
        text = f"a{'<x>' * count}b"
        assert ours.encode(text, add_special_tokens=False) == core.encode(text).ids


@pytest.mark.parametrize("rewrite", [normalizers.Prepend("▁"), normalizers.Lowercase()])
def test_runs_are_those_of_the_text_as_it_is_rewritten(rewrite: Any) -> None:
    """With something put before a text, a token is another one at its beginning."""
    core = Tokenizer.from_str(trained_bpe())
    core.normalizer = rewrite
    core.add_tokens([AddedToken(t, normalized=True) for t in ("<x>", "<X><x>B")])
    ours = PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=core), TextMarker([]))
    for text in ("<x><x><x><x><x>", "a<x><x><x><x><x>b", "<x><X><x><x><x><x>B"):
        assert ours.encode(text, add_special_tokens=False) == core.encode(text).ids


def test_what_goes_around_a_text_may_be_its_unknown_token() -> None:
    """No place in `? ? ?` says which of them is the text."""
    core = Tokenizer(models.WordLevel({"?": 0, "7": 1}, unk_token="?"))
    core.post_processor = TemplateProcessing(single="? $A ?", special_tokens=[("?", 0)])
    ours = PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=core), TextMarker([]))
    assert ours.around(True) == ([0], [0])
    assert ours.encode("7", add_special_tokens=True) == [0, 1, 0]


_tokenizers: list[Any] = []


def _cached(auto: Any) -> Any:
    if not _tokenizers:
        _tokenizers.append(auto.from_pretrained(str(GOLDEN / "qwen2_5_vl")))
    return _tokenizers[0]


def test_marked_tokens_become_the_ids_of_their_characters(
    tokenizer: PromptTokenizer, hf_tokenizer: Any
) -> None:
    user = f"see {PAD} and <|im_end|>!"
    text = f"<|im_start|>user\n{tokenizer.marker.protect(user)}<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    special = {hf_tokenizer.convert_tokens_to_ids(t) for t in (PAD, "<|im_end|>")}
    assert [i for i in ids if i in special] == [
        hf_tokenizer.convert_tokens_to_ids("<|im_end|>")  # the template's own
    ]
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        f"<|im_start|>user\n{user}<|im_end|>\n"
    )


def test_text_beside_marked_text_is_tokenized_as_ever(
    tokenizer: PromptTokenizer, hf_tokenizer: Any
) -> None:
    before = f"<|im_start|>user\nhello there{PAD * 6}"
    sealed = tokenizer.marker.protect(PAD)
    ids = tokenizer.encode(f"{before}<|im_end|>{sealed}", add_special_tokens=False)
    plain = hf_tokenizer.encode(f"{before}<|im_end|>", add_special_tokens=False)
    assert ids[: len(plain)] == plain


def test_spans_name_the_tokens_of_their_characters(tokenizer: PromptTokenizer) -> None:
    collapsed = tokenizer.collapse(f"<|vision_start|>{PAD * 10}<|vision_end|>")
    start = len("<|vision_start|>")
    encoded = tokenizer.encode_collapsed(
        collapsed, add_special_tokens=False, spans=[(start, start + len(PAD))]
    )
    first, stop = encoded.token_spans[0]
    assert (first, stop) == (1, 11)
    assert set(encoded.token_ids[first:stop]) == {tokenizer.token_id(PAD)}


def test_characters_are_found_inside_and_behind_runs(tokenizer: PromptTokenizer) -> None:
    text = f"a{PAD * 10}b{PAD}"
    assert tokenizer.locate(text, 0) == 0
    assert tokenizer.locate(text, 1 + 3 * len(PAD)) == 4
    assert tokenizer.locate(text, 1 + 10 * len(PAD)) == 11
    assert tokenizer.locate(text, len(text) - 1) == 12


def test_special_tokens_go_around_the_whole_text(frontend: LoadFrontend) -> None:
    llava = frontend("llava")
    bos = llava.tokenizer.bos_token_id
    plain = llava.encode("hi", add_special_tokens=False)
    assert llava.encode("hi") == [bos, *plain]
    sealed = llava.prompt_tokenizer.marker.protect("hi <image>")
    ids = llava.prompt_tokenizer.encode(sealed, add_special_tokens=True)
    assert ids[0] == bos
    assert llava.prompt_tokenizer.token_id("<image>") not in ids


def test_padding_of_the_hf_tokenizer_does_not_reach_other_threads(
    tokenizer: PromptTokenizer, hf_tokenizer: Any
) -> None:
    expected = tokenizer.encode("one two", add_special_tokens=False)

    def pad(number: int) -> None:
        hf_tokenizer(["a", "a b c d e f g"], padding=True)

    def encode(number: int) -> list[int]:
        return tokenizer.encode("one two", add_special_tokens=False)

    with ThreadPoolExecutor(4) as pool:
        padded = [pool.submit(pad, n) for n in range(200)]
        results = list(pool.map(encode, range(400)))
        for future in padded:
            future.result()
    assert all(ids == expected for ids in results)


def test_a_slow_tokenizer_serves_too() -> None:
    class Slow:
        """The least that a tokenizer of another library offers."""

        unk_token_id = 0
        added_tokens_decoder: Any = None

        def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
            ids = [ord(c) for c in text]
            return [1, *ids] if add_special_tokens else ids

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(map(chr, ids))

        def convert_tokens_to_ids(self, token: str) -> int:
            return 0

    slow = PromptTokenizer(Slow(), TextMarker(["<x>"]))
    assert slow.encode("ab", add_special_tokens=True) == [1, 97, 98]
    sealed = slow.marker.protect("a<x>")
    assert slow.decode(slow.encode(sealed, add_special_tokens=False)) == "a<x>"


def test_text_in_a_sentencepiece_vocabulary_spells_what_it_would_have_been() -> None:
    hf_tokenizer = make_tokenizer(get_family("fuyu"))
    speaker = hf_tokenizer.convert_tokens_to_ids("|SPEAKER|")
    answer = hf_tokenizer.convert_tokens_to_ids("<0x04>")
    marker = TextMarker(control_tokens(hf_tokenizer, None, ["|SPEAKER|"]))
    tokenizer = PromptTokenizer(hf_tokenizer, marker)
    plain = "What is |SPEAKER| here?<0x04> And there?"
    assert tokenizer.encode(plain, add_special_tokens=False).count(speaker) == 1

    ids = tokenizer.encode(marker.protect(plain), add_special_tokens=False)
    assert speaker not in ids
    assert answer not in ids
    assert tokenizer.decode(ids) == plain
    # Behind a control token each section begins with the mark of a space, marked or not.
    after = tokenizer.encode(f"<0x04>{marker.protect('here')}", add_special_tokens=False)
    assert after == tokenizer.encode("<0x04>here", add_special_tokens=False)
    after = tokenizer.encode(f"<0x04>here {marker.protect('<s>')}", add_special_tokens=False)
    here = tokenizer.encode("<0x04>here ", add_special_tokens=False)
    assert after[: len(here) - 1] == here[:-1]
