"""Segments and the forms of a transcript."""

from __future__ import annotations

import json

import pytest

from lazydecode.engine.protocol import TokenLogprob
from lazydecode.models.speech import TimestampTokens
from lazydecode.renderers.recordings import Piece
from lazydecode.server.transcripts import (
    Segment,
    Transcript,
    done_event,
    separator,
    split_segments,
)

TIMES = TimestampTokens(first=100, step_s=0.02, max_initial=None)
PIECE = Piece(1, start=16000 * 30, stop=16000 * 50, rate_hz=16000)


def decode(ids: list[int]) -> str:
    return "".join(f" {i}" for i in ids)


def split(*ids: int) -> list[tuple[float, float, str]]:
    logprobs = [TokenLogprob(i, -0.5, []) for i in ids]
    segments = split_segments(ids, logprobs, PIECE, TIMES, decode)
    assert all(segment.avg_logprob == -0.5 for segment in segments)
    return [(round(s.start_s, 2), round(s.end_s, 2), s.text) for s in segments]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((100, 5, 6, 150, 150, 7, 200), [(30.0, 31.0, " 5 6"), (31.0, 32.0, " 7")]),
        ((110, 5, 150, 170, 7), [(30.2, 31.0, " 5"), (31.4, 50.0, " 7")]),  # no last time
        ((5, 6), [(30.0, 50.0, " 5 6")]),  # no times at all
        ((100, 5, 5000), [(30.0, 50.0, " 5")]),  # a time beyond the piece
        ((100, 150), []),
        ((), []),
    ],
)
def test_segments_stand_between_two_times(
    ids: tuple[int, ...], expected: list[tuple[float, float, str]]
) -> None:
    assert split(*ids) == expected


@pytest.mark.parametrize(
    ("before", "after", "language", "between"),
    [
        ("one", "two", "en", " "),
        ("one", " two", "en", ""),
        ("一", "二", "zh", ""),
        ("one", "two", None, " "),
        ("", "two", "en", ""),
        ("one", "", "en", ""),
    ],
)
def test_pieces_are_joined_as_the_language_writes(
    before: str, after: str, language: str | None, between: str
) -> None:
    assert separator(before, after, language) == between


TRANSCRIPT = Transcript(
    "transcribe",
    "Hello. a --> b",
    "english",
    3725.5,
    0.2,
    [
        Segment(0.0, 1.5, " Hello.", [1, 2], -0.25),
        Segment(3723.004, 3725.5, " a --> b\n\n<i>", [3], -1.0),
    ],
)


def test_subtitles_cannot_be_broken_by_what_was_said() -> None:
    assert TRANSCRIPT.to_srt() == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello.\n\n2\n01:02:03,004 --> 01:02:05,500\na -> b <i>\n"
    )
    assert TRANSCRIPT.to_vtt() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello.\n\n"
        "01:02:03.004 --> 01:02:05.500\na -&gt; b &lt;i&gt;\n"
    )


def test_the_verbose_form_has_a_line_per_segment() -> None:
    verbose = TRANSCRIPT.to_verbose_json()
    assert (verbose["language"], verbose["duration"]) == ("english", 3725.5)
    assert [s["id"] for s in verbose["segments"]] == [0, 1]
    assert verbose["segments"][1]["seek"] == 372300
    assert verbose["segments"][0]["temperature"] == 0.2
    assert verbose["usage"] == {"type": "duration", "seconds": 3726}


def test_the_last_event_holds_the_whole_text() -> None:
    event = done_event(TRANSCRIPT, {})
    assert json.loads(event.removeprefix(b"data: ")) == {
        "type": "transcript.text.done",
        "text": TRANSCRIPT.text,
        "usage": {"type": "duration", "seconds": 3726},
    }
