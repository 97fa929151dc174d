"""What was said, in the forms in which clients want it: OpenAI's JSON, text, subtitles, events."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from lazydecode.engine.protocol import TokenLogprob
from lazydecode.models.speech import TimestampTokens
from lazydecode.renderers.recordings import Piece

_UNSPACED: Final = frozenset({"zh", "ja", "yue", "th", "lo", "my", "km"})
"""Languages that are written without spaces between words."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the transcript with its times, in seconds from the recording's beginning."""

    start_s: float
    end_s: float
    text: str
    token_ids: list[int]
    avg_logprob: float


def separator(before: str, after: str, language: str | None) -> str:
    """Return what stands between the transcripts of two pieces."""
    if not before or not after or before[-1].isspace() or after[0].isspace():
        return ""
    return "" if language in _UNSPACED else " "


def split_segments(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    piece: Piece,
    times: TimestampTokens,
    decode: Callable[[list[int]], str],
) -> list[Segment]:
    """Return the segments of one piece: what stands between two times.

    Words before the first time begin with the piece, those after the last one end with it; no
    time is beyond it.

    Args:
        token_ids: What the model wrote, without the token that ended it.
        logprobs: Parallel to it, or longer.
        piece: Where the piece lies in the recording.
        times: Which tokens are times.
        decode: Token ids to text, special tokens left out.
    """
    segments: list[Segment] = []
    start = piece.start_s
    words: list[int] = []
    scores: list[float] = []

    def close(end: float) -> None:
        text = decode(words)
        if text.strip():
            score = sum(scores) / len(scores) if scores else 0.0
            segments.append(Segment(start, max(start, end), text, list(words), score))
        words.clear()
        scores.clear()

    for position, token in enumerate(token_ids):
        if token >= times.first:
            time = min(piece.start_s + times.seconds(token), piece.stop_s)
            if words:
                close(time)
            start = time
        else:
            words.append(token)
            if position < len(logprobs):
                scores.append(logprobs[position].logprob)
    if words:
        close(piece.stop_s)
    return segments


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole answer."""

    task: str
    text: str
    language: str | None
    """English name in lower case; None if nobody knows."""
    duration_s: float
    temperature: float
    segments: list[Segment]

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of models that are paid by the duration."""
        return {"type": "duration", "seconds": math.ceil(self.duration_s)}

    def to_json(self) -> dict[str, Any]:
        """The plain form."""
        return {"text": self.text, "usage": self.usage()}

    def to_verbose_json(self) -> dict[str, Any]:
        """The form with language, duration and segments.

        `no_speech_prob` is null: the probability of no speech is not asked for.
        """
        return {
            "task": self.task,
            "language": self.language,
            "duration": round(self.duration_s, 3),
            "text": self.text,
            "segments": [
                {
                    "id": number,
                    "seek": int(segment.start_s * 100),
                    "start": round(segment.start_s, 2),
                    "end": round(segment.end_s, 2),
                    "text": segment.text,
                    "tokens": segment.token_ids,
                    "temperature": self.temperature,
                    "avg_logprob": segment.avg_logprob,
                    "compression_ratio": _compression_ratio(segment.text),
                    "no_speech_prob": None,
                }
                for number, segment in enumerate(self.segments)
            ],
            "usage": self.usage(),
        }

    def to_text(self, kind: str) -> tuple[str, str]:
        """Return a form that is not JSON (`srt`, `vtt`, else plain), and its content type."""
        if kind == "srt":
            return self.to_srt(), "application/x-subrip; charset=utf-8"
        if kind == "vtt":
            return self.to_vtt(), "text/vtt; charset=utf-8"
        return f"{self.text}\n", "text/plain; charset=utf-8"

    def to_srt(self) -> str:
        """SubRip subtitles."""
        blocks = [
            f"{number}\n{_clock(s.start_s, ',')} --> {_clock(s.end_s, ',')}\n{_line(s.text)}\n"
            for number, s in enumerate(self.segments, 1)
        ]
        return "\n".join(blocks)

    def to_vtt(self) -> str:
        """WebVTT subtitles."""
        blocks = [
            f"{_clock(s.start_s, '.')} --> {_clock(s.end_s, '.')}\n{_escape(_line(s.text))}\n"
            for s in self.segments
        ]
        return "\n".join(["WEBVTT\n", *blocks])


def delta_event(text: str) -> bytes:
    """A piece of the transcript, as a server-sent event."""
    return _event({"type": "transcript.text.delta", "delta": text})


def done_event(transcript: Transcript, extra: dict[str, Any]) -> bytes:
    """The whole transcript, as the last event."""
    return _event(
        {
            "type": "transcript.text.done",
            "text": transcript.text,
            "usage": transcript.usage(),
            **extra,
        }
    )


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _clock(seconds: float, point: str) -> str:
    """Return a time as hours, minutes, seconds and milliseconds: `01:02:03,450`."""
    rest, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, whole = divmod(rest, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{whole:02d}{point}{milliseconds:03d}"


def _line(text: str) -> str:
    """Return a subtitle's text: an empty line would end it, an arrow would begin another."""
    return " ".join(text.split()).replace("-->", "->")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _compression_ratio(text: str) -> float:
    """Return how well the text compresses; over 2.4, Whisper's authors say, it repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
