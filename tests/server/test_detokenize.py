from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.server.detokenize import Detokenizer


def from_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def run(data: bytes, sizes: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(from_bytes, stop)
    pieces = []
    position = 0
    for size in sizes:
        pieces.append(detokenizer.push(list(data[position : position + size])))
        position += size
    pieces.append(detokenizer.push(list(data[position:])))
    pieces.append(detokenizer.finish())
    return pieces, detokenizer


@given(st.text(max_size=40), st.lists(st.integers(0, 5), max_size=40))
def test_pieces_join_to_the_text(text: str, sizes: list[int]) -> None:
    pieces, _ = run(text.encode(), sizes)
    assert "".join(pieces) == text


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(
    text: str, sizes: list[int], stop: list[str]
) -> None:
    pieces, detokenizer = run(text.encode(), sizes, tuple(stop))
    joined = "".join(pieces)
    assert text.startswith(joined)
    if detokenizer.stopped_by is None:
        assert joined == text
    else:
        assert text[len(joined) :].startswith(detokenizer.stopped_by)
    assert not any(s in joined for s in stop)


def test_a_split_character_waits_for_its_last_byte() -> None:
    detokenizer = Detokenizer(from_bytes)
    assert detokenizer.push([0xE2]) == ""
    assert detokenizer.push([0x82]) == ""
    assert detokenizer.push([0xAC, 0x41]) == "€A"


def test_bytes_that_never_become_a_character_do_not_hold_the_stream() -> None:
    detokenizer = Detokenizer(from_bytes)
    text = "".join(detokenizer.push([0xFF]) for _ in range(20)) + detokenizer.finish()
    assert text == "\ufffd" * 20


def test_a_possible_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(from_bytes, ("STOP",))
    assert detokenizer.push(list(b"a S")) == "a "
    assert detokenizer.push(list(b"TO")) == ""
    assert detokenizer.push(list(b"x")) == "STOx"
    assert detokenizer.push(list(b" STOP and more")) == " "
    assert detokenizer.stopped_by == "STOP"
    assert detokenizer.push(list(b"y")) == ""
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_an_incomplete_last_character_is_shown_at_the_end(stop: tuple[str, ...]) -> None:
    detokenizer = Detokenizer(from_bytes, stop)
    assert detokenizer.push([0x41, 0xE2]) == "A"
    assert detokenizer.finish() == "\ufffd"
