"""What runs at the same time: phases of other requests, decodes of one, processing of several."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from lazydecode.errors import CorruptMediaError
from lazydecode.media.base import MediaRef
from lazydecode.media.image import ImageMediaIO
from lazydecode.processing.flights import ItemFlights
from lazydecode.processing.inputs import ProcessorInputs
from tests.processing.helpers import (
    CountingImageIO,
    ItemwisePixelProcessor,
    PixelProcessor,
    jpeg,
    make_inputs,
    only_cache,
    sender_cache,
    tensors_of,
)
from tests.processing.test_phases import Server


@pytest.fixture(params=["batch", "flights"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with (
        ThreadPoolExecutor(1) as worker,
        ThreadPoolExecutor(2) as processing,
        ThreadPoolExecutor(3) as media,
    ):
        if request.param == "batch":
            yield Server(PixelProcessor(media_executor=media), worker, processing, media)
            return
        flights = ItemFlights(processing, media_executor=media)
        yield Server(ItemwisePixelProcessor(flights=flights), worker, processing, media)
        flights.close()


@pytest.fixture
def io() -> CountingImageIO:
    return CountingImageIO()


def test_phase_1_starts_the_decodes_and_waits_for_none(server: Server, io: CountingImageIO) -> None:
    io.gate = threading.Event()
    inputs = make_inputs(server.processor, [io.ref(jpeg(1)), io.ref(jpeg(2))], cache=sender_cache())
    state = server.processor.apply_phase1(inputs)
    try:
        assert [job.future.done() for job in state.decodes] == [False, False]
        assert [job.original_index for job in state.decodes] == [0, 1]
    finally:
        io.gate.set()
        with state:
            state.wait_items()
    assert io.num_decodes == 2


async def test_the_ordered_worker_serves_others_while_a_request_waits(
    server: Server, io: CountingImageIO
) -> None:
    cache = sender_cache()
    await server.run(make_inputs(server.processor, [io.ref(jpeg(1))], cache=cache))
    io.gate = threading.Event()
    slow = asyncio.create_task(
        server.run(make_inputs(server.processor, [io.ref(jpeg(2))], cache=cache))
    )
    try:
        while io.num_decodes < 2:
            await asyncio.sleep(0.002)
        hit = await server.run(make_inputs(server.processor, [io.ref(jpeg(1))], cache=cache))
        assert hit["mm_kwargs"]["image"] == [None]
        assert not slow.done()
    finally:
        io.gate.set()
    assert (await slow)["mm_kwargs"]["image"][0] is not None


@pytest.mark.parametrize("is_cached", [True, False])
def test_who_waits_for_one_item_decodes_it(is_cached: bool) -> None:
    """Several go to the media threads, and so does one between whose phases others' may come."""
    threads: list[str] = []

    def ref(data: bytes) -> MediaRef[Image.Image]:
        encoded = ImageMediaIO().load_bytes_ref(data)

        def decode() -> Image.Image:
            threads.append(threading.current_thread().name.rpartition("_")[0])
            return encoded.decode()

        return MediaRef(decode, data, encoded.spec, key=encoded.key)

    with ThreadPoolExecutor(2, "media") as media:
        processor = PixelProcessor(media_executor=media)

        def inputs(*payloads: bytes) -> ProcessorInputs:
            cache = only_cache() if is_cached else None
            return make_inputs(processor, [ref(data) for data in payloads], cache=cache)

        alone = processor.apply(inputs(jpeg(1)))
        assert threads.pop() == ""
        processor.apply(inputs(jpeg(1), jpeg(2)))
        assert [threads.pop(), threads.pop()] == ["media"] * 2
        with processor.apply_phase1(inputs(jpeg(1))) as state:
            state.wait_items()
            in_phases = processor.apply_phase2(state)
        assert threads.pop() == "media"
        with pytest.raises(CorruptMediaError) as raised:
            processor.apply(inputs(jpeg(1)[:300]))
        assert (raised.value.modality, raised.value.index) == ("image", 0)
        assert threads.pop() == ""
    assert not threads
    one, other = (tensors_of(prompt["mm_kwargs"]["image"][0]) for prompt in (alone, in_phases))
    assert one == other


async def test_the_items_of_a_request_are_decoded_at_the_same_time(
    server: Server, io: CountingImageIO
) -> None:
    together = threading.Barrier(3)
    io.gate = threading.Event()
    io.gate.set()
    io.gate.wait = lambda timeout=None: together.wait(120) >= 0  # type: ignore[method-assign]
    refs = [io.ref(jpeg(seed)) for seed in range(3)]
    await server.run(make_inputs(server.processor, refs, cache=only_cache()))
    assert io.num_decodes == 3


async def test_requests_are_processed_at_the_same_time(server: Server, io: CountingImageIO) -> None:
    together = threading.Barrier(2)
    server.processor.on_call = lambda: together.wait(120) and None
    cache = sender_cache()
    results = await asyncio.gather(
        *(
            server.run(make_inputs(server.processor, [io.ref(jpeg(seed))], cache=cache))
            for seed in range(2)
        )
    )
    assert server.processor.num_calls == 2
    assert all(result["mm_kwargs"]["image"][0] is not None for result in results)


@pytest.mark.parametrize("is_cached", [False, True])
async def test_the_phases_give_what_apply_gives(
    server: Server, io: CountingImageIO, is_cached: bool
) -> None:
    results = []
    for in_phases in (False, True):
        inputs = make_inputs(
            server.processor,
            [io.ref(jpeg(1)), io.ref(jpeg(9)), io.ref(jpeg(1))],
            cache=only_cache() if is_cached else None,
        )
        results.append(await server.run(inputs) if in_phases else server.processor.apply(inputs))
    whole, split = results
    for field in ("prompt_token_ids", "mm_hashes", "mm_placeholders"):
        assert whole[field] == split[field]  # type: ignore[literal-required]
    for one, other in zip(whole["mm_kwargs"]["image"], split["mm_kwargs"]["image"], strict=True):
        assert tensors_of(one) == tensors_of(other)
