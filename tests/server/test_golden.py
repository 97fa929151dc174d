"""The render route against answers of another implementation: ids, ranges, tensors, wire form."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lazydecode.cli.main import cli
from tests.server.harness import Server

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = ("qwen2_5_vl", "qwen2_audio")
KIND_NAMES = {
    "MultiModalBatchedField": "batched",
    "MultiModalFlatField": "flat",
    "MultiModalSharedField": "shared",
}


def load_cases(family: str) -> list[Any]:
    requests = json.loads((GOLDEN / f"{family}.requests.json").read_text())
    answers = json.loads((GOLDEN / f"{family}.answers.json").read_text())["answers"]
    by_id = {answer["id"]: answer for answer in answers}
    return [
        pytest.param(family, case["body"], by_id[case["id"]], id=f"{family}-{case['id']}")
        for case in requests
    ]


def fill_in(value: Any) -> Any:
    """Replace `{dataurl:NAME}` and `{base64:NAME}` by the file."""
    if isinstance(value, dict):
        return {key: fill_in(item) for key, item in value.items()}
    if isinstance(value, list):
        return [fill_in(item) for item in value]
    for kind, prefix in (("dataurl", "data:application/octet-stream;base64,"), ("base64", "")):
        if isinstance(value, str) and value.startswith(f"{{{kind}:"):
            name = value.removeprefix(f"{{{kind}:").removesuffix("}")
            return prefix + base64.b64encode((GOLDEN / "media" / name).read_bytes()).decode()
    return value


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """Render-only servers of the golden models, which have no weights."""
    vision = Server(GOLDEN / "models" / "qwen2_5_vl", engine="none", served_model_name=("golden",))
    audio = Server(GOLDEN / "models" / "qwen2_audio", engine="none")
    with vision, audio:
        yield {"qwen2_5_vl": vision, "qwen2_audio": audio}


def read_entry(entry: str) -> dict[str, Any]:
    """An independent reader of one entry: field -> (dtype, shape, bytes, field rule)."""

    def ext(code: int, data: memoryview) -> bytes:
        assert code == 3
        return bytes(data)

    decoded = msgspec.msgpack.decode(base64.b64decode(entry, validate=True), ext_hook=ext)
    return {
        name: (*field["data"], field["field"]) if isinstance(field["data"], list) else field
        for name, field in decoded.items()
    }


@pytest.mark.parametrize("round_number", [1, 2])
@pytest.mark.parametrize(
    ("family", "body", "expected"), [case for f in FAMILIES for case in load_cases(f)]
)
def test_the_answer_equals_the_golden_one(
    servers: dict[str, Server], family: str, body: Any, expected: Any, round_number: int
) -> None:
    response = servers[family].render(fill_in(body))
    assert response.status_code == expected["status"], response.text
    answer = response.json()
    assert answer["token_ids"] == expected["token_ids"]
    features = answer["features"]
    if "mm_placeholders" not in expected:
        assert features is None
        return
    assert features["mm_placeholders"] == expected["mm_placeholders"]
    counts = {modality: len(hashes) for modality, hashes in features["mm_hashes"].items()}
    assert counts == expected["modalities"]
    if body.get("mm_payload") == "none":
        assert features["kwargs_data"] is None
        assert features["mm_metadata"] is None
        return
    assert features["kwargs_data"].keys() == expected["items"].keys()
    for modality, items in expected["items"].items():
        entries = features["kwargs_data"][modality]
        assert len(entries) == len(items)
        for entry, item in zip(entries, items, strict=True):
            check_item(read_entry(entry), item, shapes_only=expected.get("shapes_only", False))
    chars = {
        modality: [len(part) for part in parts]
        for modality, parts in features["mm_metadata"].items()
    }
    assert chars == expected["mm_metadata_chars"]


def check_item(fields: dict[str, Any], expected: Any, *, shapes_only: bool) -> None:
    assert fields.keys() == expected["fields"].keys()
    for name, wanted in expected["fields"].items():
        dtype, shape, data, rule = fields[name]
        assert (dtype, shape) == (wanted["dtype"], wanted["shape"]), name
        assert rule[0] == KIND_NAMES[expected["field_kinds"][name]]
        if not shapes_only:
            assert hashlib.sha256(data).hexdigest() == wanted["sha256"], name
    if "wire_base64" in expected and not shapes_only:
        wire = read_entry(expected["wire_base64"])
        assert {name: field[:3] for name, field in wire.items()} == {
            name: field[:3] for name, field in fields.items()
        }


def test_the_answer_has_the_fields_that_consumers_read(servers: dict[str, Server]) -> None:
    answer = (
        servers["qwen2_5_vl"]
        .render(
            {
                "model": "golden",
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 3,
                "temperature": 0.5,
                "cache_salt": "tenant",
            }
        )
        .json()
    )
    assert answer["request_id"].startswith("chatcmpl-")
    assert answer["model"] == "golden"
    assert answer["features"] is None
    assert answer["sampling_params"] == {"max_tokens": 3, "temperature": 0.5}
    assert answer["stream"] is False
    assert answer["priority"] == 0
    assert answer["cache_salt"] == "tenant"


def test_a_render_only_server_refuses_to_generate(servers: dict[str, Server]) -> None:
    response = servers["qwen2_5_vl"].post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
    )
    assert response.status_code == 400
    assert "/v1/chat/completions/render" in response.json()["error"]["message"]


def test_the_second_round_decoded_nothing(servers: dict[str, Server]) -> None:
    body = fill_in(
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "{dataurl:photo.jpg}"}},
                        {"type": "video_url", "video_url": {"url": "{dataurl:clip.mp4}"}},
                    ],
                }
            ]
        }
    )
    server = servers["qwen2_5_vl"]
    first = server.render(body).json()
    before = server.decodes("image"), server.decodes("video")
    assert server.render(body).json()["features"] == first["features"]
    assert (server.decodes("image"), server.decodes("video")) == before


def test_the_command_gives_the_routes_answer(servers: dict[str, Server], tmp_path: Path) -> None:
    from click.testing import CliRunner

    case = load_cases("qwen2_5_vl")[1].values[1]
    body = fill_in(case)
    (tmp_path / "request.json").write_text(json.dumps(body))
    routed = servers["qwen2_5_vl"].render(body).json()
    for payload in ("tensors", "none"):
        result = CliRunner().invoke(
            cli,
            [
                "render",
                str(GOLDEN / "models" / "qwen2_5_vl"),
                str(tmp_path / "request.json"),
                "--payload",
                payload,
                "-o",
                str(tmp_path / "answer.json"),
            ],
        )
        assert result.exit_code == 0, result.output
        answer = json.loads((tmp_path / "answer.json").read_text())
        assert answer["token_ids"] == routed["token_ids"]
        if payload == "tensors":
            assert answer["features"] == routed["features"]
        else:
            assert answer["features"]["mm_hashes"] == routed["features"]["mm_hashes"]
            assert answer["features"]["kwargs_data"] is None
