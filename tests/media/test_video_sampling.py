"""The frame choice as pure functions: what holds for every video and every option."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.media.video_backends.qwen2_vl import Qwen2VLVideoLoader
from lazydecode.media.video_sampling import (
    SamplingOptions,
    Timeline,
    sample_uniformly,
    select_frames,
    spread_evenly,
)

timelines = st.builds(
    lambda gaps, last, start: Timeline(
        start + np.concatenate([[0.0], np.cumsum(gaps)]),
        (len(gaps) + 1) / (sum(gaps) + last),
        sum(gaps) + last,
    ),
    st.lists(st.floats(0.01, 2.0), max_size=60),
    st.floats(0.01, 2.0),
    st.floats(0.0, 5.0),
)
counts = st.one_of(st.just(-1), st.integers(1, 80))
rates = st.one_of(st.none(), st.floats(0.05, 60.0))
ceilings = st.one_of(st.none(), st.integers(1, 80))


@given(timelines, counts, rates, ceilings)
def test_choice_is_ascending_within_the_video_and_under_every_limit(
    timeline: Timeline, num_frames: int, fps: float | None, max_frames: int | None
) -> None:
    options = SamplingOptions(num_frames=num_frames, fps=fps, max_frames=max_frames)
    chosen = select_frames(options, timeline)
    assert chosen
    assert chosen == sorted(set(chosen))
    assert 0 <= chosen[0] <= chosen[-1] < timeline.num_frames
    if num_frames != -1:
        assert len(chosen) <= num_frames
    if fps is not None:
        assert len(chosen) <= max(timeline.duration_s * fps + 1e-5, 1)
    if max_frames is not None:
        assert len(chosen) <= max_frames


@given(timelines, counts, rates, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_window_holds_the_frames_on_screen_in_it(
    timeline: Timeline, num_frames: int, fps: float | None, a: float, b: float
) -> None:
    first_s = float(timeline.times_s[0])
    start = first_s + a * timeline.duration_s * 0.99
    end = start + b * timeline.duration_s + 0.01
    options = SamplingOptions(num_frames=num_frames, fps=fps, start_time_s=start, end_time_s=end)
    chosen = select_frames(options, timeline)
    for index in chosen:
        shown_until = (
            timeline.times_s[index + 1] if index + 1 < timeline.num_frames else timeline.end_s
        )
        assert timeline.times_s[index] < end
        assert shown_until > start - 1e-5


@given(timelines, st.lists(st.floats(0.0, 1.0), min_size=1, max_size=10))
def test_frame_at_a_time_is_the_one_on_screen(timeline: Timeline, parts: list[float]) -> None:
    times = [float(timeline.times_s[0]) + part * timeline.duration_s for part in parts]
    chosen = select_frames(SamplingOptions(timestamps=tuple(times)), timeline)
    for time_s, index in zip(times, chosen, strict=True):
        assert timeline.times_s[index] <= time_s + 2e-6
        if index + 1 < timeline.num_frames:
            assert timeline.times_s[index + 1] > time_s


@given(st.integers(0, 50), st.integers(1, 200), st.integers(1, 200))
def test_spread_takes_both_ends(first: int, total: int, count: int) -> None:
    chosen = spread_evenly(first, first + total, count)
    assert len(chosen) == min(count, total)
    assert chosen[0] == first
    if len(chosen) > 1:
        assert chosen[-1] == first + total - 1
        steps = np.diff(chosen)
        assert steps.max() - steps.min() <= 1
        assert steps.min() >= 1


@given(timelines, counts, rates, ceilings)
def test_qwen2_vl_takes_whole_patches_from_the_start(
    timeline: Timeline, num_frames: int, fps: float | None, max_frames: int | None
) -> None:
    given_options = {"fps": fps, "max_frames": max_frames}
    chosen = Qwen2VLVideoLoader.select(num_frames, given_options, timeline)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert chosen[-1] < timeline.num_frames
    takes_all = num_frames == -1 and fps is None and max_frames is None
    assert len(chosen) % 2 == 0 or len(chosen) == 1 or takes_all


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [
        (20, 4, [0, 6, 12, 19]),
        (60, 8, [0, 8, 16, 25, 33, 42, 50, 59]),
        (20, 1, [0]),
        (1, 4, [0]),
        (3, 3, [0, 1, 2]),
    ],
)
def test_positions(total: int, count: int, expected: list[int]) -> None:
    timeline = Timeline.at_constant_rate(total, 10.0)
    options = SamplingOptions(num_frames=count)
    assert sample_uniformly(options, timeline, 0, total) == expected
