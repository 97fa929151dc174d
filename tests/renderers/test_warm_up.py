"""Warm-up: one item of each kind on the ordered worker, between requests, and joined."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lazydecode.config import Settings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.renderers import warm_up as module
from lazydecode.renderers.warm_up import WarmUp


@pytest.fixture(scope="module")
def frontend(tiny_model: Callable[..., Path]) -> ModelFrontend:
    return load_model_frontend(str(tiny_model("qwen2_5_vl", weights=False)), Settings())


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "ordered-worker") as executor:
        yield executor


@pytest.fixture
def runs(frontend: ModelFrontend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was processed, as (modality, thread) in words."""
    done: list[str] = []
    processor = frontend.mm_processor
    assert processor is not None
    apply = processor.apply

    def record(inputs: Any, *rest: Any) -> Any:
        result = apply(inputs, *rest)
        [modality] = result["mm_kwargs"]
        assert result["mm_placeholders"][modality][0].length > 1
        done.append(f"{modality} on {threading.current_thread().name.rpartition('_')[0]}")
        return result

    monkeypatch.setattr(processor, "apply", record)
    return done


def test_each_kind_runs_on_the_ordered_worker_and_lets_requests_in_between(
    frontend: ModelFrontend, worker: ThreadPoolExecutor, runs: list[str]
) -> None:
    gate = threading.Event()
    worker.submit(gate.wait, 30)
    warm_up = WarmUp(frontend, worker)
    warm_up.start()
    request = worker.submit(runs.append, "request")
    assert warm_up.is_running
    gate.set()
    request.result(60)
    assert warm_up._done is not None
    warm_up._done.result(60)
    assert runs == ["image on ordered-worker", "request", "video on ordered-worker"]
    assert not warm_up.is_running


def test_a_failure_is_said_and_the_rest_goes_on(
    frontend: ModelFrontend,
    worker: ThreadPoolExecutor,
    runs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(module._SAMPLES, "image", lambda: b"no picture")  # type: ignore[arg-type]
    warm_up = WarmUp(frontend, worker)
    with caplog.at_level(logging.INFO):
        warm_up.start()
        assert warm_up._done is not None
        warm_up._done.result(60)
    assert "the warm-up with one image failed" in caplog.text
    assert runs == ["video on ordered-worker"]
    warm_up.join()


def test_joining_leaves_out_what_has_not_begun(
    frontend: ModelFrontend, worker: ThreadPoolExecutor, runs: list[str]
) -> None:
    gate = threading.Event()
    worker.submit(gate.wait, 30)
    warm_up = WarmUp(frontend, worker)
    warm_up.join()  # never started: nothing to wait for
    warm_up = WarmUp(frontend, worker)
    warm_up.start()
    joined = threading.Thread(target=warm_up.join)
    joined.start()
    assert warm_up._stopped.wait(120)
    gate.set()
    joined.join(60)
    assert runs == []


def test_the_worker_itself_cannot_join(
    frontend: ModelFrontend, worker: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = WarmUp(frontend, worker)
    errors: list[Exception] = []

    def join(*_: object) -> None:
        try:
            warm_up.join()
        except RuntimeError as exc:
            errors.append(exc)

    monkeypatch.setattr(module, "warm_up", join)
    warm_up.start()
    assert warm_up._done is not None
    warm_up._done.result(60)
    assert [str(error) for error in errors] == [
        "warm-up cannot be joined from the worker that it runs on"
    ] * 2


@pytest.mark.parametrize("modality", ["audio"])
def test_recordings_are_warmed_up(tiny_model: Callable[..., Path], modality: str) -> None:
    frontend = load_model_frontend(str(tiny_model("qwen2_audio", weights=False)), Settings())
    module.warm_up(frontend, modality)


def test_a_model_without_a_chat_template_is_warmed_up_with_a_prompt_of_ids(
    tiny_model: Callable[..., Path],
) -> None:
    whisper = load_model_frontend(str(tiny_model("whisper", weights=False)), Settings())
    processor = whisper.encoder_processor
    assert processor is not None
    prompts: list[Any] = []
    apply = processor.apply

    def record(inputs: Any) -> Any:
        prompts.append(inputs.prompt)
        return apply(inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "apply", record)
        module.warm_up(whisper, "audio")
    assert prompts == [[0]]
