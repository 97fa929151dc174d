"""One suite over every video backend: the same frames for the same request, and how far their
pixels may be apart.

The libraries bring FFmpeg builds of their own, so they run in a child process: a crash there
fails a test instead of the run.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import multiprocessing
import subprocess
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from lazydecode.errors import CorruptMediaError, MediaTooLargeError, ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media import ImageMediaIO, VideoMediaIO
from lazydecode.media.video import VIDEO_LOADER_REGISTRY, backend_fingerprint
from lazydecode.media.video_backends import nvdec
from tests.builders_video import draw_number, make_video, read_numbers, turn
from tests.media.test_video_frames import COUNT, FORMATS, damage, sample

CASES = Path(__file__).parent.parent / "cases" / "media"


@functools.cache
def loads(module: str) -> bool:
    """Whether a library loads here; asked in a child, since it may take the process along."""
    if importlib.util.find_spec(module) is None:
        return False
    code = f"import {module}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


# opencv is part of the dev extra: where it does not load, the tests fail. TorchCodec needs
# FFmpeg on the system, which a wheel cannot bring; NVDEC needs a GPU.
BACKENDS = ["pyav", "opencv"]
BACKENDS += [
    name
    for name, module in (("torchcodec", "torchcodec"), ("nvdec", "PyNvVideoCodec"))
    if loads(module)
]
SIZES = {"nvdec": (160, 144)}
"""Sizes of the samples for whom the usual one is too small: HEVC on a GPU needs 144 rows."""
OWN_PIXELS = {
    "opencv": {
        "h264 10 bit": 4,  # the scaler's rounding
        "prores mov": 1,
    },
    "nvdec": {
        "vp9 webm": 1,  # the last bits of the conversion to RGB
        "mpeg2 ts": 2,  # the inverse DCT, which the format leaves open by a bit
        "mpeg4 mp4": 5,
    },
}
"""Largest difference to PyAV's pixels, in levels, where it is not 0."""
LEFT_TO_PYAV = {
    "opencv": {"av1 mp4", "h264 avi", "mpeg4 avi"},
    "torchcodec": {
        "h264 avi",
        "mpeg4 avi",
        "h264 ts",
        "mpeg2 ts",
        "h264 mp4, open groups",
        "h264 mkv, open groups",
    },
    "nvdec": {
        "h264 mp4, open groups",
        "h264 mkv, open groups",
        "h264 avi",
        "h264 10 bit",
        "h264 4:4:4",
        "av1 mp4",
        "mpeg4 avi",
        "mjpeg avi",
        "prores mov",
        "gif",
        "apng",
        "wmv",
    },
}
"""Formats that a backend cannot read exactly."""


def decode(data: bytes, backend: str, options: dict[str, Any], limits: DecodeLimits) -> Any:
    io = VideoMediaIO(ImageMediaIO(), video_backend=backend, limits=limits, **options)
    return io.load_bytes(data)


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(abs, 1).result()
        yield pool


class Decoder:
    def __init__(self, pool: ProcessPoolExecutor, backend: str) -> None:
        self.pool, self.backend = pool, backend

    def __call__(self, data: bytes, limits: DecodeLimits | None = None, **options: Any) -> Any:
        arguments = (data, self.backend, options, limits or DecodeLimits())
        return self.pool.submit(decode, *arguments).result(timeout=240)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, child: ProcessPoolExecutor) -> Decoder:
    return Decoder(child, request.param)


@pytest.mark.parametrize("name", FORMATS)
def test_frames_are_those_of_every_backend(name: str, backend: Decoder) -> None:
    data = sample(name, SIZES.get(backend.backend, (96, 64)))
    for options in ({"num_frames": 9}, {"fps": 5, "max_frames": 4}, {"frame_indices": [59, 3, 3]}):
        expected, about = decode(data, "pyav", options, DecodeLimits())
        frames, metadata = backend(data, **options)
        decoder = metadata.pop("video_backend")
        about.pop("video_backend")
        assert metadata == about
        assert frames.dtype == np.uint8
        assert read_numbers(frames) == metadata["frames_indices"]
        if name in LEFT_TO_PYAV.get(backend.backend, ()):
            assert decoder == "pyav"
        else:
            assert decoder == backend.backend
        allowed = OWN_PIXELS.get(backend.backend, {}).get(name, 0)
        assert np.abs(frames.astype(int) - expected).max() <= allowed


def test_times_of_a_variable_rate(backend: Decoder) -> None:
    times = [0.0, 0.1, 0.2, 0.7, 0.8, 2.0]
    frames, metadata = backend(make_video(6, times=times), timestamps=[0.69, 0.7, 1.9])
    assert read_numbers(frames) == metadata["frames_indices"] == [2, 3, 4]
    assert metadata["timestamps"] == pytest.approx([0.2, 0.7, 0.8], abs=1e-4)


def test_edit_list(backend: Decoder) -> None:
    data = make_video(20, times=[n / 10 - 0.5 for n in range(20)], b_frames=0)
    frames, metadata = backend(data, num_frames=3)
    assert read_numbers(frames) == [5, 12, 19]
    assert metadata["total_num_frames"] == 15


@pytest.mark.parametrize("how", [90, 180, 270, "mirrored", "transposed"])
def test_rotation(how: int | str, backend: Decoder) -> None:
    data = turn(make_video(pictures=[draw_number(0b1010_0110_0011_0001)] * 2), how)
    expected, about = decode(data, "pyav", {"num_frames": 1}, DecodeLimits())
    frames, metadata = backend(data, num_frames=1)
    assert np.array_equal(frames, expected)
    assert (metadata["width"], metadata["height"]) == (about["width"], about["height"])


def test_damaged_frames_are_left_out(backend: Decoder) -> None:
    data = damage(make_video(20, gop=1, b_frames=0), range(5, 8))
    frames, metadata = backend(data, frame_indices=[4, 6, 9])
    assert read_numbers(frames) == metadata["frames_indices"] == [4, 9]
    _, metadata = backend(data, frame_indices=[4, 6, 9], frame_recovery=True)
    assert metadata["frames_indices"] == [4, 8, 9]


def test_damaged_first_frame_moves_no_other(backend: Decoder) -> None:
    data = damage(make_video(20, gop=1, b_frames=0), range(1))
    frames, metadata = backend(data, frame_indices=[2, 9])
    assert read_numbers(frames) == metadata["frames_indices"] == [2, 9]


@pytest.mark.parametrize(
    "name", ["k3_truncated_no_index.mp4", "k3_audio_only.mp4", "k1_gray.jpg", "k2_u8.wav"]
)
def test_what_is_no_video_is_corrupt(name: str, backend: Decoder) -> None:
    with pytest.raises(CorruptMediaError):
        backend((CASES / name).read_bytes())


def test_limits(backend: Decoder) -> None:
    data = sample("h264 mp4")
    with pytest.raises(MediaTooLargeError):
        backend(data, DecodeLimits(max_video_frames=5), num_frames=6)
    with pytest.raises(MediaTooLargeError):
        backend(data, DecodeLimits(max_video_decoded_bytes=96 * 64 * 3 * 5), num_frames=6)
    with pytest.raises(MediaTooLargeError):
        backend(data, DecodeLimits(max_image_pixels=96 * 64 - 1))


def test_many_decodes_in_one_process(backend: Decoder) -> None:
    data = sample("h264 mp4")
    for number in range(0, COUNT, 3):
        assert read_numbers(backend(data, frame_indices=[number])[0]) == [number]


def test_fingerprint_names_the_library() -> None:
    import cv2

    assert backend_fingerprint("opencv").startswith(f"opencv {cv2.__version__}")


# -- packages that are not there


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("opencv", "cv2", "opencv-python-headless"),
        ("torchcodec", "torchcodec", "torchcodec"),
    ],
)
def test_missing_package_is_a_bad_request_that_names_the_extra(
    name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted: None if wanted == module else find_spec(wanted)
    )
    with pytest.raises(ValidationError) as caught:
        VideoMediaIO(ImageMediaIO(), video_backend=name)
    assert package in str(caught.value)
    assert f"lazydecode[{name}]" in str(caught.value)
    assert caught.value.parameter == "video_backend"


# -- NVDEC, with a stand-in for the library: the choice and the fallback, not the GPU


class FakeGpuPacket:
    bsl = bsl_data = pts = 0


class FakeGpuFrame:
    def __init__(self, frame: av.VideoFrame, shift: int) -> None:
        self.pts = frame.pts + shift
        self.pixels = frame.to_ndarray(format="rgb24")

    def getPTS(self) -> int:
        return self.pts

    def __dlpack__(self, **options: Any) -> Any:
        return self.pixels.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.pixels.__dlpack_device__()


class FakeGpuDecoder:
    """Takes what the GPU takes, an Annex B stream by address and length; FFmpeg decodes it."""

    calls: list[dict[str, Any]] = []
    shift = 0

    def __init__(self, **options: Any) -> None:
        self.calls.append(options)
        self.context = av.CodecContext.create("h264", "r")
        self.seek_pts = 0

    def SetSeekPTS(self, pts: int) -> None:
        self.seek_pts = pts

    def Decode(self, packet: FakeGpuPacket) -> list[FakeGpuFrame]:
        data = av.Packet(ctypes.string_at(packet.bsl_data, packet.bsl)) if packet.bsl else None
        if data is not None:
            data.pts = packet.pts
        frames = self.context.decode(data)
        if data is None:
            self.context.flush_buffers()
        return [FakeGpuFrame(frame, self.shift) for frame in frames if frame.pts >= self.seek_pts]


@pytest.fixture
def gpu_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    library = types.ModuleType("PyNvVideoCodec")
    library.__spec__ = importlib.util.spec_from_loader("PyNvVideoCodec", None)
    library.CreateDecoder = FakeGpuDecoder  # type: ignore[attr-defined]
    library.PacketData = FakeGpuPacket  # type: ignore[attr-defined]
    library.cudaVideoCodec = types.SimpleNamespace(H264="h264")  # type: ignore[attr-defined]
    library.OutputColorType = types.SimpleNamespace(RGB="rgb")  # type: ignore[attr-defined]
    FakeGpuDecoder.calls.clear()
    monkeypatch.setattr(FakeGpuDecoder, "shift", 0)
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", library)
    monkeypatch.setattr(nvdec, "_library", [])
    yield library
    nvdec._library.clear()


def test_gpu_decodes_where_there_is_one(gpu_library: types.ModuleType) -> None:
    frames, metadata = decode(
        sample("h264 mp4"), "nvdec", {"num_frames": 3, "device": 1}, DecodeLimits()
    )
    assert read_numbers(frames) == metadata["frames_indices"] == [0, 29, 59]
    assert metadata["video_backend"] == "nvdec"
    assert [call["gpuid"] for call in FakeGpuDecoder.calls] == [1]


def test_gpu_that_gives_other_frames_is_not_believed(
    gpu_library: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeGpuDecoder, "shift", 1)
    with caplog.at_level(logging.INFO, logger="lazydecode.media"):
        frames, metadata = decode(sample("h264 mp4"), "nvdec", {"num_frames": 3}, DecodeLimits())
    assert read_numbers(frames) == metadata["frames_indices"] == [0, 29, 59]
    assert metadata["video_backend"] == "pyav"
    assert "some frames do not decode" in caplog.text


def test_without_a_gpu_pyav_decodes_and_the_log_says_so_once(
    gpu_library: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loader = VIDEO_LOADER_REGISTRY.loader_class("nvdec")

    original = importlib.import_module

    def refuse(name: str) -> Any:
        if name == "PyNvVideoCodec":
            raise RuntimeError("Failed to load NVENC library")
        return original(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with caplog.at_level(logging.INFO, logger="lazydecode.media"):
        for _ in range(3):
            frames, metadata = decode(
                sample("h264 mp4"), "nvdec", {"num_frames": 3}, DecodeLimits()
            )
    assert read_numbers(frames) == [0, 29, 59]
    assert metadata["video_backend"] == "pyav"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no GPU decodes video here" in caplog.text
    assert loader.fingerprint() == backend_fingerprint("pyav")


def test_without_the_gpus_package_pyav_decodes_and_the_log_names_the_extra_once(
    gpu_library: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda wanted: None if wanted == "PyNvVideoCodec" else find_spec(wanted),
    )
    with caplog.at_level(logging.INFO, logger="lazydecode.media"):
        for _ in range(3):
            frames, metadata = decode(
                sample("h264 mp4"), "nvdec", {"num_frames": 3}, DecodeLimits()
            )
    assert read_numbers(frames) == [0, 29, 59]
    assert metadata["video_backend"] == "pyav"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "install lazydecode[nvdec]" in caplog.text
    assert backend_fingerprint("nvdec") == backend_fingerprint("pyav")


def test_gpu_can_be_switched_off(gpu_library: types.ModuleType) -> None:
    _, metadata = decode(
        sample("h264 mp4"), "nvdec", {"num_frames": 3, "gpu_decoder": False}, DecodeLimits()
    )
    assert metadata["video_backend"] == "pyav"
    assert FakeGpuDecoder.calls == []


@pytest.mark.parametrize("name", ["device", "decoder_pool_size"])
def test_wrong_gpu_options_are_refused(name: str, gpu_library: types.ModuleType) -> None:
    with pytest.raises(ValidationError) as caught:
        VideoMediaIO(ImageMediaIO(), video_backend="nvdec", **{name: -1}).load_bytes_ref(b"")
    assert caught.value.parameter == name
