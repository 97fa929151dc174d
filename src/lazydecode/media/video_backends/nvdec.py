"""Frames by the GPU's video decoder, where there is one; else by PyAV."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import av.error
import numpy as np
from av.bitstream import BitStreamFilterContext
from numpy.typing import NDArray

from lazydecode.errors import ValidationError
from lazydecode.media.video_backends.container import open_video, translated_errors
from lazydecode.media.video_backends.frame_index import FrameIndex
from lazydecode.media.video_backends.optional import (
    FrameCollector,
    OptionalVideoLoader,
    UnsuitableError,
)
from lazydecode.media.video_backends.packet_runs import LostPositionError, plan_runs, read_runs
from lazydecode.media.video_backends.pyav import library_fingerprint
from lazydecode.media.video_sampling import SamplingOptions

logger = logging.getLogger(__name__)

_POOL_SIZE: Final = 4
"""GPU decoders that run at once, unless `decoder_pool_size` says otherwise."""

_STREAMS: Final = {
    "h264": ("H264", "h264_mp4toannexb"),
    "hevc": ("HEVC", "hevc_mp4toannexb"),
    "mpeg1video": ("MPEG1", None),
    "mpeg2video": ("MPEG2", None),
    "mpeg4": ("MPEG4", "dump_extra"),
    "vp8": ("VP8", None),
    "vp9": ("VP9", None),
    "av1": ("AV1", None),
    "libdav1d": ("AV1", None),
}
"""FFmpeg's codec -> the GPU's name for it, and the filter that makes a stream of its packets."""


class NvdecVideoLoader(OptionalVideoLoader):
    """Decodes with PyNvVideoCodec on an NVIDIA GPU, chosen when a video is decoded.

    The file is read here, and the GPU is handed packets with their presentation times: the
    library's own reader takes frame numbers, but finds the wrong frame where a file has open
    groups, edit lists or no table of its key frames.

    Options, all of them the server's alone: `device` (number of the GPU, 0), `gpu_decoder`
    (false: never use it), `decoder_pool_size` (videos decoded at once). H.264, HEVC, VP8
    and VP9 in 8 bits equal PyAV's pixels but for the last bit of the conversion to RGB (1 level);
    MPEG-2 and MPEG-4 part 2, whose inverse transform is not exact by their standards, by up to 5.
    It takes work off the CPU rather than time off a request: 32 frames of a 30 s 720p or 1080p
    video took half of PyAV's CPU time and twice as long on an H200, where 10-bit and 4:4:4
    H.264, AV1 and open groups were left to PyAV.
    """

    name: ClassVar[str] = "nvdec"
    module: ClassVar[str] = "PyNvVideoCodec"
    distribution: ClassVar[str] = "pynvvideocodec"
    extra: ClassVar[str] = "nvdec"
    startup_options: ClassVar[frozenset[str]] = frozenset(
        {"device", "gpu_decoder", "decoder_pool_size"}
    )

    def __init__(self) -> None:
        # Nothing is required yet, not even the package: the GPU is looked for at the first decode.
        pass

    @classmethod
    def fingerprint(cls) -> str:
        """What would decode now: the GPU's library, or PyAV."""
        if _gpu_library(cls) is None:
            return library_fingerprint()
        return super().fingerprint()

    @classmethod
    def options(cls, num_frames: int, options: dict[str, Any]) -> SamplingOptions:
        """Check the sampling options and those that choose the GPU."""
        for name, least in (("device", 0), ("decoder_pool_size", 1)):
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
        """Hand the GPU the packets that the wanted frames need; take the frames by their times."""
        if not options.get("gpu_decoder", True):
            raise UnsuitableError("the GPU is not to be used", is_logged=True)
        library = _gpu_library(type(self))
        if library is None:
            raise UnsuitableError("no GPU decodes video here", is_logged=True)
        if index.codec not in _STREAMS:
            raise UnsuitableError(f"the GPU has no decoder for {index.codec}")
        with _PERMITS.permit(options.get("decoder_pool_size") or _POOL_SIZE):
            decoder = _GpuDecoder(library, index.codec, device=options.get("device") or 0)
            for pts, pixels in _decode_runs(data, index, collector.wanted, decoder):
                number = index.frame_of_pts.get(pts)
                if number is not None and collector.lacks(number):
                    image = index.orientation.apply(pixels)
                    height, width = image.shape[:2]
                    collector.slot(number, width, height)[...] = image
                if collector.is_complete:
                    break


class _GpuDecoder:
    """One stream's decoder on the GPU.

    Raises:
        UnsuitableError: From every method, if the GPU does not take what it is given. The
            library raises plain `Exception`.
    """

    def __init__(self, library: Any, codec: str, *, device: int) -> None:
        self._library = library
        name, self.filter_name = _STREAMS[codec]
        with self._errors():
            self._decoder = library.CreateDecoder(
                gpuid=device,
                codec=getattr(library.cudaVideoCodec, name),
                usedevicememory=False,
                outputColorType=library.OutputColorType.RGB,
            )

    def decode(self, payload: bytes, pts: int) -> list[tuple[int, NDArray[np.uint8]]]:
        """Return (presentation time, RGB pixels) of the frames that are ready; b"" ends a run."""
        packet = self._library.PacketData()
        data = np.frombuffer(payload, np.uint8)
        packet.bsl = len(payload)
        packet.bsl_data = data.ctypes.data if payload else 0
        packet.pts = pts
        with self._errors():
            return [
                (frame.getPTS(), np.asarray(np.from_dlpack(frame), dtype=np.uint8))
                for frame in self._decoder.Decode(packet)
            ]

    def skip_to(self, pts: int) -> None:
        """Say that frames before `pts` are not wanted: they are decoded, but not converted."""
        with self._errors():
            self._decoder.SetSeekPTS(pts)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            raise UnsuitableError("the GPU does not decode it") from exc


def _decode_runs(
    data: bytes, index: FrameIndex, wanted: list[int], decoder: _GpuDecoder
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (presentation time, RGB pixels) of frames, among them those of `wanted` (ascending)."""
    times = [int(index.pts[index.display_order[number]]) for number in wanted]
    with open_video(data) as (container, stream), translated_errors("the video cannot be read"):
        bitstream = None
        if decoder.filter_name is not None:
            bitstream = BitStreamFilterContext(decoder.filter_name, stream)
        runs = plan_runs(index, wanted)
        try:
            for packet, ends_run in read_runs(container, stream, index, runs, seek=index.can_seek):
                payloads = _filtered(packet, bitstream)
                # Nothing at the end of a run: the frames still held come out.
                for payload, pts in [*payloads, (b"", 0)] if ends_run else payloads:
                    decoder.skip_to(times[0])
                    for shown, pixels in decoder.decode(payload, pts):
                        yield shown, pixels
                        while len(times) > 1 and times[0] <= shown:
                            del times[0]
        except LostPositionError:
            raise UnsuitableError("its key frames are not where its index says") from None


def _filtered(packet: Any, bitstream: Any) -> list[tuple[bytes, int]]:
    """Return (payload, presentation time) of what the GPU is to be given for `packet`."""
    pts = packet.pts
    try:
        packets = [packet] if bitstream is None else bitstream.filter(packet)
    except (av.error.FFmpegError, OSError) as exc:
        raise UnsuitableError("it is damaged") from exc
    return [(bytes(each), pts if each.pts is None else each.pts) for each in packets]


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
    """Return the library if it is installed and finds a GPU driver, else None; looked for once."""
    with _lock:
        if not _library:
            try:
                _library.append(loader.import_module())
            except ValidationError as exc:
                # Once: it is a property of the machine, not of a video.
                logger.warning("no GPU decodes video here, pyav does: %s", exc.message)
                _library.append(None)
        return _library[0]
