"""The first item of each kind, before a client sends it.

What only the first item pays for: decoder libraries that load when they are first used, threads
that start, kernels that torch chooses, tables of the tokenizer. One small item of each modality
goes the whole way, through the same processor calls under the same guard as a client's, and
nothing of it is kept in a cache.
"""

from __future__ import annotations

import io
import logging
import threading
import time
import wave
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
from PIL import Image

from lazydecode.models.frontend import ModelFrontend
from lazydecode.processing.inputs import ProcessorInputs

logger = logging.getLogger(__name__)

_IMAGE: Final = (320, 240)
_FRAME: Final = (160, 112)
_NUM_FRAMES: Final = 8
_RATE_HZ: Final = 16000


class WarmUp:
    """Runs in the background on the ordered worker, one modality per job.

    Between two jobs the worker takes what was queued meanwhile, so a request waits for at most
    one item. As requests' own phases run on the same thread, and processors that let one thread
    in only are entered under their guard, warm-up never meets a request inside one.

    Args:
        frontend: The model; text-only ones have nothing to warm up.
        worker: The ordered worker.
    """

    def __init__(self, frontend: ModelFrontend, worker: Executor) -> None:
        self._frontend = frontend
        self._worker = worker
        self._stopped = threading.Event()
        self._done: Future[None] | None = None
        self._worker_thread: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._done is not None and not self._done.done()

    def start(self) -> None:
        """Begin; returns at once. To be called once."""
        self._done = Future()
        modalities = self._frontend.modalities if self._frontend.any_processor is not None else ()
        self._submit(list(modalities), time.perf_counter())

    def join(self) -> None:
        """Return when it does not run, after leaving out what it has not begun.

        Raises:
            RuntimeError: On the worker itself, which would wait for itself for ever.
        """
        if self._worker_thread == threading.get_ident():
            raise RuntimeError("warm-up cannot be joined from the worker that it runs on")
        self._stopped.set()
        if self._done is not None:
            self._done.result()

    def _submit(self, modalities: list[str], started: float) -> None:
        assert self._done is not None
        if not modalities or self._stopped.is_set():
            if not modalities:
                logger.info("warmed up in %.2f s", time.perf_counter() - started)
            self._done.set_result(None)
            return

        def run() -> None:
            self._worker_thread = threading.get_ident()
            modality, *rest = modalities
            try:
                if not self._stopped.is_set():
                    warm_up(self._frontend, modality)
            except Exception:
                # Wide: what a model makes of the item is the first client's to hear; the server
                # can serve the other modalities, and perhaps larger items of this one.
                logger.warning("the warm-up with one %s failed", modality, exc_info=True)
            finally:
                self._worker_thread = None
            self._submit(rest, started)

        try:
            self._worker.submit(run)
        except RuntimeError:  # the worker was shut down
            self._done.set_result(None)


def warm_up(frontend: ModelFrontend, modality: str) -> None:
    """Decode and process one small item, and put it into a prompt.

    Raises:
        LazyDecodeError: If the model does not take it.
    """
    processor = frontend.any_processor
    assert processor is not None
    prompt: str | list[int] = [0]  # of a model without a template, whose prompt has no items
    if frontend.template is not None:
        prompt = frontend.template.render_items([modality])
    ref = frontend.info.get_media_io(modality).load_bytes_ref(sample_of(modality))
    try:
        items = frontend.info.parse_mm_data({modality: [ref]}, validate=False)
        processor.apply(ProcessorInputs(prompt, items))
    finally:
        ref.release()


def sample_of(modality: str) -> bytes:
    """Return one small encoded item."""
    return _SAMPLES[modality]()


def _image() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(_noise(*_IMAGE)).save(buffer, "JPEG")
    return buffer.getvalue()


def _video() -> bytes:
    buffer = io.BytesIO()
    width, height = _FRAME
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.time_base = Fraction(1, 4)
        picture = _noise(width, height)
        for number in range(_NUM_FRAMES):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, number, 1), "rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 4)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def _audio() -> bytes:
    buffer = io.BytesIO()
    tone = np.sin(np.arange(_RATE_HZ) * (440 * 2 * np.pi / _RATE_HZ))
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE_HZ)
        file.writeframes((tone * 8000).astype("<i2").tobytes())
    return buffer.getvalue()


def _noise(width: int, height: int) -> Any:
    """Return a picture of blocks, shape (height, width, 3), uint8."""
    blocks = np.random.default_rng(0).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    return np.ascontiguousarray(blocks.repeat(16, 0).repeat(16, 1))


_SAMPLES: Final[Mapping[str, Callable[[], bytes]]] = {
    "image": _image,
    "video": _video,
    "audio": _audio,
}
"""Modality -> one small encoded item."""
