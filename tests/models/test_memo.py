"""Memory for pure functions: what is kept, what is dropped, and that nobody changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.errors import InvalidRequestError
from lazydecode.models.memo import Memo
from tests.builders import make_jpeg
from tests.models.conftest import LoadFrontend
from tests.models.test_generic import IMAGE, inputs, processor, refs, text, user


def test_the_least_recently_used_goes_first() -> None:
    made: list[str] = []
    memo: Memo[str] = Memo(2)

    def get(key: str) -> str:
        return memo.get(key, lambda: made.append(key) or key.upper())  # type: ignore[func-returns-value]

    assert [get(key) for key in "abacab"] == [*"ABACAB"]
    assert made == [*"abcb"]
    assert (memo.peek("a"), memo.peek("c")) == ("A", None)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=60))
def test_sizes_in_all_never_exceed_the_limit(uses: list[tuple[int, int]]) -> None:
    memo: Memo[bytes] = Memo(5, cost=len, max_cost=80)
    for key, size in uses:
        value = memo.get((key, size), lambda size=size: bytes(size))  # type: ignore[misc]
        assert value == bytes(size)
        kept = list(memo._values.values())
        assert sum(map(len, kept)) == memo._total_cost <= 80
        assert len(kept) <= 5
        assert all(len(value) <= 10 for value in kept)  # an eighth


def test_a_prompt_is_written_by_the_class_once_per_tenant(
    frontend: LoadFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = frontend("qwen2_5_vl")
    family = processor(model).family
    written: list[str] = []
    run_text = family.items.run_text

    def counting(prompt: str, *arguments: Any, **options: Any) -> Any:
        written.append(prompt)
        return run_text(prompt, *arguments, **options)

    def render(words: str, size: tuple[int, int], salt: str | None = None) -> Any:
        prompt = model.render_chat(user(IMAGE, text(words)))
        media = refs(model, image=[make_jpeg(size)])
        return processor(model).render_from_headers(inputs(model, prompt, media, cache_salt=salt))

    words = "a question that no other test asks"
    expanded = render(words, (200, 130))
    monkeypatch.setattr(family, "proof", replace(family.proof, mode="whole_request"))
    monkeypatch.setattr(family.items, "run_text", counting)
    first = render(words, (200, 130))
    again = render(words, (200, 130))
    assert len(written) == 1
    assert again.token_ids == first.token_ids == expanded.token_ids
    assert again.placeholders == first.placeholders == expanded.placeholders
    again.token_ids.clear()
    again.placeholders["image"].clear()
    assert render(words, (200, 130)).token_ids == first.token_ids
    assert len(written) == 1

    larger = render(words, (400, 130))  # the same words around more tokens
    assert len(larger.token_ids) > len(first.token_ids)
    assert render(words, (200, 130), salt="another tenant").token_ids == first.token_ids
    assert render(f"{words}?", (200, 130)).token_ids != first.token_ids
    assert len(written) == 4


def test_a_prompt_that_is_refused_is_refused_again(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_5_vl")
    prompt = model.render_chat(user(IMAGE, IMAGE, text("two")))
    for _ in range(2):
        media = refs(model, image=[make_jpeg((200, 130))])
        with pytest.raises(InvalidRequestError, match="2 image placeholders for 1 image"):
            processor(model).render_from_headers(inputs(model, prompt, media))
