"""Embeddings from files: only finite plain numbers, and only as many as there are bytes."""

from __future__ import annotations

import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.errors import CorruptMediaError, LazyDecodeError, ValidationError
from lazydecode.media.base import derive_media_key
from lazydecode.media.embeddings import EmbeddingMediaIO, load_safetensors


def npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    return EmbeddingMediaIO().load_bytes_ref(data).decode()


def tensors(header: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(kind: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": offsets}


VALUES = np.arange(12, dtype=np.float32).reshape(3, 4) / 8


@pytest.mark.parametrize("kind", ["<f2", "<f4", "<f8", ">f4", "<i8", ">i2", "|u1", "|b1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_gives_its_values(kind: str, order: Any) -> None:
    array = np.array(VALUES, dtype=kind, order=order)
    loaded = load(npy(array))
    assert np.array_equal(loaded, array)
    assert loaded.dtype == array.dtype.newbyteorder("=")
    assert loaded.flags.writeable and loaded.flags.c_contiguous and loaded.dtype.isnative


def test_safetensors_gives_its_arrays_by_name() -> None:
    arrays = {"embeds": VALUES, "grid": np.array([[1, 2, 3]]), "half": VALUES.astype(np.float16)}
    loaded = load(safetensors.numpy.save(arrays, metadata={"format": "np"}))
    assert sorted(loaded) == sorted(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert np.array_equal(loaded[name], array)
        assert loaded[name].flags.writeable


def test_bfloat16_becomes_float32_exactly() -> None:
    raw = (VALUES.view(np.uint32) >> 16).astype("<u2").tobytes()
    loaded = load(tensors({"x": entry("BF16", [3, 4], [0, 24])}, raw))
    assert loaded["x"].dtype == np.float32
    assert np.array_equal(loaded["x"], VALUES)


def test_empty_arrays_are_arrays() -> None:
    assert load(npy(np.zeros((0, 4), np.float32))).shape == (0, 4)
    assert load(tensors({"x": entry("F32", [0, 4], [0, 0])}))["x"].shape == (0, 4)


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was run",)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("objects", npy(np.array([Bomb()], dtype=object), allow_pickle=True)),
        ("pickle", pickle.dumps(Bomb())),
        ("structured", npy(np.zeros(2, dtype=[("a", "f4")]))),
        ("text", npy(np.array(["text"]))),
        ("dates", npy(np.array(["2020-01-01"], dtype="M8[D]"))),
        ("complex", npy(np.zeros(2, np.complex64))),
        ("scalar", npy(np.float32(1))),
        ("nan", npy(np.array([1.0, np.nan]))),
        ("infinity", npy(np.array([np.inf], np.float16))),
        ("cut", npy(VALUES)[:-1]),
        ("longer", npy(VALUES) + b"x"),
        ("zip", b"PK\x03\x04" + bytes(100)),
        ("nothing", b""),
        ("magic only", b"\x93NUMPY"),
        ("version 3", npy(VALUES).replace(b"NUMPY\x01", b"NUMPY\x03", 1)),
        ("a huge shape", npy(VALUES).replace(b"(3, 4)", b"(999999999, 4)"[:6])),
    ],
)
def test_a_file_with_anything_else_is_refused(name: str, data: bytes) -> None:
    with pytest.raises(CorruptMediaError, match="Failed to load embeddings"):
        load(data)


@pytest.mark.parametrize(
    "data",
    [
        tensors({}),
        tensors({"x": 1}),
        tensors({"x": entry("F32", [2])}, bytes(4)),
        tensors({"x": entry("F8_E4M3", [4])}, bytes(4)),
        tensors({"x": entry(shape=[-1])}, bytes(4)),
        tensors({"x": entry(shape=[1.0])}, bytes(4)),
        tensors({"x": entry(shape=[True])}, bytes(4)),
        tensors({"x": entry(shape=[])}, bytes(4)),
        tensors({"x": entry(shape="1")}, bytes(4)),
        tensors({"x": entry(shape=[2**62, 4])}, bytes(4)),
        tensors({"x": entry(offsets=[0, 8])}, bytes(4)),
        tensors({"x": entry(offsets=[4, 0])}, bytes(4)),
        tensors({"x": entry(offsets=[-4, 0])}, bytes(4)),
        tensors({"x": entry(offsets=[0])}, bytes(4)),
        tensors({"x": entry(offsets=None)}, bytes(4)),
        tensors({"x": entry(), "y": entry()}, bytes(4)),
        tensors({"x": entry(offsets=[4, 8])}, bytes(8)),
        tensors({"x": entry()}, bytes(5)),
        tensors({"x": entry()}, struct.pack("<f", float("nan"))),
        tensors({"x": entry("BOOL", [4])}, b"\0\1\2\0"),
        tensors({f"x{n}": entry(shape=[0], offsets=[0, 0]) for n in range(1025)}),
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", 9) + b'{"a":1,]}',
        struct.pack("<Q", 2) + b"{" + b"\xff" * 2,
        struct.pack("<Q", 20_000) + b"{" + b'"a":{' * 3999 + b"     ",
    ],
)
def test_a_malformed_safetensors_file_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptMediaError, match="Failed to load embeddings"):
        load(data)


def test_a_name_that_stands_twice_is_refused() -> None:
    one = json.dumps(entry(shape=[1], offsets=[0, 4]))
    text = f'{{"x": {one}, "x": {one}}}'.encode()
    with pytest.raises(ValueError, match="twice"):
        load_safetensors(struct.pack("<Q", len(text)) + text + bytes(4))


@given(st.binary(max_size=120), st.sampled_from([b"\x93NUMPY\x01\x00", b"\x40\0\0\0\0\0\0\0{"]))
def test_any_bytes_are_read_or_refused(body: bytes, magic: bytes) -> None:
    try:
        load(magic + body)
    except LazyDecodeError as exc:
        assert "0x" not in str(exc)


def test_all_ways_in_and_the_key(tmp_path: Path) -> None:
    data = npy(VALUES)
    path = tmp_path / "x.npy"
    path.write_bytes(data)
    io_ = EmbeddingMediaIO()
    text = pybase64.b64encode(data).decode()
    for loaded in (
        io_.load_file(path),
        io_.load_base64("", text),
        io_.load_file_ref(path).decode(),
    ):
        assert np.array_equal(loaded, VALUES)
    ref = io_.load_base64_ref("", text)
    assert ref.key == derive_media_key(data, io_.get_decode_spec())
    assert EmbeddingMediaIO(extra=1).load_bytes_ref(data).key != ref.key
    with pytest.raises(ValidationError, match="embedding options"):
        EmbeddingMediaIO(extra=object())


def test_the_arrays_do_not_hold_the_payload() -> None:
    ref = EmbeddingMediaIO().load_bytes_ref(npy(VALUES))
    loaded: Any = ref.decode()
    assert loaded.base is None
    loaded[0, 0] = 5
    assert ref.decode()[0, 0] == 5  # type: ignore[index]
