"""Results on disk: the same again in any process, and nothing that is not a result."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazydecode.cache import MultiModalProcessorOnlyCache, MultiModalProcessorSenderCache
from lazydecode.cache.store import ItemStore
from lazydecode.cache.stored import StoredCache, StoredResults
from lazydecode.inputs import BatchedField, FlatField, MultiModalFieldElem, MultiModalKwargsItem
from lazydecode.models.expansion import ItemText
from lazydecode.models.tokenization import CollapsedText

TEXT = [ItemText("image", CollapsedText("<i>"), (1, 2), (3, (4, 5)))]


def item(value: int = 1) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {
            "pixels": MultiModalFieldElem(
                torch.full((5, 3), value, dtype=torch.bfloat16), FlatField()
            ),
            "grid": MultiModalFieldElem(torch.tensor([1, 2, 3]), BatchedField(keep_on_cpu=True)),
            "none": MultiModalFieldElem([torch.empty(0, 4), 7, None], BatchedField()),
            "view": MultiModalFieldElem(torch.arange(12).reshape(3, 4).T, BatchedField()),
        }
    )


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.fixture
def store(tmp_path: Path) -> ItemStore:
    return ItemStore(tmp_path / "store", max_bytes=100_000)


def only_file(store: ItemStore) -> Path:
    (path,) = store._folder._folder.iterdir()
    return path


def test_what_is_stored_comes_back_to_the_bit(store: ItemStore) -> None:
    assert store.get("a") is None
    store.put("a", (item(), TEXT))
    found = store.get("a")
    assert found is not None
    kwargs, updates = found
    assert updates == TEXT and kwargs.keys() == item().keys()
    for name, elem in item().items():
        assert kwargs[name].field == elem.field and same(kwargs[name].data, elem.data)
    store.clear()
    assert store.get("a") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:30],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:],
    ],
)
def test_a_damaged_entry_is_dropped(store: ItemStore, damage: Any) -> None:
    store.put("a", (item(), TEXT))
    path = only_file(store)
    path.write_bytes(damage(path.read_bytes()))
    assert store.get("a") is None and not path.exists()


class Shell:
    def __reduce__(self) -> Any:
        return os.system, ("exit 3",)


def test_an_entry_runs_nothing(store: ItemStore, tmp_path: Path) -> None:
    for content in (Shell(), np.dtype, pickle.Pickler):
        store.put("a", (item(), [content]))
        path = only_file(store)
        assert store.get("a") is None and not path.exists()


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    store = ItemStore(tmp_path, max_bytes=4000)
    store.put("a", (item(), TEXT))
    size = only_file(store).stat().st_size
    for number in range(1 + 4000 // size):
        store.put(str(number), (item(), TEXT))
    assert store.get(str(4000 // size)) is not None
    assert len(list(tmp_path.iterdir())) <= 4000 // size


def test_a_result_made_elsewhere_is_a_hit_and_goes_to_the_mirror_with_tensors(
    store: ItemStore,
) -> None:
    theirs = StoredResults(store)
    other = StoredCache(MultiModalProcessorOnlyCache(capacity_bytes=10_000), theirs)
    other.get_and_update_item((item(), TEXT), "a")
    theirs.close()

    results = StoredResults(store)
    cache = StoredCache(MultiModalProcessorSenderCache(capacity_bytes=10_000), results)
    assert not cache.is_cached_item("a")
    loan, second = results.borrow(), results.borrow()
    loan.load(["a", "b"])
    second.load(["a"])
    assert cache.is_cached(["a", "b"]) == [True, False] and len(cache) == 0
    with pytest.raises(RuntimeError), cache.transaction():
        assert cache.get_and_update_item(None, "a")[0] is not None
        raise RuntimeError
    assert cache.snapshot() == []
    loan.end()
    kwargs, updates = cache.get_and_update_item(None, "a")
    assert kwargs is not None and same(kwargs["grid"].data, item()["grid"].data)
    assert updates == TEXT
    second.end()
    assert cache.get_and_update_item(None, "a") == (None, TEXT)
    assert results._borrowed == {} and results._pending == {}
    cache.clear_cache()
    assert not cache.is_cached_item("a")
    assert store.get("a") is not None
    results.close()


def test_a_folder_that_cannot_be_listed_any_more_is_logged(
    store: ItemStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        store.put("a", (item(), TEXT))  # the first write looks what is there
    assert "could not make room: Permission denied" in caplog.text
    assert store.get("a") is not None


def test_a_cache_over_a_store_ends_what_the_cache_itself_holds(store: ItemStore) -> None:
    class Outside(MultiModalProcessorOnlyCache):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    first = Outside(capacity_bytes=1000)
    StoredCache(first, StoredResults(store)).close()
    assert first.is_closed
