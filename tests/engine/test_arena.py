"""Shared memory: extents that never overlap, loans that outlast eviction, and a full house."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazydecode.engine.arena import ArenaView, ExtentAllocator, Notices, SharedArena
from lazydecode.engine.wire import tensor_bytes, tensor_from_buffer

KIB = 1024


# -- extents


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 30)), max_size=60))
def test_extents_never_overlap_and_all_come_back(steps: list[tuple[int, int]]) -> None:
    allocator = ExtentAllocator(4096)
    lent: dict[int, int] = {}
    for size, which in steps:
        if which < len(lent):
            start = sorted(lent)[which]
            allocator.free(start)
            del lent[start]
            continue
        start = allocator.allocate(size)
        if start is None:
            continue
        assert start % 64 == 0
        assert start + size <= 4096
        for other, length in lent.items():
            assert start + size <= other or other + length <= start
        lent[start] = max(size, 1)
    for start in lent:
        allocator.free(start)
    assert allocator.used_bytes == 0
    assert allocator.allocate(4096) == 0  # joined to one again


def test_low_addresses_are_used_again_first() -> None:
    allocator = ExtentAllocator(1000 * 64)
    first, second, third = (allocator.allocate(64) for _ in range(3))
    assert (first, second, third) == (0, 64, 128)
    allocator.free(64)
    assert allocator.allocate(65) == 192
    assert allocator.allocate(1) == 64


def test_the_peak_is_that_of_the_time_since_it_was_asked_for() -> None:
    allocator = ExtentAllocator(1000 * 64)
    for start in [allocator.allocate(64) for _ in range(5)][1:]:
        assert start is not None
        allocator.free(start)
    assert [allocator.take_peak(), allocator.take_peak()] == [320, 64]
    assert allocator.allocate(64) == 64
    allocator.free(64)
    allocator.free(0)
    assert [allocator.take_peak(), allocator.take_peak()] == [128, 0]


def test_what_does_not_fit_is_refused() -> None:
    allocator = ExtentAllocator(128)
    assert allocator.allocate(129) is None
    assert allocator.allocate(128) == 0
    assert allocator.allocate(1) is None
    assert ExtentAllocator(0).allocate(1) is None
    with pytest.raises(KeyError):
        allocator.free(64)


# -- both ends


@pytest.fixture
def ends() -> Iterator[tuple[SharedArena, ArenaView]]:
    arena = SharedArena.create(1024 * KIB)
    assert arena is not None
    yield arena, ArenaView(os.dup(arena.fd), arena.size)
    arena.close()


def lend(arena: SharedArena, view: ArenaView, tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor_bytes(tensor)
    offset = arena.place(raw)
    assert offset is not None
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor_from_buffer(name, list(tensor.shape), view.view(offset, len(raw)))


def test_what_is_placed_is_seen_without_a_copy(ends: tuple[SharedArena, ArenaView]) -> None:
    arena, view = ends
    sent = torch.arange(5000, dtype=torch.int32).reshape(50, 100)
    seen = lend(arena, view, sent)
    assert seen.equal(sent)
    os.pwrite(arena.fd, b"\x63\0\0\0", 0)
    assert int(seen[0, 0]) == 99


def test_an_extent_is_lent_until_its_last_user_dies(ends: tuple[SharedArena, ArenaView]) -> None:
    arena, view = ends
    whole = lend(arena, view, torch.arange(5000))
    part = whole[100:200].reshape(10, 10)
    del whole
    gc.collect()
    assert view.take_released() == []
    assert int(part[0, 0]) == 100
    del part
    gc.collect()
    released = view.take_released()
    assert released == [0]
    arena.release(released)
    assert arena.lent_bytes == 0
    assert view.take_released() == []


def test_a_full_arena_says_so_once_and_serves_again(
    ends: tuple[SharedArena, ArenaView], caplog: pytest.LogCaptureFixture
) -> None:
    arena, view = ends
    tensor = torch.zeros(400 * KIB, dtype=torch.uint8)
    held = [lend(arena, view, tensor) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        assert arena.place(tensor_bytes(tensor)) is None
        assert arena.place(tensor_bytes(tensor)) is None
    assert len([r for r in caplog.records if "are full" in r.message]) == 1
    held.pop()
    gc.collect()
    arena.release(view.take_released())
    assert arena.place(tensor_bytes(tensor)) is not None


def test_a_peak_is_given_back_once_it_is_long_past(ends: tuple[SharedArena, ArenaView]) -> None:
    arena, view = ends
    held = [lend(arena, view, torch.full((10_000,), n, dtype=torch.int64)) for n in range(10)]
    taken = os.fstat(arena.fd).st_blocks
    assert taken * 512 >= 800_000
    del held[2:]
    for number in range(2 * 256):
        arena.release(view.take_released())
        assert int(lend(arena, view, torch.full((10_000,), number))[-1]) == number
    assert 240_000 <= os.fstat(arena.fd).st_blocks * 512 < 300_000
    assert [int(tensor[9_999]) for tensor in held] == [0, 1]
    assert os.fstat(arena.fd).st_size == arena.size
    again = [lend(arena, view, torch.full((10_000,), n, dtype=torch.int64)) for n in range(10)]
    assert [int(tensor[9_999]) for tensor in again] == list(range(10))


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse to write further into any file, memory files included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_that_the_system_cannot_give_is_no_crash(
    ends: tuple[SharedArena, ArenaView], caplog: pytest.LogCaptureFixture
) -> None:
    arena, _ = ends
    data = memoryview(bytes(10 * KIB))
    with no_file_beyond(4 * KIB):
        assert arena.place(data) is None
        assert arena.place(data) is None
    assert "no memory left to share with the engine ([Errno 27] File too large)" in caplog.text
    assert len([r for r in caplog.records if r.name.startswith("lazydecode.engine")]) == 1
    assert arena.lent_bytes == 0


def test_arenas_that_share_their_notices_say_each_once(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    create = partial(SharedArena.create, peer="the workers", notices=notices)
    arenas = [create(64), create(64)]
    for arena in arenas:
        assert arena is not None
        assert arena.place(memoryview(bytes(65))) is None
        arena.close()
    with no_file_beyond(KIB):
        assert create(4 * KIB) is None
        assert create(4 * KIB) is None
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "the 0 MiB of memory shared with the workers are full",
        "no shared memory for the workers ([Errno 27] File too large)",
    ]


def test_without_memory_files_there_is_no_arena(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(name: str) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "memfd_create", refused)
    with caplog.at_level(logging.WARNING):
        assert SharedArena.create(1000) is None
    assert "no shared memory" in caplog.text
    monkeypatch.delattr(os, "memfd_create")
    assert SharedArena.create(1000) is None


def test_a_closed_arena_takes_nothing() -> None:
    arena = SharedArena.create(1000)
    assert arena is not None
    arena.close()
    arena.close()
    assert arena.place(memoryview(b"x")) is None


def test_memory_that_cannot_be_mapped_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    fd = os.memfd_create("test")
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        ArenaView(fd, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
