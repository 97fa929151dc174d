"""The video case files: what a correct front end does with each, at library level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazydecode.errors import LazyDecodeError, ValidationError
from lazydecode.media import ImageMediaIO, MediaRef, VideoHeader, VideoMediaIO, plan_frames

FOLDER = Path(__file__).parent.parent / "cases" / "media"
CASES: dict[str, dict[str, Any]] = {
    case["file"]: case
    for case in json.loads((FOLDER / "cases.json").read_text())["cases"]
    if case["modality"] == "video"
}
KIND_3 = sorted(name for name, case in CASES.items() if case["kind"] == 3)


def load(name: str, **options: Any) -> MediaRef[Any]:
    io = VideoMediaIO(ImageMediaIO(), **options)
    path = FOLDER / name
    if path.suffix == ".txt":
        head, _, text = path.read_text().strip().partition(",")
        return io.load_base64_ref(head.removeprefix("data:").removesuffix(";base64"), text)
    return io.load_bytes_ref(path.read_bytes())


@pytest.mark.parametrize("name", KIND_3)
def test_case_file(name: str) -> None:
    expected = CASES[name]["expected"]
    if expected["outcome"] == "error":
        with pytest.raises(LazyDecodeError) as caught:
            load(name, num_frames=-1).decode()
        assert 400 <= caught.value.status < 500
        return
    ref = load(name, num_frames=-1)
    frames, metadata = ref.decode()
    assert frames.dtype == np.uint8
    assert frames.shape == (expected["frames"], *reversed(expected["size"]), 3)
    assert [metadata["width"], metadata["height"]] == expected["size"]
    assert len(metadata["frames_indices"]) == len(metadata["timestamps"]) == len(frames)
    if "codes" in expected:
        codes = frames.reshape(len(frames), -1).mean(axis=1)
        assert np.abs(codes - expected["codes"]).max() <= expected["code_tol"]
    if "fps" in expected:
        assert metadata["fps"] == expected["fps"]
    if "times" in expected:
        assert metadata["timestamps"] == pytest.approx(expected["times"], abs=1e-6)
        assert metadata["total_num_frames"] == len(frames)
    if "relative_times" in expected:
        relative = np.subtract(metadata["timestamps"], metadata["timestamps"][0])
        assert relative == pytest.approx(expected["relative_times"], abs=1e-6)
    if "readable_indices" in expected:
        assert metadata["frames_indices"] == expected["readable_indices"]
        assert metadata["total_num_frames"] == expected["header_frames"]
    if "corners" in expected:
        assert_corners(frames[0], expected["corners"], expected["tol"])
    if "sample_check" in expected:
        check = expected["sample_check"]
        few, about = load(name, num_frames=check["num_frames"]).decode()
        assert about["frames_indices"] == check["indices"]
        assert np.array_equal(few, frames[check["indices"]])


def assert_corners(frame: np.ndarray[Any, Any], corners: dict[str, list[int]], tol: int) -> None:
    height, width = frame.shape[:2]
    places = {"tl": (0, 0), "tr": (0, 1), "bl": (1, 0), "br": (1, 1)}
    for name, colour in corners.items():
        row, column = places[name]
        pixel = frame[height // 4 + row * height // 2, width // 4 + column * width // 2]
        assert np.abs(pixel.astype(int) - colour).max() <= tol, (name, pixel)


@pytest.mark.parametrize("name", [n for n in KIND_3 if CASES[n]["expected"]["outcome"] == "ok"])
def test_plan_from_the_header_names_the_frames_that_a_decode_returns(name: str) -> None:
    ref = load(name, num_frames=7)
    header = ref.header
    assert isinstance(header, VideoHeader)
    assert not ref.is_decoded
    planned = plan_frames(ref.spec, header)
    assert planned is not None
    _, metadata = ref.decode()
    if "readable_indices" in CASES[name]["expected"]:
        # The header lies: two frames that it states do not decode.
        readable = set(CASES[name]["expected"]["readable_indices"])
        assert [i for i in planned["frames_indices"] if i in readable] == metadata["frames_indices"]
    else:
        assert planned == metadata


@pytest.mark.parametrize("name", [n for n in KIND_3 if CASES[n]["expected"]["outcome"] == "ok"])
def test_header_knows_size_and_sound(name: str) -> None:
    header = load(name).header
    assert isinstance(header, VideoHeader)
    assert [header.width, header.height] == CASES[name]["expected"]["size"]
    assert header.has_audio == ("audio" in CASES[name]["expected"])


@pytest.mark.parametrize("name", ["k3_audio_only.mp4", "k3_truncated_no_index.mp4"])
def test_file_that_is_no_video_has_no_header(name: str) -> None:
    assert load(name).header is None


def test_audio_only_file_is_refused_with_what_it_has() -> None:
    with pytest.raises(LazyDecodeError, match=r"no video stream.*audio"):
        load("k3_audio_only.mp4").decode()


@pytest.mark.parametrize("name", sorted(n for n, c in CASES.items() if c["kind"] == 5))
def test_files_that_differ_in_one_track_have_different_keys(name: str) -> None:
    for other, relation in CASES[name]["expected"]["identity_vs"].items():
        assert (load(name).key == load(other).key) == (relation == "same")


# -- cases that are requests


def test_four_frames_are_spread_over_the_whole_video() -> None:
    _, metadata = load("k3_plain.mp4", num_frames=4).decode()
    assert metadata["frames_indices"] == [0, 6, 12, 19]
    assert metadata["timestamps"] == pytest.approx([0.0, 0.6, 1.2, 1.9])
    assert (metadata["fps"], metadata["total_num_frames"]) == (10, 20)


@pytest.mark.parametrize("num_frames", [0, -5])
def test_impossible_frame_count_is_a_bad_request(num_frames: int) -> None:
    with pytest.raises(ValidationError, match="num_frames must be greater than 0 or -1") as caught:
        load("k3_plain.mp4", num_frames=num_frames)
    assert (caught.value.status, caught.value.parameter) == (400, "num_frames")


def test_client_says_where_its_jpeg_frames_come_from() -> None:
    indices = [0, 10, 20, 30, 40, 50]
    _, metadata = load(
        "k3_jpeg_sequence.txt", fps=5, frames_indices=indices, total_num_frames=60
    ).decode()
    assert metadata["frames_indices"] == indices
    assert metadata["timestamps"] == [0, 2, 4, 6, 8, 10]
    assert (metadata["total_num_frames"], metadata["duration"]) == (60, 12.0)


def test_picture_is_not_a_video() -> None:
    with pytest.raises(LazyDecodeError, match="cannot be opened"):
        load("k1_gray.jpg").decode()


def test_only_the_asked_for_jpeg_frames_of_a_long_sequence_are_taken() -> None:
    frames, metadata = load("k3_jpeg_sequence_2500.txt", num_frames=3).decode()
    assert len(frames) == 3
    assert metadata["total_num_frames"] == 3
