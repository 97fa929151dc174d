"""Resampling and channels: lengths that headers can predict, tones that survive."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.media.audio import normalize_channels, resample, resampled_length
from lazydecode.media.audio_transforms import RESAMPLING_METHODS
from tests.builders import loudest_hz, tone

INSTALLED = [
    method
    for method in RESAMPLING_METHODS
    if method == "soxr" or __import__("importlib.util").util.find_spec(method)
]


def test_scipy_is_there_for_its_tests() -> None:
    assert "scipy" in INSTALLED


@pytest.mark.parametrize("method", INSTALLED)
@pytest.mark.parametrize("rate", [8000, 11_025, 44_100, 48_000])
def test_a_tone_keeps_its_frequency_and_duration(method: str, rate: int) -> None:
    source = tone([440.0], rate=rate, seconds=1)[:, 0].astype(np.float32)
    samples = resample(source, rate, target_rate=16_000, method=method)
    assert samples.dtype == np.float32
    assert samples.shape == (16_000,)
    assert loudest_hz(samples, 16_000) == [440]
    middle = samples[2000:-2000]
    assert abs(np.abs(middle).max() - 0.5) < 0.01


@pytest.mark.parametrize("method", INSTALLED)
def test_channels_are_resampled_each_on_its_own(method: str) -> None:
    source = tone([440.0, 880.0], rate=48_000, seconds=0.5).T.astype(np.float32)
    both = resample(source, 48_000, target_rate=16_000, method=method)
    assert both.shape == (2, 8000)
    for channel in (0, 1):
        alone = resample(source[channel], 48_000, target_rate=16_000, method=method)
        assert np.abs(both[channel] - alone).max() < 1e-6


def test_what_the_target_cannot_hold_is_filtered_out() -> None:
    source = tone([9000.0], rate=48_000, seconds=1)[:, 0].astype(np.float32)
    samples = resample(source, 48_000, target_rate=16_000)
    assert np.abs(samples[1000:-1000]).max() < 1e-4


@given(
    st.integers(1, 5000),
    st.sampled_from([8000, 11_025, 16_000, 22_050, 44_100, 48_000]),
    st.sampled_from([8000, 16_000, 24_000]),
)
def test_length_is_known_without_resampling(num_samples: int, rate: int, target: int) -> None:
    samples = resample(np.zeros(num_samples, np.float32), rate, target_rate=target)
    expected = -(-num_samples * target // rate)
    assert len(samples) == resampled_length(num_samples, rate, target) == expected >= 1


def test_equal_rates_and_empty_audio_pass() -> None:
    source = np.ones(5, np.float32)
    assert resample(source, 16_000, target_rate=16_000) is source
    assert resample(np.zeros(0, np.float32), 8000, target_rate=16_000).shape == (0,)


def test_rates_need_not_be_whole() -> None:
    assert len(resample(np.zeros(1000, np.float32), 22_050.5, target_rate=16_000.0)) == 726
    with pytest.raises(ValueError, match="whole rates"):
        resample(np.zeros(1000, np.float32), 22_050.5, target_rate=16_000, method="scipy")


@pytest.mark.parametrize("rates", [(0, 16_000), (16_000, 0), (-1, 16_000), (float("nan"), 1)])
def test_a_rate_must_be_positive(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        resample(np.zeros(4, np.float32), rates[0], target_rate=rates[1])


def test_an_unknown_method_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'soxr', 'scipy', 'torchaudio'.* got 'sinc'"):
        resample(np.zeros(4, np.float32), 8000, target_rate=16_000, method="sinc")


def test_a_method_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.signal", None)
    with pytest.raises(ValueError, match="not installed"):
        resample(np.zeros(4, np.float32), 8000, target_rate=16_000, method="scipy")


def test_three_dimensions_are_refused() -> None:
    for function in (lambda a: resample(a, 1, target_rate=2), lambda a: normalize_channels(a, 1)):
        with pytest.raises(ValueError, match="dimensions"):
            function(np.zeros((1, 2, 3), np.float32))


STEREO = np.array([[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]])


@pytest.mark.parametrize("array", [STEREO, STEREO.T, STEREO.astype(np.float64)])
def test_mono_is_the_mean_whichever_axis_has_the_channels(array: Any) -> None:
    mono = normalize_channels(array, 1)
    assert mono.dtype == np.float32
    assert mono.tolist() == [0.5, 0.5, 0.5]


def test_channel_targets() -> None:
    mono = np.array([0.1, 0.2, 0.3], np.float32)
    assert normalize_channels(mono, None) is mono
    assert normalize_channels(mono, 1) is mono
    assert normalize_channels(mono, 2).tolist() == [mono.tolist()] * 2
    assert normalize_channels(STEREO.T, None).shape == (2, 3)
    assert normalize_channels(STEREO, 2).shape == (2, 3)
    with pytest.raises(ValueError, match="cannot make 3 channels of 2"):
        normalize_channels(STEREO, 3)
