"""The LRU order, and taking back what was done to it."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.cache import CacheStats, LRUCache


def filled(capacity: int = 10, **sizes: int) -> LRUCache[str]:
    cache: LRUCache[str] = LRUCache(capacity)
    for key, size in sizes.items():
        cache.put(key, key.upper(), size)
    return cache


def test_the_least_recently_used_goes_first() -> None:
    cache = filled(a=4, b=4, c=2)
    assert cache.get("a") == "A"
    cache.put("d", "D", 3)
    assert cache.keys_in_order() == ["c", "a", "d"]
    assert cache.used == 9
    assert "b" not in cache


def test_asking_changes_nothing() -> None:
    cache = filled(a=4, b=4)
    assert "a" in cache
    assert cache.peek("a") == "A"
    assert cache.keys_in_order() == ["a", "b"]
    assert cache.stats() == CacheStats(0, 0)


def test_a_touch_makes_young_and_ignores_what_is_absent() -> None:
    cache = filled(a=1, b=1, c=1)
    cache.touch("a")
    cache.touch("x")
    assert cache.keys_in_order() == ["b", "c", "a"]


def test_an_entry_larger_than_the_cache_evicts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cache = filled(a=4, b=4)
    assert not cache.put("big", "BIG", 11)
    assert not cache.put("bigger", "BIGGER", 12)
    assert cache.keys_in_order() == ["a", "b"]
    assert len([r for r in caplog.records if r.name.startswith("lazydecode.cache")]) == 1
    assert cache.put("whole", "WHOLE", 10)
    assert cache.keys_in_order() == ["whole"]


def test_putting_again_replaces() -> None:
    cache = filled(a=4, b=4)
    cache.put("a", "new", 5)
    assert (cache.peek("a"), cache.used, cache.keys_in_order()) == ("new", 9, ["b", "a"])


def test_stats_count_gets_and_deltas_start_anew() -> None:
    cache = filled(a=1)
    cache.get("a")
    cache.get("x")
    assert cache.stats() == CacheStats(1, 2)
    assert cache.stats(delta=True) == CacheStats(1, 2)
    cache.get("a")
    assert cache.stats(delta=True) == CacheStats(1, 1)
    assert cache.stats() == CacheStats(2, 3)
    assert cache.stats().hit_ratio == pytest.approx(2 / 3)
    assert CacheStats().hit_ratio == 0.0


def test_a_cleared_cache_frees_its_values_at_once() -> None:
    class Value:
        pass

    cache: LRUCache[Value] = LRUCache(10)
    values = [Value() for _ in range(3)]
    refs = [weakref.ref(value) for value in values]
    for number, value in enumerate(values):
        cache.put(str(number), value, 3)
    del values, value
    gc.disable()
    try:
        cache.pop("1")
        assert [ref() is None for ref in refs] == [False, True, False]
        cache.clear()
        assert [ref() is None for ref in refs] == [True, True, True]
    finally:
        gc.enable()
    assert (len(cache), cache.used) == (0, 0)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        LRUCache(-1)


def test_clearing_within_a_transaction_is_refused() -> None:
    cache = filled(a=1)
    with pytest.raises(RuntimeError, match="transaction"), cache.transaction():
        cache.clear()
    assert cache.keys_in_order() == ["a"]


def test_a_transaction_within_another_is_part_of_it() -> None:
    cache = filled(a=1)

    def run() -> None:
        with cache.transaction():
            with cache.transaction():
                cache.put("b", "B", 1)
            assert cache.keys_in_order() == ["a", "b"]
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert cache.keys_in_order() == ["a"]


keys = st.sampled_from("abcdefg")
steps = st.lists(
    st.tuples(st.sampled_from(["put", "get", "touch", "pop"]), keys, st.integers(0, 12)),
    max_size=25,
)


def do(cache: LRUCache[str], operations: list[tuple[str, str, int]]) -> None:
    for name, key, size in operations:
        if name == "put":
            cache.put(key, key, size)
        else:
            getattr(cache, name)(key)


def state(cache: LRUCache[str]) -> tuple[list[str], int, int]:
    backwards = []
    node = cache._ring.older
    while node is not cache._ring:
        backwards.append(node.key)
        node = node.older
    assert backwards[::-1] == cache.keys_in_order()
    assert set(backwards) == set(cache._nodes)
    return cache.keys_in_order(), cache.used, len(cache)


@given(steps, steps)
def test_a_failed_transaction_leaves_no_trace(before: list, within: list) -> None:
    cache: LRUCache[str] = LRUCache(20)
    do(cache, before)
    expected = state(cache)

    def run() -> None:
        with cache.transaction():
            do(cache, within)
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert state(cache) == expected
    with cache.transaction():
        do(cache, within)
    fresh: LRUCache[str] = LRUCache(20)
    do(fresh, before + within)
    assert state(cache) == state(fresh)


@given(steps)
def test_the_order_is_that_of_a_plain_model(operations: list[tuple[str, str, int]]) -> None:
    cache: LRUCache[str] = LRUCache(20)
    model: dict[str, int] = {}
    for name, key, size in operations:
        do(cache, [(name, key, size)])
        if name == "put":
            model.pop(key, None)
            if size <= 20:
                while sum(model.values()) + size > 20:
                    del model[next(iter(model))]
                model[key] = size
        elif name == "pop":
            model.pop(key, None)
        elif key in model:
            model[key] = model.pop(key)
        assert cache.keys_in_order() == list(model)
        assert cache.used == sum(model.values()) <= 20
