"""Transforms of decoded media that are known by name, so that a mapped ref can be rebuilt.

A closure ends with its process. What is done to media after the decode is therefore a function
with named parameters: the parameters are in the spec of the mapped ref, and lead back from there
to the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from lazydecode.media.audio_transforms import Samples, normalize_channels, resample
from lazydecode.media.base import DecodeSpec, MediaRef


@dataclass(frozen=True, slots=True)
class MediaTransform:
    """A function of decoded media whose parameters change the result."""

    name: str
    kind: str
    """What it is for: the part of the decoder's name before the slash, such as `audio`."""
    parameters: frozenset[str]
    """Its keyword arguments. Those of two transforms of one kind have nothing in common."""
    function: Callable[..., Any]
    """Takes the decoded media and all parameters, which are JSON values."""

    def map(self, ref: MediaRef[Any], **settings: Any) -> MediaRef[Any]:
        """Return `ref` mapped by this; the settings extend its spec and change its key.

        Raises:
            ValueError: If a parameter is missing or unknown: the result would not follow from
                the spec.
        """
        if settings.keys() != self.parameters:
            raise ValueError(
                f"the transform {self.name!r} takes {sorted(self.parameters)}, "
                f"got {sorted(settings)}"
            )
        return ref.map(partial(self.function, **settings), **settings)


class TransformTable:
    """Transforms in the order in which they would be applied to a ref. Not for change by
    several threads at once: parts register when they are imported.
    """

    def __init__(self, transforms: Iterable[MediaTransform] = ()) -> None:
        self._transforms: dict[str, MediaTransform] = {}
        for transform in transforms:
            self.register(transform)

    def register(self, transform: MediaTransform) -> MediaTransform:
        """Add a transform; the same one once more is no error.

        Raises:
            ValueError: If its name is taken, or a spec could not tell it from another one.
        """
        known = self._transforms.setdefault(transform.name, transform)
        if known != transform:
            raise ValueError(f"a transform named {transform.name!r} exists already")
        for other in self._transforms.values():
            common = other.parameters & transform.parameters
            if other is not transform and other.kind == transform.kind and common:
                del self._transforms[transform.name]
                raise ValueError(
                    f"the transforms {other.name!r} and {transform.name!r} share parameters: "
                    f"{sorted(common)}"
                )
        return transform

    def with_own(self, transforms: Iterable[MediaTransform]) -> TransformTable:
        """Return a table with further transforms after these."""
        return TransformTable([*self._transforms.values(), *transforms])

    def applied(self, kind: str, spec: DecodeSpec) -> list[MediaTransform]:
        """Return the transforms by which a ref of that kind with that spec was mapped."""
        settings = spec.settings.keys()
        return [
            transform
            for transform in self._transforms.values()
            if transform.kind == kind and transform.parameters <= settings
        ]


def normalize_audio(
    audio: Any,
    *,
    target_sr: float | None,
    resample_method: str,
    target_channels: int | None,
) -> Samples:
    """Return audio at the target rate, with the target channels.

    Args:
        audio: A pair of samples and their rate in Hz, or samples alone, whose rate is then
            left; the samples as an array or a tensor as `resample` takes them, or a list.
        target_sr: Rate of the result in Hz; None leaves it.
        resample_method: One of `RESAMPLING_METHODS`.
        target_channels: Channels of the result; None leaves them.

    Raises:
        ValueError: If `audio` has another form, and as `resample` and `normalize_channels`.
    """
    is_pair = isinstance(audio, tuple) and len(audio) == 2
    given, rate = audio if is_pair else (audio, None)
    if isinstance(given, list):
        given = np.asarray(given, dtype=np.float32)
    elif hasattr(given, "detach"):  # a tensor, without an import of torch
        given = given.detach().cpu().numpy()
    if not isinstance(given, np.ndarray):
        raise ValueError(f"audio cannot be given as {type(audio).__name__}")
    samples: Samples = given
    if rate is not None and target_sr is not None and rate != target_sr:
        # Mono first, as one channel is resampled for half the price of two; the order changes
        # no more than rounding.
        samples = normalize_channels(samples, 1 if target_channels == 1 else None)
        samples = resample(samples, rate, target_rate=target_sr, method=resample_method)
    if target_channels is not None:
        samples = normalize_channels(samples, target_channels)
    return samples


NORMALIZE_AUDIO: Final = MediaTransform(
    "normalize_audio",
    "audio",
    frozenset({"target_sr", "resample_method", "target_channels"}),
    normalize_audio,
)
"""What a clip decodes to -> samples as the model takes them."""

MEDIA_TRANSFORMS: Final = TransformTable([NORMALIZE_AUDIO])
"""The process's transforms; whoever maps refs by settings registers how."""
