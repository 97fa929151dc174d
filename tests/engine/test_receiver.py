"""The engine's end of the mirror: applied in order, complete about what is missing."""

from __future__ import annotations

import pytest
import torch

from lazydecode.cache import MultiModalReceiverCache
from lazydecode.engine.protocol import EngineRequest
from lazydecode.engine.receiver import Receiver
from lazydecode.errors import CacheMissError, EngineError, PluginBrokenError
from lazydecode.inputs import FlatField, MultiModalFieldElem, MultiModalKwargsItem, PlaceholderRange


def item(value: int, size: int = 10) -> MultiModalKwargsItem:
    data = torch.full((size,), value, dtype=torch.uint8)
    return MultiModalKwargsItem({"x": MultiModalFieldElem(data, FlatField())})


def request(
    items: dict[str, list[MultiModalKwargsItem | None]],
    hashes: dict[str, list[str]],
    offsets: dict[str, list[int]] | None = None,
    **options: bool,
) -> EngineRequest:
    places = offsets or {m: list(range(len(given))) for m, given in items.items()}
    ranges = {m: [PlaceholderRange(offset, 1) for offset in places[m]] for m in places}
    return EngineRequest("r", [0] * 10, items, hashes, ranges, **options)  # type: ignore[arg-type]


def receiver(capacity_bytes: int = 10_000) -> Receiver:
    return Receiver(MultiModalReceiverCache(capacity_bytes=capacity_bytes))


def first_values(placed: list[object]) -> list[int]:
    return [int(one.tensors["x"].data[0]) for one in placed]  # type: ignore[attr-defined]


def test_what_was_sent_once_is_there_the_next_time() -> None:
    one = receiver()
    sent, num_cached = one.receive(request({"image": [item(7)]}, {"image": ["a"]}))
    assert (first_values(sent), num_cached) == ([7], 0)
    again, num_cached = one.receive(request({"image": [None]}, {"image": ["a"]}))
    assert (first_values(again), num_cached) == ([7], 1)
    assert one.snapshot() == ["a"]


def test_items_come_in_the_order_of_the_prompt() -> None:
    placed, _ = receiver().receive(
        request(
            {"image": [item(1), item(3)], "audio": [item(2)]},
            {"image": ["a", "c"], "audio": ["b"]},
            {"image": [1, 7], "audio": [4]},
        )
    )
    assert first_values(placed) == [1, 2, 3]
    assert [one.modality for one in placed] == ["image", "audio", "image"]


def test_the_same_item_twice_is_sent_once() -> None:
    placed, num_cached = receiver().receive(
        request({"image": [item(5), None]}, {"image": ["a", "a"]})
    )
    assert first_values(placed) == [5, 5]
    assert num_cached == 1


def test_all_missing_items_are_named_together_and_the_others_applied() -> None:
    one = receiver()
    one.receive(request({"image": [item(1)]}, {"image": ["old"]}))
    with pytest.raises(CacheMissError) as caught:
        one.receive(
            request(
                {"image": [None, item(2), None], "audio": [None, None]},
                {"image": ["x", "new", "old"], "audio": ["y", "x"]},
            )
        )
    assert caught.value.hashes == ["x", "y"]
    assert one.snapshot() == ["new", "old"]


def test_touches_keep_a_requests_own_items() -> None:
    one = receiver(capacity_bytes=2 * (1000 + 256) + 100)
    one.receive(request({"image": [item(1, 1000)]}, {"image": ["a"]}))
    one.receive(request({"image": [item(2, 1000)]}, {"image": ["b"]}))
    placed, _ = one.receive(request({"image": [item(3, 1000), None]}, {"image": ["c", "a"]}))
    assert first_values(placed) == [3, 1]
    assert one.snapshot() == ["c", "a"]


def test_items_that_pass_the_cache_by_leave_no_trace() -> None:
    one = receiver()
    placed, num_cached = one.receive(
        request({"image": [item(4)]}, {"image": ["a"]}, cache_items=False)
    )
    assert (first_values(placed), num_cached, one.snapshot()) == ([4], 0, [])
    with pytest.raises(CacheMissError):
        one.receive(request({"image": [None]}, {"image": ["a"]}, cache_items=False))


def test_numbers_that_do_not_agree_are_our_own_fault() -> None:
    with pytest.raises(EngineError, match="1 image items, 2 hashes and 1 places"):
        receiver().receive(request({"image": [item(1)]}, {"image": ["a", "b"]}))


def test_clear_forgets_everything() -> None:
    one = receiver()
    one.receive(request({"image": [item(1)]}, {"image": ["a"]}))
    one.clear()
    assert one.snapshot() == []


class OddCache(MultiModalReceiverCache):
    def touch_receiver_cache_item(self, mm_hash: str) -> None:
        raise KeyError(mm_hash)


def test_a_cache_of_another_package_is_named_when_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = Receiver(OddCache(capacity_bytes=10_000))
    name = "tests.engine.test_receiver:OddCache"
    with pytest.raises(PluginBrokenError, match=f"the processor cache '{name}' failed: KeyError"):
        odd.receive(request({"image": [item(7)]}, {"image": ["a"]}))
    assert name in caplog.text


def test_the_end_of_a_front_end_is_the_end_of_its_cache() -> None:
    class Outside(MultiModalReceiverCache):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    cache = Outside(capacity_bytes=1)
    Receiver(cache).close()
    assert cache.is_closed
