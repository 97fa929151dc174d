"""Run both benchmarks in short form, show the goals, and write the page.

One tiny model is built for both; the whole takes under five minutes on two free cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from lazydecode.tiny_models import build

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CLI = [sys.executable, "-m", "lazydecode"]


def main() -> None:
    """Measure; stop at the first command that fails."""
    frontend, serve = RESULTS / "frontend.json", RESULTS / "serve.json"
    with tempfile.TemporaryDirectory() as folder:
        print("building a tiny model")
        model = str(build("qwen2_5_vl", Path(folder) / "qwen2_5_vl", weights=False))
        run(["bench", "frontend", "--size", "short", "--model", model, "-o", str(frontend)])
        run(["bench", "serve", model, "--size", "short", "--with-eager", "-o", str(serve)])
    run(["bench", "goals", str(frontend), str(serve)])
    subprocess.run([sys.executable, str(HERE / "write_page.py")], check=True)


def run(arguments: list[str]) -> None:
    """Run one command of ours, with its output."""
    subprocess.run([*CLI, *arguments], check=True)


if __name__ == "__main__":
    main()
