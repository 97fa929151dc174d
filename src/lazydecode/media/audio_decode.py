"""Encoded audio to mono float samples at the native rate, within limits, whatever the file says.

Each decoder yields blocks; a block is mixed down and counted before the next one is decoded, so
a file that unpacks to hours is given up as soon as it passes a limit.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Final

import av
import av.error
import numpy as np
import soundfile
from av.codec.codec import Codec, UnknownCodecError
from av.stream import Discard
from numpy.typing import NDArray

from lazydecode.errors import CorruptMediaError, MediaTooLargeError, ValidationError
from lazydecode.limits import MIB, DecodeLimits
from lazydecode.media.headers import AudioHeader
from lazydecode.media.mp4_boxes import check_sample_counts
from lazydecode.media.wav import parse_wav, read_wav

Samples = NDArray[np.float32]

_BLOCK_SAMPLES: Final = 1 << 17
_FORMATS: Final = (
    "mov,matroska,ogg,mp3,aac,wav,flac,aiff,caf,au,w64,amr,avi,mpegts,mpeg,flv,asf,ac3,eac3,wv,tta,"
    "ape,loas"
)
"""Demuxers that read one file and refer to no other (playlists name further URLs and paths)."""


_MAX_SAMPLE: Final = 1e12
"""Full scale is 1, and of whole numbers in floats 2**31. The power of what is larger is infinite in
float32, and a model that gets infinities answers with none of its tokens."""

# -- what all decoders share


class MonoSink:
    """Collects decoded blocks as mono, and stops at the limits.

    Raises:
        MediaTooLargeError: From the constructor if the header already states too much, and
            from `write` once the blocks are too much.
        CorruptMediaError: If a sample is not finite or absurdly large, or there are none at all.
    """

    def __init__(
        self, rate_hz: int, channels: int, limits: DecodeLimits, *, stated_s: float | None = None
    ) -> None:
        if rate_hz < 1 or channels < 1:
            raise CorruptMediaError(f"the audio states {channels} channels at {rate_hz} Hz")
        self.rate_hz = rate_hz
        self._channels = channels
        self._limits = limits
        self._blocks: list[Samples] = []
        self.num_samples = 0
        self._decoded_bytes = 0
        if stated_s is not None:
            self._check(stated_s, int(stated_s * rate_hz) * channels * 4)

    def write(self, block: NDArray[np.float32]) -> None:
        """Take a block of shape (samples, channels)."""
        self.num_samples += len(block)
        self._decoded_bytes += block.size * 4
        self._check(self.num_samples / self.rate_hz, self._decoded_bytes)
        mono = _mean_of_channels(block)
        if not np.isfinite(mono).all():
            raise CorruptMediaError("the audio has samples that are not finite")
        if len(mono) and max(-mono.min(), mono.max()) > _MAX_SAMPLE:
            raise CorruptMediaError(
                f"the audio has samples beyond {_MAX_SAMPLE:g}; 1 is full scale"
            )
        self._blocks.append(mono)

    def _check(self, seconds: float, decoded_bytes: int) -> None:
        longest = self._limits.max_audio_duration_s
        if seconds > longest:
            raise MediaTooLargeError(
                f"the audio's duration of {seconds:.1f} s or more exceeds the limit of "
                f"{longest:g} s",
                parameter="max_audio_decode_duration",
                value=seconds,
            )
        most = self._limits.max_audio_decoded_bytes
        if decoded_bytes > most:
            raise MediaTooLargeError(
                f"the audio's decoded size exceeds the limit of {most / MIB:g} MiB",
                parameter="max_audio_decode_mb",
                value=decoded_bytes / MIB,
            )

    def result(self, *, max_samples: int | None = None) -> Samples:
        """Return all samples, shape (samples,), at most `max_samples`."""
        total = self.num_samples if max_samples is None else min(max_samples, self.num_samples)
        if total == 0:
            raise CorruptMediaError("the audio is empty: it has no samples")
        if len(self._blocks) == 1 and self._blocks[0].flags.owndata:
            return self._blocks.pop()[:total]
        # Filled block by block, and each is let go of, so that memory holds one copy.
        samples = np.empty(total, np.float32)
        filled = 0
        self._blocks.reverse()
        while self._blocks and filled < total:
            block = self._blocks.pop()[: total - filled]
            samples[filled : filled + len(block)] = block
            filled += len(block)
        self._blocks.clear()
        return samples


def _mean_of_channels(block: NDArray[np.float32]) -> Samples:
    """Return the mean of a block's channels: numpy's own, bit by bit.

    numpy sums along a row, and rows of two samples take it six times as long as two columns do.
    """
    if block.shape[1] == 1:
        return block[:, 0]
    if block.shape[1] != 2:
        mean: Samples = block.mean(axis=1, dtype=np.float32)
        return mean
    mono: Samples = block[:, 0] + block[:, 1]
    mono *= np.float32(0.5)
    mono += np.float32(0)  # numpy begins at 0, so that there are no negative zeros
    return mono


# -- WAV


def decode_wav(data: bytes, limits: DecodeLimits) -> tuple[Samples, int] | None:
    """Decode a plain WAV; None if the bytes are none."""
    layout = parse_wav(data)
    if layout is None:
        return None
    stated_s = layout.num_samples / layout.rate_hz
    sink = MonoSink(layout.rate_hz, layout.channels, limits, stated_s=stated_s)
    for block in read_wav(data, layout):
        sink.write(block)
    return sink.result(), layout.rate_hz


# -- libsndfile


def decode_soundfile(data: bytes, limits: DecodeLimits) -> tuple[Samples, int]:
    """Decode with libsndfile.

    Raises:
        soundfile.LibsndfileError: If it cannot open the bytes.
        CorruptMediaError: If it opened them and then failed, or found less than they state.
    """
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        stated = _stated_frames(file)
        stated_s = None if stated is None else stated / file.samplerate
        sink = MonoSink(file.samplerate, file.channels, limits, stated_s=stated_s)
        step = max(1, _BLOCK_SAMPLES // file.channels)
        try:
            while True:
                block = file.read(step, dtype="float32", always_2d=True)
                if not len(block):
                    break
                sink.write(block)
        except soundfile.LibsndfileError as exc:
            raise CorruptMediaError(f"the audio cannot be decoded: {exc.error_string}") from exc
        if stated is not None:
            check_complete(sink.num_samples, stated, sink.rate_hz)
        return sink.result(), sink.rate_hz


def _stated_frames(file: soundfile.SoundFile) -> int | None:
    frames = int(file.frames)
    return frames if 0 < frames < 2**62 else None


def check_complete(decoded: int, stated: int, rate_hz: int) -> None:
    """Refuse a file that ends well before what it states; some slack is for padding.

    Raises:
        CorruptMediaError: If more than 1 % and more than a quarter of a second is missing.
    """
    missing = stated - decoded
    if missing > stated // 100 and missing > rate_hz // 4:
        raise CorruptMediaError(
            f"the audio is cut off: {decoded / rate_hz:.2f} s of {stated / rate_hz:.2f} s"
        )


# -- FFmpeg


@contextmanager
def _open_av(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Open `data` with FFmpeg and yield the container and its first audio stream.

    No frame of a video is decoded: FFmpeg would probe every stream with its decoder, so only
    those of sound are allowed to open.
    """
    check_sample_counts(data)
    try:
        container = av.open(
            io.BytesIO(data),
            mode="r",
            # No protocol and no demuxer that would open anything but these bytes.
            container_options={
                "codec_whitelist": _audio_decoders(),
                "format_whitelist": _FORMATS,
                "protocol_whitelist": "",
            },
            io_open=_refuse_second_file,
            metadata_errors="replace",
        )
    except av.error.FFmpegError as exc:
        raise CorruptMediaError("the audio is of no format that can be read") from exc
    with container:
        # A track of an unknown codec has no context: phones write a second one for spatial sound.
        readable = [track for track in container.streams.audio if track.codec_context is not None]
        if not readable:
            found = (
                "no audio track that can be read" if container.streams.audio else "no audio track"
            )
            raise CorruptMediaError(f"the file has {found}")
        chosen = readable[0]
        for stream in container.streams:
            if stream.index != chosen.index:
                stream.discard = Discard.all
        yield container, chosen


@cache
def _audio_decoders() -> str:
    """Return the names of all decoders of sound, as FFmpeg takes a list."""
    names = []
    for name in sorted(av.codecs_available):
        try:
            is_audio = Codec(name, "r").type == "audio"
        except UnknownCodecError:  # it encodes only
            continue
        if is_audio:
            names.append(name)
    return ",".join(names)


def _refuse_second_file(*_: Any) -> Any:
    raise CorruptMediaError("the file refers to another one")


def decode_av(data: bytes, limits: DecodeLimits) -> tuple[Samples, int]:
    """Decode the first audio track with FFmpeg.

    Raises:
        CorruptMediaError: If nothing reads it, there is no audio track, or a part is damaged.
    """
    with _open_av(data) as (container, stream):
        stated = _stated_samples(stream)
        try:
            sink = _drain(container, stream, limits)
        except av.error.FFmpegError as exc:
            reason = exc.strerror or type(exc).__name__
            raise CorruptMediaError(f"the audio cannot be decoded: {reason}") from exc
        if sink is None:
            raise CorruptMediaError("the audio is empty: it has no samples")
        if stated is not None:
            check_complete(sink.num_samples, stated, sink.rate_hz)
            # What is beyond is the padding of codecs that the container's count leaves out.
            if sink.num_samples - stated > 2 * _LONGEST_FRAME:
                stated = None
        return sink.result(max_samples=stated), sink.rate_hz


_LEAST_BYTES_PER_S: Final = 32
"""No codec holds sound in less, silence included."""
_LONGEST_FRAME: Final = 2048
"""Samples in the longest usual codec frame: AAC with SBR."""


def _drain(container: Any, stream: Any, limits: DecodeLimits) -> MonoSink | None:
    sink: MonoSink | None = None
    fifo, form = av.AudioFifo(), None
    for frame in container.decode(stream):
        if not frame.samples:
            continue
        frame.pts = None  # the fifo refuses gaps; there are none in what we count
        channels = frame.layout.nb_channels
        if sink is None:
            stated_s = _stated_seconds(container, stream)
            if stated_s is not None and stated_s > container.size / _LEAST_BYTES_PER_S:
                stated_s = None  # a header that overstates: what is decoded will tell
            sink = MonoSink(frame.sample_rate, channels, limits, stated_s=stated_s)
        elif frame.sample_rate != sink.rate_hz:
            raise CorruptMediaError("the audio changes its sampling rate on the way")
        if form is not None and form != (frame.format.name, frame.layout.name):
            _write_fifo(sink, fifo)
            fifo = av.AudioFifo()
        form = (frame.format.name, frame.layout.name)
        # One array per 100 frames instead of per frame: a third of the time.
        fifo.write(frame)
        if fifo.samples * channels >= _BLOCK_SAMPLES:
            _write_fifo(sink, fifo)
    if sink is not None:
        _write_fifo(sink, fifo)
    return sink


def _write_fifo(sink: MonoSink, fifo: av.AudioFifo) -> None:
    frame = fifo.read()
    if frame is not None:
        sink.write(frame_to_float(frame))


_SCALES: Final[dict[str, float]] = {"s16": 2.0**15, "s32": 2.0**31}


def frame_to_float(frame: av.AudioFrame) -> Samples:
    """Return a frame's samples, shape (samples, channels), float32; integers become [-1, 1)."""
    array: NDArray[Any] = frame.to_ndarray()
    samples = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    kind = frame.format.name.removesuffix("p")
    if kind == "u8":
        return (samples.astype(np.float32) - np.float32(128)) / np.float32(128)
    scale = _SCALES.get(kind)
    converted = samples.astype(np.float32, copy=False)
    return converted if scale is None else converted / np.float32(scale)


def _stated_samples(stream: Any) -> int | None:
    """Samples that the track of an MP4 or MOV decodes to, after its edit list; None elsewhere.

    Other containers count in milliseconds, or state the encoder's padding too. AAC decodes to
    whole frames: the encoder's padding of the last one stays, as FFmpeg leaves it, so that the
    number of audio tokens is that of other front ends.
    """
    if "mov" not in stream.container.format.name or not stream.duration:
        return None
    rate = stream.codec_context.sample_rate
    stated = stream.duration * stream.time_base * rate if rate else 0
    if stated <= 0:
        return None
    frame_size = stream.codec_context.frame_size if stream.codec_context.name == "aac" else 0
    return math.ceil(stated / frame_size) * frame_size if frame_size else int(stated)


def _stated_seconds(container: Any, stream: Any) -> float | None:
    """Duration that the file states for the track; None if it does not, or for all tracks only."""
    if stream.duration and stream.duration > 0:
        return float(stream.duration * stream.time_base)
    if container.duration and container.duration > 0 and len(container.streams) == 1:
        return float(container.duration / av.time_base)
    return None


# -- torchcodec, only when named


def decode_torchcodec(data: bytes, limits: DecodeLimits) -> tuple[Samples, int]:
    """Decode with torchcodec, which must be installed."""
    with _open_av(data):
        pass  # torchcodec's FFmpeg takes playlists too, and would open what they name
    try:
        module = import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError) as exc:  # no FFmpeg libraries: RuntimeError
        raise ValidationError(
            "audio_backend torchcodec cannot be loaded here; leave it out, or use auto",
            parameter="audio_backend",
            value="torchcodec",
        ) from exc
    decoder = module.AudioDecoder(data)
    metadata = decoder.metadata
    rate, channels = int(metadata.sample_rate), int(metadata.num_channels)
    sink = MonoSink(rate, channels, limits, stated_s=metadata.duration_seconds_from_header)
    # One call, and no more than the limits allow: the header may understate.
    most_s = limits.max_audio_decoded_bytes / (rate * channels * 4)
    samples = decoder.get_samples_played_in_range(
        0.0, min(limits.max_audio_duration_s, most_s) + 1.0
    )
    sink.write(samples.data.numpy().T)
    return sink.result(), rate


# -- by content


def decode_auto(data: bytes, limits: DecodeLimits) -> tuple[Samples, int]:
    """Decode with whichever decoder is best for what the bytes are, the same everywhere."""
    plain = decode_wav(data, limits)
    if plain is not None:
        return plain
    if reads_well(data):
        try:
            return decode_soundfile(data, limits)
        except soundfile.LibsndfileError:
            pass  # not what it looked like, or a variant: FFmpeg decides
    return decode_av(data, limits)


DECODERS: Final[dict[str, Callable[[bytes, DecodeLimits], tuple[Samples, int]]]] = {
    "auto": decode_auto,
    "soundfile": decode_soundfile,
    "pyav": decode_av,
    "torchcodec": decode_torchcodec,
}
"""Names that `audio_backend` takes."""


def reads_well(data: bytes) -> bool:
    """Whether libsndfile is the better decoder for these bytes: WAV, FLAC, MP3, Vorbis, AIFF, AU.

    It takes three times as long as FFmpeg for Opus, and does not read MP4 or WebM.
    """
    if data[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64"):
        return data[8:12] == b"WAVE"
    if data[:4] == b"FORM":
        return data[8:12] in (b"AIFF", b"AIFC")
    if data[:4] == b"OggS":
        return b"\x01vorbis" in data[:128]
    if data[:4] in (b"fLaC", b".snd", b"riff"):
        return True
    if data[:3] == b"ID3":
        return True
    # MPEG audio: 11 sync bits, then a layer; 0 in the layer's place is ADTS, which is AAC.
    return len(data) > 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 6 != 0


# -- headers


def probe_audio(data: bytes) -> AudioHeader | None:
    """Read what the bytes say about themselves, without decoding; None if they do not parse."""
    layout = parse_wav(data)
    if layout is not None:
        return _header(layout.rate_hz, layout.channels, layout.num_samples)
    if reads_well(data):
        try:
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                return _header(file.samplerate, file.channels, _stated_frames(file))
        except soundfile.LibsndfileError:
            pass  # as in `decode_auto`
    with _open_av(data) as (container, stream):
        context = stream.codec_context
        if not context.sample_rate or not context.layout.nb_channels:
            return None
        num_samples = _stated_samples(stream)
        if num_samples is not None:
            return _header(context.sample_rate, context.layout.nb_channels, num_samples)
        duration_s = _stated_seconds(container, stream)
        return AudioHeader(context.sample_rate, context.layout.nb_channels, duration_s)


def _header(rate_hz: int, channels: int, num_samples: int | None) -> AudioHeader:
    duration_s = None if num_samples is None else num_samples / rate_hz
    return AudioHeader(rate_hz, channels, duration_s, num_samples)
