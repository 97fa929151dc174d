"""Items with chance in them: never taken for what was made of them before, and said why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.cli.inspect_model import inspect_model
from lazydecode.config import Settings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.models.randomness import random_options
from lazydecode.processing.inputs import ProcessorInputs
from tests.models.reference import picture, sound


def changed(folder: Path, to: Path, part: str, **settings: Any) -> ModelFrontend:
    """Load a copy of a model with other settings of one part of its processor."""
    copy = Path(shutil.copytree(folder, to))
    found = False
    for path in copy.glob("*processor*.json"):
        content = json.loads(path.read_text())
        if part in content or path.stem == f"pre{part}" or path.stem.startswith("preprocessor"):
            content.get(part, content).update(settings)
            path.write_text(json.dumps(content))
            found = True
    assert found
    return load_model_frontend(str(copy), Settings())


def twice(model: ModelFrontend, modality: str, item: Any, **more: Any) -> tuple[Any, Any]:
    """Two runs of one item with one cache."""
    cache = MultiModalProcessorOnlyCache(capacity_bytes=1 << 28)
    processor = model.any_processor
    assert processor is not None
    prompt: Any = [0]
    if model.template is not None:
        prompt = model.template.render_items([modality])

    def run() -> Any:
        return processor.apply(
            ProcessorInputs(
                prompt,
                model.info.parse_mm_data({modality: [item]}),
                cache=cache,
                processor_fingerprint=model.fingerprint,
                **more,
            )
        )

    return run(), run()


def first_tensor(result: Any, modality: str) -> torch.Tensor:
    tensor = next(iter(result["mm_kwargs"][modality][0].values())).data
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.fixture(scope="module")
def dithering(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> ModelFrontend:
    """Gemma 3n whose feature extractor adds noise."""
    folder = tmp_path_factory.mktemp("random") / "gemma3n"
    return changed(tiny_model("gemma3n", weights=False), folder, "feature_extractor", dither=1e-4)


def test_noise_sets_sounds_apart_and_leaves_pictures_cached(dithering: ModelFrontend) -> None:
    assert dithering.random() == {"audio": "its audio processor adds noise (dither=0.0001)"}
    first, second = twice(dithering, "audio", (sound(0.5, 16000), 16000))
    assert first["mm_hashes"] != second["mm_hashes"]
    assert not torch.equal(first_tensor(first, "audio"), first_tensor(second, "audio"))
    first, second = twice(dithering, "image", picture(64, 48))
    assert first["mm_hashes"] == second["mm_hashes"]
    assert torch.equal(first_tensor(first, "image"), first_tensor(second, "image"))


def test_noise_is_not_sent_twice_to_whoever_goes_by_identities(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = changed(
        tiny_model("whisper", weights=False), tmp_path / "whisper", "feature_extractor", dither=0.1
    )
    assert model.random() == {"audio": "its audio processor adds noise (dither=0.1)"}
    first, second = twice(model, "audio", (sound(0.5, 16000), 16000))
    assert first["mm_hashes"] != second["mm_hashes"]


def test_a_crop_at_random_is_known_though_no_probe_shows_it(
    tiny_model: Callable[..., Path],
) -> None:
    folder = tiny_model("clap", weights=False)
    model = load_model_frontend(str(folder), Settings())
    why = "its audio processor cuts long items at random (truncation=rand_trunc)"
    assert model.random() == {"audio": why}
    rate = model.processor.feature_extractor.sampling_rate
    ramp = np.linspace(-1, 1, 11 * rate, dtype=np.float32) ** 3
    first, second = twice(model, "audio", (ramp, rate))
    assert first["mm_hashes"] != second["mm_hashes"]
    assert not torch.equal(first_tensor(first, "audio"), first_tensor(second, "audio"))
    report = inspect_model(str(folder), Settings())
    assert report["media"]["audio"]["cached"] == f"no: {why}"


def test_an_option_of_one_request_counts_for_that_request(dithering: ModelFrontend) -> None:
    assert dithering.random({"images_kwargs": {"do_random_crop": True}}) == {
        "audio": "its audio processor adds noise (dither=0.0001)",
        "image": "its image processor crops at random (do_random_crop)",
    }


def test_what_a_class_does_at_random_shows_in_the_probes(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    original = Qwen2VLImageProcessor.preprocess

    def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        values = output["pixel_values"]
        if values.device.type != "meta":
            output["pixel_values"] = values + torch.rand(())
        return output

    monkeypatch.setattr(Qwen2VLImageProcessor, "preprocess", preprocess)
    folder = Path(shutil.copytree(tiny_model("qwen2_vl", weights=False), tmp_path / "model"))
    settings = Settings(mm_processor_kwargs={"min_pixels": 3137})  # not what others found out
    model = load_model_frontend(str(folder), settings)
    assert model.random() == {"image": "its image processor gave two results for one probe"}


@pytest.mark.parametrize(
    ("settings", "layers", "why"),
    [
        ({"dither": 0.0}, [], None),
        ({"dither": 0.0}, [{"dither": 1e-5}], "adds noise (dither=1e-05)"),
        ({"dither": 1e-5}, [{"audio_kwargs": {"dither": 0.0}}], None),
        ({"dither": 1e-5}, [{"images_kwargs": {"dither": 0.0}}], "adds noise (dither=1e-05)"),
        ({"truncation": "fusion"}, [], "cuts long items at random (truncation=fusion)"),
        ({"truncation": True}, [], None),
        ({}, [{}, {"random_crop": True}], "crops at random (random_crop)"),
        ({}, [{"random_crop": False}, {"random_crop": True}], None),
    ],
)
def test_options_that_bring_chance_in(
    settings: dict[str, Any], layers: list[dict[str, Any]], why: str | None
) -> None:
    processor = SimpleNamespace(feature_extractor=SimpleNamespace(**settings))
    found = random_options(processor, *layers)
    assert found == ({} if why is None else {"audio": f"its audio processor {why}"})
