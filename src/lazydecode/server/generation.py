"""From a rendered request to the pieces of its answer, over engine restarts and cache misses.

A request is submitted on the ordered worker, right after phase 2, so that the receiver cache
sees the updates in the order of the sender cache. If the receiver lacks items, they are sent
again; if the engine was lost, the prompt with what was generated so far is. The client notices
a delay and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Literal

from lazydecode.engine.protocol import (
    Engine,
    EngineOutput,
    EngineRequest,
    SamplingParams,
    TokenLogprob,
)
from lazydecode.errors import CacheMissError, EngineDeadError, EngineError
from lazydecode.inputs import MultiModalInput, PlaceholderRange
from lazydecode.renderers.rendered import RenderedRequest
from lazydecode.server.detokenize import Detokenizer
from lazydecode.server.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_CACHE_MISSES: Final = 3
"""A miss can repeat when the engine goes on forgetting; then the items pass both caches by."""
MAX_ENGINE_LOSSES: Final = 3
"""A request that was running each time the engine died is probably the cause."""


@dataclass(slots=True)
class Delta:
    """What one step adds to the answer."""

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"] | None = None
    """Set in the last delta."""
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Generation:
    """One answer, from submission to its end.

    Args:
        engine: Generates.
        rendered: The prompt, and the media for as long as they may be needed again.
        sampling: How tokens are chosen.
        detokenizer: Turns tokens into text and knows the stop strings.
        metrics: Counts repairs.
    """

    def __init__(
        self,
        engine: Engine,
        rendered: RenderedRequest,
        sampling: SamplingParams,
        detokenizer: Detokenizer,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._rendered = rendered
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._generated: list[int] = []
        self._prompt_token_ids: list[int] = []
        self._placeholders: Mapping[str, Sequence[PlaceholderRange]] = {}
        self._attempt = 0

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._generated)

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield the answer piece by piece; leaving early aborts it in the engine.

        Raises:
            ValidationError: If the prompt does not fit into the model's context.
            EngineError: If the engine failed, also after repairs.
        """
        misses = losses = 0
        while True:
            try:
                use_cache = misses < MAX_CACHE_MISSES
                async with aclosing(self._attempt_once(use_cache=use_cache)) as attempt:
                    async for delta in attempt:
                        misses = 0
                        yield delta
                return
            except CacheMissError as exc:
                misses += 1
                logger.info(
                    "request %s: the engine lacks %d items, sending them again",
                    self._rendered.request_id, len(exc.hashes),
                )  # fmt: skip
                self._metrics.repairs.add(1, "cache_miss")
                await self._rendered.invalidate(exc.hashes, self._engine.invalidate_cache)
            except EngineDeadError:
                losses += 1
                if losses > MAX_ENGINE_LOSSES or self._has_generated_placeholders():
                    raise
                logger.warning(
                    "request %s: the engine was lost after %d tokens, going on with a new one",
                    self._rendered.request_id, self.num_tokens,
                )  # fmt: skip
                self._metrics.repairs.add(1, "engine_lost")

    async def _attempt_once(self, *, use_cache: bool) -> AsyncGenerator[Delta]:
        self._attempt += 1
        submission = _Submission(
            self._engine,
            f"{self._rendered.request_id}-{self._attempt}",
            lambda engine_id, prompt: self._build_request(
                engine_id, prompt, use_cache and self._rendered.has_sender_cache
            ),
        )
        try:
            await self._rendered.process(submission.submit, use_cache=use_cache)
        except BaseException:
            # Cancelled or out of time at the end of phase 2, it may be with the engine already.
            submission.withdraw()
            raise
        async with aclosing(_as_generator(self._engine.stream(submission.engine_id))) as outputs:
            async for output in outputs:
                delta = self._take(output)
                if delta.token_ids or delta.finish_reason is not None:
                    yield delta
                if delta.finish_reason is not None:
                    return
        raise EngineError("the engine's stream ended without a reason")

    def _has_generated_placeholders(self) -> bool:
        """Whether the answer holds a token that, in a prompt, stands for media.

        The model would miss its item, and fail; others in the same batch would have to start anew.
        """
        prompt = self._prompt_token_ids
        media_tokens = {
            prompt[place.offset + at]
            for places in self._placeholders.values()
            for place in places
            for at in range(place.length)
            if place.is_embed is None or place.is_embed[at]
        }
        return not media_tokens.isdisjoint(self._generated)

    def _build_request(
        self, engine_id: str, prompt: MultiModalInput, uses_cache: bool
    ) -> EngineRequest:
        self._prompt_token_ids = prompt["prompt_token_ids"]
        self._placeholders = prompt["mm_placeholders"]
        return EngineRequest(
            engine_id,
            prompt["prompt_token_ids"] + self._generated,
            mm_kwargs=prompt["mm_kwargs"],
            mm_hashes=prompt["mm_hashes"],
            mm_placeholders=prompt["mm_placeholders"],
            sampling=self._sampling,
            num_resumed_tokens=len(self._generated),
            cache_items=uses_cache,
        )

    def _take(self, output: EngineOutput) -> Delta:
        self._generated += output.new_token_ids
        ids = output.new_token_ids
        # A token that ended the answer by its id is not part of the text.
        shown = ids[:-1] if output.stop_token_id is not None and ids else ids
        text = self._detokenizer.push(shown)
        reason = output.finish_reason
        if reason is not None:
            text += self._detokenizer.finish()
        if self._detokenizer.stopped_by is not None:
            reason = "stop"
        if reason == "abort":
            raise EngineError("the engine aborted the request")
        return Delta(text, ids, reason, output.logprobs or [])


class _Submission:
    """One attempt's way to the engine. The lock covers submitting and withdrawing."""

    def __init__(
        self,
        engine: Engine,
        engine_id: str,
        build: Callable[[str, MultiModalInput], EngineRequest],
    ) -> None:
        self.engine_id = engine_id
        self._engine = engine
        self._build = build
        self._lock = threading.Lock()
        self._is_withdrawn = False

    def submit(self, prompt: MultiModalInput) -> None:
        """Runs on the ordered worker, in the same job as phase 2, which is undone if it raises."""
        request = self._build(self.engine_id, prompt)
        with self._lock:
            if self._is_withdrawn:
                raise EngineError("nobody waits for this request any more")
            self._engine.submit(request)

    def withdraw(self) -> None:
        """Nobody reads the stream: abort what was submitted, and submit nothing later."""
        with self._lock:
            self._is_withdrawn = True
        self._engine.abort(self.engine_id)


async def _as_generator(outputs: AsyncIterator[EngineOutput]) -> AsyncGenerator[EngineOutput]:
    """An async generator over any async iterator, so that leaving it early closes both."""
    try:
        async for output in outputs:
            yield output
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()
