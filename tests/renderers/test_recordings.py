"""Recordings in pieces: cut once, decoded once, shared, and let go of."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from lazydecode.errors import CorruptMediaError, LazyDecodeError, MediaTooLargeError
from lazydecode.media.audio import Audio, AudioMediaIO
from lazydecode.media.base import MediaRef, derive_media_key
from lazydecode.media.budget import ByteBudget
from lazydecode.media.executor import MediaExecutor
from lazydecode.media.silence import CutRule
from lazydecode.renderers.recordings import Recording, Recordings
from lazydecode.renderers.timeline import Timeline
from tests.builders import make_wav

RATE = 4000
RULE = CutRule(2.0, 1.0)


class CountingIO(AudioMediaIO):
    """Counts its decodes, which wait for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_decodes = 0
        self.go = threading.Event()
        self.go.set()

    def load_bytes(self, data: bytes) -> Audio:
        self.num_decodes += 1
        assert self.go.wait(120)
        return super().load_bytes(data)


def wav(seconds: float) -> bytes:
    noise = np.random.default_rng(0).uniform(-1, 1, (int(seconds * RATE), 1))
    return make_wav(noise, rate=RATE)


@pytest.fixture
async def executor() -> AsyncIterator[MediaExecutor]:
    executor = MediaExecutor(4)
    yield executor
    await asyncio.to_thread(executor.shutdown)


@pytest.fixture
def budget() -> ByteBudget:
    return ByteBudget(1 << 20)


@pytest.fixture
def recordings(executor: MediaExecutor, budget: ByteBudget) -> Recordings:
    return Recordings(budget, max_bytes=1 << 19, executor=executor)


async def test_a_short_recording_is_one_item_with_its_own_identity(
    recordings: Recordings, budget: ByteBudget
) -> None:
    io = CountingIO()
    ref = io.load_bytes_ref(wav(1.5))
    async with recordings.open(ref) as recording:
        plan = await recording.plan(RULE, Timeline())
        whole = recording.whole_ref(plan)
        assert (plan.cuts, io.num_decodes, budget.held_bytes) == ((), 0, 0)
        assert (whole.key, whole.spec) == (ref.key, ref.spec)
        samples, rate = await asyncio.to_thread(whole.decode)
        assert (len(samples), rate) == (1.5 * RATE, RATE)


async def test_pieces_have_identities_of_file_and_range(
    recordings: Recordings, budget: ByteBudget
) -> None:
    io = CountingIO()
    ref = io.load_bytes_ref(wav(5.0))
    timeline = Timeline()
    async with recordings.open(ref) as recording:
        plan = await recording.plan(RULE, timeline)
        pieces = plan.pieces()
        assert [piece.start for piece in pieces] == [0, *plan.cuts]
        assert pieces[-1].stop == 5 * RATE
        assert budget.held_bytes >= 5 * RATE * 4
        refs = [recording.piece_ref(piece) for piece in pieces]
        for piece, piece_ref in zip(pieces, refs, strict=True):
            spec = ref.spec.extend(start=piece.start, stop=piece.stop)
            assert piece_ref.key == derive_media_key(ref.key, spec)
        assert len({r.key for r in refs} | {ref.key}) == len(refs) + 1
        whole, _ = AudioMediaIO().load_bytes(ref.data)
        parts = [await asyncio.to_thread(r.renew().decode) for r in refs]
        np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), whole)
        assert io.num_decodes == 1
    assert (budget.held_bytes, recordings.num_open) == (0, 0)
    [item] = timeline.items
    assert "decode" in item.seconds
    async with recordings.open(io.load_bytes_ref(wav(5.0))) as recording:
        assert await recording.plan(RULE, Timeline()) == plan
        assert (io.num_decodes, recording.is_decoded) == (1, False)
        # Cut by another rule, it is another matter.
        await recording.plan(CutRule(1.0, 0.5), Timeline())
        assert io.num_decodes == 2


async def test_requests_at_the_same_time_share_one_decode(recordings: Recordings) -> None:
    io = CountingIO()
    io.go.clear()
    inside = asyncio.Event()

    async def use() -> int:
        async with recordings.open(io.load_bytes_ref(wav(5.0))) as recording:
            inside.set()
            return len((await recording.plan(RULE, Timeline())).pieces())

    tasks = [asyncio.create_task(use()) for _ in range(16)]
    await inside.wait()
    tasks[0].cancel()  # the one that decodes: the others go on with what it began
    io.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert len(set(results[1:])) == 1
    assert (io.num_decodes, recordings.num_open) == (1, 0)


async def test_a_file_that_cannot_be_decoded_leaves_nothing_behind(
    recordings: Recordings, budget: ByteBudget
) -> None:
    data = make_wav(np.zeros((8 * RATE, 1)) + 0.5, rate=RATE, format="FLAC")
    broken = data[: len(data) // 2]
    with pytest.raises(CorruptMediaError, match="Failed to decode audio media at index 0"):
        async with recordings.open(AudioMediaIO().load_bytes_ref(broken)) as recording:
            await recording.plan(RULE, Timeline())
    assert (budget.held_bytes, recordings.num_open) == (0, 0)


async def test_a_recording_over_the_budget_is_refused_before_it_is_decoded(
    recordings: Recordings,
) -> None:
    io = CountingIO()
    with pytest.raises(MediaTooLargeError, match="when decoded; at most 524288 are allowed"):
        async with recordings.open(io.load_bytes_ref(wav(40.0))) as recording:
            await recording.plan(RULE, Timeline())
    assert io.num_decodes == 0


async def test_a_header_that_understates_is_found_out(recordings: Recordings) -> None:
    class LyingIO(AudioMediaIO):
        def probe_header(self, data: bytes) -> Any:
            header = super().probe_header(data)
            assert header is not None
            return type(header)(header.rate_hz, 1, 1.0, RATE)

    async with recordings.open(LyingIO().load_bytes_ref(wav(5.0))) as recording:
        plan = await recording.plan(RULE, Timeline())
        ref: MediaRef[Audio] = recording.whole_ref(plan)
        with pytest.raises(LazyDecodeError, match=r"longer than its header states: 5\.00 s"):
            await asyncio.to_thread(ref.decode)


async def test_a_file_whose_length_is_not_stated_is_decoded_for_it(
    recordings: Recordings,
) -> None:
    data = bytearray(wav(1.5))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", 0xFFFFFFFF)  # a streamed WAV
    io = CountingIO()
    async with recordings.open(io.load_bytes_ref(bytes(data))) as recording:
        assert isinstance(recording, Recording)
        plan = await recording.plan(RULE, Timeline())
        assert (plan.num_samples, plan.cuts) == (1.5 * RATE, ())
        before = io.num_decodes
        await asyncio.to_thread(recording.whole_ref(plan).decode)
        assert io.num_decodes == max(1, before)
