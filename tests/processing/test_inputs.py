"""Identities of items, and inputs over forks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lazydecode.hasher import MultiModalHasher
from lazydecode.media.base import DecodeSpec, MediaRef
from lazydecode.parse import MultiModalDataItems, MultiModalDataParser
from lazydecode.processing.inputs import ProcessorInputs
from tests.processing.helpers import only_cache


def never() -> object:
    raise AssertionError("decoded")


def ref(data: bytes = b"x", **options: Any) -> MediaRef[Any]:
    return MediaRef(never, data, DecodeSpec({"mode": "RGB"}), **options)


def inputs_of(uuids: Any = None, **fields: Any) -> ProcessorInputs:
    data = {key: fields.pop(key) for key in list(fields) if key in ("image", "audio", "video")}
    return ProcessorInputs("", MultiModalDataParser().parse_mm_data(data), uuids, **fields)


def hashes(**fields: Any) -> dict[str, list[str]]:
    return inputs_of(**fields).get_mm_hashes("m", "sha256")


def sha(**factors: Any) -> str:
    return MultiModalHasher.hash_kwargs("sha256", **factors)


def test_a_reference_is_hashed_by_key_alone() -> None:
    media = ref()
    expected = {"image": [sha(model_id="m", image=media.key)]}
    assert hashes(image=[media]) == expected
    assert hashes(image=[media], media_io_kwargs={"image": {"image_mode": "L"}}) == expected


def test_decoded_items_are_hashed_with_their_decode_options() -> None:
    array = np.zeros((2, 2, 3), np.uint8)
    options = {"image_mode": "L"}
    assert hashes(image=[array]) == {"image": [sha(model_id="m", image=array)]}
    assert hashes(image=[array], media_io_kwargs={"image": options, "audio": {"a": 1}}) == {
        "image": [sha(model_id="m", image=array, media_io_kwargs={"image": options})]
    }
    assert hashes(image=[array], media_io_kwargs={"image": {}, "video": {"fps": 1}}) == hashes(
        image=[array]
    )


def test_a_uuid_is_the_identity_unless_something_else_counts() -> None:
    uuids = {"image": ["id", "", None]}
    media = [ref(), ref(), ref()]
    assert hashes(image=media, uuids=uuids)["image"][:2] == ["id", ""]
    assert hashes(image=media, uuids=uuids)["image"][2] == hashes(image=[ref()])["image"][0]
    options = {"image": {"image_mode": "L"}}
    assert hashes(image=media, uuids=uuids, media_io_kwargs=options)["image"] == [
        sha(model_id="m", image="id", media_io_kwargs=options),
        sha(model_id="m", image="", media_io_kwargs=options),
        hashes(image=[ref()])["image"][0],
    ]


def test_an_item_without_data_hashes_as_with_data() -> None:
    uuids = {"image": ["id"]}
    for extra in ({}, {"cache_salt": "t"}, {"hf_processor_mm_kwargs": {"size": 3}}):
        assert hashes(image=[None], uuids=uuids, **extra) == hashes(
            image=[ref()], uuids=uuids, **extra
        )


def test_every_modality_is_there_and_one_without_uuids_has_none() -> None:
    result = hashes(image=[ref()], audio=[], video=[ref(), ref(b"y")], uuids={"image": ["id"]})
    assert result["image"] == ["id"]
    assert result["audio"] == []
    assert len(set(result["video"])) == 2


def test_processor_options_of_other_modalities_do_not_count() -> None:
    options = {
        "images_kwargs": {"a": 1},
        "videos_kwargs": {"b": 2},
        "audio_kwargs": {"c": 3},
        "flat": 4,
    }
    for modality, group in (
        ("image", "images_kwargs"),
        ("video", "videos_kwargs"),
        ("audio", "audio_kwargs"),
    ):
        media = MultiModalDataParser().parse_mm_data({modality: [ref()]})[modality].get_raw(0)
        kept = {group: options[group], "flat": 4}
        assert hashes(**{modality: [ref()]}, hf_processor_mm_kwargs=options) == {
            modality: [sha(model_id="m", **{modality: media}, mm_processor_kwargs=kept)]
        }
    others = {name: options[name] for name in ("videos_kwargs", "audio_kwargs")}
    assert hashes(image=[ref()], hf_processor_mm_kwargs=others) == hashes(image=[ref()])


def test_chunks_keep_all_options() -> None:
    items = MultiModalDataParser().parse_mm_data({"vision_chunk": [{"type": "image"}]})
    io_options = {"image": {"image_mode": "L"}}
    options = {"videos_kwargs": {"b": 2}}
    inputs = ProcessorInputs("", items, None, options, io_options)
    assert inputs.get_mm_hashes("m", "sha256") == {
        "vision_chunk": [
            sha(
                model_id="m",
                vision_chunk={"type": "image"},
                media_io_kwargs=io_options,
                mm_processor_kwargs=options,
            )
        ]
    }


@pytest.mark.parametrize("field", ["cache_salt", "processor_fingerprint"])
@pytest.mark.parametrize("uuids", [None, {"image": ["id"]}])
def test_tenants_and_processors_are_kept_apart(field: str, uuids: Any) -> None:
    results = [
        hashes(image=[ref()], uuids=uuids, **({field: value} if value else {}))["image"][0]
        for value in ("", "a", "b")
    ]
    assert len(set(results)) == 3


def test_an_identity_from_elsewhere_is_kept_apart_by_decode_settings() -> None:
    rgb = ref(key=b"i" * 16, key_covers_spec=False)
    grey = MediaRef(never, b"x", DecodeSpec({"mode": "L"}), key=b"i" * 16, key_covers_spec=False)
    other_bytes = ref(b"y", key=b"i" * 16, key_covers_spec=False)
    assert hashes(image=[rgb]) == hashes(image=[other_bytes])
    assert hashes(image=[rgb]) != hashes(image=[grey])


def test_hashes_depend_on_model_and_algorithm() -> None:
    inputs = inputs_of(image=[ref()])
    assert inputs.get_mm_hashes("m", "sha256") != inputs.get_mm_hashes("n", "sha256")
    assert len(inputs.get_mm_hashes("m", "sha512")["image"][0]) == 128


def test_forks_are_released_without_touching_the_callers() -> None:
    media, array = ref(), np.zeros((2, 2, 3))
    inputs = inputs_of(image=[media, None, array], audio=[ref(b"a")], cache=only_cache())
    forked = inputs.fork_media_refs()
    items, originals = forked.mm_data_items["image"], inputs.mm_data_items["image"]
    fork = items.get_raw(0)
    assert isinstance(fork, MediaRef) and fork is not media
    assert (fork.key, fork.spec) == (media.key, media.spec) and fork.data is media.data
    assert items.get_raw(1) is None
    assert items.get_raw(2) is array
    assert originals.get_raw(0) is media
    fork.release()
    assert media.data == b"x"
    assert forked.cache is inputs.cache
    assert type(items) is type(originals)


def test_embeddings_are_not_for_the_cache() -> None:
    tensor = torch.zeros(1, 2, 3)
    cache = only_cache()
    assert inputs_of(image=[ref()], cache=cache).can_use_cache
    assert not inputs_of(image=[ref()]).can_use_cache
    assert not inputs_of(image=tensor, audio=[ref()], cache=cache).can_use_cache
    assert inputs_of(cache=cache).can_use_cache
    forked = inputs_of(image=tensor, cache=cache).fork_media_refs()
    assert forked.mm_data_items["image"].get_passthrough_data()["image_embeds"] is tensor


def test_fields_come_in_the_documented_order() -> None:
    items = MultiModalDataItems()
    inputs = ProcessorInputs([1], items, {"image": []}, {"a": 1}, {"image": {}}, None)
    assert inputs.mm_data_items is items
    assert inputs.hf_processor_mm_kwargs == {"a": 1}
    assert inputs.media_io_kwargs == {"image": {}}
    assert ProcessorInputs("", items).mm_uuid_items is None
