"""Tensors of `torch.save`: their values, and nothing that the file would have run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazydecode.errors import CorruptMediaError
from lazydecode.limits import DecodeLimits
from lazydecode.media.embeddings import EmbeddingMediaIO

VALUES = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes, **limits: Any) -> Any:
    return EmbeddingMediaIO(limits=DecodeLimits(**limits)).load_bytes(data)


def edited(data: bytes, change: Callable[[str, bytes], bytes], compression: int = 0) -> bytes:
    """The archive with other entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return out.getvalue()


def with_pickle(pickled: bytes) -> bytes:
    return edited(saved(VALUES), lambda n, data: pickled if n.endswith("data.pkl") else data)


@pytest.mark.parametrize(
    "tensor",
    [
        VALUES,
        VALUES.T,
        VALUES[1:, ::2],
        VALUES.double(),
        VALUES.half(),
        VALUES.long(),
        VALUES.to(torch.uint8),
        VALUES > 0.5,
        torch.nn.Parameter(VALUES),
        torch.zeros(0, 4),
    ],
)
def test_a_tensor_gives_its_values(tensor: torch.Tensor) -> None:
    loaded = load(saved(tensor))
    assert np.array_equal(loaded, tensor.detach().numpy())
    assert loaded.dtype == tensor.detach().numpy().dtype
    assert loaded.flags.writeable and loaded.flags.c_contiguous


def test_bfloat16_becomes_float32_exactly() -> None:
    tensor = (torch.arange(7) / 3).bfloat16()
    assert np.array_equal(load(saved(tensor)), tensor.float().numpy())


def test_tensors_by_name() -> None:
    loaded = load(saved({"embeds": VALUES.clone(), "grid": torch.tensor([1, 2, 2])}))
    assert np.array_equal(loaded["embeds"], VALUES.numpy())
    assert loaded["grid"].tolist() == [1, 2, 2]


def test_a_sparse_tensor_becomes_dense_within_the_limit() -> None:
    indices = torch.tensor([[0, 2, 2], [1, 0, 0]])
    sparse = torch.sparse_coo_tensor(
        indices, torch.tensor([1.0, 2.0, 3.0]), (3, 4), check_invariants=True
    )
    assert np.array_equal(load(saved(sparse)), sparse.to_dense().numpy())
    with pytest.raises(CorruptMediaError, match="48 bytes when dense"):
        load(saved(sparse), max_embedding_bytes=47)
    huge = torch.sparse_coo_tensor(indices, torch.ones(3), (2**40, 2**20), check_invariants=True)
    with pytest.raises(CorruptMediaError, match="when dense"):
        load(saved(huge))


@pytest.mark.parametrize("bad", [5, -1])
def test_sparse_indices_must_lie_within_the_size(bad: int) -> None:
    with torch.sparse.check_sparse_tensor_invariants(False):
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, bad]]), torch.ones(2), (3,))
        data = saved(sparse)
    with pytest.raises(CorruptMediaError, match="beyond its size"):
        load(data)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("lazydecode-was-here",)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (saved({"x": Bomb()}), "mkdir"),
        (with_pickle(pickle.dumps(Bomb(), 2)), "mkdir"),
        (with_pickle(pickle.dumps({"x": 1}, 4)), "not accepted"),
        (with_pickle(b"\x80\x02."), "."),
        (with_pickle(b"\x80\x02}"), "."),
        (with_pickle(b"\x80\x02K\x01\x86."), "takes more than it gave"),
        (with_pickle(b"\x80\x02ctorch\nFloatStorage\n)R."), "no plain tensor"),
        (saved([VALUES]), "EMPTY_LIST"),
        (saved({"a": VALUES, "b": VALUES}), "names a tensor twice"),
        (saved({"a": VALUES, "b": VALUES[1:]}), "share their storage"),
        (saved(VALUES.expand(5, 3, 4)), "does not fit"),
        (saved(VALUES.to(torch.complex64)), "ComplexFloatStorage"),
        (saved(torch.tensor([float("nan")])), "not finite"),
        (edited(saved(VALUES), lambda _, data: data, zipfile.ZIP_DEFLATED), "compressed"),
        (edited(saved(VALUES), lambda n, d: d[:-4] if n.endswith("data/0") else d), "does not fit"),
        (
            edited(saved(VALUES), lambda n, d: b"odd" if n.endswith("byteorder") else d),
            "byte order",
        ),
        (saved(VALUES)[:-30], "Failed to load embeddings"),
    ],
)
def test_anything_else_is_refused_and_nothing_runs(data: bytes, reason: str) -> None:
    with pytest.raises(CorruptMediaError, match=reason):
        load(data)
    assert not os.path.exists("lazydecode-was-here")


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, len(saved(VALUES)) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_gives_numbers_or_our_error(at: int, bit: int) -> None:
    data = bytearray(saved(VALUES))
    data[at] ^= 1 << bit
    try:
        loaded = load(bytes(data))
    except CorruptMediaError:
        return
    assert loaded.nbytes <= 2 * len(data)
