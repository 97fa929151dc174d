"""Where a long recording may be cut: at the quietest place before a piece gets too long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_FRAME_S: Final = 0.1
"""Length over which loudness is measured: shorter than a pause between words, longer than one
period of the deepest voice."""
_HOP_S: Final = 0.01
_LEAST_REST_S: Final = 1.0
"""A cut leaves at least this much behind it: models make things up over shorter pieces."""


@dataclass(frozen=True, slots=True)
class CutRule:
    """How long pieces may be, and where their ends are looked for."""

    longest_s: float
    """Longest piece, in seconds."""
    search_s: float = 5.0
    """The cut lies in the last so many seconds of the longest piece."""

    def __post_init__(self) -> None:
        if not self.longest_s > 0 or not 0 < self.search_s <= self.longest_s:
            raise ValueError(f"0 < search_s <= longest_s must hold, got {self}")

    def longest_samples(self, rate: int) -> int:
        """Return the longest piece in samples, at least 1."""
        return max(1, int(self.longest_s * rate))


def find_cuts(samples: NDArray[np.float32], rate: int, rule: CutRule) -> list[int]:
    """Return where `samples` are cut, so that no piece is longer than the rule allows.

    With L the longest piece and W the searched part, in samples: a rest of at most L stays in
    one piece. Of a longer one that begins at s, the loudness of frames of 0.1 s, every 0.01 s, is
    measured over [s + L - W, s + L], without the last second of the recording; the cut is the
    middle of the frame with the least energy, the latest of them if several have it. So pieces
    but the last have between L - W and L samples, and their sum is the recording.

    Args:
        samples: Shape (samples,), mono.
        rate: Sampling rate in Hz.
        rule: How long pieces may be.

    Returns:
        Positions in samples, ascending, without 0 and the end; empty if nothing is to be cut.
    """
    longest = rule.longest_samples(rate)
    searched = max(1, min(longest - 1, int(rule.search_s * rate)))
    cuts: list[int] = []
    start = 0
    while len(samples) - start > longest:
        first = start + max(1, longest - searched)
        last = min(start + longest, max(first, len(samples) - int(_LEAST_REST_S * rate)))
        start = first + _quietest(samples[first:last], rate)
        cuts.append(start)
    return cuts


def _quietest(samples: NDArray[np.float32], rate: int) -> int:
    """Return the middle of the quietest frame; with less than one frame, the end."""
    frame, hop = max(1, int(_FRAME_S * rate)), max(1, int(_HOP_S * rate))
    if len(samples) <= frame:
        return len(samples)
    energy = np.concatenate(([0.0], np.cumsum(np.square(samples, dtype=np.float64))))
    starts = np.arange(0, len(samples) - frame + 1, hop)
    sums = energy[starts + frame] - energy[starts]
    # Differences of sums: silence after loud parts comes out as a tiny number, not as zero.
    quiet = sums <= sums.min() + 1e-9 * energy[-1]
    return int(starts[np.flatnonzero(quiet)[-1]]) + frame // 2
