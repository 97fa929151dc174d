"""Long texts and the other threads of the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lazydecode.models import core_calls
from lazydecode.models.marks import TextMarker
from lazydecode.models.tokenization import PromptTokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
TEXT = "one word, two words; " * 2000


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    from transformers import AutoTokenizer

    hf_tokenizer = AutoTokenizer.from_pretrained(str(GOLDEN / "qwen2_5_vl"))
    return PromptTokenizer(hf_tokenizer, TextMarker(["<|im_end|>"]))


@contextmanager
def another_thread() -> Iterator[Callable[[], int]]:
    """Count how often another thread gets to run; what is given tells the count."""
    turns, shall_end = [0], threading.Event()

    def run() -> None:
        while not shall_end.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: turns[0]
    finally:
        shall_end.set()
        thread.join()


@pytest.mark.parametrize("work", ["encode", "marked", "runs", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(
    tokenizer: PromptTokenizer, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    during: list[int] = []
    text = {"marked": TEXT + tokenizer.marker.protect("<|im_end|>"), "runs": "<|im_end|>" * 9}
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    tokenizer._bare.clear()  # it keeps the functions that are counted
    with another_thread() as turns:

        def counting(name: str) -> Callable[..., Any]:
            call = getattr(core_calls, name)

            def counted(*args: Any, **options: Any) -> Any:
                before = turns()
                result = call(*args, **options)
                during.append(turns() - before)
                return result

            return counted

        for name in ("encode", "encode_with_offsets", "decode"):
            monkeypatch.setattr(core_calls, name, counting(name))
        # A call that keeps the interpreter's lock lets nobody in, or once at its border. One that
        # does not lets in who has a core: on a busy machine, that takes a few calls.
        deadline = time.monotonic() + 60
        while max(during, default=0) <= 3 and time.monotonic() < deadline:
            if work == "decode":
                tokenizer.decode(ids * 10)
            else:
                tokenizer.encode(TEXT + text.get(work, ""), add_special_tokens=False)
    assert max(during) > 3, during[-20:]


def test_long_texts_have_the_ids_and_places_of_the_plain_call(tokenizer: PromptTokenizer) -> None:
    core = tokenizer._core
    for text in (TEXT, "a" * 5000, "<|im_end|> é漢\n" * 600):
        plain = core.encode(text, add_special_tokens=False)
        assert core_calls.encode(core, text) == plain.ids
        assert core_calls.encode_with_offsets(core, text) == (plain.ids, plain.offsets)
        for skipped in (True, False):
            assert core_calls.decode(core, plain.ids, skip_special_tokens=skipped) == core.decode(
                plain.ids, skip_special_tokens=skipped
            )
