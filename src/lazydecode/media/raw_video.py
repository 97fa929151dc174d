"""Videos for models that open the container themselves: checked, identified, and not decoded.

What such a model is handed comes out of a decoder like everything else, so that it is the same
on a hit and on a miss, and has an identity of its own: that of the bytes under this decoder's
spec.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lazydecode.errors import CorruptMediaError
from lazydecode.limits import DecodeLimits
from lazydecode.media.base import (
    DecodeSpec,
    MediaIO,
    MediaRef,
    VideoHeader,
    decode_base64,
)
from lazydecode.media.jpeg_sequence import is_jpeg_sequence
from lazydecode.media.video import DecodedVideo, VideoMediaIO
from lazydecode.media.video_backends.base import check_index
from lazydecode.media.video_backends.frame_index import read_index
from lazydecode.media.video_header import header_of, probe_video_header

RAW_VIDEO_DECODER: Final = "raw-video/1"
"""What decodes, and the version of what it gives."""


@dataclass(frozen=True, slots=True)
class RawVideo:
    """A whole video file: an accepted container that has a decodable video stream."""

    data: bytes = field(repr=False)
    """The payload itself, not a copy."""
    header: VideoHeader
    """What its packets say."""


class RawVideoMediaIO(MediaIO[RawVideo | DecodedVideo]):
    """Hands videos over as they are, once they proved to be videos that may be decoded.

    A jpeg sequence is no container; its frames are decoded.

    Args:
        frames_io: Decodes what is no container.
        limits: What one video may yield.
    """

    def __init__(
        self,
        frames_io: VideoMediaIO,
        *,
        limits: DecodeLimits = DecodeLimits(),  # noqa: B008  # frozen
    ) -> None:
        self.frames_io = frames_io
        self.limits = limits
        self._spec = DecodeSpec({"decoder": RAW_VIDEO_DECODER, "video_decode": "raw_bytes"})

    def get_decode_spec(self) -> DecodeSpec:
        """Says that nothing is decoded, which sets the key apart from that of any frames."""
        return self._spec

    def identity_scope(self) -> Hashable | None:
        """The limits; it has no options."""
        if type(self) is not RawVideoMediaIO:
            return None  # a subclass may go by more
        return (RawVideoMediaIO, self._spec, self.limits)

    def probe_header(self, data: bytes) -> VideoHeader | None:
        """Size after rotation, rate, duration and frames; None if it does not parse."""
        return probe_video_header(data)

    def load_bytes(self, data: bytes) -> RawVideo:
        """Return `data` as a video whose packets are all there.

        Raises:
            CorruptMediaError: If it is no video, has no video stream, or is cut off.
            MediaTooLargeError: If its picture is over a limit.
        """
        index = read_index(data)
        check_index(index, self.limits)
        header = header_of(index)
        if header is None or not header.num_frames:
            raise CorruptMediaError("the video has no frames, or frames without a size")
        return RawVideo(data, header)

    def load_base64(self, media_type: str, data: str) -> RawVideo | DecodedVideo:
        """Take base64 text: a jpeg sequence for `video/jpeg`, else a file."""
        if is_jpeg_sequence(media_type):
            return self.frames_io.load_base64(media_type, data)
        return self.load_bytes(decode_base64(data))

    def load_file(self, filepath: Path) -> RawVideo:
        """Take a file."""
        return self.load_bytes(filepath.read_bytes())

    def load_base64_ref(
        self, media_type: str, data: str | bytes | memoryview
    ) -> MediaRef[RawVideo | DecodedVideo]:
        """Return a ref over a jpeg sequence (`video/jpeg`), or over decoded base64.

        Raises:
            CorruptMediaError: If the text of a file is not base64.
            MediaTooLargeError: If a sequence has more frames than the limit.
            ValidationError: If an option of a sequence is wrong.
        """
        if is_jpeg_sequence(media_type):
            # The ref's type is what it may decode to, and nobody puts anything into it.
            sequence: MediaRef[RawVideo | DecodedVideo] = self.frames_io.load_base64_ref(  # type: ignore[assignment]
                media_type, data
            )
            return sequence
        return self.load_bytes_ref(decode_base64(data))
