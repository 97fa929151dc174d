"""Frames by the GPU's video decoder, where there is one; else by PyAV."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from lazydecode.errors import ValidationError
from lazydecode.media.video_backends.frame_index import FrameIndex
from lazydecode.media.video_backends.optional import (
    FrameCollector,
    OptionalVideoLoader,
    UnsuitableError,
)
from lazydecode.media.video_backends.pyav import library_fingerprint
from lazydecode.media.video_sampling import SamplingOptions

logger = logging.getLogger(__name__)

_POOL_SIZE: Final = 4
"""GPU decoders that run at once, unless `decoder_pool_size` says otherwise."""


class NvdecVideoLoader(OptionalVideoLoader):
    """Decodes with PyNvVideoCodec on an NVIDIA GPU, chosen when a video is decoded.

    Options, all of them the server's alone: `device` (number of the GPU, 0), `gpu_decoder`
    (false: never use it), `num_decoders` (sessions that a decoder keeps), `decoder_pool_size`
    (videos decoded at once). Colours are converted on the GPU, so pixels differ from PyAV's
    by rounding.
    """

    name: ClassVar[str] = "nvdec"
    module: ClassVar[str] = "PyNvVideoCodec"
    distribution: ClassVar[str] = "pynvvideocodec"
    extra: ClassVar[str] = "nvdec"
    startup_options: ClassVar[frozenset[str]] = frozenset(
        {"device", "gpu_decoder", "num_decoders", "decoder_pool_size"}
    )

    @classmethod
    def fingerprint(cls) -> str:
        """What would decode now: the GPU's library, or PyAV."""
        if _gpu_library(cls) is None:
            return library_fingerprint()
        return super().fingerprint()

    @classmethod
    def options(cls, num_frames: int, options: dict[str, Any]) -> SamplingOptions:
        """Check the sampling options and those that choose the GPU."""
        for name, least in (("device", 0), ("num_decoders", 1), ("decoder_pool_size", 1)):
            value = options.get(name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < least
            ):
                raise ValidationError(
                    f"{name}: must be an integer of at least {least}, got {value!r}",
                    parameter=name,
                    value=value,
                )
        return super().options(num_frames, options)

    def decode(
        self, data: bytes, index: FrameIndex, collector: FrameCollector, options: dict[str, Any]
    ) -> None:
        """Ask the GPU for the wanted frames; each must have the time that its number has."""
        if not options.get("gpu_decoder", True):
            raise UnsuitableError("the GPU is not to be used", is_logged=True)
        library = _gpu_library(type(self))
        if library is None:
            raise UnsuitableError("no GPU decodes video here", is_logged=True)
        with _PERMITS.permit(options.get("decoder_pool_size") or _POOL_SIZE):
            try:
                decoder = library.SimpleDecoder(
                    data,
                    gpu_id=options.get("device") or 0,
                    use_device_memory=False,
                    decoder_cache_size=options.get("num_decoders") or 1,
                    output_color_type=library.OutputColorType.RGB,
                )
                frames = decoder.get_batch_frames_by_index(collector.wanted)
            except Exception as exc:
                # The library raises plain Exception for whatever the GPU does not take.
                raise UnsuitableError("the GPU does not decode it") from exc
            if len(frames) != len(collector.wanted):
                raise UnsuitableError("the GPU gives other frames")
            for number, frame in zip(collector.wanted, frames, strict=True):
                if index.frame_of_pts.get(frame.getPTS()) != number:
                    raise UnsuitableError("the GPU's frame times do not fit")
                pixels: NDArray[np.uint8] = np.asarray(np.from_dlpack(frame), dtype=np.uint8)
                image = index.orientation.apply(pixels)
                height, width = image.shape[:2]
                collector.slot(number, width, height)[...] = image


class _Permits:
    """Bounds how many GPU decoders run at once, over all loaders of the process.

    The lock covers the count alone; waiting is for another thread's decode to finish.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._running = 0

    @contextmanager
    def permit(self, limit: int) -> Iterator[None]:
        with self._free:
            self._free.wait_for(lambda: self._running < limit)
            self._running += 1
        try:
            yield
        finally:
            with self._free:
                self._running -= 1
                self._free.notify()


_PERMITS: Final = _Permits()
_lock = threading.Lock()
_library: list[Any] = []
"""The library, or None if no GPU decodes here; empty until it was looked for."""


def _gpu_library(loader: type[NvdecVideoLoader]) -> Any:
    """Return the library if it finds a GPU driver, else None; looked for once.

    Raises:
        ValidationError: If the package is not installed.
    """
    loader.require()
    with _lock:
        if not _library:
            try:
                _library.append(loader.import_module())
            except ValidationError as exc:
                # Once: it is a property of the machine, not of a video.
                logger.warning("no GPU decodes video here, pyav does: %s", exc.message)
                _library.append(None)
        return _library[0]
