"""DecodeSpec and media keys: canonical, framed, and the same in every process."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.media.identity import (
    EMPTY_SPEC,
    DecodeSpec,
    DigestInSlices,
    PayloadDigest,
    derive_media_key,
)

# A small alphabet with what escaping and UTF-8 treat differently.
LETTERS = 'ab1 "\\\n\x00\x7fß€😀'

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(LETTERS, max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.", max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
settings_dicts = st.dictionaries(st.text(LETTERS, max_size=4), json_values, max_size=4)


@given(settings_dicts)
def test_canonical_form_is_sorted_compact_utf8_json(settings: dict[str, Any]) -> None:
    spec = DecodeSpec(settings)
    text = spec.canonical_bytes().decode("utf-8")
    assert json.loads(text) == settings
    assert text == json.dumps(
        settings, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    assert DecodeSpec(spec.settings) == spec
    assert hash(DecodeSpec(spec.settings)) == hash(spec)


@given(settings_dicts)
def test_order_of_settings_does_not_matter(settings: dict[str, Any]) -> None:
    assert DecodeSpec(dict(reversed(settings.items()))) == DecodeSpec(settings)


@given(settings_dicts, settings_dicts)
def test_specs_are_equal_only_for_equal_canonical_bytes(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    same = DecodeSpec(left).canonical_bytes() == DecodeSpec(right).canonical_bytes()
    assert (DecodeSpec(left) == DecodeSpec(right)) is same


@given(settings_dicts)
def test_pickle_keeps_a_spec(settings: dict[str, Any]) -> None:
    spec = DecodeSpec(settings)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_numbers_and_booleans_stay_distinct() -> None:
    specs = {DecodeSpec({"a": value}) for value in (1, 1.0, True, "1", "true", None)}
    assert len(specs) == 6


def test_tuples_come_back_as_lists() -> None:
    assert DecodeSpec({"a": (1, (2, 3))}).settings == {"a": [1, [2, 3]]}
    assert DecodeSpec({"a": (1, 2)}) == DecodeSpec({"a": [1, 2]})


def test_subclasses_of_json_types_are_taken_by_value() -> None:
    class Mode(enum.StrEnum):
        RGB = "RGB"

    class Level(enum.IntEnum):
        HIGH = 3

    spec = DecodeSpec({"mode": Mode.RGB, "level": Level.HIGH, "rate": np.float64(0.5)})
    assert spec.settings == {"mode": "RGB", "level": 3, "rate": 0.5}
    assert spec == DecodeSpec({"mode": "RGB", "level": 3, "rate": 0.5})


def test_settings_are_a_snapshot_and_each_read_is_fresh() -> None:
    source: dict[str, Any] = {"list": [1]}
    spec = DecodeSpec(source)
    source["list"].append(2)
    spec.settings["list"].append(3)
    assert spec.settings == {"list": [1]}


def test_extensions_that_are_equal_in_python_alone_stay_distinct() -> None:
    spec = DecodeSpec({"a": 1})
    values: list[Any] = [1, 1.0, True, 0, 0.0, -0.0, False, [1], [True], None, "1"]
    for _ in range(2):  # made, then remembered
        extended = [spec.extend(b=value) for value in values]
        assert extended == [DecodeSpec({"a": 1, "b": value}) for value in values]
        assert len(set(extended)) == len(values)


def test_extend_merges_and_leaves_the_original() -> None:
    spec = DecodeSpec({"a": 1, "b": 2})
    assert spec.extend(b=3, c=4).settings == {"a": 1, "b": 3, "c": 4}
    assert spec.settings == {"a": 1, "b": 2}


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        EMPTY_SPEC._canonical = b"{}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [math.nan], {"x": math.inf}])
def test_numbers_that_are_not_finite_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="finite"):
        DecodeSpec({"a": value})


@pytest.mark.parametrize("value", [b"x", {1, 2}, object(), np.int64(1), {1: 2}, {None: 1}, 1j])
def test_values_that_are_not_json_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        DecodeSpec({"a": value})


def test_a_structure_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="too deeply"):
        DecodeSpec({"a": endless})


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        DecodeSpec({"a": "\ud800"})


# -- keys


def test_key_is_sha256_over_payload_then_spec_each_behind_its_length() -> None:
    spec = DecodeSpec({"a": 1})
    canonical = b'{"a":1}'
    framed = (3).to_bytes(8, "little") + b"abc" + (7).to_bytes(8, "little") + canonical
    assert derive_media_key(b"abc", spec) == hashlib.sha256(framed).digest()


@given(st.binary(max_size=64), settings_dicts)
def test_a_shared_digest_gives_the_same_keys(data: bytes, settings: dict[str, Any]) -> None:
    digest = PayloadDigest(data)
    spec = DecodeSpec(settings)
    first, again = digest.key(spec), digest.key(spec)
    assert first == again == derive_media_key(data, spec)
    assert digest.content() == PayloadDigest(data).content()
    assert digest.num_bytes == len(data)


@given(st.binary(max_size=64), st.lists(st.integers(1, 40), min_size=64, max_size=64))
def test_a_digest_in_slices_is_that_of_the_whole(data: bytes, sizes: list[int]) -> None:
    slices = DigestInSlices(data)
    taken = 0
    for size in sizes:
        taken += size
        digest = slices.take(size)
        if digest is not None:
            break
    assert digest is not None
    assert taken - size < max(1, len(data)) <= max(1, taken)
    assert digest.num_bytes == len(data)
    assert digest.content() == PayloadDigest(data).content()


@given(st.lists(st.tuples(st.binary(max_size=24), settings_dicts), min_size=2, max_size=6))
def test_distinct_inputs_have_distinct_keys(inputs: list[tuple[bytes, dict[str, Any]]]) -> None:
    distinct = {(data, DecodeSpec(settings).canonical_bytes()) for data, settings in inputs}
    keys = {derive_media_key(data, DecodeSpec(settings)) for data, settings in inputs}
    assert len(keys) == len(distinct)


def test_content_cannot_shift_the_boundary_to_the_spec() -> None:
    spec = DecodeSpec({"a": 1})
    frame = (len(spec.canonical_bytes())).to_bytes(8, "little") + spec.canonical_bytes()
    assert derive_media_key(b"data" + frame, EMPTY_SPEC) != derive_media_key(b"data", spec)
    assert derive_media_key(b"data" + spec.canonical_bytes(), EMPTY_SPEC) != derive_media_key(
        b"data", spec
    )


def test_key_is_the_same_under_every_hash_seed() -> None:
    program = (
        "from lazydecode.media.identity import DecodeSpec, derive_media_key\n"
        "spec = DecodeSpec({c: [{d: 1.5 for d in 'zyx'}] for c in 'qwertyß'})\n"
        "print(derive_media_key(b'payload', spec).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    # A fixed value: a change means that every key in every cache and store changes.
    assert outputs == {"eb7e9aabcebf33d8642f8af3552c50769864eaf834f9ee6454ff8afed9b8c41a\n"}
