"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from lazydecode.errors import InvalidRequestError, NotFoundError
from lazydecode.models.speech import Task
from lazydecode.renderers.hold import EncodedHold
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.multipart import FILE_FIELD, Form, read_form
from lazydecode.server.requests import TIMELINE_HEADER
from lazydecode.server.transcribing import open_transcription, recording_io, speech_of
from lazydecode.server.transcription import Transcription
from lazydecode.server.transcription_form import (
    TranscriptionForm,
    check_abilities,
    parse_form,
)
from lazydecode.server.transcripts import delta_event, done_event


async def create_transcription(context: ServerContext, exchange: Exchange) -> None:
    """Answer what is said in a recording, in its own language."""
    await _create(context, exchange, "transcribe")


async def create_translation(context: ServerContext, exchange: Exchange) -> None:
    """Answer what is said in a recording, in English."""
    await _create(context, exchange, "translate")


async def _create(context: ServerContext, exchange: Exchange, task: Task) -> None:
    speech = speech_of(context)
    limits = context.settings.request_limits
    media_io = recording_io(context)
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
        await exchange.run_while_connected(_answer(context, exchange, form, wanted))


def _check_model(context: ServerContext, wanted: TranscriptionForm) -> None:
    if wanted.model is not None and wanted.model not in context.model_names:
        raise NotFoundError(
            f"the model {wanted.model[:200]!r} is not served here; "
            f"this is {context.model_names[0]!r}",
            parameter="model",
        )


async def _answer(
    context: ServerContext, exchange: Exchange, form: Form, wanted: TranscriptionForm
) -> None:
    view, form.file = form.file, None
    if view is None:
        raise InvalidRequestError(
            "the form has no field 'file' with the recording",
            parameter=FILE_FIELD,
            modality="audio",
            index=0,
        )
    opened = open_transcription(context, view, wanted, timeline=exchange.timeline)
    del view
    async with opened as transcription:
        answer = _Answer(context, exchange, wanted, transcription)
        await (answer.stream() if wanted.stream else answer.send_whole())


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
            text, content_type = transcript.to_text(kind)
            await exchange.answer(200, text.encode(), content_type=content_type, headers=headers)

    async def stream(self) -> None:
        """Send events as the words come."""
        await self._exchange.answer_events(self._events(), self._headers)

    async def _events(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._observed()) as deltas:
            async for text in deltas:
                yield delta_event(text)
        self._exchange.complete()
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
