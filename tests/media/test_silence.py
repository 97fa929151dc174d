"""Where recordings are cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lazydecode.media.silence import CutRule, find_cuts

RATE = 1000


def noise(
    seconds: float, *, seed: int = 0, quiet: tuple[tuple[float, float], ...] = ()
) -> NDArray[np.float32]:
    """White noise with silence in the given spans of seconds."""
    samples = np.random.default_rng(seed).uniform(-1, 1, int(seconds * RATE)).astype(np.float32)
    for begin, end in quiet:
        samples[int(begin * RATE) : int(end * RATE)] = 0
    return samples


def pieces(samples: NDArray[np.float32], rule: CutRule) -> list[int]:
    edges = [0, *find_cuts(samples, RATE, rule), len(samples)]
    return list(np.diff(edges))


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(0, 40_000),
    longest_ms=st.integers(1, 9_000),
    share=st.floats(0.01, 1.0),
    seed=st.integers(0, 5),
)
def test_pieces_cover_the_recording_and_none_is_too_long(
    num_samples: int, longest_ms: int, share: float, seed: int
) -> None:
    samples = noise(num_samples / RATE, seed=seed)
    rule = CutRule(longest_ms / 1000, longest_ms / 1000 * share)
    lengths = pieces(samples, rule)
    longest = rule.longest_samples(RATE)
    assert sum(lengths) == len(samples)
    assert all(0 < length <= longest for length in lengths) or not len(samples)
    assert all(length >= longest - int(rule.search_s * RATE) - 1 for length in lengths[:-1])


@settings(max_examples=40, deadline=None)
@given(begin=st.integers(2500, 3850), length=st.integers(120, 400), gain=st.integers(-8, 8))
def test_the_cut_lies_in_the_pause_whatever_the_volume(begin: int, length: int, gain: int) -> None:
    pause = (begin / RATE, (begin + length) / RATE)
    samples = noise(6.0, quiet=(pause,)) * np.float32(2.0**gain)
    (cut,) = find_cuts(samples, RATE, CutRule(4.0, 2.0))
    assert begin <= cut <= min(begin + length, 4000)


def test_short_recordings_stay_whole() -> None:
    assert find_cuts(noise(4.0), RATE, CutRule(4.0, 1.0)) == []
    assert find_cuts(noise(0.0), RATE, CutRule(4.0, 1.0)) == []


def test_of_equally_quiet_places_the_latest_is_taken() -> None:
    (cut,) = find_cuts(np.zeros(6000, np.float32), RATE, CutRule(4.0, 2.0))
    assert cut == 4000 - 50


def test_a_cut_leaves_a_second_behind_it() -> None:
    samples = noise(4.2, quiet=((3.85, 4.0),))
    (cut,) = find_cuts(samples, RATE, CutRule(4.0, 2.0))
    assert 2000 <= cut <= 3200


@pytest.mark.parametrize("rule", [(0.0, 1.0), (4.0, 0.0), (4.0, 5.0), (float("nan"), 1.0)])
def test_a_rule_without_sense_is_refused(rule: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="search_s"):
        CutRule(*rule)
