"""From a file to a `Transcription` of it: identified, its header checked, its cuts known."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from lazydecode.errors import InvalidRequestError, LazyDecodeError
from lazydecode.media.audio import Audio, AudioMediaIO
from lazydecode.media.base import AudioHeader, MediaRef
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.media.silence import CutRule
from lazydecode.models.speech import SpeechModel
from lazydecode.renderers.decode_options import merge_media_io_kwargs
from lazydecode.renderers.timeline import Timeline
from lazydecode.server.context import ServerContext
from lazydecode.server.transcription import Transcription
from lazydecode.server.transcription_form import TranscriptionForm


def speech_of(context: ServerContext) -> SpeechModel:
    """Return how the served model is asked to write down speech.

    Raises:
        InvalidRequestError: If it is not, or the server only renders.
    """
    if not context.generates:
        raise InvalidRequestError("this server renders only (--engine none)")
    if context.frontend.speech is None:
        raise InvalidRequestError(
            f"the model {context.model_names[0]!r} is not one that writes down speech; "
            "if it takes audio, ask it in /v1/chat/completions",
            parameter="model",
        )
    return context.frontend.speech


def recording_io(context: ServerContext) -> AudioMediaIO:
    """Return the decoder of recordings: that of audio items, with the limits of recordings."""
    settings = context.settings
    options = merge_media_io_kwargs(settings.media_io_kwargs, {})
    media_io = context.frontend.info.get_media_io("audio", options)
    assert isinstance(media_io, AudioMediaIO)
    return media_io.with_limits(settings.recording_limits)


@asynccontextmanager
async def open_transcription(
    context: ServerContext,
    data: bytes | memoryview,
    wanted: TranscriptionForm,
    *,
    timeline: Timeline,
) -> AsyncIterator[Transcription]:
    """Identify a file and begin its transcription; the block runs it.

    Everything is let go of at the end of the block. What fails because of the file, in the block
    too, names it as audio 0.

    Args:
        context: The server's parts; it runs.
        data: The encoded file.
        wanted: What is asked; checked against the model.
        timeline: Is told of the file and its pieces.

    Raises:
        LazyDecodeError: If the file is empty, too large or too long, or cannot be decoded.
    """
    try:
        ref = await _identify(context, data, timeline)
        del data
        try:
            async with context.renderer.recordings.open(ref) as recording:
                speech = speech_of(context)
                plan = await recording.plan(_cut_rule(context, speech), timeline)
                yield Transcription(
                    context,
                    speech,
                    recording,
                    plan,
                    wanted,
                    request_id=f"transcr-{uuid.uuid4().hex}",
                    timeline=timeline,
                )
        finally:
            ref.release()
    except LazyDecodeError as exc:
        # Of the only file, whichever piece of it failed.
        is_named = exc.modality is not None or exc.status not in (400, 422)
        raise exc if is_named else exc.at("audio", 0) from exc.__cause__


def _cut_rule(context: ServerContext, speech: SpeechModel) -> CutRule:
    settings = context.settings
    longest_s = settings.transcription_chunk
    if speech.window_s is not None:
        longest_s = min(longest_s, speech.window_s)
    return CutRule(longest_s, min(settings.transcription_cut_search, longest_s))


async def _identify(
    context: ServerContext, data: bytes | memoryview, timeline: Timeline
) -> MediaRef[Audio]:
    """Digest the file and read its header, off the event loop."""
    if not len(data):
        raise InvalidRequestError("the file is empty", parameter="file")
    media_io = recording_io(context)
    started = time.perf_counter()
    item = timeline.item("audio", 0)
    item.num_bytes = len(data)
    quick = context.renderer.executor.quick
    job = asyncio.get_running_loop().run_in_executor(quick, partial(_make_ref, media_io, data))
    ref = await await_with_cancellation_drain(job)
    item.add("digest", time.perf_counter() - started)
    header = ref.header
    if isinstance(header, AudioHeader) and header.duration_s is not None:
        media_io.check_duration(header.duration_s)
    return ref


def _make_ref(media_io: AudioMediaIO, data: bytes | memoryview) -> MediaRef[Audio]:
    ref = media_io.load_bytes_ref(bytes(data))
    _ = ref.header  # read here: some containers are walked through for it
    return ref
