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


def test_a_tokenizer_that_knows_no_text_is_none(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Without its files, Gemma's class makes itself a vocabulary of control tokens alone."""
    folder = Path(shutil.copytree(tiny_model("gemma3", weights=False), tmp_path / "model"))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer of .* is empty"):
        load_model_frontend(str(folder), Settings())


@pytest.mark.parametrize("name", ["/no/such/model", "./no/such/model"])
def test_a_path_to_nothing_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"there is no folder {name}"):
        load_model_frontend(name, Settings())


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


def take_template(folder: Path) -> str:
    """Remove the chat template of a model's folder, wherever it is, and return it."""
    path = folder / "chat_template.jinja"
    template = path.read_text()
    path.unlink()
    return template


def test_without_a_template_chat_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    take_template(folder)
    with caplog.at_level(logging.WARNING):
        model = load_model_frontend(str(folder), Settings())
    assert "no chat template, so that chat and media are off; --chat-template FILE" in caplog.text
    with pytest.raises(InvalidRequestError, match="no chat template"):
        model.render_chat([{"role": "user", "content": "hello"}])


def test_a_template_can_be_given_as_a_file(
    folder: Path, tmp_path: Path, frontend: LoadFrontend
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(take_template(folder))
    model = load_model_frontend(str(folder), Settings(chat_template=file))
    assert model.fingerprint == frontend("qwen2_vl").fingerprint
    assert model.modalities == ("image", "video")

    file.write_text(file.read_text().replace("assistant", "helper"))
    other = load_model_frontend(str(folder), Settings(chat_template=file))
    assert other.render_chat([{"role": "user", "content": "x"}]).text.endswith("helper\n")
    assert other.fingerprint != model.fingerprint


def test_a_template_that_is_given_wins_over_the_models_and_its_class(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """SmolVLM's class renders videos by a template of its own, whatever the folder has."""
    folder = tiny_model("smolvlm", weights=False)
    file = tmp_path / "own.jinja"
    template = (folder / "chat_template.jinja").read_text()
    file.write_text(f"{template}{{# ours #}}~")
    model = load_model_frontend(str(folder), Settings(chat_template=file))
    text = model.render_chat([{"role": "user", "content": [{"type": "video"}]}]).text
    assert text.endswith("~")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "cannot be read: it is no UTF-8"),
        (b" \n", "is empty"),
        (b"hi\n{% if %}", "line 2: "),
    ],
)
def test_a_file_that_is_no_template_ends_the_start(
    folder: Path, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=reason):
        load_model_frontend(str(folder), Settings(chat_template=file))


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
