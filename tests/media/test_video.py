"""VideoMediaIO: identity, options, the merge of options, plans, plug-ins; and no leaks."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lazydecode.errors import CorruptMediaError, LazyDecodeError, ValidationError
from lazydecode.media import (
    DecodeSpec,
    ImageMediaIO,
    PayloadDigest,
    VideoHeader,
    VideoMediaIO,
    derive_media_key,
    plan_frames,
)
from lazydecode.media.video import VIDEO_LOADER_REGISTRY, backend_fingerprint
from tests.builders_video import make_mp4, make_video, read_numbers

CASES = Path(__file__).parent.parent / "cases" / "media"


@functools.cache
def clip() -> bytes:
    return make_mp4(20)


def video_io(**options: Any) -> VideoMediaIO:
    return VideoMediaIO(ImageMediaIO(), **options)


@pytest.fixture
def register() -> Iterator[Callable[[str, type[Any]], None]]:
    names: list[str] = []

    def add(name: str, loader_class: type[Any]) -> None:
        names.append(name)
        VIDEO_LOADER_REGISTRY.register(name)(loader_class)

    yield add
    for name in names:
        VIDEO_LOADER_REGISTRY.remove(name)


# -- identity


def test_spec_holds_every_option_as_it_is_used() -> None:
    settings = video_io(fps=2.0, num_frames=8, custom=["x"]).get_decode_spec().settings
    del settings["decoder"]
    assert settings == {"num_frames": 8, "video_backend": "pyav", "fps": 2.0, "custom": ["x"]}


def test_default_backend_is_in_the_spec_by_its_name() -> None:
    named = video_io(video_backend="qwen2_vl").get_decode_spec()
    by_default = video_io(default_backend="qwen2_vl").get_decode_spec()
    assert named == by_default != video_io().get_decode_spec()
    assert video_io(video_backend=None).get_decode_spec() == video_io().get_decode_spec()
    assert video_io(video_backend=None).video_loader_backend == "pyav"


def test_key_covers_payload_and_options() -> None:
    ref = video_io(num_frames=4).load_bytes_ref(clip())
    assert ref.spec == video_io(num_frames=4).get_decode_spec()
    assert ref.key == derive_media_key(clip(), ref.spec)
    assert (
        ref.key == video_io(num_frames=4).load_bytes_ref(clip(), digest=PayloadDigest(clip())).key
    )
    keys = {
        video_io(**options).load_bytes_ref(clip()).key
        for options in ({}, {"num_frames": 4}, {"fps": 1}, {"video_backend": "qwen2_vl"})
    }
    assert len(keys) == 4
    assert (
        video_io(num_frames=32).load_bytes_ref(clip()).key == video_io().load_bytes_ref(clip()).key
    )


def test_limits_are_no_part_of_the_key() -> None:
    from lazydecode.limits import DecodeLimits

    few = video_io(limits=DecodeLimits(max_video_frames=40))
    assert few.get_decode_spec() == video_io().get_decode_spec()


def test_bytes_base64_and_file_give_the_same_ref(tmp_path: Path) -> None:
    import pybase64

    path = tmp_path / "clip.mp4"
    path.write_bytes(clip())
    io = video_io(num_frames=3)
    text = pybase64.b64encode(clip()).decode()
    refs = [
        io.load_bytes_ref(clip()),
        io.load_base64_ref("video/mp4", text),
        io.load_file_ref(path),
    ]
    assert len({ref.key for ref in refs}) == 1
    decoded = [ref.decode()[0] for ref in refs]
    decoded += [io.load_bytes(clip())[0], io.load_base64("video/mp4", text)[0]]
    decoded.append(io.load_file(path)[0])
    assert all(np.array_equal(frames, decoded[0]) for frames in decoded)
    with pytest.raises(CorruptMediaError):
        io.load_base64_ref("video/mp4", text + "!")


def test_making_a_ref_decodes_nothing_and_pickling_does() -> None:
    ref = video_io(num_frames=2).load_bytes_ref(clip())
    assert not ref.is_decoded
    assert "undecoded" in repr(ref)
    restored = pickle.loads(pickle.dumps(ref))
    assert restored.is_decoded
    assert (restored.key, restored.spec, restored.header) == (ref.key, ref.spec, ref.header)
    assert read_numbers(restored.decode()[0]) == [0, 19]


def test_damage_surfaces_at_decode_and_not_before() -> None:
    ref = video_io().load_bytes_ref(clip()[:100])
    assert ref.header is None
    with pytest.raises(CorruptMediaError):
        ref.decode()


# -- options


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"num_frames": "8"}, "num_frames"),
        ({"num_frames": True}, "num_frames"),
        ({"num_frames": 2.5}, "num_frames"),
        ({"fps": 0}, "fps"),
        ({"fps": -2.0}, "fps"),
        ({"fps": "fast"}, "fps"),
        ({"max_frames": 0}, "max_frames"),
        ({"max_frames": 1.5}, "max_frames"),
        ({"start_time": -1}, "start_time"),
        ({"start_time": 2, "end_time": 1}, "end_time"),
        ({"timestamps": []}, "timestamps"),
        ({"timestamps": [-0.5]}, "timestamps"),
        ({"timestamps": "0.5"}, "timestamps"),
        ({"timestamps": [0.5], "frame_indices": [1]}, "timestamps"),
        ({"timestamps": [0.5], "start_time": 1}, "timestamps"),
        ({"frame_indices": [1.0]}, "frame_indices"),
        ({"frame_indices": [-1]}, "frame_indices"),
        ({"frame_indices": [True]}, "frame_indices"),
        ({"frame_recovery": "yes"}, "frame_recovery"),
        ({"video_backend": "qwen2_vl", "min_frames": 0}, "min_frames"),
    ],
)
def test_wrong_option_is_a_bad_request_before_any_decode(
    options: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        video_io(**options).load_bytes_ref(clip())
    assert caught.value.parameter == parameter
    with pytest.raises(ValidationError):
        video_io(**options).load_bytes(clip())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, object()])
def test_option_that_no_key_can_hold_is_a_bad_request(value: object) -> None:
    with pytest.raises(ValidationError):
        video_io(custom=value)


def test_unknown_backend_is_a_bad_request_that_lists_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"'vhs'.*pyav.*qwen2_vl") as caught:
        video_io(video_backend="vhs")
    assert (caught.value.parameter, caught.value.value) == ("video_backend", "vhs")
    with pytest.raises(ValidationError):
        video_io(video_backend=3)


def test_rate_alone_lifts_the_default_count() -> None:
    assert video_io().num_frames == 32
    assert video_io(fps=2).num_frames == -1
    assert video_io(fps=2, num_frames=32).num_frames == 32


# -- merging


@pytest.mark.parametrize(
    ("server", "request_", "merged"),
    [
        (None, None, {}),
        ({"num_frames": 16}, {}, {"num_frames": 16}),
        ({"num_frames": 16}, {"num_frames": 8}, {"num_frames": 8}),
        ({"num_frames": 16}, {"fps": 2}, {"fps": 2}),
        ({"fps": 1}, {"num_frames": 8}, {"num_frames": 8}),
        (
            {"fps": 1, "num_frames": 16},
            {"fps": 2, "num_frames": 8},
            {"fps": 2, "num_frames": 8},
        ),
        (
            {"fps": 1, "num_frames": 16},
            {"max_frames": 4},
            {"fps": 1, "num_frames": 16, "max_frames": 4},
        ),
        (
            {"video_backend": "qwen2_vl", "min_frames": 8, "max_frames": 64},
            {"video_backend": "pyav"},
            {"video_backend": "pyav", "max_frames": 64},
        ),
        (
            {"video_backend": "qwen2_vl", "min_frames": 8},
            {"video_backend": "qwen2_vl"},
            {"video_backend": "qwen2_vl", "min_frames": 8},
        ),
        (
            {"video_backend": "qwen2_vl", "min_frames": 8},
            {"video_backend": "pyav", "min_frames": 2},
            {"video_backend": "pyav", "min_frames": 2},
        ),
    ],
)
def test_merge(server: Any, request_: Any, merged: dict[str, Any]) -> None:
    before = (dict(server or {}), dict(request_ or {}))
    assert VideoMediaIO.merge_kwargs(server, request_) == merged
    assert before == (server or {}, request_ or {})


@pytest.mark.parametrize("name", ["device", "gpu_decoder", "decoder_pool_size"])
def test_request_may_not_choose_hardware(name: str) -> None:
    with pytest.raises(ValidationError, match="when the server starts") as caught:
        VideoMediaIO.merge_kwargs({name: 1}, {name: 2})
    assert caught.value.parameter == name
    with pytest.raises(ValidationError):
        VideoMediaIO.merge_kwargs(None, {name: 2})
    assert VideoMediaIO.merge_kwargs({name: 1}, {"num_frames": 2}) == {name: 1, "num_frames": 2}


# -- plans


def test_plan_needs_count_and_rate() -> None:
    spec = video_io(num_frames=4).get_decode_spec()
    assert plan_frames(spec, VideoHeader(64, 48)) is None
    assert plan_frames(spec, VideoHeader(64, 48, num_frames=20)) is None
    planned = plan_frames(spec, VideoHeader(64, 48, fps=10.0, num_frames=20))
    assert planned is not None
    assert planned["frames_indices"] == [0, 6, 12, 19]
    assert planned["timestamps"] == pytest.approx([0, 0.6, 1.2, 1.9])
    assert (planned["width"], planned["height"]) == (64, 48)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fps": 3},
        {"num_frames": -1},
        {"start_time": 0.31, "end_time": 1.7, "fps": 4},
        {"timestamps": [0.05, 1.95, 0.4]},
        {"frame_indices": [9, 3]},
        {"video_backend": "qwen2_vl"},
        {"video_backend": "qwen2_vl", "fps": 5, "max_frames": 6},
    ],
)
def test_plan_is_what_a_decode_returns(options: dict[str, Any]) -> None:
    times = [0.0, 0.1, 0.2, 0.25, 0.3, 0.8, 1.0, 1.6, 1.7, 2.2]
    for data in (clip(), make_video(10, times=times)):
        ref = video_io(**options).load_bytes_ref(data)
        header = ref.header
        assert isinstance(header, VideoHeader)
        assert plan_frames(ref.spec, header) == ref.decode()[1]


def test_plan_refuses_what_the_decode_refuses() -> None:
    header = VideoHeader(64, 48, fps=10.0, num_frames=20)
    with pytest.raises(ValidationError):
        plan_frames(video_io(frame_indices=[20]).get_decode_spec(), header)


def test_backend_from_elsewhere_has_no_plan(
    register: Callable[[str, type[Any]], None],
) -> None:
    register("elsewhere", FakeLoader)
    spec = video_io(video_backend="elsewhere").get_decode_spec()
    assert plan_frames(spec, VideoHeader(64, 48, fps=10.0, num_frames=20)) is None


# -- Qwen2-VL's frame choice


@pytest.mark.parametrize(
    ("total", "fps", "options", "expected"),
    [
        (48, 24, {}, [0, 12, 24, 36]),
        (48, 24, {"num_frames": 8}, [0, 12, 24, 36]),
        (48, 24, {"num_frames": 3}, [0, 24]),
        (48, 24, {"num_frames": 1}, [0]),
        (48, 24, {"fps": 1}, [0, 12, 24, 36]),
        (48, 24, {"fps": 1, "min_frames": 2}, [0, 24]),
        (48, 24, {"fps": 3}, [0, 8, 16, 24, 32, 40]),
        (48, 24, {"fps": 3, "max_frames": 5}, [0, 12, 24, 36]),
        (3, 24, {}, [0, 1]),
        (1, 24, {}, [0]),
        (6, 24, {"num_frames": -1}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_qwen2_vl_samples_as_its_processor(
    total: int, fps: float, options: dict[str, Any], expected: list[int]
) -> None:
    spec = video_io(video_backend="qwen2_vl", **options).get_decode_spec()
    planned = plan_frames(spec, VideoHeader(64, 48, fps=fps, num_frames=total))
    assert planned is not None
    assert planned["frames_indices"] == expected


def test_qwen2_vl_decodes_what_it_planned() -> None:
    frames, metadata = video_io(video_backend="qwen2_vl").load_bytes(clip())
    assert read_numbers(frames) == metadata["frames_indices"] == [0, 5, 10, 15]
    assert metadata["video_backend"] == "qwen2_vl"


# -- the registry


class FakeLoader:
    calls: list[tuple[bytes, dict[str, Any]]] = []

    def load_bytes(self, data: bytes, num_frames: int = -1, **options: Any) -> tuple[Any, Any]:
        self.calls.append((data, {"num_frames": num_frames, **options}))
        return np.zeros((1, 2, 2, 3), np.uint8), {"fps": 1.0}


def test_registered_loader_is_called_with_the_options(
    register: Callable[[str, type[Any]], None],
) -> None:
    register("fake", FakeLoader)
    FakeLoader.calls.clear()
    frames, metadata = video_io(video_backend="fake", num_frames=7, shade=3).load_bytes(b"abc")
    assert FakeLoader.calls == [(b"abc", {"num_frames": 7, "shade": 3})]
    assert frames.shape == (1, 2, 2, 3)
    assert metadata == {"fps": 1.0}
    assert "fake" in VIDEO_LOADER_REGISTRY.names()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that installs a package offering the backend `plugged`."""

    def add(module_text: str) -> None:
        (tmp_path / "plugged_video.py").write_text(module_text)
        info = tmp_path / "plugged_video-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-video\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[lazydecode.video_backends]\nplugged = plugged_video:Loader\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        VIDEO_LOADER_REGISTRY.rescan()

    yield add
    monkeypatch.undo()
    sys.modules.pop("plugged_video", None)
    VIDEO_LOADER_REGISTRY.rescan()


def test_installed_package_can_offer_a_backend(install: Callable[[str], None]) -> None:
    install(
        "import numpy\n"
        "class Loader:\n"
        "    def load_bytes(self, data, num_frames=-1, **options):\n"
        "        frames = numpy.full((num_frames, 4, 4, 3), data[0], numpy.uint8)\n"
        "        return frames, {'num_frames': num_frames}\n"
    )
    assert "plugged" in VIDEO_LOADER_REGISTRY.names()
    frames, metadata = video_io(video_backend="plugged", num_frames=3).load_bytes(b"x")
    assert frames.shape == (3, 4, 4, 3) and (frames == ord("x")).all()
    assert metadata == {"num_frames": 3}


@pytest.mark.parametrize("text", ["raise RuntimeError('boom')", "Loader = 3", "Loader = dict", ""])
def test_bad_plug_in_fails_with_its_name(text: str, install: Callable[[str], None]) -> None:
    install(text)
    with pytest.raises(LazyDecodeError, match="plug-in 'plugged'"):
        video_io(video_backend="plugged")


def test_fingerprint_names_library_and_version(
    register: Callable[[str, type[Any]], None],
) -> None:
    import av

    assert backend_fingerprint("pyav").startswith(f"pyav {av.__version__} (libavcodec ")
    assert backend_fingerprint("qwen2_vl") == backend_fingerprint("pyav")
    register("fake", FakeLoader)
    assert backend_fingerprint("fake").endswith("test_video.FakeLoader")
    with pytest.raises(ValidationError):
        backend_fingerprint("vhs")


# -- what is left behind


def test_five_hundred_decodes_leave_nothing() -> None:
    data = (CASES / "k3_plain.mp4").read_bytes()
    io = video_io(num_frames=4)
    process = psutil.Process()
    for _ in range(50):
        io.load_bytes(data)
    gc.collect()
    rss, descriptors = process.memory_info().rss, process.num_fds()
    for _ in range(500):
        io.load_bytes(data)
    gc.collect()
    assert process.num_fds() <= descriptors  # others of this process may be collected meanwhile
    assert process.memory_info().rss - rss < 32 * 2**20


def test_failing_decodes_leave_nothing() -> None:
    process = psutil.Process()
    broken = clip()[:-300]
    rss, descriptors = process.memory_info().rss, process.num_fds()
    for _ in range(200):
        with pytest.raises(LazyDecodeError):
            video_io().load_bytes(broken)
    assert process.num_fds() <= descriptors  # others of this process may be collected meanwhile
    assert process.memory_info().rss - rss < 32 * 2**20


def test_threads_may_share_a_decoder() -> None:
    io = video_io(num_frames=5)
    clips = [make_mp4(n) for n in (20, 30, 40)]
    expected = [io.load_bytes(data)[0] for data in clips]
    barrier = threading.Barrier(6)

    def work(turn: int) -> bool:
        barrier.wait()
        return all(
            np.array_equal(io.load_bytes(clips[(turn + n) % 3])[0], expected[(turn + n) % 3])
            for n in range(6)
        )

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def test_ffmpeg_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("k3_plain.mp4", "k3_corrupt_middle.mp4", "k3_truncated_no_index.mp4"):
        with contextlib.suppress(LazyDecodeError):
            video_io().load_bytes((CASES / name).read_bytes())
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_missing_frames_are_logged_without_content(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lazydecode.media"):
        video_io(num_frames=-1).load_bytes((CASES / "k3_corrupt_middle.mp4").read_bytes())
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 20 chosen frames do not decode"
    ]


def test_video_room_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from lazydecode.media import VideoMediaIO, ImageMediaIO; "
        "VideoMediaIO(ImageMediaIO()); "
        "assert not {'torch', 'transformers', 'cv2'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_spec_alone_rebuilds_the_decoder() -> None:
    ref = video_io(fps=3, max_frames=5, video_backend="qwen2_vl").load_bytes_ref(clip())
    settings = DecodeSpec(ref.spec.settings).settings
    settings.pop("decoder")
    rebuilt = VideoMediaIO(ImageMediaIO(), **settings).load_bytes_ref(clip())
    assert rebuilt.key == ref.key
    assert np.array_equal(rebuilt.decode()[0], ref.decode()[0])
