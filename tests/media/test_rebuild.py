"""A ref again from payload and spec: here, and in a process that knows nothing else of it."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest

from lazydecode.errors import ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media import (
    AudioMediaIO,
    DecodeSpec,
    EmbeddingMediaIO,
    ImageMediaIO,
    MediaIO,
    MediaRef,
    VideoMediaIO,
    rebuild_decoder,
)
from lazydecode.media.raw_video import RawVideoMediaIO
from lazydecode.media.rebuild import register_decoder
from lazydecode.media.transforms import (
    MEDIA_TRANSFORMS,
    NORMALIZE_AUDIO,
    MediaTransform,
    TransformTable,
)
from lazydecode.parse import MultiModalDataParser
from tests.builders import make_exif, make_jpeg, make_png, make_wav
from tests.builders_video import make_mp4

CHILD = """
import hashlib, json, pickle, sys
from lazydecode.media import DecodeSpec, rebuild_decoder

answers = []
for canonical, data in pickle.load(sys.stdin.buffer):
    decoder = rebuild_decoder(DecodeSpec(json.loads(canonical)))
    ref = decoder.ref(data)
    answers.append((ref.key, ref.spec, repr(ref.header), pickle.dumps(ref.decode())))
assert not {"torch", "transformers"} & sys.modules.keys()
sys.stdout.buffer.write(pickle.dumps(answers))
"""


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def mapped_audio() -> MediaRef[Any]:
    parser = MultiModalDataParser(target_sr=16000.0, target_channels=1)
    items = parser.parse_mm_data({"audio": [AudioMediaIO().load_bytes_ref(make_wav(rate=8000))]})
    mapped = items["audio"].get_raw(0)
    assert isinstance(mapped, MediaRef)
    return mapped


@functools.cache
def refs() -> dict[str, MediaRef[Any]]:
    frames = b",".join(pybase64.b64encode(make_jpeg(seed)) for seed in ((64, 48), (64, 48)))
    video_io = VideoMediaIO(ImageMediaIO("L"), num_frames=3, video_backend="qwen2_vl", fps=4)
    return {
        "image": ImageMediaIO("L", rgba_background_color=[1, 2, 3]).load_bytes_ref(make_png()),
        "audio": AudioMediaIO(audio_backend="pyav").load_bytes_ref(make_wav()),
        "mapped audio": mapped_audio(),
        "video": video_io.load_bytes_ref(make_mp4(12)),
        "jpeg sequence": VideoMediaIO(ImageMediaIO("L"), fps=2.0).load_base64_ref(
            "video/jpeg", frames
        ),
        "raw video": RawVideoMediaIO(video_io).load_bytes_ref(make_mp4(12)),
        "embedding": EmbeddingMediaIO().load_bytes_ref(npy(np.ones((2, 3), np.float32))),
    }


def digest(media: Any) -> str:
    return hashlib.sha256(pickle.dumps(media)).hexdigest()


def test_payload_and_spec_are_enough_in_another_process() -> None:
    given = [(ref.spec.canonical_bytes(), ref.data) for ref in refs().values()]
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=pickle.dumps(given), capture_output=True, timeout=180
    )
    assert child.returncode == 0, child.stderr.decode()
    for ref, (key, spec, header, media) in zip(
        refs().values(),
        pickle.loads(child.stdout),
        strict=True,
    ):
        assert (key, spec, header) == (ref.key, ref.spec, repr(ref.header))
        assert hashlib.sha256(media).hexdigest() == digest(ref.decode())


def test_a_mapped_clip_is_rebuilt_with_its_transform() -> None:
    ref = mapped_audio()
    decoder = rebuild_decoder(DecodeSpec(ref.spec.settings))
    assert decoder.transforms == (NORMALIZE_AUDIO,)
    rebuilt = decoder.ref(ref.data)
    assert rebuilt.key == ref.key
    np.testing.assert_array_equal(rebuilt.decode(), ref.decode())
    assert len(rebuilt.decode()) == 2 * len(AudioMediaIO().load_bytes(ref.data)[0])


def test_a_given_key_is_taken_and_nothing_is_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_jpeg(exif=make_exif(image_id="c0ffee00-0000-4000-8000-000000000001"))
    ref = ImageMediaIO().load_bytes_ref(data)
    assert not ref.key_covers_spec
    monkeypatch.setattr("lazydecode.media.rebuild.derive_media_key", None)
    rebuilt = rebuild_decoder(ref.spec).ref(data, key=ref.key, key_covers_spec=False)
    assert (rebuilt.key, rebuilt.key_covers_spec) == (ref.key, False)
    assert rebuilt.decode().tobytes() == ref.decode().tobytes()


def test_the_limits_are_those_of_the_place_that_decodes() -> None:
    ref = refs()["image"]
    decoder = rebuild_decoder(ref.spec, limits=DecodeLimits(max_image_pixels=10))
    with pytest.raises(ValueError, match="exceed"):
        decoder.decode(ref.data)


@pytest.mark.parametrize("name", ["image/0", "smell/1", None, 7])
def test_a_decoder_of_another_version_is_not_guessed(name: object) -> None:
    with pytest.raises(ValidationError, match=r"no decoder .* known are: audio/1.*image/1"):
        rebuild_decoder(DecodeSpec({"decoder": name}))


def test_decoders_and_transforms_from_elsewhere_are_registered() -> None:
    class TextIO(MediaIO[str]):
        def load_bytes(self, data: bytes) -> str:
            return data.decode()

        def load_base64(self, media_type: str, data: str) -> str:
            raise NotImplementedError

        def load_file(self, filepath: Path) -> str:
            return filepath.read_text()

        def get_decode_spec(self) -> DecodeSpec:
            return DecodeSpec({"decoder": "text/1"})

    def build(settings: dict[str, Any], limits: DecodeLimits) -> TextIO:
        return TextIO()

    def cut(text: str, *, length: int) -> str:
        return text[:length]

    register_decoder("text/1", build)
    register_decoder("text/1", build)
    with pytest.raises(ValueError, match="exists already"):
        register_decoder("text/1", lambda settings, limits: TextIO())
    transform = MediaTransform("cut", "text", frozenset({"length"}), cut)
    ref = transform.map(TextIO().load_bytes_ref(b"abcdef"), length=2)
    rebuilt = rebuild_decoder(ref.spec, transforms=MEDIA_TRANSFORMS.with_own([transform]))
    assert (rebuilt.ref(ref.data).key, rebuilt.ref(ref.data).decode()) == (ref.key, "ab")
    with pytest.raises(ValueError, match=r"takes \['length'\], got \['size'\]"):
        transform.map(ref, size=2)


def test_two_transforms_cannot_be_mistaken_for_each_other() -> None:
    table = TransformTable([NORMALIZE_AUDIO, NORMALIZE_AUDIO])
    with pytest.raises(ValueError, match="exists already"):
        table.register(MediaTransform("normalize_audio", "audio", frozenset({"x"}), len))
    with pytest.raises(ValueError, match=r"share parameters: \['target_sr'\]"):
        table.register(MediaTransform("slow", "audio", frozenset({"target_sr"}), len))
    table.register(MediaTransform("slow", "video", frozenset({"target_sr"}), len))
