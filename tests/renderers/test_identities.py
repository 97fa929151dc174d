"""What a uuid may stand for, over random requests: always bytes that came under it."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.cache import CONTESTED, MultiModalProcessorOnlyCache, UuidBindings
from lazydecode.errors import MissingMediaError, UuidConflictError
from lazydecode.media.base import MediaRef
from lazydecode.parse import MultiModalDataParser
from lazydecode.processing.context import BaseProcessingInfo, InputProcessingContext, ModelConfig
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.renderers.chat import MediaRequest
from lazydecode.renderers.identities import ConflictPolicy, ItemIdentities, ResolvedItems
from lazydecode.renderers.media import EncodedItem

INFO = BaseProcessingInfo(InputProcessingContext(ModelConfig("m"), None))


def item(uuid: str | None, data: bytes | None, index: int = 0) -> EncodedItem:
    ref = None if data is None else MediaRef(lambda: data, data)
    return EncodedItem("image", index, uuid, ref)


def inputs(items: list[EncodedItem], tenant: str | None = None, **options: Any) -> ProcessorInputs:
    parsed = MultiModalDataParser().parse_mm_data({"image": [each.ref for each in items]})
    return ProcessorInputs("", parsed, cache_salt=tenant, **options)


def resolve(
    identities: ItemIdentities, *items: EncodedItem, tenant: str | None = None
) -> ResolvedItems:
    return identities.resolve(items, inputs(list(items), tenant))


def content_hash(data: bytes, tenant: str | None = None) -> str:
    return inputs([item(None, data)], tenant).get_item_hash("image", 0, "m", "sha256")


Sent = list[tuple[str | None, bytes | None]]
one_item = st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from([b"1", b"2", None])).filter(
    lambda pair: pair != (None, None)
)
requests = st.lists(
    st.tuples(st.sampled_from(["x", "y", None]), st.lists(one_item, min_size=1, max_size=3)),
    max_size=12,
)


@given(requests, st.integers(1, 3) | st.just(1000))
def test_an_item_is_its_bytes_and_a_uuid_alone_is_the_only_bytes_that_came_under_it(
    sequence: list[tuple[str | None, Sent]], capacity: int
) -> None:
    identities = ItemIdentities(INFO, bindings=UuidBindings(capacity))
    seen: dict[tuple[str | None, str], set[bytes]] = defaultdict(set)
    for tenant, sent in sequence:
        items = [item(uuid, data, index) for index, (uuid, data) in enumerate(sent)]
        own: dict[str, set[bytes]] = defaultdict(set)
        for uuid, data in sent:
            if uuid is not None and data is not None:
                own[uuid].add(data)
        try:
            resolved = resolve(identities, *items, tenant=tenant)
        except MissingMediaError as exc:
            assert exc.index is not None
            uuid, data = sent[exc.index]
            assert data is None and uuid is not None
            # Never refused in vain, unless the name was forgotten.
            assert len(own[uuid] or seen[tenant, uuid]) != 1 or capacity < 1000
            continue
        for (uuid, data), mm_hash in zip(sent, resolved.hashes["image"], strict=True):
            if data is not None:
                assert mm_hash == content_hash(data, tenant)
                continue
            assert uuid is not None
            meant = own[uuid] or seen[tenant, uuid]
            assert mm_hash in {content_hash(one, tenant) for one in meant}
            assert len(meant) == 1 or capacity < 1000
        identities.bind(resolved.named)
        for uuid, one in own.items():
            seen[tenant, uuid] |= one


@pytest.mark.parametrize("conflict", ["miss", "error"])
def test_other_bytes_under_a_known_uuid(conflict: ConflictPolicy) -> None:
    identities = ItemIdentities(INFO, conflict=conflict)
    identities.bind(resolve(identities, item("u", b"1")).named)
    if conflict == "error":
        with pytest.raises(UuidConflictError, match="image at index 1") as caught:
            resolve(identities, item(None, b"3"), item("u", b"2", 1))
        assert (caught.value.modality, caught.value.index, caught.value.status) == ("image", 1, 400)
        assert resolve(identities, item("u", None)).hashes["image"] == [content_hash(b"1")]
        return
    other = resolve(identities, item("u", b"2"))
    assert other.hashes["image"] == [content_hash(b"2")]
    identities.bind(other.named)
    with pytest.raises(MissingMediaError, match="Different media"):
        resolve(identities, item("u", None))
    # Bytes still count: both pictures are what they are.
    for data in (b"1", b"2"):
        assert resolve(identities, item("u", data)).hashes["image"] == [content_hash(data)]


def test_two_media_under_one_uuid_within_a_request() -> None:
    strict = ItemIdentities(INFO, conflict="error")
    with pytest.raises(UuidConflictError, match="index 1"):
        resolve(strict, item("u", b"1"), item("u", b"2", 1))
    lenient = ItemIdentities(INFO)
    both = resolve(lenient, item("u", b"1"), item("u", b"2", 1))
    assert both.hashes["image"] == [content_hash(b"1"), content_hash(b"2")]
    with pytest.raises(MissingMediaError, match="index 2"):
        resolve(lenient, item("u", b"1"), item("u", b"2", 1), item("u", None, 2))


def test_of_two_requests_at_once_the_slower_one_is_told() -> None:
    identities = ItemIdentities(INFO, conflict="error")
    first, second = (resolve(identities, item("u", data)) for data in (b"1", b"2"))
    identities.bind(first.named)
    with pytest.raises(UuidConflictError):
        identities.bind(second.named)


def test_options_that_change_the_result_are_part_of_the_name() -> None:
    identities = ItemIdentities(INFO)
    sent = [item("u", b"1")]
    identities.bind(identities.resolve(sent, inputs(sent)).named)
    alone = [item("u", None)]
    for options in (
        {"media_io_kwargs": {"image": {"image_mode": "L"}}},
        {"hf_processor_mm_kwargs": {"max_pixels": 1}},
        {"processor_fingerprint": "f"},
        {"tenant": "x"},
    ):
        with pytest.raises(MissingMediaError):
            identities.resolve(alone, inputs(alone, **options))
    elsewhere = {"media_io_kwargs": {"video": {"num_frames": 2}}}
    assert identities.resolve(alone, inputs(alone, **elsewhere)).hashes["image"] == [
        content_hash(b"1")
    ]


def test_only_what_the_cache_holds_need_not_be_fetched() -> None:
    identities = ItemIdentities(INFO)
    cache = MultiModalProcessorOnlyCache(capacity_bytes=10_000)
    named = resolve(identities, item("u", b"1"), item("gone", b"2", 1)).named
    identities.bind(named)
    kwargs: Any = SimpleNamespace(nbytes=1)
    cache.get_and_update_item((kwargs, ()), named[0].mm_hash)
    before = cache.snapshot(), cache.make_stats()

    def held(*media: tuple[str | None, str | None]) -> list[bool]:
        parts = [
            MediaRequest("image", index, "", source, uuid=uuid)
            for index, (uuid, source) in enumerate(media)
        ]
        identities.find_held(parts, inputs([]), cache)
        return [part.is_held for part in parts]

    assert held(
        ("u", "http://h/a"),
        ("u", "FILE:///a"),
        ("u", "Data:image/png;base64,AA=="),
        ("u", None),
        (None, "http://h/a"),
        ("gone", "http://h/a"),
        ("new", "http://h/a"),
        ("new", None),
    ) == [True, True, False, False, False, False, False, False]
    with pytest.raises(MissingMediaError, match="index 1"):
        held(("u", None), ("gone", None))
    assert (cache.snapshot(), cache.make_stats()) == before


def test_the_least_recently_used_name_is_forgotten_first() -> None:
    bindings = UuidBindings(2)
    assert bindings.bind("a", "1", contest=True) and bindings.bind("b", "2", contest=True)
    assert bindings.get("a") == "1"
    assert bindings.bind("c", "3", contest=True)
    assert bindings.snapshot() == [("a", "1"), ("c", "3")]
    assert not bindings.bind("a", "4", contest=False)
    assert bindings.peek("a") == "1"
    assert not bindings.bind("a", "4", contest=True)
    assert bindings.snapshot() == [("c", "3"), ("a", CONTESTED)]
    bindings.clear()
    assert len(bindings) == 0 and bindings.peek("a") is None
