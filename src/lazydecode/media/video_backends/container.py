"""Opening video bytes with FFmpeg so that nothing but those bytes can be reached.

Formats that name other resources (playlists, concat lists, image sequences, subtitles) are
not on the list of accepted formats, no protocol is allowed, and a container that asks for a
second file all the same is refused.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import av
import av.error
from av.stream import Discard, Disposition

from lazydecode.errors import CorruptMediaError, LazyDecodeError
from lazydecode.media.mp4_boxes import check_sample_counts

_FORMATS: Final = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,gif,apng,ivf"
"""Demuxers that read one file and refer to no other."""
_CODECS: Final = frozenset(
    {
        *("h264", "hevc", "vvc", "av1", "libdav1d", "vp8", "vp9", "libvpx", "libvpx-vp9"),
        *("mpeg1video", "mpeg2video", "mpeg4", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "msmpeg4"),
        *("h263", "h263i", "h263p", "flv", "vp6", "vp6f", "vp6a", "wmv1", "wmv2", "wmv3", "vc1"),
        *("theora", "cinepak", "svq1", "svq3", "qtrle", "rpza", "mjpeg", "gif", "apng", "png"),
        *("prores", "dnxhd", "dvvideo", "ffv1", "huffyuv", "ffvhuff", "utvideo", "magicyuv"),
        *("rawvideo", "v210"),
    }
)
"""Video decoders that are used; FFmpeg has hundreds more, most of them for formats nobody sends."""
_TEXT_MAGIC: Final = frozenset({b"RIFF", b"OggS", b"GIF8", b"DKIF"})
"""Accepted formats whose first four bytes are letters."""
_BUFFER_BYTES: Final = 128 * 1024
"""Read size. Each read takes the GIL once; more than this reads ahead too far after a seek."""


@contextmanager
def open_video(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Open `data` and yield its PyAV container and the video stream to decode.

    No frame is decoded by opening: FFmpeg would probe streams with their decoders (5 to 30 ms);
    an empty codec list forbids it, and the stream's own decoder still opens later. Streams
    other than the video one are not read.

    Raises:
        CorruptMediaError: If no accepted demuxer reads it, or it has no video stream.
    """
    _refuse_text(data)
    check_sample_counts(data)
    with translated_errors("the video cannot be opened"):
        container = av.open(
            io.BytesIO(data),
            mode="r",
            container_options={
                "codec_whitelist": "none",
                "format_whitelist": _FORMATS,
                "protocol_whitelist": "",
            },
            io_open=_refuse_second_file,
            metadata_errors="replace",
            buffer_size=_BUFFER_BYTES,
        )
    try:
        yield container, _choose_stream(container)
    finally:
        container.close()


@contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Turn FFmpeg's exceptions into `CorruptMediaError` saying `what` and FFmpeg's reason."""
    try:
        yield
    except LazyDecodeError:
        raise
    except (av.error.FFmpegError, OSError, EOFError) as exc:
        # `strerror` only: the full text can hold the demuxer's log with heap addresses.
        reason = getattr(exc, "strerror", None) or type(exc).__name__
        raise CorruptMediaError(f"{what}: {reason}") from exc
    except (ValueError, IndexError, AssertionError, UnicodeError, MemoryError) as exc:
        raise CorruptMediaError(f"{what}: {type(exc).__name__}") from exc


def has_audio(container: Any) -> bool:
    """Whether the container has an audio track."""
    return len(container.streams.audio) > 0


def _refuse_text(data: bytes) -> None:
    """Refuse what begins as text: that is how formats look that refer to other files.

    Our demuxer list says so too, but not every decoder that gets these bytes later has one.
    """
    start = data[:4]
    if start and start not in _TEXT_MAGIC and all(32 <= byte < 127 for byte in start):
        raise CorruptMediaError("the video cannot be opened: it is text, not a video")


def _refuse_second_file(url: str, flags: int, options: dict[str, str]) -> Any:
    raise OSError("the container refers to another file, which is never opened")


def _choose_stream(container: Any) -> Any:
    """Return the default video stream, else the first one; cover pictures do not count."""
    candidates = [
        stream
        for stream in container.streams.video
        if not stream.disposition & (Disposition.attached_pic | Disposition.timed_thumbnails)
    ]
    if not candidates:
        kinds = sorted({stream.type for stream in container.streams})
        found = f"only {', '.join(kinds)}" if kinds else "no streams at all"
        raise CorruptMediaError(f"the file has no video stream: it has {found}")
    chosen = next((s for s in candidates if s.disposition & Disposition.default), candidates[0])
    codec_context = chosen.codec_context
    if codec_context is None or codec_context.name not in _CODECS:
        name = "an unknown one" if codec_context is None else codec_context.name
        raise CorruptMediaError(f"the video codec ({name}) is not supported")
    for stream in container.streams:
        stream.discard = Discard.default if stream is chosen else Discard.all
    return chosen
