"""Every image and audio case file gives what it must, or is refused as it must be."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lazydecode.errors import LazyDecodeError
from lazydecode.media.audio import AudioMediaIO, resample
from lazydecode.media.image import ImageMediaIO
from tests.builders import loudest_hz
from tests.cases import CASES, FOLDER, Case, cases


def test_case_files_are_as_described() -> None:
    entries = json.loads((FOLDER / "cases.json").read_text())["cases"]
    for entry in entries:
        if "sha256" not in entry:
            continue  # the link below
        data = (FOLDER / entry["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], entry["file"]
    link = FOLDER / "k4_tree/allowed/link_out.png"
    assert link.is_symlink()
    assert link.resolve() == (FOLDER / "k4_tree/secret/secret.png").resolve()


def assert_refused(case: Case, error: LazyDecodeError) -> None:
    assert 400 <= error.status < 500
    forbidden = case.expected.get("error_text_must_not_match", "0x[0-9a-fA-F]{6,}")
    assert not re.search(forbidden, str(error))
    if "error_must_say" in case.expected:
        assert re.search("duration|size", str(error))
        assert "unsupported" not in str(error)


def near(image: Image.Image, spot: tuple[int, int], expected: list[int], tolerance: int) -> None:
    pixel: Any = image.getpixel(spot)
    assert np.abs(np.subtract(pixel, expected)).max() <= tolerance, (spot, pixel)


@pytest.mark.parametrize("case", cases(1, 5, 6, modality="image"))
def test_image(case: Case) -> None:
    expected = case.expected
    if expected["outcome"] == "error":
        with pytest.raises(LazyDecodeError) as caught:
            ImageMediaIO().load_bytes_ref(case.read()).decode()
        assert_refused(case, caught.value)
        return
    ref = ImageMediaIO().load_bytes_ref(case.read())
    header, image = ref.header, ref.decode()
    assert header is not None
    assert image.mode == "RGB"
    assert (header.width, header.height) == image.size
    width, height = image.size
    tolerance = expected.get("tol", 0)
    if "size" in expected:
        assert list(image.size) == expected["size"]
    if "frames_in_file" in expected:
        assert header.num_frames == expected["frames_in_file"]
    spots = {
        "tl": (0, 0),
        "tr": (width - 1, 0),
        "bl": (0, height - 1),
        "br": (width - 1, height - 1),
    }
    for name, pixel in expected.get("corners", {}).items():
        near(image, spots[name], pixel, tolerance)
    for name, pixel in expected.get("pixels", {}).items():
        x, y = map(int, name.split(","))
        near(image, (x, y), pixel, tolerance)
    if "mean" in expected:
        pixels = np.asarray(image)
        assert abs(pixels.mean() - expected["mean"]) <= expected["mean_tol"]
        assert pixels[0, [0, -1], 0].tolist() == expected["ramp_left_to_right"]


@pytest.mark.parametrize("case", cases(2, 5, modality="audio"))
def test_audio(case: Case) -> None:
    expected = case.expected
    if expected["outcome"] == "error":
        with pytest.raises(LazyDecodeError) as caught:
            AudioMediaIO().load_bytes_ref(case.read()).decode()
        assert_refused(case, caught.value)
        return
    ref = AudioMediaIO().load_bytes_ref(case.read())
    header, (samples, rate) = ref.header, ref.decode()
    assert header is not None
    assert samples.dtype == np.float32
    assert np.isfinite(samples).all()
    assert header.rate_hz == rate == expected.get("rate", rate)
    assert header.channels == expected.get("channels", header.channels)
    assert header.num_samples in (None, len(samples))
    if "samples" in expected:
        assert abs(len(samples) - expected["samples"]) <= expected["tol_samples"]
    if "peak" in expected and header.channels == 1:
        assert abs(np.abs(samples).max() - expected["peak"]) <= expected.get("peak_tol", 0.01)
    if "mean_abs_below" in expected:
        assert abs(samples.mean()) < expected["mean_abs_below"]
    if "tones_hz" in expected:
        found = loudest_hz(samples, rate, len(expected["tones_hz"]))
        assert np.abs(np.subtract(found, expected["tones_hz"])).max() <= 5
    if "mono_16k_samples" in expected:
        resampled = resample(samples, rate, target_rate=16_000)
        assert len(resampled) == expected["mono_16k_samples"]


@pytest.mark.parametrize("case", cases(5))
def test_identities_of_a_pair(case: Case) -> None:
    media_io = AudioMediaIO() if case.modality == "audio" else ImageMediaIO()
    key = media_io.load_bytes_ref(case.read()).key
    for other, relation in case.expected["identity_vs"].items():
        same = key == media_io.load_bytes_ref((FOLDER / other).read_bytes()).key
        assert same is (relation == "same")


@pytest.mark.parametrize("case", cases(1, 2))
def test_the_other_modality_refuses_with_our_error(case: Case) -> None:
    media_io = ImageMediaIO() if case.modality == "audio" else AudioMediaIO()
    with pytest.raises(LazyDecodeError) as caught:
        media_io.load_bytes_ref(case.read()).decode()
    assert 400 <= caught.value.status < 500
    assert not re.search("0x[0-9a-fA-F]{6,}", str(caught.value))


def test_bombs_cost_little_memory() -> None:
    """In a process of its own: the peak of this one has been higher already."""
    bombs = [
        (case, case.expected["max_rss_growth_mb"])
        for case in CASES
        if case.kind in (1, 2) and "max_rss_growth_mb" in case.expected
    ]
    assert len(bombs) == 3
    for case, most_mb in bombs:
        kind = "image.Image" if case.modality == "image" else "audio.Audio"
        module, name = kind.split(".")
        program = f"""
import resource, sys
from lazydecode.errors import LazyDecodeError
from lazydecode.media.{module} import {name}MediaIO
data = open({str(case.path)!r}, "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    {name}MediaIO().load_bytes_ref(data).decode()
except LazyDecodeError:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
        output = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        assert int(output) < most_mb, case.file
