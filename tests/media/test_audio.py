"""AudioMediaIO: the right samples from every container, and limits that hold while decoding."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import numpy as np
import pybase64
import pytest
import soundfile

from lazydecode.errors import (
    CorruptMediaError,
    LazyDecodeError,
    MediaTooLargeError,
    ValidationError,
)
from lazydecode.limits import DecodeLimits
from lazydecode.media.audio import AUDIO_DECODER, AudioMediaIO
from lazydecode.media.audio_decode import MonoSink, frame_to_float
from lazydecode.media.base import PayloadDigest, derive_media_key
from tests.builders import (
    loudest_hz,
    make_av_audio,
    make_image,
    make_jpeg,
    make_sound,
    make_wav,
    make_webp,
    tone,
)
from tests.builders_video import make_video

TONES = (440.0, 880.0)


def decode(data: bytes, **options: Any) -> tuple[Any, int]:
    return AudioMediaIO(**options).load_bytes_ref(data).decode()


CONTAINERS: dict[str, tuple[Callable[..., bytes], tuple[str, ...], int, int]] = {
    # name: builder, its arguments, rate, tolerance in samples
    "wav": (make_wav, (), 44_100, 0),
    "flac": (make_sound, ("FLAC",), 44_100, 0),
    "aiff": (make_sound, ("AIFF",), 44_100, 0),
    "au": (make_sound, ("AU",), 44_100, 0),
    "w64": (make_sound, ("W64", "PCM_16"), 44_100, 0),
    "mp3": (make_sound, ("MP3",), 44_100, 0),
    "vorbis": (make_sound, ("OGG", "VORBIS"), 44_100, 0),
    "ogg-opus": (make_av_audio, ("ogg", "libopus"), 48_000, 0),
    "ogg-flac": (make_av_audio, ("ogg", "flac"), 48_000, 0),
    "webm-opus": (make_av_audio, ("webm", "libopus"), 48_000, 0),
    "m4a": (make_av_audio, ("ipod", "aac"), 48_000, 1024),
    "mp4": (make_av_audio, ("mp4", "aac"), 48_000, 1024),
    "m4a-alac": (make_av_audio, ("ipod", "alac"), 48_000, 0),
    "aac": (make_av_audio, ("adts", "aac"), 48_000, 2048),
    "mkv-flac": (make_av_audio, ("matroska", "flac"), 48_000, 0),
    "mkv-ac3": (make_av_audio, ("matroska", "ac3"), 48_000, 2048),
    "mov-s16": (make_av_audio, ("mov", "pcm_s16le"), 48_000, 0),
    "mov-s24": (make_av_audio, ("mov", "pcm_s24be"), 48_000, 0),
    "mov-f32": (make_av_audio, ("mov", "pcm_f32le"), 48_000, 0),
    "mov-mulaw": (make_av_audio, ("mov", "pcm_mulaw"), 48_000, 0),
    "avi": (make_av_audio, ("avi", "pcm_s16le"), 48_000, 0),
    "caf": (make_av_audio, ("caf", "pcm_s16le"), 48_000, 0),
    "mpegts": (make_av_audio, ("mpegts", "aac"), 48_000, 2048),
    "mp2": (make_av_audio, ("mp2", "mp2"), 48_000, 2048),
}


def build(name: str, **options: Any) -> bytes:
    builder, arguments, rate, _ = CONTAINERS[name]
    return builder(*arguments, **{"rate": rate, "freqs": TONES, **options})


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_mono_at_its_own_rate(name: str) -> None:
    _, _, rate, tolerance = CONTAINERS[name]
    samples, decoded_rate = decode(build(name))
    assert decoded_rate == rate
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert abs(len(samples) - rate // 2) <= tolerance
    assert np.abs(np.subtract(loudest_hz(samples, rate, 2), [440, 880])).max() <= 2
    # The mean of two tones of 0.5, in [-1, 1] whatever the stored format.
    middle = samples[rate // 8 : rate // 4]
    expected = tone(TONES, rate=rate).mean(axis=1)
    assert abs(float(np.sqrt((middle**2).mean())) - np.sqrt((expected**2).mean())) < 0.02


@pytest.mark.parametrize("name", CONTAINERS)
def test_header_is_what_is_decoded(name: str) -> None:
    data = build(name)
    header = AudioMediaIO().load_bytes_ref(data).header
    samples, rate = decode(data)
    assert header is not None
    assert (header.rate_hz, header.channels) == (rate, 2)
    if header.num_samples is not None:
        assert header.num_samples == len(samples)
    if header.duration_s is not None:
        assert abs(header.duration_s - 0.5) < 0.06


@pytest.mark.parametrize("name", ["wav", "flac", "aiff", "mp3", "vorbis", "m4a", "mov-s16"])
def test_exact_lengths_are_stated(name: str) -> None:
    header = AudioMediaIO().probe_header(build(name))
    assert header is not None
    # AAC decodes to whole frames of 1024 samples: the padding of the last one stays.
    exact = CONTAINERS[name][2] // 2
    assert header.num_samples == (-(-exact // 1024) * 1024 if name == "m4a" else exact)


def test_headers_do_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(soundfile.SoundFile, "read", refuse)
    monkeypatch.setattr("lazydecode.media.audio_decode._drain", refuse)
    for name in CONTAINERS:
        assert AudioMediaIO().load_bytes_ref(build(name)).header is not None


def test_exact_formats_are_exact() -> None:
    source = tone(TONES, rate=48_000)
    wanted = (np.round(source * 32767) / 32768).astype(np.float32).mean(axis=1)
    for name in ("wav", "flac", "aiff", "mov-s16", "avi", "mkv-flac", "m4a-alac"):
        samples, _ = decode(build(name, rate=48_000))
        assert np.abs(samples - wanted).max() < 1e-4, name


def test_packed_and_planar_frames_of_every_format() -> None:
    values = np.array([[-1.0, 0.5], [0.25, -0.5], [0.0, 0.99]])
    for name in ("u8", "s16", "s32", "flt", "dbl"):
        scale = {"u8": 128, "s16": 2**15, "s32": 2**31}.get(name)
        kind = {"u8": "u1", "s16": "i2", "s32": "i4", "flt": "f4", "dbl": "f8"}[name]
        raw = values if scale is None else np.round(values * scale) + (128 if name == "u8" else 0)
        for planar in (False, True):
            array = raw.astype(kind)
            array = np.ascontiguousarray(array.T) if planar else array.reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(array, format=name + "p" * planar, layout="stereo")
            samples = frame_to_float(frame)
            assert samples.dtype == np.float32
            assert np.abs(samples - values).max() <= (1 / 128 if name == "u8" else 1e-4)


def test_the_audio_track_of_a_video() -> None:
    data = (Path(__file__).parent.parent / "cases/media/k3_with_audio.mp4").read_bytes()
    samples, rate = decode(data)
    header = AudioMediaIO().probe_header(data)
    assert header is not None
    assert header.num_samples == len(samples) == 94 * 1024
    assert rate == 48_000


def test_the_sound_of_a_video_decodes_no_frame() -> None:
    data = make_video(30, 10, audio=True)
    pictures = re.compile(r"nal_unit_type: (1\(|5\()")  # coded slices: what a frame is made of

    def count(use: Callable[[], object]) -> int:
        av.logging.set_level(av.logging.DEBUG)
        try:
            with av.logging.Capture(local=False) as logs:
                use()
        finally:
            av.logging.set_level(None)
        return sum(1 for _, source, line in logs if source == "h264" and pictures.match(line))

    def open_plainly() -> None:
        av.open(io.BytesIO(data)).close()

    assert count(open_plainly) > 0  # FFmpeg looks at frames to learn about the stream
    assert count(lambda: decode(data)) == 0
    assert count(lambda: AudioMediaIO().probe_header(data)) == 0


def test_a_video_without_sound_says_that_it_has_no_audio_track() -> None:
    data = (Path(__file__).parent.parent / "cases/media/k3_plain.mp4").read_bytes()
    ref = AudioMediaIO().load_bytes_ref(data)
    assert ref.header is None
    with pytest.raises(CorruptMediaError, match="no audio track"):
        ref.decode()


def test_two_channels_become_their_mean_bit_by_bit() -> None:
    noise = np.random.default_rng(5).standard_normal((5000, 2)).astype(np.float32)
    noise[:3] = [[-0.0, -0.0], [-0.0, 0.0], [1e-45, -1e-45]]
    data = io.BytesIO()
    soundfile.write(data, noise, 16000, format="WAV", subtype="FLOAT")
    samples, _ = AudioMediaIO().load_bytes(data.getvalue())
    assert samples.tobytes() == noise.mean(axis=1, dtype=np.float32).tobytes()


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_any_number_of_channels_becomes_one(channels: int) -> None:
    freqs = [300.0 * (n + 1) for n in range(channels)]
    samples, rate = decode(make_av_audio("ogg", "flac", freqs=freqs))
    assert loudest_hz(samples, rate, channels) == [round(freq) for freq in freqs]


# -- what is refused


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("webp", make_webp()),
        ("jpeg", make_jpeg()),
        ("png", make_image("PNG")),
        ("gif", make_image("GIF")),
        ("avif", make_image("AVIF")),
        ("text", b"hello, this is no audio at all\n" * 50),
        ("html", b"<!DOCTYPE html><html><body>404</body></html>"),
        ("empty", b""),
        ("zeros", bytes(5000)),
        ("id3 only", b"ID3\x04\0\0\0\0\0\x0a" + bytes(10)),
        ("midi", b"MThd\0\0\0\x06\0\0\0\x01\0\x60MTrk\0\0\0\x04\0\xff\x2f\0"),
    ],
)
def test_what_is_no_audio_is_refused(name: str, data: bytes) -> None:
    ref = AudioMediaIO().load_bytes_ref(data)
    assert ref.header is None
    with pytest.raises(CorruptMediaError) as caught:
        ref.decode()
    assert "0x" not in str(caught.value)


@pytest.mark.parametrize(
    "playlist",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{target}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{target}'\n",
        "<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011'><Period><AdaptationSet>"
        "<Representation><BaseURL>{target}</BaseURL></Representation></AdaptationSet></Period></MPD>",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
        "[playlist]\nFile1={target}\n",
    ],
)
@pytest.mark.parametrize("backend", ["auto", "pyav"])
def test_a_playlist_opens_nothing(playlist: str, backend: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.wav"
    secret.write_bytes(make_wav())
    for target in (secret, f"file://{secret}"):
        with pytest.raises(CorruptMediaError):
            decode(playlist.format(target=target).encode(), audio_backend=backend)


def test_empty_audio_is_an_error_in_every_container() -> None:
    nothing = np.zeros((0, 1))
    for data in (
        make_wav(nothing),
        make_sound("FLAC", None, nothing),
        make_sound("AIFF", None, nothing),
    ):
        with pytest.raises(CorruptMediaError):
            decode(data)


@pytest.mark.parametrize("name", ["flac", "mp3", "m4a", "mp4", "vorbis"])
def test_a_file_cut_in_half_is_an_error_where_it_states_its_length(
    name: str, tmp_path: Path
) -> None:
    data = build(name, seconds=4)
    if name in ("m4a", "mp4"):
        data = move_index_to_front(data, tmp_path / "faststart.mp4")
    assert abs(len(decode(data)[0]) / CONTAINERS[name][2] - 4) < 0.02
    if name == "vorbis":  # its length is that of its last page: a shorter file is a shorter clip
        assert len(decode(data[: len(data) // 2])[0]) < 3 * 44_100
        return
    with pytest.raises(CorruptMediaError):
        decode(data[: len(data) // 2])


def move_index_to_front(data: bytes, path: Path) -> bytes:
    """The same MP4 with `moov` before `mdat`, so that a cut file still has its index."""
    source = av.open(io.BytesIO(data))
    with av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as target:
        stream = target.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    source.close()
    return path.read_bytes()


@pytest.mark.parametrize("name", CONTAINERS)
def test_damage_is_read_or_our_error(name: str) -> None:
    data = build(name)
    rng = np.random.default_rng(0)
    for _ in range(12):
        damaged = bytearray(data)
        for position in rng.integers(0, min(len(data), 3000), 6):
            damaged[position] = rng.integers(0, 256)
        cut = bytes(damaged[: int(rng.integers(1, len(data)))])
        for sample in (bytes(damaged), cut):
            AudioMediaIO().probe_header(sample)
            try:
                samples, rate = decode(sample)
                assert samples.dtype == np.float32 and rate > 0 and len(samples) > 0
            except LazyDecodeError as exc:
                assert "0x" not in str(exc)


@pytest.mark.parametrize(
    "error",
    [
        OSError("x"),
        ValueError("x"),
        RuntimeError("x"),
        struct.error("x"),
        IndexError(),
        KeyError("k"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_decoder_raises_becomes_our_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    clips = [build("flac"), build("m4a")]
    monkeypatch.setattr(soundfile.SoundFile, "__init__", fail)
    monkeypatch.setattr(soundfile.SoundFile, "__del__", lambda _: None)
    monkeypatch.setattr("lazydecode.media.audio_decode.av.open", fail)
    for clip in clips:
        with pytest.raises(CorruptMediaError, match="Failed to load audio"):
            decode(clip)


# -- limits


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "vorbis", "ogg-opus", "m4a", "webm-opus"])
def test_duration_and_decoded_size_are_limited(name: str) -> None:
    data = build(name, seconds=3)
    with pytest.raises(MediaTooLargeError, match=r"duration of .* exceeds the limit of 2 s"):
        decode(data, limits=DecodeLimits(max_audio_duration_s=2))
    with pytest.raises(MediaTooLargeError, match=r"decoded size exceeds the limit of 0.5 MiB"):
        decode(data, limits=DecodeLimits(max_audio_decoded_bytes=512 * 1024))
    assert len(decode(data, limits=DecodeLimits(max_audio_duration_s=3.5))[0])


def test_a_header_that_understates_is_found_while_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazydecode.media.audio_decode._stated_frames", lambda _: None)
    monkeypatch.setattr("lazydecode.media.audio_decode._stated_seconds", lambda *_: None)
    monkeypatch.setattr("lazydecode.media.audio_decode._stated_samples", lambda _: None)
    blocks: list[int] = []
    write = MonoSink.write

    def count(sink: MonoSink, block: Any) -> None:
        blocks.append(len(block))
        write(sink, block)

    monkeypatch.setattr(MonoSink, "write", count)
    for name in ("flac", "ogg-opus", "m4a"):
        blocks.clear()
        data = build(name, seconds=30)
        with pytest.raises(MediaTooLargeError, match="exceeds the limit of 2 s"):
            decode(data, limits=DecodeLimits(max_audio_duration_s=2))
        assert sum(blocks) < 5 * 48_000, name


def test_an_hour_in_a_small_file_costs_little_memory() -> None:
    case = Path(__file__).parent.parent / "cases/media/k2_bomb_61min.ogg"
    program = f"""
import resource
from pathlib import Path
from lazydecode.errors import MediaTooLargeError
from lazydecode.media import audio_decode
from lazydecode.media.audio import AudioMediaIO
data = Path({str(case)!r}).read_bytes()
AudioMediaIO().load_bytes(Path({str(case.with_name("k2_vorbis.ogg"))!r}).read_bytes())
audio_decode._stated_seconds = lambda *_: None
audio_decode._stated_frames = lambda *_: None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    AudioMediaIO().load_bytes(data)
except MediaTooLargeError as exc:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, exc)
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    grown_mb, text = output.split(" ", 1)
    assert int(grown_mb) < 300
    assert "duration" in text


def test_a_header_that_overstates_beyond_reason_is_not_believed() -> None:
    data = bytearray(build("webm-opus"))
    position = data.index(b"\x44\x89\x88") + 3  # the segment's duration, a double in ms
    data[position : position + 8] = struct.pack(">d", 3.6e9)
    samples, _ = decode(bytes(data))
    assert len(samples) == 24_000


def test_a_track_of_an_unknown_codec_is_passed_over() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mov") as container:
        streams = [container.add_stream("pcm_s16le", rate=8000, layout="mono") for _ in range(2)]
        for stream in streams:
            samples = (tone(rate=8000).T * 32767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.rate = 8000
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    data = buffer.getvalue()
    first = data.index(b"sowt")
    assert len(decode(data.replace(b"sowt", b"zzzz", 1))[0]) == 4000
    assert data[first : first + 4] == b"sowt"
    with pytest.raises(CorruptMediaError, match="no audio track that can be read"):
        decode(data.replace(b"sowt", b"zzzz"))


# -- the guard on encoded bytes

SMALL = DecodeLimits(max_audio_clip_bytes=1000)


def assert_refused(action: Callable[[], object], size: float) -> None:
    with pytest.raises(ValidationError, match="Maximum file size exceeded") as caught:
        action()
    assert caught.value.status == 400
    assert caught.value.parameter == "audio_filesize_mb"
    assert caught.value.value == pytest.approx(size / 1024 / 1024)


def test_too_many_encoded_bytes_are_refused_at_once(tmp_path: Path) -> None:
    io_ = AudioMediaIO(limits=SMALL)
    path = tmp_path / "clip.wav"
    path.write_bytes(bytes(1001))
    assert_refused(lambda: io_.load_bytes(bytes(1001)), 1001)
    assert_refused(lambda: io_.load_bytes_ref(bytes(1001)), 1001)
    assert_refused(lambda: io_.load_file(path), 1001)
    assert_refused(lambda: io_.load_file_ref(path), 1001)
    assert io_.get_max_bytes() == 1000
    assert AudioMediaIO().get_max_bytes() == 25 * 1024 * 1024


def test_base64_is_refused_by_its_length_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    io_ = AudioMediaIO(limits=SMALL)
    longest = pybase64.b64encode(bytes(1000)).decode()
    assert io_.load_base64_ref("audio/wav", longest).data == bytes(1000)
    monkeypatch.setattr("lazydecode.media.base.decode_base64", None)
    monkeypatch.setattr("lazydecode.media.audio.decode_base64", None)
    too_long = "A" * (len(longest) + 4)
    assert_refused(lambda: io_.load_base64_ref("audio/wav", too_long), len(too_long) * 3 / 4)
    assert_refused(
        lambda: io_.load_base64_ref("", memoryview(too_long.encode())), len(too_long) * 3 / 4
    )
    assert_refused(lambda: io_.load_base64("audio/wav", too_long), len(too_long) * 3 / 4)


def test_a_file_that_is_too_large_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "clip.wav"
    with path.open("wb") as file:
        file.truncate(10**12)  # sparse
    assert_refused(lambda: AudioMediaIO().load_file_ref(path), 10**12)


# -- identity and options


def test_spec_holds_every_option_as_it_is_used() -> None:
    assert AudioMediaIO(extra=[1]).get_decode_spec().settings == {
        "audio_backend": "auto",
        "decoder": AUDIO_DECODER,
        "extra": [1],
    }
    assert (
        AudioMediaIO(audio_backend=None).get_decode_spec()
        == AudioMediaIO(audio_backend="auto", limits=SMALL).get_decode_spec()
    )
    assert AudioMediaIO(audio_backend="pyav").get_decode_spec() != AudioMediaIO().get_decode_spec()


def test_key_is_digest_of_bytes_and_spec() -> None:
    data = make_wav()
    io_ = AudioMediaIO()
    expected = derive_media_key(data, io_.get_decode_spec())
    assert io_.load_bytes_ref(data).key == expected
    assert io_.load_bytes_ref(data, digest=PayloadDigest(data)).key == expected
    assert AudioMediaIO(audio_backend="pyav").load_bytes_ref(data).key != expected


def test_spec_alone_rebuilds_the_decoder() -> None:
    asked = AudioMediaIO(audio_backend="pyav").load_bytes_ref(make_wav())
    rebuilt = AudioMediaIO(**asked.spec.settings).load_bytes_ref(make_wav())
    assert (rebuilt.key, rebuilt.spec) == (asked.key, asked.spec)
    np.testing.assert_array_equal(rebuilt.decode()[0], asked.decode()[0])


@pytest.mark.parametrize("backend", ["ffmpeg", "", 7, ["auto"]])
def test_an_unknown_backend_is_told_the_known_ones(backend: Any) -> None:
    with pytest.raises(ValidationError, match=r"auto.*pyav.*soundfile.*torchcodec"):
        AudioMediaIO(audio_backend=backend)


def test_an_option_that_is_not_json_is_refused_at_construction() -> None:
    with pytest.raises(ValidationError, match="audio options"):
        AudioMediaIO(extra=float("nan"))


def test_a_backend_that_is_not_installed_is_refused_at_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lazydecode.media.audio.find_spec", lambda _: None)
    with pytest.raises(ValidationError, match="not installed"):
        AudioMediaIO(audio_backend="torchcodec")


def test_a_backend_that_does_not_load_is_not_the_fault_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lazydecode.media.audio.find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(ValidationError, match="cannot be loaded"):
        decode(make_wav(), audio_backend="torchcodec")


@pytest.mark.parametrize("name", ["flac", "mp3", "vorbis", "aiff"])
def test_backends_agree(name: str) -> None:
    data = build(name)
    left, left_rate = decode(data, audio_backend="soundfile")
    right, right_rate = decode(data, audio_backend="pyav")
    assert left_rate == right_rate
    # FFmpeg drops up to a short block at the end of Vorbis.
    assert abs(len(left) - len(right)) <= (128 if name == "vorbis" else 0)
    common = min(len(left), len(right))
    assert np.abs(left[:common] - right[:common]).max() < 1e-3


def torchcodec_loads() -> bool:
    """Whether torchcodec is installed and finds the FFmpeg libraries of the system."""
    if find_spec("torchcodec") is None:
        return False
    program = "import torchcodec.decoders"
    return subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


@pytest.mark.skipif(not torchcodec_loads(), reason="torchcodec needs the system's FFmpeg")
def test_torchcodec_where_it_is_installed(tmp_path: Path) -> None:
    for name in ("wav", "flac", "mp3", "ogg-opus", "mov-s16"):
        data = build(name)
        left, left_rate = decode(data, audio_backend="torchcodec")
        right, right_rate = decode(data, audio_backend="pyav")
        assert left_rate == right_rate
        assert len(left) == len(right)
        assert np.abs(left - right).max() < 1e-3, name
    with pytest.raises(MediaTooLargeError, match="duration"):
        decode(
            build("m4a", seconds=4),
            audio_backend="torchcodec",
            limits=DecodeLimits(max_audio_duration_s=3),
        )
    secret = tmp_path / "secret.wav"
    secret.write_bytes(make_wav())
    for playlist in (
        f"#EXTM3U\n#EXTINF:1,\n{secret}\n",
        f"ffconcat version 1.0\nfile '{secret}'\n",
    ):
        with pytest.raises(CorruptMediaError, match="no format that can be read"):
            decode(playlist.encode(), audio_backend="torchcodec")


def test_a_named_backend_is_used_alone() -> None:
    with pytest.raises(CorruptMediaError):
        decode(build("m4a"), audio_backend="soundfile")
    assert len(decode(build("wav"), audio_backend="soundfile")[0])
    assert len(decode(build("wav"), audio_backend="pyav")[0])


def test_all_ways_in_give_the_same(tmp_path: Path) -> None:
    data = make_wav()
    path = tmp_path / "clip.mp3"
    path.write_bytes(data)
    text = pybase64.b64encode(data).decode()
    io_ = AudioMediaIO()
    ways = [
        io_.load_bytes(data),
        io_.load_base64("audio/mp3", text),
        io_.load_file(path),
        io_.load_bytes_ref(data).decode(),
        io_.load_base64_ref("audio/mp3", text).decode(),
        io_.load_file_ref(path).decode(),
    ]
    assert {(samples.tobytes(), rate) for samples, rate in ways} == {(ways[0][0].tobytes(), 16_000)}
