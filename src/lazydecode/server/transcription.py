"""One recording on its way through the model: its pieces together, their words in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from lazydecode.engine.protocol import SamplingParams, TimestampRule, TokenLogprob
from lazydecode.errors import EngineError, LazyDecodeError
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.models.speech import LanguageProbe, SpeechModel
from lazydecode.renderers.decode_options import merge_media_io_kwargs
from lazydecode.renderers.jobs import Job
from lazydecode.renderers.media import EncodedItem
from lazydecode.renderers.recordings import Piece, Plan, Recording
from lazydecode.renderers.rendered import RenderedRequest
from lazydecode.renderers.timeline import Timeline
from lazydecode.server.context import ServerContext
from lazydecode.server.detokenize import Detokenizer
from lazydecode.server.generation import Delta, Generation
from lazydecode.server.transcription_form import TranscriptionForm
from lazydecode.server.transcripts import Segment, Transcript, separator, split_segments

logger = logging.getLogger(__name__)

_MOST_TOKENS_PER_S: Final = 25
"""Nobody speaks faster; a model that repeats itself is stopped. With some for the form."""
_FORM_TOKENS: Final = 64
_PROBE_BIAS: Final = 100.0
"""Far above the differences between a model's scores."""

_Outcome = Delta | LazyDecodeError | Exception | None
"""What a piece's task tells: a delta, its failure, or its end."""


@dataclass(slots=True)
class _PieceResult:
    """What came of one piece so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    raw: str = ""


class Transcription:
    """Runs the pieces of a recording through the engine, several at a time.

    Args:
        context: The server's parts.
        speech: How the model is asked.
        recording: What is transcribed; it must stay open.
        plan: How it is cut.
        form: What the client wants.
        request_id: Names the request in logs, and in the engine.
        timeline: Is told of the pieces.
    """

    def __init__(
        self,
        context: ServerContext,
        speech: SpeechModel,
        recording: Recording,
        plan: Plan,
        form: TranscriptionForm,
        *,
        request_id: str,
        timeline: Timeline,
    ) -> None:
        self._context = context
        self._speech = speech
        self._recording = recording
        self._plan = plan
        self._form = form
        self._request_id = request_id
        self._timeline = timeline
        self._pieces = plan.pieces()
        self._results = [_PieceResult() for _ in self._pieces]
        self._queues: list[asyncio.Queue[_Outcome]] = [asyncio.Queue() for _ in self._pieces]
        self._is_cut_first = False
        self._language: str | None = None
        self._text = ""
        self.done_s = 0.0
        """Duration of the pieces that are done."""

    @property
    def duration_s(self) -> float:
        """Duration of the recording."""
        return self._plan.duration_s

    async def deltas(self) -> AsyncGenerator[str]:
        """Yield the transcript piece by piece; leaving early ends all that runs for it.

        Raises:
            LazyDecodeError: If a piece cannot be decoded, processed or transcribed.
        """
        await self._decode_if_needed()
        probe = self._speech.language_probe(self._form.speech)
        if probe is not None:
            self._language = await self._find_language(probe)
        prompt = await asyncio.get_running_loop().run_in_executor(
            self._context.renderer.executor.quick,
            self._speech.prompt, self._form.speech, self._language,
        )  # fmt: skip
        slots = asyncio.Semaphore(self._context.settings.max_batch_size)
        tasks = [
            asyncio.create_task(
                self._run_piece(piece, prompt, slots),
                name=f"piece-{self._request_id}-{piece.index}",
            )
            for piece in self._pieces
        ]
        try:
            for piece in self._pieces:
                async for text in self._take(piece.index):
                    yield text
        finally:
            for task in tasks:
                task.cancel()
            await await_with_cancellation_drain(asyncio.wait(tasks))

    def transcript(self) -> Transcript:
        """Return the whole, after `deltas` has ended."""
        segments: list[Segment] = []
        times = self._speech.timestamps
        if times is not None and self._form.speech.timestamps:
            for piece, result in zip(self._pieces, self._results, strict=True):
                segments += split_segments(
                    result.token_ids, result.logprobs, piece, times, self._decode
                )
        code = self._form.speech.language or self._language
        return Transcript(
            self._form.speech.task,
            self._text.strip(),
            self._speech.language_name(code),
            self._plan.duration_s,
            self._form.temperature,
            segments,
        )

    # -- in order

    async def _take(self, number: int) -> AsyncGenerator[str]:
        """Yield what one piece adds to the transcript."""
        queue, result = self._queues[number], self._results[number]
        is_first = True
        while (outcome := await queue.get()) is not None:
            if isinstance(outcome, Exception):
                raise outcome
            result.raw += outcome.text
            if self._speech.answers_plainly and outcome.text:
                if text := self._write(outcome.text, is_first=is_first):
                    yield text
                is_first = False
        if not self._speech.answers_plainly:
            language, words = self._speech.read(result.raw)
            self._language = self._language or language
            if text := self._write(words, is_first=True):
                yield text

    def _write(self, text: str, *, is_first: bool) -> str:
        """Add to the transcript; returns what was added."""
        if not self._text:
            text = text.lstrip()
        elif is_first:
            language = self._form.speech.language or self._language
            text = separator(self._text, text, language) + text
        self._text += text
        return text

    # -- beside each other

    async def _decode_if_needed(self) -> None:
        """Decode the recording once, before pieces of it are asked for on many threads."""
        renderer, recording = self._context.renderer, self._recording
        if self._plan.cuts:
            jobs = [self._job(piece, [], "check") for piece in self._pieces]
            try:
                missing = await await_with_cancellation_drain(
                    asyncio.get_running_loop().run_in_executor(
                        renderer.executor.quick,
                        lambda: any(
                            renderer.runner.needs_media(job, renderer.sender_cache) for job in jobs
                        ),
                    )
                )
            finally:
                for job in jobs:
                    _release(job)
            if missing:
                await recording.decode(self._timeline)
        self._is_cut_first = recording.is_decoded

    async def _run_piece(
        self, piece: Piece, prompt: str | list[int], slots: asyncio.Semaphore
    ) -> None:
        queue, result = self._queues[piece.index], self._results[piece.index]
        async with slots:
            try:
                started = time.perf_counter()
                sampling = self._sampling(piece, prompt)
                async with aclosing(self._generate(piece, prompt, sampling)) as deltas:
                    async for delta in deltas:
                        is_end = delta.finish_reason == "stop" and delta.token_ids
                        result.token_ids += delta.token_ids[:-1] if is_end else delta.token_ids
                        result.logprobs += delta.logprobs
                        queue.put_nowait(delta)
            except Exception as exc:
                # To whichever piece is being waited for: the first failure ends the request.
                for other in self._queues:
                    other.put_nowait(exc)
                return
        self.done_s += piece.stop_s - piece.start_s
        queue.put_nowait(None)
        self._context.metrics.transcribed_seconds.add(piece.stop_s - piece.start_s)
        logger.info(
            "request %s: piece %d of %d (%.1f s to %.1f s) took %.1f s",
            self._request_id, piece.index + 1, len(self._pieces), piece.start_s, piece.stop_s,
            time.perf_counter() - started,
        )  # fmt: skip

    async def _generate(
        self, piece: Piece, prompt: str | list[int], sampling: SamplingParams, name: str = "piece"
    ) -> AsyncGenerator[Delta]:
        """Yield what the model writes to one piece."""
        context, timeline = self._context, Timeline()
        job = self._job(piece, prompt, name)
        rendered = RenderedRequest(context.renderer, job, timeline)
        generation = Generation(
            context.engine, rendered, sampling, Detokenizer(self._decode), context.metrics
        )
        started = time.perf_counter()
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            _release(job)
            spent = time.perf_counter() - started - rendered.processing_s
            timeline.add("engine", max(0.0, spent))
            if self._is_cut_first:
                for item in timeline.items:
                    if "decode" in item.seconds:
                        item.seconds["cut"] = item.seconds.pop("decode")
            self._timeline.add_piece(piece.index, timeline)
            context.metrics.prompt_tokens.add(rendered.num_prompt_tokens)
            context.metrics.answer_tokens.add(generation.num_tokens)

    def _job(self, piece: Piece, prompt: str | list[int], name: str) -> Job:
        """Return one piece as a request of its own; to be released."""
        recording, settings = self._recording, self._context.settings
        ref = recording.piece_ref(piece) if self._plan.cuts else recording.whole_ref(self._plan)
        limit_s = settings.max_render_time
        deadline = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        return Job(
            request_id=f"{self._request_id}-{name}-{piece.index}",
            prompt=prompt,
            items=[EncodedItem("audio", 0, None, ref)],
            media_io_kwargs=merge_media_io_kwargs(settings.media_io_kwargs, {}),
            cache_salt=self._form.cache_salt,
            deadline=deadline,
            is_paid=recording.holds_memory,
        )

    def _sampling(self, piece: Piece, prompt: str | list[int]) -> SamplingParams:
        times = self._speech.timestamps
        rule = None
        if times is not None and self._form.speech.timestamps:
            rule = TimestampRule(times.first, times.max_initial)
        penalty = self._context.default_sampling.get("repetition_penalty", 1.0)
        return SamplingParams(
            max_tokens=self._most_tokens(piece, prompt),
            temperature=self._form.temperature,
            repetition_penalty=penalty,
            logprobs=None if rule is None else 0,
            timestamps=rule,
        )

    def _most_tokens(self, piece: Piece, prompt: str | list[int]) -> int:
        """Return the limit on a piece's answer: the client's, within what can be said, and what
        the context takes."""
        limit = int(_MOST_TOKENS_PER_S * (piece.stop_s - piece.start_s)) + _FORM_TOKENS
        if self._form.max_tokens is not None:
            limit = min(limit, self._form.max_tokens)
        context_size = self._context.max_model_len
        if context_size is not None:
            # Of a prompt that is text the length is not known yet.
            room = context_size // 2 if isinstance(prompt, str) else context_size - len(prompt)
            limit = min(limit, room)
        return max(1, limit)

    async def _find_language(self, probe: LanguageProbe) -> str:
        """Return the code of the language that the model hears in the first piece."""
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logit_bias=dict.fromkeys(probe.languages, _PROBE_BIAS),
            ignore_eos=True,
        )
        found: list[int] = []
        generated = self._generate(self._pieces[0], probe.token_ids, sampling, "language")
        async with aclosing(generated) as deltas:
            async for delta in deltas:
                found += delta.token_ids
        code = probe.languages.get(found[0]) if found else None
        if code is None:
            raise EngineError("the model named no language")
        return code

    def _decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids; times are none."""
        times = self._speech.timestamps
        if times is not None:
            token_ids = [token for token in token_ids if token < times.first]
        return self._context.frontend.decode(token_ids)


def _release(job: Job) -> None:
    for item in job.items:
        item.release()
