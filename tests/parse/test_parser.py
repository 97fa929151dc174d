"""What users and the fetcher give, as item groups; references stay undecoded."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lazydecode.inputs import BatchedField, FlatField, MultiModalFieldElem, MultiModalKwargsItem
from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.base import DecodeSpec, MediaRef
from lazydecode.media.image import ImageMediaIO
from lazydecode.parse import (
    AudioEmbeddingItems,
    AudioProcessorItems,
    DictEmbeddingItems,
    ImageEmbeddingItems,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
    MultiModalDataParser,
    VideoEmbeddingItems,
    VideoProcessorItems,
    VisionChunkProcessorItems,
    parse_mm_uuids,
)
from tests.builders import make_exif, make_jpeg, make_wav, quadrants

METADATA = {"fps": 2.0, "total_num_frames": 3, "frames_indices": [0, 1, 2]}


def frames(value: int = 0, count: int = 3) -> np.ndarray[Any, Any]:
    return np.full((count, 4, 6, 3), value, np.uint8)


def video_ref(media: object, name: str = "v") -> MediaRef[Any]:
    calls: list[int] = []
    ref: MediaRef[Any] = MediaRef(
        lambda: (calls.append(1), media)[1], name.encode(), DecodeSpec({"num_frames": 3})
    )
    return ref


def parse(parser: MultiModalDataParser | None = None, **data: object) -> MultiModalDataItems:
    return (parser or MultiModalDataParser()).parse_mm_data(data)


# -- the whole


def test_unknown_modality_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'smell'.*audio.*image.*video.*vision_chunk"):
        parse(smell=[1])


def test_none_drops_the_modality_and_an_empty_list_stays() -> None:
    items = parse(image=None, audio=[], video=[None])
    assert items.get_all_counts() == {"audio": 0, "video": 1}
    assert items["video"].get_raw(0) is None
    assert items["audio"].get_processor_data() == {"audios": []}


def test_uuids() -> None:
    assert parse_mm_uuids(None) == {}
    assert parse_mm_uuids({"image": "a", "audio": ["b", None]}) == {
        "image": ["a"],
        "audio": ["b", None],
    }


def test_groups_can_be_picked_by_modality() -> None:
    items = parse(image=[quadrants()], audio=[np.zeros(3)])
    assert set(items.select({"audio"})) == {"audio"}
    assert items.get_count("image") == 1
    assert items.get_count("video", strict=False) == 0
    with pytest.raises(KeyError, match="video"):
        items.get_count("video")
    assert items.get_items("image", ImageProcessorItems) is items["image"]
    with pytest.raises(TypeError, match="ImageProcessorItems"):
        items.get_items("image", VideoProcessorItems)


# -- images


def test_references_stay_undecoded_until_got() -> None:
    ref = ImageMediaIO().load_bytes_ref(make_jpeg())
    items = parse(image=[ref, None])["image"]
    assert items.get_raw(0) is ref
    assert items.get_all_raw() == [ref, None]
    assert not ref.is_decoded
    image = items.get(0)
    assert isinstance(image, Image.Image) and image.mode == "RGB"
    assert items[0] is image
    assert list(items) == [image, None]
    assert items.get_processor_data() == {"images": [image, None]}
    assert items.get_passthrough_data() == {}
    assert "image, 2 items" in repr(items)


def test_both_views_are_one_for_what_came_decoded() -> None:
    embeddings = parse(image=torch.arange(24.0).reshape(2, 3, 4))["image"]
    assert torch.equal(embeddings.get_raw(1), embeddings.get(1))  # type: ignore[arg-type]
    for modality, media in (("image", np.zeros((4, 6, 3))), ("video", frames()), ("audio", [0.5])):
        items = parse(**{modality: [media]})[modality]
        assert items.get_raw(0) is items.get(0)


@pytest.mark.parametrize(
    "image",
    [quadrants(), np.zeros((4, 6, 3), np.uint8), ImageMediaIO().load_bytes_ref(make_jpeg())],
    ids=["pil", "array", "ref"],
)
def test_a_single_image_is_wrapped(image: object) -> None:
    assert parse(image=image)["image"].get_count() == 1


def test_images_are_turned_and_converted() -> None:
    image = quadrants((64, 48)).convert("L")
    image.info["exif"] = make_exif(orientation=6).tobytes()
    parsed = parse(image=image)["image"].get(0)
    assert (parsed.mode, parsed.size) == ("RGB", (48, 64))
    broken = quadrants()
    broken.info["exif"] = b"Exif\0\0broken"
    assert parse(image=broken)["image"].get(0).size == (64, 48)


def test_transparency_is_flattened_before_conversion() -> None:
    image = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert parse(image=image)["image"].get(0).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (np.zeros((4, 6, 3)), (6, 4)),
        (np.zeros((3, 4, 6)), (6, 4)),
        (np.zeros((4, 6, 1)), (6, 4)),
        (np.zeros((1, 4, 6)), (6, 4)),
        (quadrants((64, 48)), (64, 48)),
    ],
)
def test_image_sizes(image: object, size: tuple[int, int]) -> None:
    items = parse(image=[image]).get_items("image", ImageProcessorItems)
    assert items.get_image_size(0) == ImageSize(*size)


def test_a_batch_of_images_is_a_list_of_them() -> None:
    assert parse(image=np.zeros((5, 4, 6, 3)))["image"].get_count() == 5
    assert parse(image=[torch.zeros(3, 4, 6)])["image"].get(0).shape == (3, 4, 6)


@pytest.mark.parametrize("image", ["cat.png", 5, object()])
@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_an_item_without_a_usable_form_is_named(modality: str, image: object) -> None:
    with pytest.raises(ValueError, match=f"{modality} at index 1"):
        good = {"image": quadrants(), "video": frames(), "audio": np.zeros(4)}[modality]
        parse(**{modality: [good, image]})


# -- selections


def test_selections_keep_raw_items_classes_and_original_places() -> None:
    refs = [ImageMediaIO().load_bytes_ref(make_jpeg((10 + i, 8))) for i in range(5)]
    items = parse(image=refs)["image"]
    assert items.get_original_index(3) == 3
    with pytest.raises(IndexError):
        items.get_original_index(5)
    once = items.select([1, 3, 4])
    twice = once.select([2, 0])
    assert type(twice) is ImageProcessorItems
    assert twice.get_all_raw() == [refs[4], refs[1]]
    assert [twice.get_original_index(i) for i in range(2)] == [4, 1]
    assert not any(ref.is_decoded for ref in refs)
    assert items.get_count() == 5
    assert items.select([]).get_count() == 0


def test_video_selections_pick_their_metadata() -> None:
    metadata = [{"fps": float(i)} for i in range(3)]
    items = VideoProcessorItems([frames(i) for i in range(3)], metadata)
    picked = items.select([2, 0])
    assert picked.metadata == [{"fps": 2.0}, {"fps": 0.0}]
    shared = VideoProcessorItems([frames(0), frames(1)], {"fps": 9.0})
    assert shared.select([1]).metadata == {"fps": 9.0}
    assert shared.get_metadata(1) == {"fps": 9.0}


# -- audio


def wav_ref(rate: int = 8000) -> MediaRef[Any]:
    return AudioMediaIO().load_bytes_ref(make_wav(rate=rate))


def test_audio_references_are_mapped_with_all_three_settings() -> None:
    ref = wav_ref()
    items = parse(audio=[ref])["audio"]
    raw = items.get_raw(0)
    assert isinstance(raw, MediaRef) and not raw.is_decoded
    assert raw.key != ref.key
    extra = {"target_sr": None, "resample_method": "soxr", "target_channels": None}
    assert raw.spec.settings == {**ref.spec.settings, **extra}
    parser = MultiModalDataParser(target_sr=16000, target_channels=1)
    other = parse(parser, audio=[ref])["audio"].get_raw(0)
    assert isinstance(other, MediaRef) and other.key != raw.key


def test_audio_is_resampled_and_mixed() -> None:
    parser = MultiModalDataParser(target_sr=16000, target_channels=1)
    samples, rate = wav_ref().decode()
    items = parse(parser, audio=[wav_ref(), (samples, rate), (np.stack([samples] * 2), rate)])
    group = items.get_items("audio", AudioProcessorItems)
    for index in range(3):
        assert group.get_audio_length(index) == 2 * len(samples)
    np.testing.assert_array_equal(group.get(0), group.get(1))
    np.testing.assert_allclose(group.get(2), group.get(1), atol=1e-6)
    assert parse(parser, audio=(samples, 16000))["audio"].get(0) is samples


@pytest.mark.parametrize(
    "audio",
    [np.zeros(4), [0.0, 0.5], (np.zeros(4), 8000), wav_ref()],
    ids=["array", "list", "pair", "ref"],
)
def test_a_single_clip_is_wrapped(audio: object) -> None:
    items = parse(audio=audio)["audio"]
    assert items.get_count() == 1
    assert isinstance(items.get(0), np.ndarray)


# -- video


def test_video_references_keep_their_key_and_split_at_decode() -> None:
    ref = video_ref((frames(1), METADATA))
    items = parse(video=[ref]).get_items("video", VideoProcessorItems)
    raw = items.get_raw(0)
    assert isinstance(raw, MediaRef)
    assert (raw.key, raw.spec) == (ref.key, ref.spec)
    assert not ref.is_decoded
    assert items.get_metadata(0) == METADATA
    assert items.get(0).shape == (3, 4, 6, 3)
    again = parse(video=[raw])["video"].get_raw(0)
    assert isinstance(again, MediaRef) and again.key == ref.key
    assert again.decode()[1] == METADATA


def test_processors_that_need_metadata_get_pairs() -> None:
    parser = MultiModalDataParser(video_needs_metadata=True)
    items = parse(parser, video=[video_ref((frames(1), METADATA)), (frames(2), METADATA)])
    group = items.get_items("video", VideoProcessorItems)
    for index in range(2):
        pixels, metadata = group.get(index)
        assert pixels[0, 0, 0, 0] == index + 1
        assert metadata == METADATA
        assert group.get_frames(index) is pixels
    assert group.get_num_frames(0) == 3
    assert group.get_frame_size(0) == ImageSize(6, 4)


def test_metadata_of_one_video_does_not_decode_the_others() -> None:
    refs = [video_ref((frames(i), {"fps": float(i)}), str(i)) for i in range(3)]
    items = parse(video=refs).get_items("video", VideoProcessorItems)
    assert items.get_metadata(1) == {"fps": 1.0}
    assert [ref.is_decoded for ref in refs] == [False, True, False]
    assert items.metadata == [{"fps": 0.0}, {"fps": 1.0}, {"fps": 2.0}]


def test_missing_metadata_is_an_error_at_once_or_at_decode() -> None:
    parser = MultiModalDataParser(video_needs_metadata=True)
    for video in (frames(), [quadrants()] * 2, torch.zeros(3, 4, 6, 3), (frames(), None)):
        with pytest.raises(ValueError, match="Video metadata is required but not found"):
            parse(parser, video=[video])
    for media in (frames(), (frames(), None)):
        items = parse(parser, video=[video_ref(media)])["video"]
        with pytest.raises(ValueError, match="Video metadata is required but not found"):
            items.get(0)


def test_video_forms() -> None:
    parser = MultiModalDataParser()
    ref = video_ref(frames())
    mapped, metadata = parser._get_video_with_metadata(ref)
    assert isinstance(mapped, MediaRef) and metadata is None
    pair = (frames(), METADATA)
    assert parser._get_video_with_metadata(pair) == pair
    stacked, _ = parser._get_video_with_metadata([quadrants((6, 4))] * 2)
    assert stacked.shape == (2, 4, 6, 3)
    array = frames()
    assert parser._get_video_with_metadata(array) == (array, None)
    singles = [array, pair, [quadrants()] * 2, ref, list(array), torch.zeros(3, 4, 6, 3)]
    for single in singles:
        assert parse(video=single)["video"].get_count() == 1
    assert parse(video=np.zeros((2, 3, 4, 6, 3)))["video"].get_count() == 2
    assert parse(video=[ref, pair, array])["video"].get_count() == 3


def test_bare_frames_where_there_is_no_metadata() -> None:
    items = parse(video=[video_ref(frames())])["video"]
    assert isinstance(items.get(0), np.ndarray)
    assert VideoProcessorItems([frames()]).get(0).shape == (3, 4, 6, 3)


# -- vision chunks


def test_vision_chunks() -> None:
    chunk = {"type": "image", "image": quadrants(), "uuid": None}
    items = parse(vision_chunk=chunk)["vision_chunk"]
    assert isinstance(items, VisionChunkProcessorItems)
    assert items.get(0) is chunk
    assert parse(vision_chunk=[chunk, chunk])["vision_chunk"].get_count() == 2
    with pytest.raises(ValueError, match="embeddings"):
        parse(vision_chunk=torch.zeros(1, 2, 3))


# -- embeddings


@pytest.mark.parametrize(
    ("modality", "kind"),
    [
        ("image", ImageEmbeddingItems),
        ("video", VideoEmbeddingItems),
        ("audio", AudioEmbeddingItems),
    ],
)
def test_embeddings_pass_the_processor_by(modality: str, kind: type) -> None:
    batch = torch.arange(24.0).reshape(2, 3, 4)
    items = parse(**{modality: batch})[modality]
    assert isinstance(items, kind)
    assert items.get_processor_data() == {}
    assert items.get_passthrough_data() == {f"{modality}_embeds": batch}
    assert items.get_count() == 2
    assert torch.equal(items.select([1]).data, batch[1:])
    assert items.select([]).data.shape == (0, 3, 4)
    ragged = parse(**{modality: [torch.zeros(2, 4), torch.zeros(5, 4)]})[modality]
    assert isinstance(ragged, kind)
    assert isinstance(ragged.select([1]).data, list)
    assert ragged.get_feature_size(1) == 5


def test_bad_embeddings_are_named() -> None:
    parser = MultiModalDataParser(expected_hidden_size=4)
    with pytest.raises(ValueError, match="image embedding at index 1 has hidden size 5"):
        parse(parser, image=[torch.zeros(2, 4), torch.zeros(2, 5)])
    with pytest.raises(ValueError, match="audio embedding at index 1 is missing"):
        parse(audio=[torch.zeros(2, 4), None])
    allowed = MultiModalDataParser(allow_missing_mm_embeddings=True)
    assert parse(allowed, audio=[torch.zeros(2, 4), None])["audio"].get_count() == 2
    with pytest.raises(ValueError, match="index 0 must have the shape"):
        ImageEmbeddingItems([torch.zeros(4)])


class PairFields:
    """Two tensors per item: one batched, one flat with a row per cell of its grid."""

    def split(self, data: Any) -> list[MultiModalKwargsItem]:
        sizes = [int(row.prod()) for row in data["grid"]]
        parts = torch.split(data["embeds"], sizes)
        return [
            MultiModalKwargsItem(
                {
                    "grid": MultiModalFieldElem(grid, BatchedField()),
                    "embeds": MultiModalFieldElem(part, FlatField()),
                }
            )
            for grid, part in zip(data["grid"], parts, strict=True)
        ]

    def join(self, items: Any) -> dict[str, Any]:
        return {
            "grid": torch.stack([item["grid"].data for item in items]),
            "embeds": torch.cat([item["embeds"].data for item in items]),
        }


def test_dictionary_embeddings_pick_the_fields_of_an_item_together() -> None:
    data = {"grid": torch.tensor([[1, 2], [2, 2]]), "embeds": torch.arange(12.0).reshape(6, 2)}
    items = DictEmbeddingItems(data, "image", {"grid", "embeds"}, lambda _: PairFields())
    assert items.get_count() == 2
    picked = items.select([1])
    assert torch.equal(picked.data["grid"], data["grid"][1:])
    assert torch.equal(picked.data["embeds"], data["embeds"][2:])
    assert picked.get_original_index(0) == 1
    assert torch.equal(picked.get(0)["embeds"], data["embeds"][2:])
    assert picked.get_passthrough_data() == picked.data
    assert picked.get_processor_data() == {}
    assert items.select([]).data["embeds"].shape == (0, 2)
    with pytest.raises(ValueError, match="missing: \\['embeds'\\]"):
        DictEmbeddingItems({"grid": 0}, "image", {"grid", "embeds"}, lambda _: PairFields())


def test_parsing_never_decodes_by_accident() -> None:
    def boom() -> object:
        raise AssertionError("decoded")

    ref: MediaRef[Any] = MediaRef(boom, b"x")
    items = parse(image=[ref, ref], audio=[ref], video=[ref])
    repr(items)
    assert len(items["image"]) == 2
    for group in items.values():
        group.select([0]).get_all_raw()
    with pytest.raises(AssertionError, match="decoded"):
        pickle.dumps(items["image"])
