"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from lazydecode.errors import InvalidRequestError, LazyDecodeError, NotFoundError
from lazydecode.media.audio import Audio, AudioMediaIO
from lazydecode.media.base import AudioHeader, MediaRef
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.media.silence import CutRule
from lazydecode.models.speech import SpeechModel, Task
from lazydecode.renderers.hold import EncodedHold
from lazydecode.renderers.media import merge_media_io_kwargs
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.multipart import FILE_FIELD, Form, read_form
from lazydecode.server.requests import TIMELINE_HEADER
from lazydecode.server.transcription import Transcription
from lazydecode.server.transcription_form import (
    TranscriptionForm,
    check_abilities,
    parse_form,
)
from lazydecode.server.transcripts import Transcript, delta_event, done_event


async def create_transcription(context: ServerContext, exchange: Exchange) -> None:
    """Answer what is said in a recording, in its own language."""
    await _create(context, exchange, "transcribe")


async def create_translation(context: ServerContext, exchange: Exchange) -> None:
    """Answer what is said in a recording, in English."""
    await _create(context, exchange, "translate")


async def _create(context: ServerContext, exchange: Exchange, task: Task) -> None:
    if not context.generates:
        raise InvalidRequestError("this server renders only (--engine none)")
    speech = context.frontend.speech
    if speech is None:
        raise InvalidRequestError(
            f"the model {context.model_names[0]!r} is not one that writes down speech; "
            "if it takes audio, ask it in /v1/chat/completions",
            parameter="model",
        )
    limits = context.settings.request_limits
    media_io = _media_io(context)
    async with EncodedHold(context.renderer.encoded_budget) as hold:
        with exchange.timeline.stage("parse"):
            try:
                form = await read_form(
                    exchange.scope,
                    exchange.receive,
                    max_file_bytes=media_io.get_max_bytes(),
                    max_bytes=limits.max_body_bytes,
                    max_stall_s=limits.max_body_stall_s,
                    hold=hold,
                    refuse_file=media_io.check_size,
                )
            except InvalidRequestError as exc:
                is_file = exc.parameter in (FILE_FIELD, "audio_filesize_mb")
                raise exc.at("audio", 0) if is_file else exc from exc.__cause__
            wanted = parse_form(form.fields, task)
        _check_model(context, wanted)
        check_abilities(wanted, speech)
        hold.shrink(0 if form.file is None else len(form.file))
        await exchange.run_while_connected(
            _answer(context, exchange, speech, media_io, form, wanted)
        )


def _media_io(context: ServerContext) -> AudioMediaIO:
    settings = context.settings
    options = merge_media_io_kwargs(settings.media_io_kwargs, {})
    media_io = context.frontend.info.get_media_io("audio", options)
    assert isinstance(media_io, AudioMediaIO)
    return media_io.with_limits(settings.recording_limits)


def _check_model(context: ServerContext, wanted: TranscriptionForm) -> None:
    if wanted.model is not None and wanted.model not in context.model_names:
        raise NotFoundError(
            f"the model {wanted.model[:200]!r} is not served here; "
            f"this is {context.model_names[0]!r}",
            parameter="model",
        )


async def _answer(
    context: ServerContext,
    exchange: Exchange,
    speech: SpeechModel,
    media_io: AudioMediaIO,
    form: Form,
    wanted: TranscriptionForm,
) -> None:
    ref = await _identify(context, exchange, media_io, form)
    settings = context.settings
    longest_s = settings.transcription_chunk
    if speech.window_s is not None:
        longest_s = min(longest_s, speech.window_s)
    rule = CutRule(longest_s, min(settings.transcription_cut_search, longest_s))
    try:
        async with context.renderer.recordings.open(ref) as recording:
            try:
                plan = await recording.plan(rule, exchange.timeline)
                transcription = Transcription(
                    context,
                    speech,
                    recording,
                    plan,
                    wanted,
                    request_id=f"transcr-{uuid.uuid4().hex}",
                    timeline=exchange.timeline,
                )
                answer = _Answer(context, exchange, wanted, transcription)
                await (answer.stream() if wanted.stream else answer.send_whole())
            except LazyDecodeError as exc:
                # Of the only file, whichever piece of it failed.
                is_named = exc.modality is not None or exc.status not in (400, 422)
                raise exc if is_named else exc.at("audio", 0) from exc.__cause__
    finally:
        ref.release()


async def _identify(
    context: ServerContext, exchange: Exchange, media_io: AudioMediaIO, form: Form
) -> MediaRef[Audio]:
    """Digest the file and read its header, off the event loop; the form lets go of it.

    Raises:
        LazyDecodeError: If there is no file, it is empty, or its header says that it is too long.
    """
    view, form.file = form.file, None
    if view is None:
        raise InvalidRequestError(
            "the form has no field 'file' with the recording",
            parameter=FILE_FIELD,
            modality="audio",
            index=0,
        )
    if not len(view):
        raise InvalidRequestError(
            "the file is empty", parameter=FILE_FIELD, modality="audio", index=0
        )
    started = time.perf_counter()
    item = exchange.timeline.item("audio", 0)
    item.num_bytes = len(view)
    quick = context.renderer.executor.quick
    job = asyncio.get_running_loop().run_in_executor(quick, partial(_make_ref, media_io, view))
    ref = await await_with_cancellation_drain(job)
    item.add("digest", time.perf_counter() - started)
    header = ref.header
    if isinstance(header, AudioHeader) and header.duration_s is not None:
        try:
            media_io.check_duration(header.duration_s)
        except LazyDecodeError as exc:
            raise exc.at("audio", 0) from None
    return ref


def _make_ref(media_io: AudioMediaIO, view: memoryview) -> MediaRef[Audio]:
    ref = media_io.load_bytes_ref(bytes(view))
    _ = ref.header  # read here: some containers are walked through for it
    return ref


class _Answer:
    """The two ways in which an answer is sent."""

    def __init__(
        self,
        context: ServerContext,
        exchange: Exchange,
        wanted: TranscriptionForm,
        transcription: Transcription,
    ) -> None:
        self._context = context
        self._exchange = exchange
        self._wanted = wanted
        self._transcription = transcription
        self._wants_timeline = exchange.header(TIMELINE_HEADER) in ("1", "true")

    async def send_whole(self) -> None:
        """Send the transcript when it is complete."""
        async with aclosing(self._observed()) as deltas:
            async for _ in deltas:
                pass
        transcript = self._transcription.transcript()
        headers = self._headers()
        exchange, kind = self._exchange, self._wanted.response_format
        if kind == "json":
            await exchange.answer_json(200, transcript.to_json() | self._extra(), headers=headers)
        elif kind == "verbose_json":
            body = transcript.to_verbose_json() | self._extra()
            await exchange.answer_json(200, body, headers=headers)
        else:
            text, content_type = _as_text(transcript, kind)
            await exchange.answer(200, text.encode(), content_type=content_type, headers=headers)

    async def stream(self) -> None:
        """Send events as the words come."""
        await self._exchange.answer_events(self._events(), self._headers)

    async def _events(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._observed()) as deltas:
            async for text in deltas:
                yield delta_event(text)
        yield done_event(self._transcription.transcript(), self._extra())

    async def _observed(self) -> AsyncGenerator[str]:
        is_first = True
        async with aclosing(self._transcription.deltas()) as deltas:
            async for text in deltas:
                if is_first:
                    seconds = time.perf_counter() - self._exchange.started
                    self._context.metrics.first_token.observe(seconds)
                    is_first = False
                yield text

    def _headers(self) -> dict[str, str]:
        if not self._wants_timeline:
            return {}
        return {"server-timing": self._exchange.timeline.server_timing()}

    def _extra(self) -> dict[str, Any]:
        return {"timeline": self._exchange.timeline.to_dict()} if self._wants_timeline else {}


def _as_text(transcript: Transcript, kind: str) -> tuple[str, str]:
    """Return a text form and its content type."""
    if kind == "srt":
        return transcript.to_srt(), "application/x-subrip; charset=utf-8"
    if kind == "vtt":
        return transcript.to_vtt(), "text/vtt; charset=utf-8"
    return f"{transcript.text}\n", "text/plain; charset=utf-8"
