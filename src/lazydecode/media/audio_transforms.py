"""What is done to decoded audio: another sampling rate, another number of channels."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import gcd
from typing import Any, Final

import numpy as np
import soxr
from numpy.typing import NDArray

Samples = NDArray[np.float32]


def resample(
    samples: NDArray[Any], rate: float, *, target_rate: float, method: str = "soxr"
) -> Samples:
    """Change the sampling rate of `samples`; the duration stays the same.

    Mix to the wanted channels first: resampling one channel costs a fraction of two.

    Args:
        samples: Shape (samples,) or (channels, samples), in [-1, 1].
        rate: Sampling rate of `samples`, in Hz.
        target_rate: Sampling rate of the result, in Hz.
        method: One of `RESAMPLING_METHODS`: `soxr` (quality HQ), `scipy` (`resample_poly`) or
            `torchaudio` (its default window); the last two if they are installed.

    Returns:
        Shape (ceil(samples * target_rate / rate),), float32, with the channels before it if
        there were any. The filter may overshoot [-1, 1]; nothing is clipped.

    Raises:
        ValueError: If a rate is not positive, the method is unknown or not installed, or the
            array has more than two dimensions.
    """
    function = _RESAMPLERS.get(method)
    if function is None:
        raise ValueError(f"resampling method must be one of {RESAMPLING_METHODS}, got {method!r}")
    if not (rate > 0 and target_rate > 0):
        raise ValueError(f"sampling rates must be positive, got {rate} and {target_rate}")
    if samples.ndim not in (1, 2):
        raise ValueError(f"audio must have one or two dimensions, got shape {samples.shape}")
    samples = np.asarray(samples, dtype=np.float32)
    if rate == target_rate or samples.shape[-1] == 0:
        return samples
    resampled = function(samples, rate, target_rate)
    return _fix_length(resampled, resampled_length(samples.shape[-1], rate, target_rate))


def resampled_length(num_samples: int, rate: float, target_rate: float) -> int:
    """Samples per channel that `resample` gives for `num_samples`: known without decoding."""
    if float(rate).is_integer() and float(target_rate).is_integer():
        return -(-num_samples * int(target_rate) // int(rate))  # exact, unlike float division
    return int(np.ceil(num_samples * target_rate / rate))


def _fix_length(samples: Samples, length: int) -> Samples:
    """Cut or zero-pad at the end: resamplers round the last fraction of a sample differently."""
    missing = length - samples.shape[-1]
    if missing > 0:
        padding = [(0, 0)] * (samples.ndim - 1) + [(0, missing)]
        samples = np.pad(samples, padding)
    return np.ascontiguousarray(samples[..., :length])


def _soxr(samples: Samples, rate: float, target_rate: float) -> Samples:
    # soxr takes (samples, channels).
    resampled: Samples = soxr.resample(samples.T, rate, target_rate, quality="HQ")
    return resampled.T


def _scipy(samples: Samples, rate: float, target_rate: float) -> Samples:
    signal = _optional("scipy.signal", "scipy")
    up, down = _ratio(rate, target_rate)
    resampled: Samples = signal.resample_poly(samples, up, down, axis=-1).astype(np.float32)
    return resampled


def _torchaudio(samples: Samples, rate: float, target_rate: float) -> Samples:
    functional = _optional("torchaudio.functional", "torchaudio")
    tensor = _optional("torch", "torchaudio").from_numpy(np.ascontiguousarray(samples))
    up, down = _ratio(rate, target_rate)
    resampled: Samples = functional.resample(tensor, down, up).numpy()
    return resampled


def _ratio(rate: float, target_rate: float) -> tuple[int, int]:
    if not (float(rate).is_integer() and float(target_rate).is_integer()):
        raise ValueError("this resampling method takes whole rates only; use soxr")
    divisor = gcd(int(rate), int(target_rate))
    return int(target_rate) // divisor, int(rate) // divisor


def _optional(module: str, method: str) -> Any:
    try:
        return import_module(module)
    except ImportError as exc:
        raise ValueError(f"resampling method {method!r} needs {method}, not installed") from exc


_RESAMPLERS: Final[dict[str, Callable[[Samples, float, float], Samples]]] = {
    "soxr": _soxr,
    "scipy": _scipy,
    "torchaudio": _torchaudio,
}
RESAMPLING_METHODS: Final = tuple(_RESAMPLERS)
"""Names that `resample` takes."""


def normalize_channels(samples: NDArray[Any], target_channels: int | None) -> Samples:
    """Bring `samples` to a number of channels; the mean of all is the mono signal.

    Args:
        samples: Shape (samples,), (channels, samples) or (samples, channels): of two
            dimensions, the shorter one is the channels.
        target_channels: Channels of the result; None leaves them as they are.

    Returns:
        float32, shape (samples,) for mono and (channels, samples) otherwise. None gives one
        dimension back as it was, and two as (channels, samples).

    Raises:
        ValueError: If the array has more than two dimensions, or neither the source nor the
            target is mono and they differ.
    """
    if samples.ndim not in (1, 2):
        raise ValueError(f"audio must have one or two dimensions, got shape {samples.shape}")
    samples = np.asarray(samples, dtype=np.float32)
    if samples.ndim == 2 and samples.shape[0] > samples.shape[1]:
        samples = samples.T
    if target_channels is None:
        return samples
    channels = 1 if samples.ndim == 1 else samples.shape[0]
    if target_channels == 1:
        return samples if samples.ndim == 1 else samples.mean(axis=0, dtype=np.float32)
    if channels == target_channels:
        return samples
    if channels == 1 and target_channels > 1:
        return np.repeat(samples.reshape(1, -1), target_channels, axis=0)
    raise ValueError(f"cannot make {target_channels} channels of {channels}")
