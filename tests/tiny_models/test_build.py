"""The first families: they load back, are the same on each build, and generate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lazydecode.tiny_models import FAMILIES, BuildError, build, get_family
from lazydecode.tiny_models.builder import _check_packages
from lazydecode.tiny_models.records import Family
from lazydecode.tiny_models.weights import model_class


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_audio", "qwen2"])
def test_same_arguments_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    first = digests(build(name, tmp_path / "a"))
    assert digests(build(name, tmp_path / "b")) == first
    assert "model.safetensors" in first


def test_another_seed_changes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    first = digests(build("qwen2", tmp_path / "a", seed=0))
    second = digests(build("qwen2", tmp_path / "b", seed=1))
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


def test_no_weights_leaves_out_the_weights(tmp_path: Path) -> None:
    assert not list(build("qwen2_vl", tmp_path / "m", weights=False).glob("*.safetensors"))


def test_an_existing_folder_is_replaced(tmp_path: Path) -> None:
    out = build("qwen2", tmp_path / "m", weights=False)
    (out / "stray").write_text("x")
    assert not (build("qwen2", out, weights=False) / "stray").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_unknown_family_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown family 'qwen'; known are: .*qwen2_vl"):
        build("qwen", tmp_path / "m")


def test_a_missing_package_is_named() -> None:
    record = Family(name="x", model_type="x", processor=None, needs=("no_such_package_here",))
    with pytest.raises(BuildError, match="x needs the package no_such_package_here"):
        _check_packages(record)


def media(modality: str, variant: int) -> dict[str, object]:
    """Keyword arguments of a processor for one item of `modality`."""
    if modality == "image":
        return {"images": [Image.new("RGB", (96, 64), (200, 60 * variant, 20))]}
    if modality == "video":
        ramp = np.arange(8 * 56 * 84 * 3, dtype=np.uint32).reshape(8, 56, 84, 3)
        return {"videos": [(ramp * variant % 251).astype(np.uint8)], "do_sample_frames": False}
    time_s = np.arange(16000, dtype=np.float32) / 16000
    tone = np.sin(2 * np.pi * 300 * variant * time_s) * time_s**variant
    return {"audio": [tone.astype(np.float32)], "sampling_rate": 16000}


@pytest.mark.parametrize(
    ("name", "modality"),
    [
        ("qwen2_vl", "image"),
        ("qwen2_vl", "video"),
        ("qwen2_5_vl", "image"),
        ("qwen2_5_vl", "video"),
        ("qwen2_audio", "audio"),
    ],
)
def test_answers_are_deterministic_and_depend_on_the_media(
    name: str, modality: str, tiny_model: Callable[..., Path]
) -> None:
    import torch
    from transformers import AutoProcessor

    folder = tiny_model(name)
    processor = AutoProcessor.from_pretrained(folder)
    model = model_class(get_family(name)).from_pretrained(folder, dtype="auto").eval()
    answers = []
    for variant in (1, 2, 1):
        content = [{"type": modality}, {"type": "text", "text": "What is this?"}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        inputs = processor(text=[text], return_tensors="pt", **media(modality, variant))
        inputs = {
            key: value.to(model.dtype) if value.is_floating_point() else value
            for key, value in inputs.items()
        }
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answers.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_loads_back_with_its_own_classes(
    name: str, tiny_model: Callable[..., Path]
) -> None:
    from transformers import AutoConfig, AutoProcessor

    family = get_family(name)
    folder = tiny_model(name, weights=False)
    assert type(AutoProcessor.from_pretrained(folder)).__name__ == family.processor
    assert AutoConfig.from_pretrained(folder).model_type == family.model_type


def test_a_folder_has_no_weights_where_the_models_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazydecode.tiny_models.records.find_spec", lambda name: None)
    assert get_family("perception_lm").no_weights == "the model needs the package timm"
    made = build("perception_lm", tmp_path / "model")
    assert (made / "config.json").exists()
    assert not list(made.glob("*.safetensors"))


def test_modalities_follow_the_parts() -> None:
    assert FAMILIES["qwen2_vl"].modalities == ("image", "video")
    assert FAMILIES["qwen2_audio"].modalities == ("audio",)
