"""Findings on disk: the same as found out, and never used for anything else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazydecode.config import Settings
from lazydecode.models import discovery
from lazydecode.models import findings as module
from lazydecode.models.findings import file_name
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.models.registry import FamilyRecord


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_findings", {})


def start(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFrontend:
    """Load a model as a new process would."""
    monkeypatch.setattr(discovery, "_findings", {})
    return load_model_frontend(str(model), Settings(proof_cache=folder))


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was proven again")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_audio", "gemma3"])
def test_a_second_start_reads_what_the_first_one_proved(
    family: str,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, folder = tiny_model(family, weights=False), tmp_path / "made" / "here"
    first = start(model, folder, monkeypatch)
    [path] = folder.iterdir()
    monkeypatch.setattr(discovery, "probe_family", never)
    second = start(model, folder, monkeypatch)
    assert second.findings == first.findings
    assert second.fingerprint == first.fingerprint
    assert second.pixel_plan == first.pixel_plan
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_a_damaged_file_is_proven_anew_and_replaced(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("qwen2_audio", weights=False)
    first = start(model, tmp_path, monkeypatch)
    [path] = tmp_path.iterdir()
    whole = path.read_text()
    for damaged in (whole[:-40], '["Path", {}]', '["map", [[1]]]', "7"):
        path.write_text(damaged)
        with caplog.at_level(logging.WARNING):
            again = start(model, tmp_path, monkeypatch)
        assert again.findings is not None
        assert first.findings is not None
        assert again.findings.facts == first.findings.facts
        assert module.FindingsStore(tmp_path).load(path.name) == again.findings
    assert "a kept proof cannot be read" in caplog.text


def test_the_name_changes_with_whatever_counts(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = load_model_frontend(str(tiny_model("qwen2_audio", weights=False)), Settings())
    processor, tokenizer = frontend.processor, frontend.tokenizer

    def name(mark: str = "mark", **fields: bool) -> str | None:
        return file_name(mark, processor, tokenizer, FamilyRecord(**fields))  # type: ignore[arg-type]

    names = [name(), name(mark="other"), name(reentrant=False)]
    tokenizer.add_tokens(["<a-new-word>"])
    names.append(name())
    monkeypatch.setattr(module, "_own_code", lambda: "changed")
    names.append(name())
    assert None not in names
    assert len(set(names)) == len(names)
    # Code from elsewhere may change without a version that says so.
    foreign = type("Foreign", (type(processor),), {"__module__": "transformers_modules.folder"})
    monkeypatch.setattr(processor, "__class__", foreign)
    assert name() is None
