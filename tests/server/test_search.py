"""Searching a buffer where it lies finds what searching a copy finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.server import search
from lazydecode.server.search import Searchable


@pytest.fixture(params=["library", "copy"], scope="module")
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "copy":
        monkeypatch.setattr(search, "_find", None)


_ALPHABET = st.sampled_from([*b';base64,"\\A', 0, 255])


def test_any_bytes_are_found_where_a_copy_has_them() -> None:
    @given(st.lists(_ALPHABET, min_size=1, max_size=60).map(bytes), st.data())
    def check(data: bytes, draw: st.DataObject) -> None:
        start = draw.draw(st.integers(0, len(data)))
        length = draw.draw(st.sampled_from([1, 1, 2, 8]))
        what = draw.draw(st.lists(_ALPHABET, min_size=length, max_size=length).map(bytes))
        expected = data.find(what, start)
        found = Searchable(data).find(what, start)
        assert found == (expected if expected >= 0 else len(data))
        assert Searchable(memoryview(bytearray(data))).find(what, start) == found

    check()


def test_a_part_of_a_buffer_ends_where_it_ends() -> None:
    whole = bytearray(b'"aaa"aaa"')
    part = Searchable(memoryview(whole)[1:4])
    assert part.num_bytes == 3
    assert part.find(b'"') == 3
    assert part.find(b"aaa") == 0
    assert part.find(b'a"') == 3
    assert part.find(b"a", 3) == 3


def test_the_least_byte_is_that_of_the_part() -> None:
    whole = memoryview(b"\x01zyx\x02")
    assert Searchable(whole).least() == 1
    assert Searchable(whole[1:4]).least() == ord("x")
    assert Searchable(whole[1:]).least() == 2
