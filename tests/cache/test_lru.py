"""The caches of processed items, each by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lazydecode.cache import (
    BaseMultiModalProcessorCache,
    CacheStats,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    item_nbytes,
)
from lazydecode.errors import CacheMissError
from lazydecode.inputs import BatchedField, MultiModalFieldElem, MultiModalKwargsItem


def item(num_floats: int, value: float = 0.0) -> MultiModalKwargsItem:
    tensor = torch.full((num_floats,), value)
    return MultiModalKwargsItem({"pixels": MultiModalFieldElem(tensor, BatchedField())})


SIZE = item_nbytes(item(100))
PROCESSOR_CACHES = [MultiModalProcessorOnlyCache, MultiModalProcessorSenderCache]


@pytest.fixture(params=PROCESSOR_CACHES, ids=["only", "sender"])
def cache(request: pytest.FixtureRequest) -> BaseMultiModalProcessorCache:
    made: BaseMultiModalProcessorCache = request.param(capacity_bytes=3 * SIZE)
    return made


def test_a_miss_stores_and_returns_what_was_given(cache: BaseMultiModalProcessorCache) -> None:
    given = (item(100), ["update"])
    assert cache.get_and_update_item(given, "a") is given
    assert cache.is_cached(["a", "b"]) == [True, False]
    assert cache.snapshot() == ["a"]


def test_a_hit_keeps_what_was_stored(cache: BaseMultiModalProcessorCache) -> None:
    first = (item(100, 1.0), ["first"])
    cache.get_and_update_item(first, "a")
    for again in (None, (item(100, 2.0), ["second"])):
        kwargs, updates = cache.get_and_update_item(again, "a")
        assert updates == ["first"]
        if isinstance(cache, MultiModalProcessorOnlyCache):
            assert kwargs is first[0]
        else:
            assert kwargs is None


def test_a_miss_without_an_item_is_our_own_bug(cache: BaseMultiModalProcessorCache) -> None:
    with pytest.raises(AssertionError, match="'a'"):
        cache.get_and_update_item(None, "a")


def test_asking_changes_no_order_and_counts_nothing(cache: BaseMultiModalProcessorCache) -> None:
    cache.get_and_update([(item(100), []), (item(100), [])], ["a", "b"])
    before = cache.make_stats()
    assert cache.is_cached_item("a")
    assert cache.snapshot() == ["a", "b"]
    assert cache.make_stats() == before == CacheStats(0, 2)
    cache.get_and_update_item(None, "a")
    assert cache.make_stats(delta=True) == CacheStats(1, 3)
    assert cache.make_stats(delta=True) == CacheStats(0, 0)


def test_touched_items_are_not_evicted_by_their_own_request(
    cache: BaseMultiModalProcessorCache,
) -> None:
    cache.get_and_update([(item(100), [])] * 3, ["a", "b", "c"])
    for mm_hash in ("new", "a"):
        cache.touch_sender_cache_item(mm_hash)
    cache.get_and_update_item((item(100), []), "new")
    assert cache.snapshot() == ["c", "a", "new"]
    cache.release_sender_touches()
    assert cache.get_and_update_item(None, "a")[1] == []


def test_an_oversized_item_is_returned_but_not_stored(cache: BaseMultiModalProcessorCache) -> None:
    cache.get_and_update_item((item(100), []), "a")
    big = (item(1000), [])
    assert cache.get_and_update_item(big, "big") is big
    assert cache.snapshot() == ["a"]


def test_forgetting(cache: BaseMultiModalProcessorCache) -> None:
    cache.get_and_update([(item(100), [])] * 3, ["a", "b", "c"])
    cache.invalidate(["b", "x"])
    assert cache.snapshot() == ["a", "c"]
    cache.clear_cache()
    assert cache.snapshot() == []
    cache.close()


def test_a_failed_request_leaves_no_trace(cache: BaseMultiModalProcessorCache) -> None:
    cache.get_and_update([(item(100), [])] * 3, ["a", "b", "c"])

    def fail() -> None:
        with cache.transaction():
            cache.touch_sender_cache_item("a")
            cache.get_and_update_item((item(200), []), "d")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert cache.snapshot() == ["a", "b", "c"]


def test_items_without_tensors_count_too() -> None:
    cache = MultiModalProcessorOnlyCache(capacity_bytes=item_nbytes(item(0)) * 2)
    for mm_hash in "abc":
        cache.get_and_update_item((item(0), []), mm_hash)
    assert cache.snapshot() == ["b", "c"]
    assert cache.used_bytes == cache.capacity_bytes


@pytest.mark.parametrize("kind", [*PROCESSOR_CACHES, MultiModalReceiverCache])
def test_the_size_comes_from_the_model_configuration(kind: type) -> None:
    config = SimpleNamespace(
        get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=0.5)
    )
    assert kind(config).capacity_bytes == 2**29
    with pytest.raises(TypeError, match="capacity_bytes"):
        kind()


def test_the_receiver_names_all_that_it_lacks_and_stores_the_rest() -> None:
    cache = MultiModalReceiverCache(capacity_bytes=10 * SIZE)
    one = item(100, 1.0)
    assert cache.get_and_update_item(one, "a") is one
    assert cache.get_and_update_item(None, "a") is one
    assert cache.get_and_update_item(item(100, 2.0), "a") is one
    with pytest.raises(CacheMissError) as caught:
        cache.get_and_update_item(None, "x")
    assert caught.value.hashes == ["x"]
    with pytest.raises(CacheMissError) as caught:
        cache.get_and_update_request(
            {"image": [None, None, None, item(100)], "audio": [None]},
            {"image": ["a", "x", "y", "b"], "audio": ["x"]},
        )
    assert caught.value.hashes == ["x", "y"]
    assert cache.snapshot() == ["a", "b"]
    assert cache.get_and_update_request({"image": [None]}, {"image": ["a"]}) == {"image": [one]}
