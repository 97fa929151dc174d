"""The two phases: what is decoded, processed, cached, and how errors name their item."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from lazydecode.cache import MultiModalReceiverCache
from lazydecode.errors import (
    CorruptMediaError,
    InvalidRequestError,
    PlaceholderMismatchError,
    UnprocessableMediaError,
)
from lazydecode.inputs import PlaceholderRange
from lazydecode.processing.flights import ItemFlights
from lazydecode.processing.timing import TimingContext
from tests.builders import make_jpeg
from tests.processing.helpers import (
    BEGIN,
    END,
    IMAGE_TOKEN,
    PAD,
    CountingImageIO,
    ItemwisePixelProcessor,
    PixelProcessor,
    jpeg,
    make_inputs,
    only_cache,
    sender_cache,
    tensors_of,
)


@pytest.fixture
def io() -> CountingImageIO:
    return CountingImageIO()


@pytest.fixture(params=["batch", "itemwise", "flights"])
def processor(request: pytest.FixtureRequest):
    if request.param == "batch":
        yield PixelProcessor()
    elif request.param == "itemwise":
        yield ItemwisePixelProcessor()
    else:
        with ThreadPoolExecutor(2) as pool:
            flights = ItemFlights(pool)
            yield ItemwisePixelProcessor(flights=flights)
            flights.close()
            assert len(flights) == 0


def test_ids_ranges_and_tensors(processor: PixelProcessor, io: CountingImageIO) -> None:
    inputs = make_inputs(processor, [io.ref(jpeg(0)), io.ref(jpeg(8))], cache=only_cache())
    result = processor.apply(inputs)
    first, second = [BEGIN, *[PAD] * 4, END], [BEGIN, *[PAD] * 4, END]
    assert result["prompt_token_ids"] == [1, *first, 2, *second, 2, 3]
    ranges = result["mm_placeholders"]["image"]
    assert [(place.offset, place.length, place.num_embeds) for place in ranges] == [
        (1, 6, 4),
        (8, 6, 4),
    ]
    sizes = [tensors_of(item)["sizes"] for item in result["mm_kwargs"]["image"]]
    assert sizes == [[32, 24], [33, 25]]


def test_second_request_decodes_nothing_and_gives_the_same(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    cache = only_cache()
    data = [jpeg(0), jpeg(1)]
    first = processor.apply(make_inputs(processor, [io.ref(d) for d in data], cache=cache))
    assert io.num_decodes == 2
    second = processor.apply(make_inputs(processor, [io.ref(d) for d in data], cache=cache))
    assert io.num_decodes == 2
    assert processor.num_images == 2
    assert second["prompt_token_ids"] == first["prompt_token_ids"]
    assert second["mm_hashes"] == first["mm_hashes"]
    assert second["mm_placeholders"] == first["mm_placeholders"]
    for one, other in zip(first["mm_kwargs"]["image"], second["mm_kwargs"]["image"], strict=True):
        assert tensors_of(one) == tensors_of(other)


def test_an_item_that_stands_three_times_is_decoded_and_processed_once(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    cache = sender_cache()
    refs = [io.ref(jpeg(3)) for _ in range(3)]
    result = processor.apply(make_inputs(processor, refs, cache=cache))
    assert io.num_decodes == 1
    assert processor.num_images == 1
    assert [item is None for item in result["mm_kwargs"]["image"]] == [False, True, True]
    assert len(result["mm_placeholders"]["image"]) == 3


def test_corrupt_item_is_named_by_its_place_in_the_request_and_the_good_one_is_kept(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    cache = sender_cache()
    processor.apply(make_inputs(processor, [io.ref(jpeg(0))], cache=cache))
    bad = jpeg(2)[:300]
    refs = [io.ref(jpeg(0)), io.ref(jpeg(1)), io.ref(bad)]
    before = cache.snapshot()
    with pytest.raises(CorruptMediaError, match="image media at index 2: ") as caught:
        processor.apply(make_inputs(processor, refs, cache=cache))
    assert (caught.value.modality, caught.value.index) == ("image", 2)
    assert caught.value.__cause__ is not None
    assert cache.snapshot() == before
    num_decodes = io.num_decodes
    if processor.flights is not None:
        processor.flights.close()  # The good one may still be under way.
        processor.flights._is_closed = False
    processor.apply(make_inputs(processor, [io.ref(jpeg(1))], cache=cache))
    assert io.num_decodes == num_decodes
    assert processor.num_images == 2


def test_a_miss_that_became_a_hit_is_not_processed(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    cache = sender_cache()
    states = [
        processor.apply_phase1(make_inputs(processor, [io.ref(jpeg(1))], cache=cache))
        for _ in range(2)
    ]
    results = []
    for state in states:
        with state:
            state.wait_decodes()
            results.append(processor.apply_phase2(state))
    assert processor.num_images == 1
    assert results[0]["mm_kwargs"]["image"][0] is not None
    assert results[1]["mm_kwargs"]["image"] == [None]


def test_a_hit_that_was_evicted_between_the_phases_is_decoded_late(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    cache = only_cache()
    processor.apply(make_inputs(processor, [io.ref(jpeg(1))], cache=cache))
    state = processor.apply_phase1(make_inputs(processor, [io.ref(jpeg(1))], cache=cache))
    with state:
        state.wait_items()
        assert io.num_decodes == 1
        cache.clear_cache()
        result = processor.apply_phase2(state)
    assert io.num_decodes == 2
    assert tensors_of(result["mm_kwargs"]["image"][0])["sizes"] == [33, 24]
    assert len(cache) == 1


def test_caller_refs_stay_usable_and_state_refs_are_released(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    ref = io.ref(jpeg(1))
    state = processor.apply_phase1(make_inputs(processor, [ref], cache=only_cache()))
    fork = state.inputs.mm_data_items["image"].get_raw(0)
    with state:
        state.wait_items()
        processor.apply_phase2(state)
        assert fork.data == jpeg(1)
    assert fork.data == b""
    assert ref.data == jpeg(1)
    assert ref.decode().size == (33, 24)


def test_uuid_without_data_is_served_from_the_cache_and_is_an_error_otherwise(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    cache = only_cache()
    with pytest.raises(InvalidRequestError, match="Cache miss for image at index 1 but data"):
        inputs = make_inputs(processor, [io.ref(jpeg(1)), None], cache=cache, uuids=["a", "b"])
        processor.apply(inputs)
    assert io.num_decodes == 0
    processor.apply(make_inputs(processor, [io.ref(jpeg(1))], cache=cache, uuids=["a"]))
    result = processor.apply(make_inputs(processor, [None], cache=cache, uuids=["a"]))
    assert result["mm_hashes"] == {"image": ["a"]}
    assert io.num_decodes == 1


def test_missing_placeholder_leaves_the_cache_as_it_was_and_keeps_the_work(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    cache = sender_cache()
    processor.apply(make_inputs(processor, [io.ref(jpeg(0)), io.ref(jpeg(1))], cache=cache))
    before, used = cache.snapshot(), cache.used_bytes
    inputs = make_inputs(
        processor, [io.ref(jpeg(2)), io.ref(jpeg(0))], cache=cache, prompt=[1, IMAGE_TOKEN]
    )
    with pytest.raises(PlaceholderMismatchError, match="image at index 1"):
        processor.apply(inputs)
    assert (cache.snapshot(), cache.used_bytes) == (before, used)
    num_images = processor.num_images
    processor.apply(make_inputs(processor, [io.ref(jpeg(2))], cache=cache))
    assert processor.num_images == num_images


def test_a_request_larger_than_the_cache_still_reaches_the_receiver(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    capacity = 3 * (34 * 26 * 3 * 4)
    sender, receiver = sender_cache(capacity), MultiModalReceiverCache(capacity_bytes=capacity)
    for seeds in ([0], [8, 9, 0], [9, 8, 0, 10, 9], [0, 8]):
        refs = [io.ref(jpeg(seed)) for seed in seeds]
        result = processor.apply(make_inputs(processor, refs, cache=sender))
        received = receiver.get_and_update_request(result["mm_kwargs"], result["mm_hashes"])
        expected = [[32 + seed % 7, 24 + seed // 7] for seed in seeds]
        assert [tensors_of(item)["sizes"] for item in received["image"]] == expected
        assert receiver.snapshot() == sender.snapshot()


def test_without_a_cache_everything_is_decoded_and_hashed(
    processor: PixelProcessor, io: CountingImageIO
) -> None:
    timing = TimingContext(True)
    result = processor.apply(make_inputs(processor, [io.ref(jpeg(1))]), timing)
    assert io.num_decodes == 1
    assert len(result["mm_hashes"]["image"][0]) == 64
    assert "apply_hf_processor" in timing.stage_secs
    assert isinstance(result["mm_placeholders"]["image"][0], PlaceholderRange)


def test_wide_image_is_named_if_the_processor_refuses_it(io: CountingImageIO) -> None:
    processor = ItemwisePixelProcessor()
    refs = [io.ref(jpeg(0)), io.ref(make_jpeg((600, 10)))]
    with pytest.raises(UnprocessableMediaError, match="process image media at index 1: image"):
        processor.apply(make_inputs(processor, refs, cache=only_cache()))
