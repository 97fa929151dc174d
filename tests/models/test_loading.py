"""Loading models: what is missing is said, and what identity depends on is in the fingerprint."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from lazydecode.config import Settings
from lazydecode.errors import InvalidRequestError
from lazydecode.models import loading
from lazydecode.models.loading import load_model_frontend
from lazydecode.models.registry import FamilyRecord, ModelLoadError
from tests.builders import make_jpeg
from tests.models.conftest import LoadFrontend


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model("qwen2_vl", weights=False), tmp_path / "model"))


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model_frontend(str(tmp_path), Settings())


def test_a_configuration_that_does_not_parse_is_said(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="configuration"):
        load_model_frontend(str(folder), Settings())


def test_without_a_tokenizer_nothing_can_be_served(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_model_frontend(str(folder), Settings())


def test_without_a_processor_it_is_served_as_text_only(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in folder.glob("*processor*"):
        path.unlink()
    with caplog.at_level(logging.WARNING):
        model = load_model_frontend(str(folder), Settings())
    assert model.mm_processor is None
    assert model.modalities == ()
    rendered = model.render_chat([{"role": "user", "content": "hello"}])
    assert model.decode(model.tokenize_prompt(rendered), skip_special_tokens=False) == rendered.text


def test_without_a_template_chat_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.pop("chat_template", None) is not None:
            path.write_text(json.dumps(content))
    model = load_model_frontend(str(folder), Settings())
    with pytest.raises(InvalidRequestError, match="no chat template"):
        model.render_chat([{"role": "user", "content": "hello"}])


def test_code_of_a_model_is_run_only_when_allowed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "something_else"
    config["auto_map"] = {"AutoConfig": "own.OwnConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('must not run')\n")
    with pytest.raises(ModelLoadError, match="--trust-remote-code"):
        load_model_frontend(str(folder), Settings())


def test_a_processor_that_is_code_of_the_model_is_run_only_when_allowed(folder: Path) -> None:
    for path in folder.glob("*processor_config.json"):
        content = json.loads(path.read_text())
        content["processor_class"] = "OwnProcessor"
        content["auto_map"] = {"AutoProcessor": "own.OwnProcessor"}
        path.write_text(json.dumps(content))
    (folder / "own.py").write_text("raise SystemExit('must not run')\n")
    with pytest.raises(ModelLoadError, match=r"processor of .* --trust-remote-code"):
        load_model_frontend(str(folder), Settings())


def test_a_text_model_has_no_media(frontend: LoadFrontend) -> None:
    model = frontend("qwen2")
    assert (model.mm_processor, model.modalities, model.max_items) == (None, (), {})


def test_the_same_model_has_the_same_fingerprint_anywhere(
    folder: Path, frontend: LoadFrontend
) -> None:
    assert load_model_frontend(str(folder), Settings()).fingerprint == (
        frontend("qwen2_vl").fingerprint
    )


@pytest.mark.parametrize(
    "change",
    [
        {"raw_pixels": False},
        {"mm_processor_kwargs": {"max_pixels": 100352}},
    ],
)
def test_options_are_part_of_the_fingerprint(
    folder: Path, frontend: LoadFrontend, change: dict[str, Any]
) -> None:
    changed = load_model_frontend(str(folder), Settings(**change))
    assert changed.fingerprint != frontend("qwen2_vl").fingerprint


@pytest.mark.parametrize("is_trusted", [None, True])
def test_a_server_trusts_an_image_id_only_when_told(
    tiny_model: Callable[..., Path], is_trusted: bool | None
) -> None:
    settings = Settings() if is_trusted is None else Settings(trust_exif_image_id=is_trusted)
    model = load_model_frontend(str(tiny_model("qwen2_vl", weights=False)), settings)
    ref = model.info.get_media_io("image").load_bytes_ref(make_jpeg(image_id=UUID(int=7)))
    assert (ref.key == UUID(int=7).bytes) is bool(is_trusted)


def test_the_processors_settings_are_part_of_the_fingerprint(
    folder: Path, frontend: LoadFrontend
) -> None:
    for path in folder.glob("*processor_config.json"):
        path.write_text(path.read_text().replace("12845056", "6422528"))
    changed = load_model_frontend(str(folder), Settings())
    assert changed.fingerprint != frontend("qwen2_vl").fingerprint


def test_a_template_that_doubles_an_item_switches_it_off(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|image_pad|>", "<|image_pad|><|image_pad|>"))
    for _ in range(2):  # what was found out before is said again
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model = load_model_frontend(str(folder), Settings())
        assert "image" not in model.modalities
        assert "video" in model.modalities
        assert "image input is off" in caplog.text


def test_a_family_that_cannot_be_proven_is_refused_with_the_difference(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "record_for", lambda processor: FamilyRecord())
    model = load_model_frontend(str(tiny_model("clip", weights=False)), Settings())
    assert model.mm_processor is None
    assert model.findings is not None
    assert model.findings.proof.mode == "unproven"
    assert "puts no image items into text" in model.findings.facts.refused["image"]


def test_what_a_record_states_is_not_found_out(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    record = FamilyRecord(
        item_text={"image": text}, header={"image": "content"}, max_items={"image": 3}
    )
    monkeypatch.setattr(loading, "record_for", lambda processor: record)
    model = load_model_frontend(str(tiny_model("qwen2_vl", weights=False)), Settings())
    assert model.findings is not None and model.mm_processor is not None
    assert model.findings.facts.modalities["image"].text == text
    assert model.findings.proof.mode == "expand"
    assert model.findings.proof.headers == {"image": "content", "video": "meta"}
    assert model.mm_processor.family.sketch("image", (56, 56)) is None
    assert model.max_items == {"image": 3, "video": None}


def test_loading_leaves_nothing_behind_that_changes_the_hf_objects(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_vl")
    assert type(model.processor.tokenizer).__module__.startswith("transformers")
    assert type(model.processor.image_processor).__module__.startswith("transformers")


def test_an_embedding_model_needs_no_template(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model("clip", weights=False), tmp_path / "clip"))
    (folder / "chat_template.jinja").unlink()
    model = load_model_frontend(str(folder), Settings())
    assert model.modalities == ("image",)
    assert not model.generates
    rendered = model.render_chat([{"role": "user", "content": "a cat"}])
    assert rendered.text == "a cat"
    assert model.tokenize_prompt(rendered) == model.processor.tokenizer("a cat")["input_ids"]
