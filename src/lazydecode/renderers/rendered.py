"""One request whose media are fetched and whose prompt is written: processed as often as needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.inputs import MultiModalInput
from lazydecode.renderers.caches import Purpose
from lazydecode.renderers.jobs import Deliver, Job
from lazydecode.renderers.late import LateMedia, repaired
from lazydecode.renderers.timeline import Timeline

if TYPE_CHECKING:
    from lazydecode.renderers.base import BaseRenderer


class RenderedRequest:
    """One request whose media are here, encoded, and whose prompt is written.

    It can be processed as often as needed: again when the engine lost what it was sent.
    """

    def __init__(
        self,
        renderer: BaseRenderer,
        job: Job,
        timeline: Timeline,
        late: LateMedia | None = None,
        *,
        skips_cache: bool = False,
    ) -> None:
        self._renderer = renderer
        self._job = job
        self._timeline = timeline
        self._late = late
        self._skips_cache = skips_cache
        self.num_prompt_tokens = 0
        """Length of the prompt with expanded placeholders; 0 before it was processed."""
        self.processing_s = 0.0
        """Time spent in `process` and `render` so far."""

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._job.request_id

    @property
    def has_sender_cache(self) -> bool:
        """Whether `process` can go by a cache that mirrors the engine's."""
        return self._cache_for("engine") is not None

    def _cache_for(self, purpose: Purpose) -> BaseMultiModalProcessorCache | None:
        return self._renderer.caches.select(purpose, skip=self._skips_cache)

    async def process(self, deliver: Deliver, *, use_cache: bool = True) -> None:
        """Process for the engine, and hand the result to `deliver` on the ordered worker.

        Items that the engine's cache holds come without tensors, unless the caches are passed by.

        Raises:
            LazyDecodeError: If an item cannot be used; it names the item.
        """
        await self._run(self._cache_for("engine") if use_cache else None, deliver)

    async def render(self, *, with_payload: bool) -> MultiModalInput:
        """Process for whoever asked: all items with tensors, if they are wanted.

        If they are not, headers may be enough, and nothing is decoded.
        """
        return await self._render(self._cache_for("render"), with_payload=with_payload)

    async def count(self) -> MultiModalInput:
        """Return ids and ranges; caches are asked, and are afterwards as they were before."""
        return await self._render(self._cache_for("count"), with_payload=False)

    async def _render(
        self, cache: BaseMultiModalProcessorCache | None, *, with_payload: bool
    ) -> MultiModalInput:
        if self._job.items and not with_payload:
            headers = self._renderer.runner.headers
            sketched = await repaired(
                self._late, self._job, lambda: headers.render(self._job, cache, self._timeline)
            )
            if sketched is not None:
                self._settle()
                return sketched
        rendered: list[MultiModalInput] = []
        await self._run(cache, rendered.append)
        return rendered[0]

    async def invalidate(
        self, mm_hashes: Sequence[str], forget: Callable[[Sequence[str]], None]
    ) -> None:
        """Forget that the engine holds these; process again after it.

        Args:
            mm_hashes: What the engine lacked.
            forget: Tells the engine, in order with the sender cache.
        """
        cache = self._renderer.sender_cache
        if cache is None:
            return

        def on_both_sides() -> None:
            cache.invalidate(mm_hashes)
            forget(mm_hashes)

        await self._renderer.on_worker(on_both_sides)

    async def _run(self, cache: BaseMultiModalProcessorCache | None, deliver: Deliver) -> None:
        def take(prompt: MultiModalInput) -> None:
            deliver(prompt)
            self.num_prompt_tokens = len(prompt["prompt_token_ids"])

        started = time.perf_counter()
        try:
            if not (self._job.items or self._job.embeddings):
                assert not isinstance(self._job.prompt, str)
                # Without items no cache changes, so the order does not matter.
                take(_text_input(self._job.prompt))
            else:
                runner = self._renderer.runner
                await repaired(
                    self._late,
                    self._job,
                    lambda: runner.run(self._job, cache, take, self._timeline),
                )
                self._settle()
        finally:
            self.processing_s += time.perf_counter() - started

    def _settle(self) -> None:
        if self._late is not None:
            self._late.settle()


def _text_input(prompt_token_ids: list[int]) -> MultiModalInput:
    return MultiModalInput(
        type="multimodal",
        prompt_token_ids=prompt_token_ids,
        mm_kwargs={},
        mm_hashes={},
        mm_placeholders={},
    )
