"""Golden requests through the library: ids, ranges, dtypes, shapes and bytes of tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.config import Settings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.processing.inputs import ProcessorInputs

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = {"qwen2_5_vl": torch.bfloat16, "qwen2_audio": torch.float16}
_MODALITY = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}


def cases() -> Iterator[Any]:
    for family in FAMILIES:
        requests = json.loads((GOLDEN / f"{family}.requests.json").read_text())
        answers = json.loads((GOLDEN / f"{family}.answers.json").read_text())["answers"]
        by_id = {answer["id"]: answer for answer in answers}
        for request in requests:
            yield pytest.param(
                family, request["body"], by_id[request["id"]], id=f"{family}-{request['id']}"
            )


@cache
def load(family: str) -> ModelFrontend:
    return load_model_frontend(str(GOLDEN / "models" / family), Settings())


def parse(
    model: ModelFrontend, body: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Return messages in Hugging Face's form, and references in order."""
    options = body.get("media_io_kwargs", {})
    messages: list[dict[str, Any]] = []
    media: dict[str, list[Any]] = {}
    for message in body["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            content = [_part(model, part, options, media) for part in content]
        messages.append({**message, "content": content})
    return messages, media


def _part(model: ModelFrontend, part: Any, options: Any, media: Any) -> dict[str, Any]:
    modality = _MODALITY.get(part["type"])
    if modality is None:
        return dict(part)
    source = part[part["type"]]
    name = (source.get("url") or source.get("data")).strip("{}").split(":", 1)[1]
    data = (GOLDEN / "media" / name).read_bytes()
    media.setdefault(modality, []).append(
        model.info.get_media_io(modality, options).load_bytes_ref(data)
    )
    return {"type": modality}


@pytest.mark.parametrize(("family", "body", "expected"), list(cases()))
def test_the_result_equals_the_golden_one(family: str, body: Any, expected: Any) -> None:
    model = load(family)
    messages, media = parse(model, body)
    rendered = model.render_chat(messages)
    if not media:
        assert model.tokenize_prompt(rendered) == expected["token_ids"]
        return
    assert model.mm_processor is not None
    cache_ = MultiModalProcessorOnlyCache(capacity_bytes=1 << 30)
    for _ in range(2):  # a miss, then a hit
        inputs = ProcessorInputs(
            rendered.text,
            model.info.parse_mm_data(parse(model, body)[1]),
            hf_processor_mm_kwargs=body.get("mm_processor_kwargs", {}),
            media_io_kwargs=body.get("media_io_kwargs", {}),
            cache=cache_,
            processor_fingerprint=model.fingerprint,
        )
        check(model.mm_processor.apply(inputs), expected, FAMILIES[family])


@pytest.mark.parametrize(("family", "body", "expected"), list(cases()))
def test_headers_alone_give_the_golden_ids(family: str, body: Any, expected: Any) -> None:
    model = load(family)
    messages, media = parse(model, body)
    if not media:
        return
    assert model.mm_processor is not None
    inputs = ProcessorInputs(
        model.render_chat(messages).text,
        model.info.parse_mm_data(media),
        hf_processor_mm_kwargs=body.get("mm_processor_kwargs", {}),
        media_io_kwargs=body.get("media_io_kwargs", {}),
    )
    rendering = model.mm_processor.render_from_headers(inputs)
    assert rendering is not None
    assert rendering.token_ids == expected["token_ids"]
    assert ranges(rendering.placeholders) == expected["mm_placeholders"]
    assert not any(ref.is_decoded for group in media.values() for ref in group)
    for modality, items in expected.get("items", {}).items():
        for metadata, item in zip(rendering.metadata[modality], items, strict=True):
            for name, elem in metadata.items():
                data = elem.data
                assert isinstance(data, torch.Tensor)
                assert data.reshape(-1).tolist() == item["fields"][name]["first"]


def ranges(placeholders: Any) -> dict[str, list[dict[str, int]]]:
    assert all(r.is_embed is None for group in placeholders.values() for r in group)
    return {
        m: [{"offset": r.offset, "length": r.length} for r in group]
        for m, group in placeholders.items()
    }


def check(result: Any, expected: Any, dtype: torch.dtype) -> None:
    assert result["prompt_token_ids"] == expected["token_ids"]
    assert ranges(result["mm_placeholders"]) == expected["mm_placeholders"]
    for modality, items in expected["items"].items():
        ours = result["mm_kwargs"][modality]
        assert len(ours) == len(items)
        for item, wanted in zip(ours, items, strict=True):
            assert item.keys() == wanted["fields"].keys()
            for name, tensor in wanted["fields"].items():
                data = item[name].data
                data = data.to(dtype) if data.is_floating_point() else data
                assert str(data.dtype).removeprefix("torch.") == tensor["dtype"]
                assert list(data.shape) == tensor["shape"]
                if not expected.get("shapes_only"):
                    raw = data.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
                    assert hashlib.sha256(raw).hexdigest() == tensor["sha256"], name
