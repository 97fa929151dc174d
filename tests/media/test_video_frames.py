"""Frame choice and true times, over containers, codecs and damage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lazydecode.errors import CorruptMediaError, MediaTooLargeError, ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media import ImageMediaIO, VideoMediaIO, plan_frames
from lazydecode.media.video_backends import frame_index, packet_runs, pyav
from lazydecode.media.video_backends.container import open_video
from tests.builders_video import (
    draw_number,
    make_audio_only_mp4,
    make_mp4,
    make_video,
    read_numbers,
    turn,
    with_index_first,
)

build = functools.cache(make_video)
OPEN_GOP = (("x264-params", "keyint=12:min-keyint=12:open-gop=1:bframes=3:b-pyramid=normal"),)
VPX = (("deadline", "realtime"), ("cpu-used", "8"), ("lag-in-frames", "12"))
FORMATS: dict[str, dict[str, Any]] = {
    "h264 mp4": {"gop": 12},
    "h264 mp4, one group": {},
    "h264 mp4, no b-frames": {"b_frames": 0, "gop": 12},
    "h264 mp4, open groups": {"codec_options": OPEN_GOP},
    "h264 mkv, open groups": {"container": "mkv", "codec_options": OPEN_GOP},
    "h264 mov": {"container": "mov", "gop": 12},
    "h264 ts": {"container": "ts", "gop": 12, "b_frames": 3},
    "h264 flv": {"container": "flv", "gop": 12},
    "h264 avi": {"container": "avi", "gop": 12, "b_frames": 2},
    "h264 fragmented mp4": {
        "gop": 12,
        "muxer_options": (("movflags", "frag_keyframe+empty_moov+default_base_moof"),),
    },
    "h264 10 bit": {"pix_fmt": "yuv420p10le", "gop": 12},
    "h264 4:4:4": {"pix_fmt": "yuv444p", "gop": 12},
    "hevc mp4": {"codec": "libx265", "gop": 12, "b_frames": 3},
    "hevc mp4, open groups": {
        "codec": "libx265",
        "codec_options": (("x265-params", "keyint=12:open-gop=1:bframes=4:log-level=none"),),
    },
    "vp9 webm": {"container": "webm", "codec": "libvpx-vp9", "gop": 12, "codec_options": VPX},
    "vp8 webm with hidden frames": {
        "container": "webm",
        "codec": "libvpx",
        "gop": 30,
        "codec_options": (
            ("deadline", "good"),
            ("cpu-used", "5"),
            ("lag-in-frames", "12"),
            ("auto-alt-ref", "1"),
        ),
    },
    "av1 mp4": {"codec": "libsvtav1", "gop": 12, "codec_options": (("preset", "12"),)},
    "mpeg4 avi": {"container": "avi", "codec": "mpeg4", "gop": 12},
    "mpeg4 mp4": {"codec": "mpeg4", "gop": 12, "codec_options": (("bf", "2"),)},
    "mpeg2 ts": {"container": "ts", "codec": "mpeg2video", "gop": 12},
    "mjpeg avi": {"container": "avi", "codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "prores mov": {"container": "mov", "codec": "prores_ks", "pix_fmt": "yuv422p10le"},
    "gif": {"container": "gif", "codec": "gif", "pix_fmt": "rgb8"},
    "apng": {"container": "apng", "codec": "apng", "pix_fmt": "rgb24"},
    "wmv": {"container": "asf", "codec": "wmv2", "gop": 12},
}
COUNT, FPS = 60, 25


def sample(name: str, size: tuple[int, int] = (96, 64)) -> bytes:
    options = dict(FORMATS[name])
    for key in ("codec_options", "muxer_options"):
        if key in options:
            options[key] = _FrozenDict(options[key])
    return build(COUNT, FPS, size, **options)


class _FrozenDict(dict[str, str]):
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def decode(data: bytes, **options: Any) -> tuple[Any, Any]:
    return VideoMediaIO(ImageMediaIO(), **options).load_bytes(data)


@pytest.mark.parametrize("name", FORMATS)
def test_every_frame_comes_once_in_order_with_its_time(name: str) -> None:
    data = sample(name)
    frames, metadata = decode(data, num_frames=-1)
    assert read_numbers(frames) == list(range(COUNT))
    assert metadata["frames_indices"] == list(range(COUNT))
    # 1 ms: Matroska, FLV and ASF round times to it.
    assert metadata["timestamps"] == pytest.approx(np.arange(COUNT) / FPS, abs=1e-3)
    assert (metadata["fps"], metadata["duration"]) == (FPS, COUNT / FPS)
    assert metadata["total_num_frames"] == COUNT


@pytest.mark.parametrize("name", FORMATS)
def test_chosen_frames_are_the_same_as_when_all_are_decoded(name: str) -> None:
    data = sample(name)
    every, _ = decode(data, num_frames=-1)
    rng = random.Random(name)
    for count in (1, 2, 5):
        chosen = sorted(rng.sample(range(COUNT), count))
        frames, metadata = decode(data, frame_indices=chosen)
        assert metadata["frames_indices"] == chosen
        assert np.array_equal(frames, every[chosen])


@pytest.mark.parametrize("name", FORMATS)
def test_header_is_true(name: str) -> None:
    io = VideoMediaIO(ImageMediaIO(), num_frames=7)
    ref = io.load_bytes_ref(sample(name))
    header = ref.header
    assert (header.width, header.height, header.num_frames) == (96, 64, COUNT)
    assert (header.fps, header.duration_s) == (FPS, COUNT / FPS)
    assert plan_frames(ref.spec, header) == ref.decode()[1]


@pytest.mark.parametrize(
    ("size", "pix_fmt"),
    [
        ((65, 49), "yuv444p"),  # x264 takes no odd sizes in 4:2:0
        ((16, 16), "yuv420p"),
        ((130, 98), "yuv420p"),
        ((130, 98), "yuv422p"),
    ],
)
def test_size_is_kept(size: tuple[int, int], pix_fmt: str) -> None:
    frames, metadata = decode(build(3, size=size, pix_fmt=pix_fmt), num_frames=-1)
    assert frames.shape == (3, size[1], size[0], 3)
    assert (metadata["width"], metadata["height"]) == size
    assert read_numbers(frames) == [0, 1, 2]


def test_colours_come_out_as_red_green_blue() -> None:
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:, :, 0], picture[:24, :, 1], picture[:, :32, 2] = 200, 100, 50
    frames, _ = decode(make_video(pictures=[picture] * 3), num_frames=1)
    for y, x in ((10, 10), (10, 50), (40, 10), (40, 50)):
        assert np.abs(frames[0, y, x].astype(int) - picture[y, x]).max() <= 6


# -- time


def test_variable_rate_keeps_the_times_of_the_stream() -> None:
    times = [0.0, 0.1, 0.2, 0.7, 0.8, 2.0]
    data = make_video(len(times), times=times)
    frames, metadata = decode(data, num_frames=-1)
    assert read_numbers(frames) == list(range(6))
    assert metadata["timestamps"] == pytest.approx(times, abs=1e-4)


@pytest.mark.parametrize("container", ["mp4", "mkv"])
def test_times_count_from_the_start_of_the_container(container: str) -> None:
    times = [5 + n / 10 for n in range(10)]
    _, metadata = decode(make_video(10, times=times, container=container), num_frames=-1)
    relative = np.subtract(metadata["timestamps"], metadata["timestamps"][0])
    assert relative == pytest.approx(np.arange(10) / 10, abs=1e-3)


def test_frames_that_an_edit_list_cuts_off_do_not_count() -> None:
    data = make_video(20, times=[n / 10 - 0.5 for n in range(20)], b_frames=0)
    frames, metadata = decode(data, num_frames=-1)
    assert read_numbers(frames) == list(range(5, 20))
    assert metadata["total_num_frames"] == 15
    assert metadata["timestamps"][0] == pytest.approx(0.0, abs=1e-3)
    some, _ = decode(data, num_frames=3)
    assert read_numbers(some) == [5, 12, 19]


def test_sampling_rate_sets_the_count() -> None:
    data = build(50, 25)
    for fps, count in ((1, 2), (2, 4), (4.5, 9), (0.1, 1), (100, 50)):
        _, metadata = decode(data, fps=fps)
        assert len(metadata["frames_indices"]) == count, fps


def test_smaller_of_rate_and_count_wins() -> None:
    data = build(50, 25)
    assert decode(data, fps=4, num_frames=3)[1]["frames_indices"] == [0, 24, 49]
    assert len(decode(data, fps=2, num_frames=30)[1]["frames_indices"]) == 4
    assert len(decode(data, fps=10, max_frames=5)[1]["frames_indices"]) == 5
    assert len(decode(data, fps=10, num_frames=-1)[1]["frames_indices"]) == 20


def test_thirty_two_frames_unless_told_otherwise() -> None:
    assert len(decode(build(50, 25))[0]) == 32
    assert len(decode(build(20))[0]) == 20


def test_time_window() -> None:
    data = build(20)
    assert decode(data, start_time=0.5, end_time=1.0)[1]["frames_indices"] == [5, 6, 7, 8, 9]
    assert decode(data, start_time=1.75)[1]["frames_indices"] == [17, 18, 19]
    assert decode(data, end_time=0.25, num_frames=2)[1]["frames_indices"] == [0, 2]
    assert decode(data, start_time=1.0, fps=2)[1]["frames_indices"] == [10, 19]
    assert decode(data, end_time=99.0)[1]["frames_indices"] == list(range(20))


def test_explicit_times_and_numbers_in_the_order_asked_for() -> None:
    data = build(20)
    frames, metadata = decode(data, timestamps=[1.95, 0.0, 0.39, 0.4, 0.0])
    assert metadata["frames_indices"] == [19, 0, 3, 4, 0]
    assert read_numbers(frames) == [19, 0, 3, 4, 0]
    frames, metadata = decode(data, frame_indices=[7, 7, 2])
    assert read_numbers(frames) == [7, 7, 2]
    assert metadata["timestamps"] == pytest.approx([0.7, 0.7, 0.2])


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"frame_indices": [0, 20]}, "frame_indices"),
        ({"timestamps": [0.0, 2.1]}, "timestamps"),
        ({"start_time": 2.0}, "start_time"),
        ({"frame_indices": [1, 2, 3], "max_frames": 2}, "max_frames"),
    ],
)
def test_frames_outside_the_video_are_a_bad_request(
    options: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        decode(build(20), **options)
    assert caught.value.parameter == parameter


# -- rotation


def test_frames_stand_upright_whatever_the_display_matrix() -> None:
    picture = draw_number(0b1010_0110_0011_0001)
    data = make_video(pictures=[picture] * 2)
    plain = decode(data, num_frames=1)[0][0]
    expected: dict[int | str, Any] = {
        0: plain,
        90: np.rot90(plain, -1),
        180: np.rot90(plain, 2),
        270: np.rot90(plain, 1),
        "mirrored": plain[:, ::-1],
        "transposed": plain.transpose(1, 0, 2),
    }
    for how, upright in expected.items():
        turned = turn(data, how)
        frames, metadata = decode(turned, num_frames=1)
        assert np.array_equal(frames[0], upright), how
        assert (metadata["height"], metadata["width"]) == upright.shape[:2]
        header = VideoMediaIO(ImageMediaIO()).probe_header(turned)
        assert (header.height, header.width) == upright.shape[:2], how


# -- damage


def damage(data: bytes, numbers: range, codec_bytes: int = 8) -> bytes:
    """Overwrite the start of the given frames' packets of an MP4."""
    broken = bytearray(data)
    with open_video(data) as (container, stream):
        for number, packet in enumerate(p for p in container.demux(stream) if p.size):
            if number in numbers:
                broken[packet.pos : packet.pos + packet.size] = b"\xff" * packet.size
    return bytes(broken)


def test_readable_frames_around_damage_survive() -> None:
    data = damage(build(20, gop=1, b_frames=0), range(5, 8))
    frames, metadata = decode(data, num_frames=-1)
    readable = [n for n in range(20) if n not in (5, 6, 7)]
    assert metadata["frames_indices"] == read_numbers(frames) == readable
    assert metadata["total_num_frames"] == 20
    frames, metadata = decode(data, frame_indices=[4, 6, 9])
    assert metadata["frames_indices"] == read_numbers(frames) == [4, 9]


def test_recovery_takes_the_next_frame_that_decodes() -> None:
    data = damage(build(20, gop=1, b_frames=0), range(5, 8))
    _, metadata = decode(data, frame_indices=[4, 6, 9], frame_recovery=True)
    assert metadata["frames_indices"] == [4, 8, 9]
    assert metadata["timestamps"] == pytest.approx([0.4, 0.8, 0.9])
    # Not past the next wanted frame: that one is there already.
    _, metadata = decode(data, frame_indices=[5, 6, 9], frame_recovery=True)
    assert metadata["frames_indices"] == [8, 9]


def test_chosen_frames_that_all_are_damaged_are_an_error() -> None:
    data = damage(build(20, gop=1, b_frames=0), range(5, 8))
    with pytest.raises(CorruptMediaError, match=r"none of the 2 chosen frames decodes"):
        decode(data, frame_indices=[5, 6])


def test_file_without_a_decodable_frame_is_an_error() -> None:
    with pytest.raises(CorruptMediaError, match=r"decodes \(codec h264\)"):
        decode(damage(build(5), range(5)))


def test_cut_off_file_is_an_error_that_says_how_much_is_there() -> None:
    data = with_index_first(build(20, gop=1, b_frames=0))
    assert len(decode(data, num_frames=-1)[0]) == 20
    cut = data[: -(len(data) // 5)]
    with pytest.raises(CorruptMediaError, match=r"cut off: 1\d of 20 frames"):
        decode(cut)
    _, metadata = decode(cut, num_frames=-1, frame_recovery=True)
    indices = metadata["frames_indices"]
    assert 10 <= len(indices) < 20
    assert indices == list(range(len(indices)))


def test_wrong_key_frame_marks_cost_no_frame() -> None:
    # Every packet claims to be a key frame: decoding in the middle finds no reference.
    data = bytearray(make_video(20, gop=250, b_frames=0))
    at = data.index(b"stss")
    data[at : at + 4] = b"free"
    frames, metadata = decode(bytes(data), frame_indices=[3, 11, 17])
    assert metadata["frames_indices"] == read_numbers(frames) == [3, 11, 17]


@pytest.mark.parametrize("junk", [b"", b"\0" * 64, b"<html>not found</html>", b"RIFF" * 40])
def test_junk_is_an_error(junk: bytes) -> None:
    with pytest.raises(CorruptMediaError, match="cannot be opened"):
        decode(junk)
    assert VideoMediaIO(ImageMediaIO()).probe_header(junk) is None


def test_sound_without_pictures_is_an_error() -> None:
    with pytest.raises(CorruptMediaError, match="no video stream"):
        decode(make_audio_only_mp4())


def test_errors_show_no_addresses_and_no_paths() -> None:
    for broken in (build(5)[:200], b"\0\0\0\x18ftypmp42" + b"\xff" * 100):
        with pytest.raises(CorruptMediaError) as caught:
            decode(broken)
        assert "0x" not in str(caught.value)
        assert "/" not in str(caught.value)


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_gives_frames_or_our_error(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(
        ["h264 mp4", "vp9 webm", "hevc mp4", "av1 mp4", "gif", "h264 ts", "mpeg4 mp4"]
    )
    data = bytearray(sample(name))
    for _ in range(rng.randint(1, 30)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        frames, metadata = decode(bytes(data[: rng.choice([None, len(data) // 2])]), num_frames=5)
    except (CorruptMediaError, MediaTooLargeError):
        return
    assert 1 <= len(frames) <= 5
    assert len(frames) == len(metadata["frames_indices"]) == len(metadata["timestamps"])


# -- limits


def test_frame_limit_holds_before_anything_is_allocated() -> None:
    limits = DecodeLimits(max_video_frames=10)
    data = build(20)
    with pytest.raises(MediaTooLargeError, match=r"20 frames .* at most 10"):
        decode(data, num_frames=-1, limits=limits)
    assert len(decode(data, num_frames=10, limits=limits)[0]) == 10
    with pytest.raises(MediaTooLargeError):
        decode(data, frame_indices=[0] * 11, limits=limits)


def test_byte_limit_holds_before_anything_is_allocated() -> None:
    frame_bytes = 64 * 48 * 3
    limits = DecodeLimits(max_video_decoded_bytes=4 * frame_bytes)
    assert len(decode(build(20), num_frames=4, limits=limits)[0]) == 4
    with pytest.raises(MediaTooLargeError, match="5 frames of 64x48"):
        decode(build(20), num_frames=5, limits=limits)
    with pytest.raises(MediaTooLargeError):
        decode(build(20), frame_indices=[0] * 5, limits=limits)


def test_picture_limit_holds_for_each_frame() -> None:
    with pytest.raises(MediaTooLargeError, match="64 x 48 pixels exceed"):
        decode(build(3), limits=DecodeLimits(max_image_pixels=64 * 48 - 1))


# -- the index


@pytest.mark.parametrize(
    "name", ["h264 mp4", "h264 mp4, no b-frames", "h264 mov", "hevc mp4", "av1 mp4", "mpeg4 mp4"]
)
def test_tables_of_an_mp4_say_what_its_packets_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned = frame_index.scan_index(sample(name))
    monkeypatch.delattr(frame_index, "_scanned_packets")
    assert_same_index(frame_index.read_index(sample(name)), scanned)


@pytest.mark.parametrize(
    "data",
    [
        make_video(20, times=[n / 10 - 0.5 for n in range(20)], b_frames=0),
        make_video(20, times=[n / 10 - 0.5 for n in range(20)], b_frames=3),
        make_video(20, times=[n / 10 + 3 for n in range(20)]),
        make_video(6, times=[0.0, 0.1, 0.2, 0.7, 0.8, 2.0]),
        make_video(20, audio=True),
        make_video(1),
        make_video(60, gop=12, muxer_options={"movflags": "frag_keyframe+empty_moov"}),
        make_video(60, gop=12, muxer_options={"movflags": "frag_keyframe"}),
    ],
    ids=["cut", "cut, b-frames", "late", "variable", "sound", "one", "fragments", "mixed"],
)
def test_index_is_the_same_however_it_is_read(data: bytes) -> None:
    assert_same_index(frame_index.read_index(data), frame_index.scan_index(data))


def assert_same_index(one: frame_index.FrameIndex, other: frame_index.FrameIndex) -> None:
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert np.array_equal(a, b), (field.name, a, b)
    assert np.array_equal(one.timeline.times_s, other.timeline.times_s)
    assert (one.timeline.fps, one.timeline.duration_s) == (
        other.timeline.fps,
        other.timeline.duration_s,
    )


def test_seeks_that_go_astray_cost_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    data = build(COUNT * 4, FPS, (96, 64), gop=12)
    chosen = [0, 100, 201]
    expected, _ = decode(data, frame_indices=chosen)

    def late(container: Any, stream: Any, index: Any, target: int) -> Any:
        raise packet_runs.LostPositionError

    monkeypatch.setattr(packet_runs, "_seek", late)
    frames, metadata = decode(data, frame_indices=chosen)
    assert metadata["frames_indices"] == read_numbers(frames) == chosen
    assert np.array_equal(frames, expected)


@pytest.mark.parametrize("container", ["mp4", "mkv", "mov"])
@pytest.mark.parametrize("gop", [1, 12, 100])
@pytest.mark.parametrize("b_frames", [0, 3])
def test_frames_far_apart_are_found_by_seeking(container: str, gop: int, b_frames: int) -> None:
    data = build(240, FPS, container=container, gop=gop, b_frames=b_frames)
    for chosen in ([239], [60, 180], [0, 47, 48, 99, 100, 238]):
        frames, metadata = decode(data, frame_indices=chosen)
        assert read_numbers(frames) == metadata["frames_indices"] == chosen


# -- how much is decoded


def decoded_packets(data: bytes, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[int]:
    """Return the sizes of the packets that a decode hands to the decoder."""
    sizes: list[int] = []
    original = pyav.decode_packet

    def spy(packet: Any) -> list[Any]:
        sizes.append(packet.size)
        return original(packet)

    monkeypatch.setattr(pyav, "decode_packet", spy)
    decode(data, **options)
    return sizes


def test_only_the_groups_of_chosen_frames_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = build(COUNT, FPS, (96, 64), gop=12)
    assert len(decoded_packets(data, monkeypatch, frame_indices=[12, 48])) == 2
    assert len(decoded_packets(data, monkeypatch, frame_indices=[0])) == 1
    assert len(decoded_packets(data, monkeypatch, frame_indices=[59])) <= 12
    assert len(decoded_packets(data, monkeypatch, num_frames=-1)) == COUNT


def test_unwanted_frames_that_no_other_refers_to_are_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = build(COUNT, FPS, (96, 64), gop=COUNT, b_frames=2)
    decoded: list[int] = []
    for name in ("decode_packet", "drain_decoder"):
        original = getattr(pyav, name)

        def spy(source: Any, original: Any = original) -> list[Any]:
            frames: list[Any] = original(source)
            decoded.append(len(frames))
            return frames

        monkeypatch.setattr(pyav, name, spy)
    frames, _ = decode(data, num_frames=-1)
    assert sum(decoded) == len(frames) == COUNT
    decoded.clear()
    frames, metadata = decode(data, frame_indices=[30, COUNT - 1])
    assert read_numbers(frames) == metadata["frames_indices"] == [30, COUNT - 1]
    # x264 puts up to two B frames between others.
    assert 2 <= sum(decoded) < COUNT * 3 // 4


def test_seeking_replaces_walking_between_frames_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    data = build(120, FPS, (96, 64), gop=12)
    targets: list[int] = []
    original = packet_runs._seek

    def spy(container: Any, stream: Any, index: Any, target: int) -> Any:
        targets.append(target)
        return original(container, stream, index, target)

    monkeypatch.setattr(packet_runs, "_seek", spy)
    decode(data, frame_indices=[0, 13, 26])
    assert targets == []
    decode(data, frame_indices=[0, 109])
    assert targets == [108]


def test_opening_and_scanning_decode_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = build(COUNT, FPS, (96, 64), gop=12)
    opened = []
    original = frame_index.open_video

    @contextlib.contextmanager
    def spy(data: bytes) -> Iterator[Any]:
        with original(data) as (container, stream):
            yield container, stream
            opened.append(stream.codec_context.is_open)

    monkeypatch.setattr(frame_index, "open_video", spy)
    index = frame_index.read_index(data)
    assert opened == [False]
    assert len(index.pts) == COUNT
    assert index.is_key.sum() == COUNT / 12


def test_frames_that_nobody_wants_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []
    original = pyav.write_rgb
    monkeypatch.setattr(
        pyav, "write_rgb", lambda frame, out: (converted.append(1), original(frame, out))[1]
    )
    decode(make_mp4(), num_frames=3)
    assert len(converted) == 3
