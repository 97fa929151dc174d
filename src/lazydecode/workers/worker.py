"""A worker process: takes one job at a time, decodes, processes, answers, until its server is gone.

It has one thread and no state between jobs: what it kills itself with harms nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from lazydecode.engine.arena import ArenaView, SharedArena
from lazydecode.engine.channel import Blob, ChannelClosedError, TensorChannel
from lazydecode.engine.messages import form_of_error
from lazydecode.errors import CorruptMediaError, LazyDecodeError, UnprocessableMediaError
from lazydecode.media.base import DecodeSpec, MediaRef
from lazydecode.media.faults import describe
from lazydecode.media.rebuild import rebuild_decoder
from lazydecode.models.frontend import ModelFrontend
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.outputs import ItemOutput
from lazydecode.workers.messages import (
    Answer,
    Decoded,
    Failed,
    Hello,
    Job,
    Refused,
    form_of_output,
)

logger = logging.getLogger(__name__)

_NO_KEY: Final = b""
"""Of a reference that is decoded here and now: nobody looks it up."""
_TIDY_AFTER: Final = 512
"""Jobs. To fault 25 MB in again costs 10 ms: a thousandth of what so many small ones take."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that is shared with the server."""

    payloads_fd: int
    payloads_bytes: int
    results_fd: int
    results_bytes: int


class CannotDoError(Exception):
    """The server's item is not the one that would be made here."""


def run_worker(
    sock: socket.socket,
    memory: Memory | None,
    frontend: ModelFrontend,
    *,
    tidy: Callable[[], object] | None = None,
) -> int:
    """Do jobs until the server closes the connection; returns the exit status.

    Args:
        sock: Connection to the server.
        memory: What is shared with it; None: everything takes the socket.
        frontend: The model.
        tidy: Called after every so many jobs, when the last one is answered.
    """
    view = arena = None
    if memory is not None:
        view = ArenaView(memory.payloads_fd, memory.payloads_bytes)
        arena = SharedArena(memory.results_fd, memory.results_bytes, peer="the server")
    channel: TensorChannel[Any] = TensorChannel(sock, Job, arena=arena, view=view)
    try:
        channel.send(Hello(os.getpid()))
        for number in count(1):
            _do_next(channel, arena, view, frontend)
            if tidy is not None and number % _TIDY_AFTER == 0:
                tidy()
    except ChannelClosedError:
        pass
    return 0


def _do_next(
    channel: TensorChannel[Any],
    arena: SharedArena | None,
    view: ArenaView | None,
    frontend: ModelFrontend,
) -> None:
    job: Job = channel.receive()
    if arena is not None:
        arena.release(job.released)
    blob: Blob = job.payload
    data = bytes(blob.data)  # decoders want bytes; from here on nothing refers to the memory
    recipe, spec = job.recipe, job.spec
    modality, options = job.modality, job.options
    del job, blob
    released = [] if view is None else view.take_released()
    answer: Answer
    try:
        output, seconds = process_item(
            frontend,
            modality,
            data,
            recipe=_spec(recipe),
            spec=_spec(spec),
            options=options,
            on_decoded=lambda seconds: channel.send(Decoded(seconds)),
        )
        answer = form_of_output(output, seconds, released)
    except ChannelClosedError:
        raise
    except (CannotDoError, TypeError) as exc:
        answer = Refused(str(exc), released)
    except LazyDecodeError as exc:
        answer = Failed(form_of_error(exc), released)
    try:
        channel.send(answer)
    except TypeError as exc:  # a value of a kind that only this process knows; nothing was sent
        channel.send(Refused(str(exc), released))


def process_item(
    frontend: ModelFrontend,
    modality: str,
    data: bytes,
    *,
    recipe: DecodeSpec,
    spec: DecodeSpec | None,
    options: Mapping[str, Any],
    on_decoded: Callable[[float], None],
) -> tuple[ItemOutput, float]:
    """Decode and process one item; return the result, and the seconds that processing took.

    Args:
        frontend: The model.
        modality: The item's.
        data: Its payload.
        recipe: Rebuilds its decoder.
        spec: What the item must have become when it was parsed; None: it is not checked.
        options: The request's processor options.
        on_decoded: Called with the seconds of the decode.

    Raises:
        CannotDoError: If the item comes out of the parser as another one.
        LazyDecodeError: If it cannot be decoded or processed.
    """
    processor, info = frontend.any_processor, frontend.info
    if processor is None:
        raise CannotDoError("the model takes no media")
    try:
        decode = rebuild_decoder(recipe, limits=info.ctx.decode_limits).decode
        ref: MediaRef[Any] = MediaRef(lambda: decode(data), data, recipe, key=_NO_KEY)
        items = info.parse_mm_data({modality: [ref]}, validate=False)
    except ValueError as exc:
        raise CannotDoError(str(exc)) from exc
    item = items[modality].get_raw(0)
    if not isinstance(item, MediaRef) or (spec is not None and item.spec != spec):
        raise CannotDoError("the parser makes another item of it")
    inputs = ProcessorInputs("", items, hf_processor_mm_kwargs=options)
    started = time.perf_counter()
    try:
        item.decode()
    except LazyDecodeError:
        raise
    except (OSError, SyntaxError, ValueError) as exc:
        # What decoders raise for bad bytes; `failures.decode_error` goes by the same rule.
        raise CorruptMediaError(describe(exc)) from exc
    except Exception as exc:
        raise UnprocessableMediaError(describe(exc)) from exc
    decoded = time.perf_counter()
    on_decoded(decoded - started)
    try:
        output = processor.process_single(inputs)
    except LazyDecodeError:
        raise
    except Exception as exc:
        logger.debug("an item cannot be processed", exc_info=True)
        raise UnprocessableMediaError(describe(exc)) from exc
    return output, time.perf_counter() - decoded


def _spec(canonical: bytes) -> DecodeSpec:
    return DecodeSpec(json.loads(canonical))
