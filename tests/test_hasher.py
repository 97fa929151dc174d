"""Digests: equal for equal values, different for different ones, whatever their kind."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lazydecode.hasher import MultiModalHasher
from lazydecode.media.base import DecodeSpec, MediaRef
from tests.builders import make_exif, quadrants


def digest(**kwargs: Any) -> str:
    return MultiModalHasher.hash_kwargs("sha256", **kwargs)


def never() -> object:
    raise AssertionError("hashing decoded a reference")


def test_a_reference_hashes_as_its_key_and_is_not_decoded() -> None:
    ref = MediaRef(never, b"payload", DecodeSpec({"mode": "RGB"}))
    assert digest(image=ref) == digest(image=ref.key)
    assert not ref.is_decoded
    assert digest(image=[{"a": ref}]) == digest(image=[{"a": ref.key}])


def with_exif(exif: bytes) -> Image.Image:
    image = quadrants()
    image.info["exif"] = exif
    return image


def test_an_image_with_a_uuid_hashes_as_the_uuid() -> None:
    identity = uuid.UUID(int=7)
    exif = make_exif(image_id=identity).tobytes()
    assert digest(image=with_exif(exif)) == digest(image=identity.bytes)
    plain = digest(image=quadrants())
    assert digest(image=with_exif(make_exif(image_id="no uuid").tobytes())) == plain
    assert digest(image=with_exif(b"Exif\0\0broken")) == plain


def test_order_of_names_does_not_matter() -> None:
    assert digest(a=1, b={"x": 1, "y": 2}) == digest(b={"y": 2, "x": 1}, a=1)


def test_lists_and_tuples_are_the_same() -> None:
    assert digest(a=(1, "x")) == digest(a=[1, "x"])


def test_every_pair_of_these_differs() -> None:
    palette = quadrants().convert("P")
    other_palette = palette.copy()
    other_palette.putpalette([255 - value for value in palette.getpalette() or []])
    transparent = palette.copy()
    transparent.info["transparency"] = 0
    values: list[Any] = [
        None, "", b"", [], {}, 0, 0.0, False, "0", b"0", 1, 1.0, True, "1", [None], [[]], [{}],
        ["ab"], ["a", "b"], {"a": "b"}, {"a": {"b": 1}}, {"a.b": 1}, {"a": None}, ["a", None],
        -1, float("inf"), float("nan"), "\ud800", 2**70,
        quadrants(), quadrants().convert("L"), quadrants((48, 64)), palette, other_palette,
        transparent,
        np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((2, 3), np.float32), np.zeros(6),
        np.ones((2, 3)), np.zeros((0, 3)), np.zeros((3, 0)), np.float32(0), np.zeros((1, 2, 3)),
        torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(2, 3, dtype=torch.float16), torch.zeros(()), torch.zeros(0, 3),
    ]  # fmt: skip
    digests = {digest(value=value) for value in values}
    assert len(digests) == len(values)
    assert digest() not in digests
    for one, other in itertools.pairwise(["a", "ab", "abc"]):
        assert digest(**{one: "x"}) != digest(**{other: "x"})
    assert digest(a="bc") != digest(ab="c")


def test_layout_in_memory_does_not_matter() -> None:
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    assert digest(x=array.T) == digest(x=np.ascontiguousarray(array.T))
    assert digest(x=array[:, ::2]) == digest(x=array[:, ::2].copy())
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    assert digest(x=tensor.permute(2, 0, 1)) == digest(x=tensor.permute(2, 0, 1).contiguous())
    grad = tensor.float().requires_grad_()
    assert digest(x=grad) == digest(x=grad.detach())
    memory = memoryview(b"abcd")
    assert digest(x=memory) == digest(x=b"abcd") == digest(x=bytearray(b"abcd"))


def test_unknown_objects_are_pickled_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    value = complex(1, 2)
    assert digest(x=value) == digest(x=complex(1, 2))
    assert digest(x=value) != digest(x=complex(2, 1))
    assert "complex" in caplog.text
    assert digest(x=np.array([None, "a"], dtype=object)) != digest(x=[None, "a"])


@pytest.mark.parametrize("algorithm", ["sha256", "sha512", "blake3"])
def test_algorithms(algorithm: str) -> None:
    value = MultiModalHasher.hash_kwargs(algorithm, x=1)
    assert value == MultiModalHasher.hash_kwargs(algorithm, x=1)
    assert len(value) == (128 if algorithm == "sha512" else 64)


def test_the_algorithm_is_required_and_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="algorithm"):
        MultiModalHasher.hash_kwargs(x=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"'md5'.*blake3, sha256, sha512"):
        MultiModalHasher.hash_kwargs("md5", x=1)
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    with pytest.raises(ValueError, match="blake3"):
        MultiModalHasher.hash_kwargs("blake3", x=1)


def test_digests_do_not_change() -> None:
    """Keys are shared between machines and versions: a change of layout must be meant."""
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    value = digest(
        model_id="m",
        image=image,
        options={"fps": 2.0, "flags": [True, None, "é"]},
        array=np.arange(3, dtype=np.int64),
    )
    assert value == "ffbad70530efa68bcbb5a22d864b466b3081b5b45b634612f6c9544ddc039087"


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


def same(one: object, other: object) -> bool:
    """Equality that tells types apart; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))  # type: ignore[arg-type]
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()  # type: ignore[arg-type]
    return one == other


@given(values, values)
def test_digests_are_equal_exactly_for_equal_values(one: object, other: object) -> None:
    assert (digest(x=one) == digest(x=other)) == same(one, other)
