"""`lazydecode transcribe`: the route's work without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.builders import make_wav


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lazydecode", "transcribe", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_a_recording_in_pieces_becomes_a_transcript(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, (8000 * 6, 1))
    (tmp_path / "talk.wav").write_bytes(make_wav(noise, rate=8000))
    done = run(
        tmp_path / "talk.wav",
        "--model", tiny_model("whisper"),
        "--language", "de",
        "--translate",
        "--format", "verbose_json",
        "--transcription-chunk", "4",
        "--transcription-cut-search", "2",
        "--max-model-len", "20",
        "--dtype", "float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    transcript = json.loads(done.stdout)
    assert (transcript["task"], transcript["language"]) == ("translate", "german")
    assert transcript["duration"] == 6.0
    assert transcript["segments"][-1]["start"] > 2.0  # the second piece's
    assert "6 of 6 s" in done.stderr


@pytest.mark.slow
def test_what_the_model_cannot_do_is_said_in_a_line(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "talk.wav").write_bytes(make_wav())
    done = run(tmp_path / "talk.wav", "--model", tiny_model("whisper"), "--language", "klingon")
    assert done.returncode == 1
    assert "does not know the language 'klingon'" in done.stderr
    assert "Traceback" not in done.stderr
