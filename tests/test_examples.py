"""The scripts in examples/ run and print what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.builders import make_jpeg, make_png

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: str, *arguments: Any) -> list[str]:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_library_decodes_each_content_once_and_without_torch(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jpg", tmp_path / "b.png"
    first.write_bytes(make_jpeg(size=(64, 48)))
    second.write_bytes(make_png(size=(32, 32)))
    lines = run("library_use.py", first, second, first)
    assert [line.split()[:2] for line in lines] == [
        ["a.jpg:", "miss"],
        ["b.png:", "miss"],
        ["a.jpg:", "hit"],
    ]
    assert "width=64, height=48" in lines[0]


def test_openais_client_gets_a_hit_the_second_time(tmp_path: Path, tiny_model: Any) -> None:
    from lazydecode.demo.server import DemoServer

    picture = tmp_path / "a.png"
    picture.write_bytes(make_png(size=(64, 48)))
    server = DemoServer(tiny_model("qwen2_vl"), tmp_path / "server.log", [])
    try:
        server.wait_until_serving()
        lines = run("openai_chat.py", server.url, picture)
    finally:
        server.stop()
    assert [line.split()[0] for line in lines] == ["miss", "hit"]
    assert lines[0].split(" ", 1)[1] == lines[1].split(" ", 1)[1]
