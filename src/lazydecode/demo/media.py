"""The demo's media, made by code: pictures, videos with sound, and a voice that says vowels."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Final

import av
import numpy as np
import soundfile as sf
from numpy.typing import NDArray
from PIL import Image, ImageDraw

RATE_HZ: Final = 16000
_VOWELS: Final = {
    "a": (800, 1200),
    "e": (450, 2100),
    "i": (300, 2400),
    "o": (450, 850),
    "u": (320, 800),
}
"""First and second formant in Hz of an adult's vowels, rounded."""


def write_media(folder: Path) -> dict[str, list[Path]]:
    """Write three pictures, three videos and three voices into `folder`; return their paths.

    Every file differs from the others, so that no item is a hit before it was seen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [
        _write(folder / f"picture{n}.{suffix}", _picture(n, format_name))
        for n, (suffix, format_name) in enumerate(
            [("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP")], 1
        )
    ]
    videos = [_write(folder / f"video{n}.mp4", _video(n)) for n in (1, 2, 3)]
    voices = [
        _write(folder / f"voice{n}.{suffix}", _voice(word, format_name))
        for n, (suffix, format_name, word) in enumerate(
            [("wav", "WAV", "aeiou"), ("flac", "FLAC", "ouiea"), ("ogg", "OGG", "iaoue")], 1
        )
    ]
    return {"image": pictures, "video": videos, "audio": voices}


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _scene(number: int, step: float, size: tuple[int, int]) -> Image.Image:
    """A sky that changes, a number, and a ball whose place follows from `step` (0 to 1)."""
    width, height = size
    rows = np.linspace(0, 1, height)[:, None, None]
    top = np.array([40 + 60 * number, 90, 200 - 40 * number])
    pixels = top * (1 - rows) + np.array([230, 210, 120 + 40 * number]) * rows
    image = Image.fromarray(np.broadcast_to(pixels, (height, width, 3)).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    radius = height // 8
    x, y = radius + step * (width - 2 * radius), height * (0.7 - 0.4 * np.sin(np.pi * step))
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(220, 40, 40))
    draw.text((width // 16, height // 16), f"scene {number}", fill=(0, 0, 0))
    return image


def _picture(number: int, format_name: str) -> bytes:
    out = io.BytesIO()
    _scene(number, number / 4, (640, 480)).save(out, format_name)
    return out.getvalue()


def _video(number: int, *, seconds: int = 3, fps: int = 12) -> bytes:
    """An MP4 with H.264 frames and an AAC track that hums."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        pictures = container.add_stream("libx264", rate=fps, options={"crf": "28"})
        pictures.width, pictures.height, pictures.pix_fmt = 448, 336, "yuv420p"
        sound = container.add_stream("aac", rate=RATE_HZ, layout="mono")
        for index in range(seconds * fps):
            scene = _scene(number, index / (seconds * fps), (448, 336))
            container.mux(pictures.encode(av.VideoFrame.from_image(scene)))
        container.mux(pictures.encode(None))
        samples = _voiced((300.0 + 100 * number, 1200.0), seconds)
        for start in range(0, len(samples), 1024):
            chunk = np.ascontiguousarray(samples[None, start : start + 1024])
            frame = av.AudioFrame.from_ndarray(chunk, format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE_HZ, start, Fraction(1, RATE_HZ)
            container.mux(sound.encode(frame))
        container.mux(sound.encode(None))
    return out.getvalue()


def _voice(vowels: str, format_name: str) -> bytes:
    samples = np.concatenate([_voiced(_VOWELS[vowel], 0.5) for vowel in vowels])
    out = io.BytesIO()
    sf.write(out, samples, RATE_HZ, format=format_name)
    return out.getvalue()


def _voiced(formants: tuple[float, float], seconds: float) -> NDArray[np.float32]:
    """Harmonics of a voice at 120 Hz, strongest near the formants, faded in and out."""
    times = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    samples = np.zeros_like(times)
    for harmonic in range(1, 30):
        hz = 120 * harmonic
        weight = sum(1 / (1 + ((hz - formant) / 120) ** 2) for formant in formants)
        samples += weight * np.sin(2 * np.pi * hz * times)
    fade = np.minimum(1, np.minimum(times, times[::-1]) / 0.05)
    samples *= fade
    scaled: NDArray[np.float32] = (0.5 * samples / np.abs(samples).max()).astype(np.float32)
    return scaled
