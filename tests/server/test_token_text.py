"""Token ids as JSON are the same however they were written."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.inputs import PlaceholderRange
from lazydecode.server.token_text import with_runs_written

RUN = [151655] * 5000


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 200_000), max_size=3), st.booleans()), max_size=4)
)
def test_runs_are_written_as_the_ids_that_they_are(parts: list[tuple[list[int], bool]]) -> None:
    ids: list[int] = []
    places: list[PlaceholderRange] = []
    for text, has_item in parts:
        ids += text
        if has_item:
            places.append(PlaceholderRange(len(ids), len(RUN)))
            ids += RUN
    # Items of two modalities, in no order.
    placeholders = {"image": places[1::2], "video": places[::2]}
    assert json.loads(msgspec.json.encode(with_runs_written(ids, placeholders))) == ids


@pytest.mark.parametrize(
    "places",
    [
        [PlaceholderRange(0, 5003)],  # more than the run
        [PlaceholderRange(2, 5000), PlaceholderRange(3, 4999)],  # one in the other
        [PlaceholderRange(2, 5000, np.arange(5000) % 2 == 0)],
        [PlaceholderRange(2, 3), PlaceholderRange(5, 0)],
        [PlaceholderRange(3, 6000), PlaceholderRange(9000, 5000)],  # beyond the ids
    ],
)
def test_what_is_no_run_of_its_own_is_written_one_by_one(places: list[PlaceholderRange]) -> None:
    ids = [7, 8, *RUN, 9]
    assert json.loads(msgspec.json.encode(with_runs_written(ids, {"image": places}))) == ids
