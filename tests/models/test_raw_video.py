"""A family that opens videos itself: the same bytes on a hit and a miss, its own frame choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils.import_utils import is_torchcodec_usable

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.errors import InvalidRequestError, MediaTooLargeError, UnprocessableMediaError
from lazydecode.inputs import MultiModalInput
from lazydecode.limits import DecodeLimits
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.raw_video import RawVideoMediaIO
from lazydecode.media.video import VideoMediaIO
from lazydecode.models.containers import ContainerReader
from lazydecode.models.joining import join_items
from lazydecode.models.pixels import finish_pixels
from tests.builders_video import make_mp4, make_video
from tests.models.conftest import LoadFrontend
from tests.models.reference import Reference
from tests.models.test_generic import inputs, processor, refs, text, user

FAMILY = "dots3_note"
VIDEO = {"type": "video"}


def apply(frontend: LoadFrontend, media: Any, cache: Any = None, **options: Any) -> MultiModalInput:
    model = frontend(FAMILY)
    prompt = model.render_chat(user(*[VIDEO for _ in media["video"]], text(" and?")))
    return processor(model).apply(
        inputs(model, prompt, media, cache=cache, hf_processor_mm_kwargs=options)
    )


def theirs(folder: Path, files: Sequence[Path], **options: Any) -> dict[str, Any]:
    """What the class makes of the files; of all their frames, where it cannot open files."""
    reference = Reference(str(folder))
    prompt = reference.text(user(*[VIDEO for _ in files], text(" and?")))
    videos: list[Any] = [str(file) for file in files]
    if not is_torchcodec_usable(decode="video"):
        decoded = [VideoMediaIO(ImageMediaIO(), num_frames=-1).load_file(f) for f in files]
        videos = [torch.from_numpy(frames).permute(0, 3, 1, 2) for frames, _ in decoded]
        facts = ("total_num_frames", "fps", "duration", "width", "height")
        options["video_metadata"] = [{f: about[f] for f in facts} for _, about in decoded]
    return dict(reference.processor(text=[prompt], videos=videos, return_tensors="pt", **options))


@pytest.mark.parametrize("options", [{}, {"fps": 5}, {"num_frames": 7, "fps": None}], ids=str)
def test_ids_and_tensors_are_those_of_the_class_on_the_files(
    frontend: LoadFrontend, tiny_model: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    media = [
        make_mp4(24, 12, (112, 84)),
        make_video(90, 30, (56, 140), container="webm", codec="libvpx"),
    ]
    files = [tmp_path / "a.mp4", tmp_path / "b.webm"]
    for file, data in zip(files, media, strict=True):
        file.write_bytes(data)
    model = frontend(FAMILY)
    ours = apply(frontend, refs(model, video=media), **options)
    expected = theirs(tiny_model(FAMILY, weights=False), files, **options)
    assert ours["prompt_token_ids"] == expected["input_ids"][0].tolist()
    items = [
        finish_pixels(i, model.pixel_plan) for i in ours["mm_kwargs"]["video"] if i is not None
    ]
    joined = join_items(items)
    for name in ("pixel_values_videos", "video_grid_thw"):
        assert torch.equal(joined[name], expected[name]), name  # type: ignore[arg-type]


def test_a_hit_opens_nothing_and_gives_the_same(
    frontend: LoadFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = frontend(FAMILY)
    cache = MultiModalProcessorOnlyCache(capacity_bytes=1 << 26)
    first = refs(model, video=[make_mp4(24, 12, (112, 84))])
    missed = apply(frontend, first, cache)
    again = refs(model, video=[make_mp4(24, 12, (112, 84))])
    monkeypatch.setattr(ContainerReader, "open", None)
    monkeypatch.setattr(RawVideoMediaIO, "load_bytes", None)
    hit = apply(frontend, again, cache)
    assert not again["video"][0].is_decoded
    assert hit["prompt_token_ids"] == missed["prompt_token_ids"]
    assert hit["mm_hashes"] == missed["mm_hashes"]
    ours, theirs_ = hit["mm_kwargs"]["video"][0], missed["mm_kwargs"]["video"][0]
    assert ours is not None and theirs_ is not None
    assert torch.equal(ours["pixel_values_videos"].data, theirs_["pixel_values_videos"].data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("frames", "fps", "size"),
    [(1, 1, (56, 56)), (5, 25, (640, 360)), (61, 30, (98, 210)), (300, 10, (64, 48))],
)
def test_headers_give_what_reading_gives(
    frontend: LoadFrontend, frames: int, fps: float, size: tuple[int, int]
) -> None:
    model = frontend(FAMILY)
    media = refs(model, video=[make_mp4(frames, fps, size)])
    prompt = model.render_chat(user(VIDEO))
    rendering = processor(model).render_from_headers(inputs(model, prompt, media))
    assert rendering is not None
    assert not media["video"][0].is_decoded
    full = processor(model).apply(inputs(model, prompt, media))
    assert rendering.token_ids == full["prompt_token_ids"]
    assert rendering.placeholders == full["mm_placeholders"]


def test_uneven_times_need_the_content(frontend: LoadFrontend) -> None:
    model = frontend(FAMILY)
    times = [0.0, 0.1, 0.2, 1.7, 1.8, 4.0, 4.1, 4.2]
    media = refs(model, video=[make_video(8, 10, (56, 56), times=times)])
    prompt = model.render_chat(user(VIDEO))
    assert processor(model).render_from_headers(inputs(model, prompt, media)) is None


def test_options_for_videos_have_the_frames_decoded(frontend: LoadFrontend) -> None:
    info = frontend(FAMILY).info
    assert isinstance(info.get_media_io("video"), RawVideoMediaIO)
    assert isinstance(info.get_media_io("video", {"image": {"image_mode": "L"}}), RawVideoMediaIO)
    for options in ({"video_backend": "opencv"}, {"num_frames": 3}):
        media_io = info.get_media_io("video", {"video": options})
        assert isinstance(media_io, VideoMediaIO)
        frames = media_io.load_bytes_ref(make_mp4(24, 12, (56, 56)))
        result = apply(lambda _family: frontend(FAMILY), {"video": [frames]})
        item = result["mm_kwargs"]["video"][0]
        assert item is not None
        assert isinstance(frames.decode()[0], np.ndarray)


def test_the_estimate_is_of_the_frames_that_the_class_reads(frontend: LoadFrontend) -> None:
    info = frontend(FAMILY).info
    ref = info.get_media_io("video").load_bytes_ref(make_mp4(300, 10, (64, 48)))
    assert info.estimate_decoded_bytes("video", ref, {}) == 60 * 64 * 48 * 3
    assert info.estimate_decoded_bytes("video", ref, {"fps": 1}) == 30 * 64 * 48 * 3
    assert not ref.is_decoded


def test_more_frames_than_allowed_are_refused_before_they_are_decoded(
    frontend: LoadFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = frontend(FAMILY)
    containers = processor(model).family.call.containers
    assert containers is not None
    monkeypatch.setattr(containers, "limits", DecodeLimits(max_video_frames=5))
    with pytest.raises(MediaTooLargeError, match="6 frames of the video") as caught:
        apply(frontend, refs(model, video=[make_mp4(30, 10, (56, 56))]))
    assert (caught.value.modality, caught.value.index, caught.value.status) == ("video", 0, 422)


def test_what_its_reader_cannot_decode_is_the_items_fault(frontend: LoadFrontend) -> None:
    model = frontend(FAMILY)
    whole = make_video(30, 10, (112, 112), gop=1)
    damaged = bytearray(whole)
    at = whole.index(b"mdat")
    end = at - 4 + int.from_bytes(whole[at - 4 : at], "big")
    middle = (at + end) // 2
    damaged[middle:end] = bytes(end - middle)
    media = refs(model, video=[make_mp4(8, 4, (56, 56)), bytes(damaged)])
    with pytest.raises(UnprocessableMediaError, match="own reader cannot") as caught:
        apply(frontend, media)
    assert (caught.value.modality, caught.value.index, caught.value.status) == ("video", 1, 422)


def test_options_that_contradict_each_other_are_the_clients(frontend: LoadFrontend) -> None:
    model = frontend(FAMILY)
    media = refs(model, video=[make_mp4(8, 4, (56, 56))])
    prompt = model.render_chat(user(VIDEO))
    both = {"fps": 1, "num_frames": 2}
    request = inputs(model, prompt, media, hf_processor_mm_kwargs=both)
    with pytest.raises(InvalidRequestError, match="mutually exclusive"):
        processor(model).render_from_headers(request)
    with pytest.raises(InvalidRequestError, match="mutually exclusive") as caught:
        processor(model).apply(request)
    assert (caught.value.status, caught.value.index) == (400, 0)
