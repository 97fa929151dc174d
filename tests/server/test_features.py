from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.engine.protocol import SamplingParams
from lazydecode.engine.wire import decode_item, small_numbers
from lazydecode.inputs import (
    BatchedField,
    FlatField,
    MultiModalFieldElem,
    MultiModalInput,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from lazydecode.server.features import (
    JSON,
    MESSAGE_PACK,
    PIECE_BYTES,
    AnswerBody,
    Base64Text,
    build_answer,
)
from lazydecode.server.protocol import Payload
from lazydecode.server.routes.render import wants_message_pack


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_base64_of_chunks_is_that_of_their_sum(chunks: list[bytes]) -> None:
    text = Base64Text(chunks)
    joined = b"".join(text.pieces())
    assert joined == base64.b64encode(b"".join(chunks))
    assert len(text) == len(joined)


def test_large_chunks_come_in_pieces() -> None:
    data = np.random.default_rng(0).bytes(5_000_001)
    text = Base64Text([b"ab", memoryview(data), b"c"])
    pieces = list(text.pieces())
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert b"".join(pieces) == base64.b64encode(b"ab" + data + b"c")


def test_what_was_encoded_is_sent_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    original = Base64Text.pieces

    def kept(text: Base64Text) -> Iterator[bytes]:
        for piece in original(text):
            made.append(piece)
            yield piece

    monkeypatch.setattr(Base64Text, "pieces", kept)
    data = np.random.default_rng(0).bytes(1_000_000)
    body = AnswerBody([b'{"a":"', Base64Text([memoryview(data)]), b'","b":1}'])
    pieces = list(body.pieces())
    assert b"".join(pieces) == b'{"a":"' + base64.b64encode(data) + b'","b":1}'
    large = {id(piece) for piece in made if len(piece) == PIECE_BYTES}
    assert len(large) == 5
    assert large <= {id(piece) for piece in pieces}


def prompt_of(num_rows: int) -> tuple[MultiModalInput, torch.Tensor]:
    """A prompt with one item whose tensors it has, and one whose it has not."""
    pixels = torch.arange(num_rows * 40, dtype=torch.int64).to(torch.uint8).reshape(num_rows, 40)
    item = MultiModalKwargsItem(
        {
            "pixels": MultiModalFieldElem(pixels, FlatField()),
            "scale": MultiModalFieldElem(torch.tensor([0.5]), BatchedField(keep_on_cpu=True)),
        }
    )
    mask = np.array([True, False, True])
    prompt = MultiModalInput(
        type="multimodal",
        prompt_token_ids=[1, 2, 2, 2],
        mm_kwargs={"image": [item, None]},
        mm_hashes={"image": ["a", "b"]},
        mm_placeholders={"image": [PlaceholderRange(1, 3, mask), PlaceholderRange(1, 1)]},
    )
    return prompt, pixels


@pytest.mark.parametrize("num_rows", [3, 40_000])
def test_an_answer_is_valid_json_and_its_tensors_come_back(num_rows: int) -> None:
    prompt, pixels = prompt_of(num_rows)
    body = build_answer(
        prompt,
        {"request_id": "r", "model": "m", "stream": False},
        SamplingParams(max_tokens=1),
        payload="tensors",
        dtype=torch.bfloat16,
    )
    assert isinstance(body, AnswerBody)
    encoded = bytes(body)
    assert len(encoded) == body.num_bytes
    answer = json.loads(encoded)
    features = answer["features"]
    assert features["kwargs_data"]["image"][1] is None
    back = decode_item(base64.b64decode(features["kwargs_data"]["image"][0]))
    assert torch.equal(back["pixels"].data, pixels)
    assert back["scale"].data.dtype == torch.bfloat16
    assert features["mm_placeholders"]["image"] == [
        {"offset": 1, "length": 3, "is_embed": [True, False, True]},
        {"offset": 1, "length": 1},
    ]
    assert answer["sampling_params"] == {"max_tokens": 1}


@pytest.mark.parametrize("payload", ["tensors", "metadata", "none"])
@pytest.mark.parametrize("num_rows", [3, 40_000])
def test_a_packed_answer_says_what_the_json_says(num_rows: int, payload: Payload) -> None:
    prompt, _ = prompt_of(num_rows)
    plain, packed = (
        build_answer(
            prompt,
            {"request_id": "r", "model": "m", "stream": False},
            SamplingParams(max_tokens=1),
            payload=payload,
            dtype=torch.bfloat16,
            packed=is_packed,
        )
        for is_packed in (False, True)
    )
    assert (plain.content_type, packed.content_type) == (JSON, MESSAGE_PACK)
    encoded = bytes(packed)
    assert len(encoded) == packed.num_bytes
    assert max(map(len, packed.pieces())) <= PIECE_BYTES
    told = json.loads(bytes(plain))
    answer = msgspec.msgpack.decode(encoded)
    for name in ("kwargs_data", "mm_metadata"):
        items = answer["features"][name]
        if items is not None:
            items["image"] = [
                item and base64.b64encode(msgspec.msgpack.encode(item)).decode()
                for item in items["image"]
            ]
    assert answer == told


def test_numbers_of_an_item_are_read_from_its_tensors_once() -> None:
    pixels = MultiModalFieldElem(torch.zeros(2), FlatField())
    grid = MultiModalFieldElem(torch.tensor([[1, 4, 6]]), BatchedField(keep_on_cpu=True))
    sizes = MultiModalFieldElem([torch.tensor(0.5), [3]], BatchedField(keep_on_cpu=True))
    item = MultiModalKwargsItem({"pixels": pixels, "grid": grid, "sizes": sizes})
    numbers = small_numbers(item)
    assert numbers == {"grid": [[1, 4, 6]], "sizes": [0.5, [3]]}
    again = small_numbers(MultiModalKwargsItem({"grid": grid}))
    assert again["grid"] is numbers["grid"]
    copied = pickle.loads(pickle.dumps(item))
    assert isinstance(copied, MultiModalKwargsItem)
    assert small_numbers(copied) == numbers


def test_pieces_of_a_packed_answer_do_not_refer_to_the_tensors() -> None:
    prompt, pixels = prompt_of(40_000)
    body = build_answer(
        prompt,
        {"request_id": "r", "model": "m"},
        SamplingParams(max_tokens=1),
        payload="tensors",
        dtype=None,
        packed=True,
    )
    pieces = list(body.pieces())
    before = b"".join(pieces)
    pixels.zero_()
    assert b"".join(pieces) == before


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        ("application/msgpack", True),
        ("application/json;q=0.5, Application/X-MsgPack ; q=1", True),
        ("application/vnd.msgpack;q=0", False),
        ("application/msgpack; q=0.00", False),
    ],
)
def test_who_asks_for_message_pack(accept: str | None, wanted: bool) -> None:
    assert wants_message_pack(accept) is wanted
