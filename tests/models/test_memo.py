"""Memory for pure functions: what is kept, and what is dropped."""

from __future__ import annotations

import pytest

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


def test_a_prompt_that_is_refused_is_refused_again(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_5_vl")
    prompt = model.render_chat(user(IMAGE, IMAGE, text("two")))
    for _ in range(2):
        media = refs(model, image=[make_jpeg((200, 130))])
        with pytest.raises(InvalidRequestError, match="2 image placeholders for 1 image"):
            processor(model).render_from_headers(inputs(model, prompt, media))
