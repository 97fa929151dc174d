"""Sender and receiver caches stay equal, whatever requests, failures and restarts come.

The test drives the real caches through the real merge step; the way between them is a queue, so
the receiver may be any number of requests behind.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lazydecode.cache import (
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    item_nbytes,
)
from lazydecode.errors import CacheMissError
from lazydecode.inputs import BatchedField, MultiModalFieldElem, MultiModalKwargsItem
from lazydecode.processing.merge import ProcessedRequest, merge_with_cache
from lazydecode.processing.outputs import ItemOutput

SIZES = {"a": 10, "b": 20, "c": 30, "d": 30, "e": 40, "f": 50, "g": 60, "h": 10, "huge": 400}
"""Hash -> floats of the item. At most 100 fit; `huge` never does."""


def make_item(mm_hash: str) -> MultiModalKwargsItem:
    tensor = torch.full((SIZES[mm_hash],), float(sorted(SIZES).index(mm_hash)))
    return MultiModalKwargsItem({"x": MultiModalFieldElem(tensor, BatchedField())})


ITEMS = {mm_hash: make_item(mm_hash) for mm_hash in SIZES}
CAPACITY = sum(sorted(item_nbytes(ITEMS[name]) for name in "abcde")) - 40


class NoDataError(Exception):
    """The client sent an identity alone, and the item is gone."""


@dataclass
class Message:
    processed: ProcessedRequest
    hashes: dict[str, list[str]]
    with_data: bool


requests = st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=7)


class Mirror(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.sender = MultiModalProcessorSenderCache(capacity_bytes=CAPACITY)
        self.receiver = MultiModalReceiverCache(capacity_bytes=CAPACITY)
        self.queue: deque[Message] = deque()
        self.is_apart = False

    def process(self, hashes: dict[str, list[str]], *, with_data: bool) -> ProcessedRequest:
        """What phase 2 does to the cache."""
        flags = {name: self.sender.is_cached(group) for name, group in hashes.items()}
        outputs: dict[str, ItemOutput] = {}
        for name, group in hashes.items():
            for mm_hash, is_hit in zip(group, flags[name], strict=True):
                if not is_hit:
                    if not with_data:
                        raise NoDataError
                    outputs[mm_hash] = ItemOutput(ITEMS[mm_hash], [mm_hash])

        def process_evicted(modality: str, position: int) -> None:
            if not with_data:
                raise NoDataError
            mm_hash = hashes[modality][position]
            outputs[mm_hash] = ItemOutput(ITEMS[mm_hash], [mm_hash])

        processed = merge_with_cache(self.sender, hashes, flags, outputs, process_evicted)
        for name, group in hashes.items():
            assert [list(update) for update in processed.updates[name]] == [[h] for h in group]
        return processed

    @rule(images=requests, audio=st.lists(st.sampled_from("abh"), max_size=2), data=st.booleans())
    def request(self, images: list[str], audio: list[str], data: bool) -> None:
        hashes = {"image": images, "audio": audio}
        before = self.sender.snapshot()
        try:
            with self.sender.transaction():
                processed = self.process(hashes, with_data=data)
        except NoDataError:
            assert self.sender.snapshot() == before
        else:
            self.queue.append(Message(processed, hashes, data))

    @rule(images=requests)
    def fail_after_the_merge(self, images: list[str]) -> None:
        """The prompt had too few placeholders."""
        before, used = self.sender.snapshot(), self.sender.used_bytes
        try:
            with self.sender.transaction():
                self.process({"image": images}, with_data=True)
                raise KeyError
        except KeyError:
            pass
        assert (self.sender.snapshot(), self.sender.used_bytes) == (before, used)

    @rule(images=requests)
    def cancel_before_phase_2(self, images: list[str]) -> None:
        self.sender.is_cached(images)

    @precondition(lambda self: self.queue)
    @rule()
    def deliver(self) -> None:
        message = self.queue.popleft()
        for _ in range(8):
            try:
                received = self.receiver.get_and_update_request(
                    message.processed.mm_kwargs, message.hashes
                )
            except CacheMissError as exc:
                assert self.is_apart
                # Repaired by sending again, behind what is under way already.
                self.sender.invalidate(exc.hashes)
                if not message.with_data:
                    return
                while self.queue:
                    self.deliver()
                message.processed = self.process(message.hashes, with_data=True)
            else:
                break
        else:
            raise AssertionError("the repair does not end")
        for name, group in message.hashes.items():
            for item, mm_hash in zip(received[name], group, strict=True):
                assert item is ITEMS[mm_hash]

    @rule()
    def restart_the_engine(self) -> None:
        """Requests under way are lost; both sides begin empty."""
        self.queue.clear()
        self.receiver = MultiModalReceiverCache(capacity_bytes=CAPACITY)
        self.sender.clear_cache()
        self.is_apart = False

    @rule()
    def clear_both(self) -> None:
        while self.queue:
            self.deliver()
        self.sender.clear_cache()
        self.receiver.clear_cache()
        self.is_apart = False

    @rule(mm_hashes=st.lists(st.sampled_from(sorted(SIZES)), max_size=3))
    def force_apart(self, mm_hashes: list[str]) -> None:
        assume(set(mm_hashes) & set(self.receiver.snapshot()))
        self.receiver.invalidate(mm_hashes)
        self.is_apart = True

    @rule(mm_hashes=st.lists(st.sampled_from(sorted(SIZES)), max_size=3))
    def invalidate_both(self, mm_hashes: list[str]) -> None:
        while self.queue:
            self.deliver()
        self.sender.invalidate(mm_hashes)
        self.receiver.invalidate(mm_hashes)

    @invariant()
    def sizes_hold(self) -> None:
        for cache in (self.sender, self.receiver):
            assert cache.used_bytes == sum(item_nbytes(ITEMS[name]) for name in cache.snapshot())
            assert cache.used_bytes <= CAPACITY

    @invariant()
    def both_are_equal_when_nothing_is_under_way(self) -> None:
        if not self.queue and not self.is_apart:
            assert self.sender.snapshot() == self.receiver.snapshot()
            assert self.sender.used_bytes == self.receiver.used_bytes


TestMirror = Mirror.TestCase
TestMirror.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_forced_difference_heals_under_pressure() -> None:
    """What the receiver holds beyond the sender is older than all that the sender believes in."""
    mirror = Mirror()
    mirror.start()
    for name in "abcd":
        mirror.request([name], [], True)
        mirror.deliver()
    mirror.receiver.invalidate(["b"])
    mirror.is_apart = True
    mirror.request(["a", "b", "c"], [], True)
    mirror.deliver()
    for names in ("efgh", "abcd", "gfed"):
        mirror.request(list(names), [], True)
        mirror.deliver()
        assert mirror.receiver.snapshot()[-len(mirror.sender.snapshot()) :] == (
            mirror.sender.snapshot()
        )
    assert mirror.receiver.snapshot() == mirror.sender.snapshot()
