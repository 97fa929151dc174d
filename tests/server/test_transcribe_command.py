"""`lazydecode transcribe`: the route's work without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lazydecode.cli.main import _run
from tests.builders import make_wav


def run_apart(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
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
    done = run_apart(
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


def test_what_the_model_cannot_do_is_said_in_a_line(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "talk.wav").write_bytes(make_wav())
    model = str(tiny_model("whisper", weights=False))  # no engine is started for this
    arguments = ["transcribe", str(tmp_path / "talk.wav"), "--model", model]
    monkeypatch.setattr(sys, "argv", ["lazydecode", *arguments, "--language", "klingon"])
    assert _run() == 1
    captured = capfd.readouterr()
    assert "does not know the language 'klingon'" in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
