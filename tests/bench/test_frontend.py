from __future__ import annotations

import json
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lazydecode.bench import lazy
from lazydecode.bench.frontend import SECTIONS, FrontendOptions, run_frontend
from lazydecode.bench.goals import goals_grid
from lazydecode.bench.media import encode_clip, encode_picture, encode_sound, frontend_items
from lazydecode.bench.model_rows import ModelRows
from lazydecode.cli.main import cli
from lazydecode.media.image import ImageMediaIO
from lazydecode.parse import MultiModalDataParser

TIMINGS = {"digest", "decoder", "eager_hit", "eager_miss", "ref_hit", "ref_miss"}


def test_the_full_form_has_every_row() -> None:
    names = [name for name, _ in frontend_items("full")]
    for kind in ("JPEG", "PNG"):
        for size in ("512²", "1024²", "2048²", "3840x2160"):
            assert f"{kind} {size}" in names
    assert {"WAV 1 s", "WAV 3 s", "WAV 10 s", "MP3 10 s", "OPUS 10 s"} <= set(names)
    assert {"MP4 480p 2 s, 32 frames", "MP4 720p 30 s, 32 frames"} <= set(names)
    assert {name for name, _ in frontend_items("short")} < set(names)


def test_media_are_the_same_each_time_and_differ_by_seed() -> None:
    for build in (
        lambda seed: encode_picture((64, 48), seed=seed),
        lambda seed: encode_picture((64, 48), "png", seed),
        lambda seed: encode_sound(0.05, "wav", seed),
        lambda seed: encode_clip(0.2, (64, 48), seed=seed),
    ):
        assert build(1) == build(1)
        assert build(1) != build(2)


def test_every_item_decodes_to_what_its_name_says() -> None:
    items = {name: build() for name, build in frontend_items("tiny")}
    assert items["JPEG 64x48"].media_io.load_bytes(items["JPEG 64x48"].data).size == (64, 48)
    samples, rate = items["WAV 0.1 s"].media_io.load_bytes(items["WAV 0.1 s"].data)
    assert (len(samples), rate) == (4800, 48000)
    frames, _ = items["MP4 64x48 0.2 s"].media_io.load_bytes(items["MP4 64x48 0.2 s"].data)
    assert frames.shape == (4, 48, 64, 3)


def test_the_record_is_complete() -> None:
    said: list[str] = []
    record = run_frontend(FrontendOptions(sizes="tiny", rounds=2, max_s=0.1), said.append)
    assert json.loads(json.dumps(record)) == record
    assert set(SECTIONS) <= record.keys()
    assert record["versions"]["lazydecode"]
    assert record["machine"]["cores"] >= 1
    assert len(record["items"]) == len(frontend_items("tiny"))
    for row in record["items"]:
        assert set(row["timings"]) == TIMINGS
        assert set(row["blended_ms"]) == {"0.5", "0.9", "0.99"}
        for timing in row["timings"].values():
            assert timing["rounds"] == 2
            assert timing["cpu_ms"] >= 0
    assert {(row["side"], row["hits"]) for row in record["memory"]} == {("eager", 3), ("ref", 3)}
    assert [row["entries"] for row in record["growth"]["lookups"]] == [10, 100]
    (row,) = record["sources"]["sizes"]
    assert row["bytes"] == 100_000
    assert {"data_floor", "data_url", "file_floor", "file_url"} == set(row["timings"])
    assert any("JPEG" in text for text in said)


def test_the_connectors_goals_have_the_floors_that_are_named() -> None:
    def row(megabytes: float, data: float, file: float) -> dict[str, Any]:
        cpu = {"data_floor": megabytes, "data_url": data, "file_floor": 1.0, "file_url": file}
        return {"megabytes": megabytes, "timings": {n: {"cpu_ms": v} for n, v in cpu.items()}}

    sources = {
        "sizes": [row(0.1, 0.3, 0.3), row(30.0, 40.0, 0.4)],
        "loop": {"cpu_ms": 0.1},
        "look": {"cpu_ms": 0.2},
    }
    grid = goals_grid({"kind": "frontend", "sources": sources}, None)
    verdicts = {cells[0]: (cells[2], cells[-1]) for cells in grid.rows}
    assert verdicts == {
        "1. a data: URL, 0.1 MB": ("0.1", "yes"),
        "1. an unchanged file:, 0.1 MB": ("0.2", "yes"),
        "1. a data: URL, 30 MB": ("30", "no"),
        "1. an unchanged file:, 30 MB": ("0.2", "no"),
        "1. an unchanged file:, 30 MB against 0.1 MB": ("0.3", "no"),
    }


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_a_model_adds_the_processor_and_header_only_rendering(tiny_model: Any, family: str) -> None:
    rows = ModelRows(str(tiny_model(family, weights=False)))
    item = next(build() for name, build in frontend_items("tiny") if name.startswith("JPEG"))
    row = rows.row(item, rounds=1, max_s=0.1)
    assert {"decoder", "processor", "eager_hit", "hit", "miss", "headers_only"} <= set(
        row["timings"]
    )
    assert row["miss_over_floor"] > 0


def test_a_ref_hit_decodes_nothing_and_a_miss_decodes() -> None:
    submitted: list[Any] = []

    class Counting(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            submitted.append(fn)
            done: Future[Any] = Future()
            done.set_result(fn(*args, **kwargs))
            return done

    data, cache, parser = encode_picture((64, 48)), lazy.new_cache(), MultiModalDataParser()
    for _ in range(2):
        lazy.request(ImageMediaIO(), "image", data, cache, parser, Counting())
    assert len(submitted) == 1


def test_the_command_writes_its_record(tmp_path: Path) -> None:
    path = tmp_path / "results" / "frontend.json"
    result = CliRunner().invoke(
        cli,
        ["bench", "frontend", "--size", "tiny", "--rounds", "1", "--section", "hashing",
         "-o", str(path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Hash throughput" in result.output
    record = json.loads(path.read_text())
    assert record["kind"] == "frontend"
    assert "items" not in record
    assert "load_after" in record["machine"]
