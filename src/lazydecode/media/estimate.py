"""How much memory a decode will take: asked before it starts, for the budgets."""

from __future__ import annotations

from typing import Any, Final

from lazydecode.errors import InvalidRequestError
from lazydecode.media.base import AudioHeader, ImageHeader, MediaRef, VideoHeader
from lazydecode.media.video import plan_frames

_UNKNOWN_RATIO: Final = 8
"""Decoded bytes per encoded byte where no header says more: a JPEG's, about."""


def estimate_decoded_bytes(ref: MediaRef[Any]) -> int:
    """Return about how many bytes `ref.decode()` will hold, from the header alone.

    A file may lie; the decoders' own limits hold whatever is estimated here.
    """
    header = ref.header
    if isinstance(header, ImageHeader):
        return header.width * header.height * 4  # Pillow keeps RGB in four bytes
    if isinstance(header, AudioHeader):
        return _audio_bytes(header, ref)
    if isinstance(header, VideoHeader):
        return _num_frames(header, ref) * header.width * header.height * 3
    return ref.num_bytes * _UNKNOWN_RATIO


def _audio_bytes(header: AudioHeader, ref: MediaRef[Any]) -> int:
    samples = header.num_samples
    if samples is None and header.duration_s is not None:
        samples = int(header.duration_s * header.rate_hz)
    if samples is None:
        return ref.num_bytes * _UNKNOWN_RATIO
    return samples * 4 * header.channels


def _num_frames(header: VideoHeader, ref: MediaRef[Any]) -> int:
    try:
        plan = plan_frames(ref.spec, header)
    except InvalidRequestError:
        return 1  # the decode will refuse these options as well, before it decodes
    if plan is not None:
        return len(plan["frames_indices"])
    asked = ref.spec.settings.get("num_frames")
    stated = header.num_frames
    if isinstance(asked, int) and asked > 0:
        return asked if stated is None else min(asked, stated)
    return stated or 1
