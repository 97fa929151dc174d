"""What workers say of their metrics counts, also when it is the last thing that they say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

WAIT_S = 120.0


def test_last_words_count_and_an_answer_is_no_answer_to_a_later_question(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.server.supervised_session", str(tmp_path / "has-died")],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            supervisor = psutil.Process(process.pid)
            deadline = time.monotonic() + WAIT_S
            while psutil.STATUS_ZOMBIE not in [child.status() for child in supervisor.children()]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGCONT)
            output, _ = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    told = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    # 5 of the one that died, and what worker 1 had counted when it was asked.
    assert told == {"0": 6.0, "1": 7.0}
