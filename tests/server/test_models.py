"""What models lack or refuse, through the server: a 400 with the reason, never a 500."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.builders import make_png, make_wav
from tests.server.harness import Server, data_url, image, request, text, video

Serve = Callable[..., Server]
PNG = "image/png"


@pytest.fixture
def serve(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Serve]:
    """`serve(family, damage)`: a render-only server of a model that `damage` was done to."""
    with ExitStack() as stack:

        def start(family: str, damage: Callable[[Path], None] | None = None) -> Server:
            folder = tiny_model(family, weights=False)
            if damage is not None:
                folder = Path(shutil.copytree(folder, tmp_path / family))
                damage(folder)
            return stack.enter_context(Server(folder, engine="none", served_model_name=("m",)))

        yield start


def picture(width: int = 64, height: int = 48) -> dict[str, Any]:
    return image(data_url(make_png((width, height)), PNG))


def refused(server: Server, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The error of a request that must be refused, header-only as with tensors."""
    answers = [
        server.render(request(*parts, text(), mm_payload=payload, **fields))
        for payload in ("tensors", "none")
    ]
    assert [a.status_code for a in answers] == [400, 400], [a.text[:300] for a in answers]
    errors = [answer.json()["error"] for answer in answers]
    assert {(e.get("modality"), e.get("index")) for e in errors} == {
        (errors[0].get("modality"), errors[0].get("index"))
    }
    error: dict[str, Any] = errors[0]
    return error


def edit_template(folder: Path, old: str, new: str) -> None:
    path = folder / "chat_template.jinja"
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new))


# -- what the processor refuses


def test_a_picture_of_a_shape_that_the_processor_refuses(render_server: Server) -> None:
    error = refused(render_server, picture(), picture(900, 3))
    assert "aspect ratio" in error["message"]
    assert (error["modality"], error["index"]) == ("image", 1)


def test_a_processor_that_raises_anything_at_all(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("qwen2_vl")
    frontend = server.context.frontend
    part = type(frontend.processor.image_processor)
    original = part.preprocess

    def preprocess(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        given = images[0] if isinstance(images, list) else images
        height, width = given.shape[-2:] if hasattr(given, "shape") else given.size[::-1]
        if (height, width) == (48, 61):
            raise ZeroDivisionError("no patches at 0x7f001234abcd in this size")
        return original(self, images, *args, **kwargs)

    monkeypatch.setattr(part, "preprocess", preprocess)
    error = refused(server, picture(), picture(61, 48))
    assert "no patches" in error["message"]
    assert "0x7f00" not in error["message"]
    assert error["index"] == 1
    assert server.render(request(picture(), text())).status_code == 200


def test_more_items_than_the_family_takes(serve: Serve) -> None:
    server = serve("florence2")
    error = refused(server, picture(), picture(32, 32))
    assert "at most 1" in error["message"]
    assert (error["modality"], error["index"]) == ("image", 1)


def test_a_modality_that_the_family_has_not(serve: Serve) -> None:
    server = serve("gemma3")
    sound = {
        "type": "audio_url",
        "audio_url": {"url": data_url(make_wav(), "audio/wav")},
    }
    for part, modality in ((sound, "audio"), (video(data_url(b"x", "video/mp4")), "video")):
        error = refused(server, picture(), part)
        assert f"takes no {modality} items" in error["message"]
        assert (error["modality"], error["index"]) == (modality, 0)


# -- templates that do not write one placeholder per item


def test_a_template_that_drops_every_placeholder_switches_the_modality_off(serve: Serve) -> None:
    server = serve("qwen2_vl", lambda folder: edit_template(folder, "<|image_pad|>", ""))
    assert "takes no image items" in refused(server, picture())["message"]


def test_a_template_that_doubles_every_placeholder_switches_the_modality_off(serve: Serve) -> None:
    pad = "<|image_pad|>"
    server = serve("qwen2_vl", lambda folder: edit_template(folder, pad, pad + pad))
    assert "takes no image items" in refused(server, picture())["message"]


@pytest.mark.parametrize(
    ("family", "pad"), [("qwen2_vl", "<|image_pad|>"), ("minicpmv4_6", "<|image_pad|>")]
)
@pytest.mark.parametrize("written", ["", "{pad}{pad}"])
def test_a_template_that_drops_or_doubles_one_in_some_conversations(
    serve: Serve, family: str, pad: str, written: str
) -> None:
    """Such as one that keeps the pictures of the last turns only."""
    condition = "messages | length > 1 and loop.first"

    def damage(folder: Path) -> None:
        path = folder / "chat_template.jinja"
        source = path.read_text()
        loop = "{%- for message in messages -%}"
        assert loop in source and pad in source
        source = source.replace(loop, loop + "{%- set odd = " + condition + " -%}")
        instead = written.format(pad=pad)
        source = source.replace(pad, f"' ~ ('{instead}' if odd else '{pad}') ~ '")
        path.write_text(source)

    server = serve(family, damage)
    content = [picture(), text()]
    assert server.render(request(*content)).status_code == 200
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": [picture(32, 32), text()]},
    ]
    for payload in ("tensors", "none"):
        answer = server.render({"messages": turns, "mm_payload": payload})
        assert answer.status_code == 400, answer.text[:300]
        error = answer.json()["error"]
        assert "placeholders" in error["message"] or "tokens" in error["message"]
        assert error.get("modality") == "image", error


# -- folders that lack something


def remove_processor(folder: Path) -> None:
    for path in folder.glob("*processor*"):
        path.unlink()


def remove_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.pop("chat_template", None) is not None:
            path.write_text(json.dumps(content))


def test_without_a_processor_text_is_served_and_media_are_refused(serve: Serve) -> None:
    server = serve("qwen2_vl", remove_processor)
    assert server.render(request(text())).status_code == 200
    assert "text-only" in refused(server, picture())["message"]


def test_without_a_template_chat_is_refused(serve: Serve) -> None:
    server = serve("qwen2_vl", remove_template)
    answer = server.render(request(text()))
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]
