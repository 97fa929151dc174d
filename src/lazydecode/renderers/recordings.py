"""Recordings in pieces: where they are cut is remembered, and none is decoded twice.

A recording that fits into one prompt is one media item, like any other. A longer one becomes
several items, each with an identity of its own: the recording's, and the range of samples. When
the same recording comes again, its cuts are known from before, every piece is found in the
cache, and nothing is decoded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from lazydecode.errors import CorruptMediaError, MediaTooLargeError
from lazydecode.media.audio import Audio
from lazydecode.media.base import AudioHeader, MediaRef, derive_media_key
from lazydecode.media.budget import ByteBudget, Reservation
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.media.estimate import estimate_decoded_bytes
from lazydecode.media.silence import CutRule, find_cuts
from lazydecode.processing.failures import decode_error
from lazydecode.renderers.timeline import Timeline

logger = logging.getLogger(__name__)

_MAX_PLANS: Final = 4096
"""Recordings whose cuts are remembered; some hundred bytes each."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a recording is cut."""

    num_samples: int
    rate_hz: int
    cuts: tuple[int, ...] = ()
    """Positions in samples, without 0 and the end."""

    @property
    def duration_s(self) -> float:
        """Length of the recording."""
        return self.num_samples / self.rate_hz

    def pieces(self) -> list[Piece]:
        """Return the pieces in order."""
        edges = [0, *self.cuts, self.num_samples]
        return [
            Piece(index, start, stop, self.rate_hz)
            for index, (start, stop) in enumerate(itertools.pairwise(edges))
        ]


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a recording's samples."""

    index: int
    start: int
    stop: int
    rate_hz: int

    @property
    def start_s(self) -> float:
        """Where it begins."""
        return self.start / self.rate_hz

    @property
    def stop_s(self) -> float:
        """Where it ends."""
        return self.stop / self.rate_hz


class Recording:
    """One encoded recording, for as long as requests use it; all that do share it.

    Its methods belong to the event loop, except the decoders of the refs that it hands out:
    those run on media threads, and take the lock of its own ref.

    Args:
        ref: The whole recording; the recording's own, to be released by `close`.
        budget: Decoded bytes that all requests together may hold.
        max_bytes: Decoded bytes that one request may hold.
        executor: Media threads.
        plans: Key and rule -> what was found out before.
    """

    def __init__(
        self,
        ref: MediaRef[Audio],
        *,
        budget: ByteBudget,
        max_bytes: int,
        executor: Executor,
        plans: OrderedDict[tuple[bytes, CutRule], Plan],
    ) -> None:
        self._ref = ref
        self._budget = budget
        self._max_bytes = max_bytes
        self._executor = executor
        self._plans = plans
        self._decoding = asyncio.Lock()
        self._reservation: Reservation | None = None
        self.num_users = 0
        """Requests that use it now."""

    @property
    def is_decoded(self) -> bool:
        """Whether its samples are here."""
        return self._ref.is_decoded

    @property
    def holds_memory(self) -> bool:
        """Whether memory for the decoded recording is reserved already."""
        return self._reservation is not None

    async def plan(self, rule: CutRule, timeline: Timeline) -> Plan:
        """Return how the recording is cut.

        It is decoded for that only if its header does not say that it is short, and it was not
        cut before.

        Raises:
            LazyDecodeError: If it cannot be decoded, or there is no memory for it.
        """
        header = self._ref.header
        if isinstance(header, AudioHeader) and header.num_samples is not None:
            stated = Plan(header.num_samples, header.rate_hz)
            if 0 < stated.num_samples <= rule.longest_samples(stated.rate_hz):
                return stated
        key = (self._ref.key, rule)
        known = self._plans.get(key)
        if known is None:
            await self.decode(timeline)
            loop = asyncio.get_running_loop()
            known = await await_with_cancellation_drain(
                loop.run_in_executor(self._executor, partial(self._find_plan, rule))
            )
            self._plans[key] = known
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return known

    def _find_plan(self, rule: CutRule) -> Plan:
        samples, rate = self._ref.decode()
        return Plan(len(samples), rate, tuple(find_cuts(samples, rate, rule)))

    async def decode(self, timeline: Timeline) -> None:
        """Decode the recording on a media thread, unless it is; its memory is held until `close`.

        Raises:
            LazyDecodeError: If it cannot be decoded, or there is no memory for it.
        """
        async with self._decoding:
            if self._ref.is_decoded:
                return
            if self._reservation is None:
                needed = estimate_decoded_bytes(self._ref)
                if needed > self._max_bytes:
                    raise MediaTooLargeError(
                        f"the recording takes {needed} bytes when decoded; at most "
                        f"{self._max_bytes} are allowed in one request"
                    )
                reservation = self._budget.reserve(needed)
                await reservation.__aenter__()
                self._reservation = reservation
            started = time.perf_counter()
            job = asyncio.get_running_loop().run_in_executor(self._executor, self._ref.decode)
            try:
                await await_with_cancellation_drain(job)
            except Exception as exc:
                raise decode_error("audio", 0, exc) from exc
            timeline.record_item("audio", 0, "decode", time.perf_counter() - started)

    def whole_ref(self, plan: Plan) -> MediaRef[Audio]:
        """Return a ref to the recording as one item, with the identity that it has everywhere."""
        return MediaRef(
            partial(self._decode_whole, plan),
            self._ref.payload,
            self._ref.spec,
            key=self._ref.key,
            header_probe=lambda: AudioHeader(plan.rate_hz, 1, plan.duration_s, plan.num_samples),
        )

    def _decode_whole(self, plan: Plan) -> Audio:
        samples, rate = self._ref.decode()
        if len(samples) > plan.num_samples * 1.01 + rate:
            raise CorruptMediaError(
                f"the audio is longer than its header states: {len(samples) / rate:.2f} s "
                f"instead of {plan.duration_s:.2f} s"
            )
        return samples, rate

    def piece_ref(self, piece: Piece) -> MediaRef[Audio]:
        """Return a ref to a range of samples, with an identity derived from the recording's.

        The same recording cut elsewhere gives other identities.
        """
        spec = self._ref.spec.extend(start=piece.start, stop=piece.stop)
        num_samples = piece.stop - piece.start
        header = AudioHeader(piece.rate_hz, 1, num_samples / piece.rate_hz, num_samples)
        return MediaRef(
            partial(self._cut, piece),
            self._ref.payload,
            spec,
            key=derive_media_key(self._ref.key, spec),
            header_probe=lambda: header,
        )

    def _cut(self, piece: Piece) -> Audio:
        samples, rate = self._ref.decode()
        return samples[piece.start : piece.stop], rate

    async def close(self) -> None:
        """Let go of the payload, the samples and their memory."""
        self._ref.release()
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            await reservation.__aexit__(None, None, None)


class Recordings:
    """The recordings that requests use now, and the cuts of earlier ones. For one event loop.

    Args:
        budget: Decoded bytes that all requests together may hold.
        max_bytes: Decoded bytes that one request may hold.
        executor: Media threads.
    """

    def __init__(self, budget: ByteBudget, *, max_bytes: int, executor: Executor) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._executor = executor
        self._open: dict[bytes, Recording] = {}
        self._plans: OrderedDict[tuple[bytes, CutRule], Plan] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Recordings that are in use."""
        return len(self._open)

    @asynccontextmanager
    async def open(self, ref: MediaRef[Audio]) -> AsyncIterator[Recording]:
        """Use a recording; the same one that others use now, if they use the same file.

        Args:
            ref: The caller's; it is released by the caller.
        """
        key = ref.key
        recording = self._open.get(key)
        if recording is None:
            recording = self._open[key] = Recording(
                ref.renew(),
                budget=self._budget,
                max_bytes=self._max_bytes,
                executor=self._executor,
                plans=self._plans,
            )
        recording.num_users += 1
        try:
            yield recording
        finally:
            recording.num_users -= 1
            if not recording.num_users:
                del self._open[key]
                await recording.close()
