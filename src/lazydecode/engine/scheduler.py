"""Which requests generate when: batches of what waits, advanced in turns."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lazydecode.engine.generation import Generation, ModelRunner
from lazydecode.engine.protocol import EngineOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    generations: list[Generation]
    steps: Iterator[None]


class Scheduler:
    """Runs everything that was added, at most `max_batch_size` requests at a time.

    What waits when there is room starts at once, as one batch if the model can; running batches
    advance by one token each in turn, so nobody waits for another's last token. If a batch
    fails, its requests go on one by one from where they were, and only the guilty one fails;
    one that lacked memory beside others gets the model to itself first.

    `add`, `abort` and `stop` are for other threads; the lock covers the queue and the index of
    running requests. Outputs are sent outside it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_batch_size: int,
        send: Callable[[list[EngineOutput]], None],
        fail: Callable[[str, Exception], None],
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._max_batch_size = max_batch_size
        self._send = send
        self._fail = fail
        self._on_idle = on_idle
        self._wake = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._running: dict[str, Generation] = {}
        self._batches: list[_Batch] = []
        self._stopping = False

    def add(self, generation: Generation) -> None:
        """Queue one request."""
        with self._wake:
            self._running[generation.request_id] = generation
            self._waiting.append(generation)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Let a request end with reason `abort` before its next token; unknown ids are ignored."""
        with self._wake:
            generation = self._running.get(request_id)
            if generation is not None:
                generation.aborted = True
                self._wake.notify()

    def stop(self) -> None:
        """Let `run` return before the next step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """Generate until `stop`; what then runs is dropped."""
        try:
            while self._admit():
                self._take_turns()
        finally:
            for batch in self._batches:
                _close(batch.steps)

    def _take_turns(self) -> None:
        # A function of its own: while `run` waits, no local of it may hold the last batch's
        # tensors.
        for batch in list(self._batches):
            if self._stopping:
                break
            self._advance(batch)

    def _admit(self) -> bool:
        """Wait for work, then start batches of what waits and has room; False to stop."""
        if not self._batches:
            self._on_idle()
        with self._wake:
            while not (self._stopping or self._waiting or self._batches):
                self._wake.wait()
            if self._stopping:
                return False
            ended = [generation for generation in self._waiting if generation.is_done]
            for generation in ended:
                self._waiting.remove(generation)
            admitted = [self._waiting.popleft() for _ in range(self._room())]
        self._report(ended)
        for group in self._group(admitted):
            self._batches.append(_Batch(group, iter(self._runner.generate(group))))
        return True

    def _room(self) -> int:
        """Return how many of those that wait may start now. Called under the lock."""
        active = [g for batch in self._batches for g in batch.generations if not g.is_done]
        if any(generation.exclusive for generation in active):
            return 0
        exclusive = next((n for n, g in enumerate(self._waiting) if g.exclusive), None)
        if exclusive == 0:
            return 0 if active else 1
        # Those before an exclusive one start; those behind wait, or it would for ever.
        room = max(0, self._max_batch_size - len(active))
        return min(room, len(self._waiting) if exclusive is None else exclusive)

    def _group(self, admitted: list[Generation]) -> list[list[Generation]]:
        alone = [[generation] for generation in admitted if generation.alone]
        rest = [generation for generation in admitted if not generation.alone]
        return alone + (self._runner.group(rest) if rest else [])

    def _advance(self, batch: _Batch) -> None:
        """Let one batch generate one token per request, and send what came."""
        try:
            next(batch.steps)
        except StopIteration:
            self._batches.remove(batch)
            unfinished = [g for g in batch.generations if not g.is_done]
            if unfinished:
                self._recover(unfinished, RuntimeError("the model stopped before the last token"))
        except Exception as exc:
            # Wide: whatever the model raises belongs to this batch's requests, which are told.
            self._batches.remove(batch)
            if self._runner.is_fatal(exc):
                raise
            self._recover([g for g in batch.generations if not g.is_done], exc)
        self._report(batch.generations)

    def _recover(self, unfinished: list[Generation], error: Exception) -> None:
        names = ", ".join(generation.request_id for generation in unfinished)
        if len(unfinished) == 1:
            generation = unfinished[0]
            if self._batches and not generation.exclusive and self._runner.is_out_of_memory(error):
                logger.warning("request %s has to wait for memory: %s", names, error)
                generation.exclusive = True
                with self._wake:
                    self._waiting.appendleft(generation)
                return
            logger.error("request %s failed", names, exc_info=error)
            self._fail(generation.request_id, error)
            with self._wake:
                self._running.pop(generation.request_id, None)
            return
        logger.warning("a batch failed (%s); going on one by one: %s", error, names)
        for generation in unfinished:
            generation.alone = True
        with self._wake:
            self._waiting.extendleft(reversed(unfinished))

    def _report(self, generations: list[Generation]) -> None:
        outputs = [
            output
            for generation in generations
            # A done request was reported when it left `_running`.
            if generation.request_id in self._running
            and (output := generation.take_output()) is not None
        ]
        if not outputs:
            return
        with self._wake:
            for output in outputs:
                if output.finish_reason is not None:
                    self._running.pop(output.request_id, None)
        self._send(outputs)


def _close(steps: Iterator[None]) -> None:
    close = getattr(steps, "close", None)
    if close is not None:
        close()
