"""Phases of several requests between each other, cancellation, failures, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lazydecode.cache import MultiModalReceiverCache
from lazydecode.errors import (
    CorruptMediaError,
    InvalidRequestError,
    LazyDecodeError,
    PlaceholderMismatchError,
    UnprocessableMediaError,
)
from lazydecode.inputs import MultiModalInput, PlaceholderRange
from lazydecode.media import executor as media_executor
from lazydecode.media.base import MediaRef
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.parse import MultiModalDataItems
from lazydecode.processing.context import BaseProcessingInfo
from lazydecode.processing.fields import MultiModalFieldConfig
from lazydecode.processing.flights import ItemFlights
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.outputs import ItemOutput
from lazydecode.processing.processor import BaseMultiModalProcessor
from lazydecode.processing.prompt_updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
)
from lazydecode.processing.state import MultiModalApplyState
from lazydecode.processing.timing import TimingContext
from tests.builders import make_jpeg
from tests.processing.helpers import (
    IMAGE_TOKEN,
    CountingImageIO,
    ItemwisePixelProcessor,
    PixelProcessor,
    jpeg,
    make_info,
    make_inputs,
    only_cache,
    sender_cache,
    tensors_of,
)

REPEATS = int(os.environ.get("LAZYDECODE_TEST_REPEATS", "1"))


@dataclass
class Server:
    """A processor with the threads that a server gives it."""

    processor: PixelProcessor
    worker: ThreadPoolExecutor
    processing: ThreadPoolExecutor
    media: ThreadPoolExecutor

    async def run(
        self,
        inputs: ProcessorInputs,
        *,
        process: bool = True,
        deliver: Callable[[MultiModalInput], None] = lambda result: None,
        states: list[MultiModalApplyState] | None = None,
    ) -> MultiModalInput:
        """As the server does it: what runs on a thread is waited for, whoever is cancelled."""
        cancelled: asyncio.CancelledError | None = None
        loop = asyncio.get_running_loop()
        phase1 = loop.run_in_executor(self.worker, self.processor.apply_phase1, inputs)
        try:
            await await_with_cancellation_drain(phase1)
        except asyncio.CancelledError as exc:
            cancelled = exc
        state = phase1.result()
        if states is not None:
            states.append(state)

        def finish() -> MultiModalInput:
            assert inputs.cache is None or state.inputs.cache is inputs.cache
            result = self.processor.apply_phase2(state)
            deliver(result)
            return result

        with state:
            if cancelled is not None:
                state.leave_flights()
                with contextlib.suppress(LazyDecodeError):
                    await state.wait_decodes_async()
                raise cancelled
            await state.wait_items_async()
            if process:
                await await_with_cancellation_drain(
                    loop.run_in_executor(self.processing, self.processor.apply_process, state)
                )
            return await await_with_cancellation_drain(loop.run_in_executor(self.worker, finish))


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
        processor = ItemwisePixelProcessor(flights=flights)
        yield Server(processor, worker, processing, media)
        flights.close()
        assert len(flights) == 0


@pytest.fixture
def io() -> CountingImageIO:
    return CountingImageIO()


async def test_hit_and_miss_give_the_engine_the_same(server: Server, io: CountingImageIO) -> None:
    cache = only_cache()
    seeds = [0, 1, 2]
    alone = await server.run(make_inputs(server.processor, [io.ref(jpeg(s)) for s in seeds]))
    orders = [[1], [0, 1], [2, 1, 0], [0, 1, 2], [1, 1, 2]]
    for order in orders:
        inputs = make_inputs(server.processor, [io.ref(jpeg(s)) for s in order], cache=cache)
        result = await server.run(inputs)
        for position, seed in enumerate(order):
            item = result["mm_kwargs"]["image"][position]
            assert tensors_of(item) == tensors_of(alone["mm_kwargs"]["image"][seed])
            assert result["mm_hashes"]["image"][position] == alone["mm_hashes"]["image"][seed]


async def test_concurrent_requests_for_one_item(server: Server, io: CountingImageIO) -> None:
    cache = sender_cache()
    io.gate = threading.Event()
    tasks = [
        asyncio.create_task(
            server.run(make_inputs(server.processor, [io.ref(jpeg(1))], cache=cache))
        )
        for _ in range(16)
    ]
    await asyncio.sleep(0.05)
    io.gate.set()
    results = await asyncio.gather(*tasks)
    assert len({tuple(result["prompt_token_ids"]) for result in results}) == 1
    assert [result["mm_kwargs"]["image"][0] is None for result in results].count(False) == 1
    if server.processor.flights is not None:
        assert io.num_decodes == 1
        assert server.processor.num_images == 1


async def test_a_failure_names_each_requests_own_index(server: Server, io: CountingImageIO) -> None:
    cache = sender_cache()
    io.gate = threading.Event()
    bad = jpeg(2)[:300]
    tasks = [
        asyncio.create_task(
            server.run(
                make_inputs(
                    server.processor,
                    [*(io.ref(jpeg(10 + at)) for at in range(place)), io.ref(bad)],
                    cache=cache,
                )
            )
        )
        for place in range(4)
    ]
    await asyncio.sleep(0.05)
    io.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for place, error in enumerate(results):
        assert isinstance(error, CorruptMediaError)
        assert error.index == place
        assert f"image media at index {place}: " in str(error)
    assert cache.snapshot() == []


async def test_a_processor_failure_names_the_item_and_keeps_the_others(
    server: Server, io: CountingImageIO
) -> None:
    cache = sender_cache()
    wide = make_jpeg((600, 10))
    refs = [io.ref(jpeg(0)), io.ref(wide), io.ref(jpeg(1))]
    with pytest.raises(UnprocessableMediaError, match="process image media at index 1: images"):
        await server.run(make_inputs(server.processor, refs, cache=cache))
    if server.processor.flights is not None:
        server.processor.flights.close()
        server.processor.flights._is_closed = False
    decodes, images = io.num_decodes, server.processor.num_images
    refs = [io.ref(jpeg(1)), io.ref(jpeg(0))]
    await server.run(make_inputs(server.processor, refs, cache=cache))
    assert (io.num_decodes, server.processor.num_images) == (decodes, images)


async def test_a_cancelled_request_drains_releases_and_does_not_disturb_others(
    server: Server, io: CountingImageIO
) -> None:
    cache = sender_cache()
    io.gate = threading.Event()
    refs = [io.ref(jpeg(1)), io.ref(jpeg(2))]
    first = asyncio.create_task(server.run(make_inputs(server.processor, refs, cache=cache)))
    second = asyncio.create_task(
        server.run(make_inputs(server.processor, [io.ref(jpeg(1))], cache=cache))
    )
    while not io.num_decodes:
        await asyncio.sleep(0.005)
    first.cancel()
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.sleep(0.02)
    assert not first.done()
    io.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    result = await second
    assert result["mm_kwargs"]["image"][0] is not None
    assert len(cache.snapshot()) == 1


async def test_a_cancelled_requests_results_are_kept_warm(
    server: Server, io: CountingImageIO
) -> None:
    cache = sender_cache()
    processor = server.processor
    state = processor.apply_phase1(make_inputs(processor, [io.ref(jpeg(1))], cache=cache))
    with state:
        await state.wait_items_async()
        await asyncio.to_thread(processor.apply_process, state)
    assert cache.snapshot() == []
    assert len(processor.warm_outputs) == 1
    inputs = make_inputs(processor, [io.ref(jpeg(1))], cache=cache)
    await server.run(inputs)
    assert (io.num_decodes, processor.num_images) == (1, 1)
    assert len(processor.warm_outputs) == 0
    assert len(cache) == 1
    processor.clear_outputs()


async def test_warm_results_stand_in_for_data(server: Server, io: CountingImageIO) -> None:
    cache = sender_cache()
    processor = server.processor
    inputs = make_inputs(processor, [io.ref(jpeg(1))], cache=cache, uuids=["u"], prompt=[1])
    with pytest.raises(PlaceholderMismatchError):
        await server.run(inputs)
    result = await server.run(make_inputs(processor, [None], cache=cache, uuids=["u"]))
    assert tensors_of(result["mm_kwargs"]["image"][0])["sizes"] == [33, 24]


def test_apply_process_after_decodes_only_leaves_shared_work_alone(io: CountingImageIO) -> None:
    gate = threading.Event()
    with ThreadPoolExecutor(1) as processing:
        flights = ItemFlights(processing)
        processor = ItemwisePixelProcessor(flights=flights)
        processor.on_call = lambda: gate.wait(120) and None
        state = processor.apply_phase1(
            make_inputs(processor, [io.ref(jpeg(1))], cache=only_cache())
        )
        with state:
            state.wait_decodes()
            processor.apply_process(state)
            gate.set()
            processor.apply_phase2(state)
        assert processor.num_calls == 1
        flights.close()


def test_a_failing_second_submission_surfaces_itself(io: CountingImageIO) -> None:
    class OneJob(Executor):
        def __init__(self) -> None:
            self.futures: list[Future[Any]] = []

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if self.futures:
                raise OSError("no more threads")
            future: Future[Any] = Future()
            self.futures.append(future)
            future.set_exception(ValueError("decode failure of the first"))
            return future

    processor = PixelProcessor(media_executor=OneJob())
    caller = [io.ref(jpeg(1)), io.ref(jpeg(2))]
    inputs = make_inputs(processor, caller, cache=only_cache())
    forks: list[MediaRef[Any]] = []
    fork = inputs.fork_media_refs
    inputs.fork_media_refs = lambda: remember(fork(), forks)  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no more threads"):
        processor.apply_phase1(inputs)
    assert [ref.data for ref in forks] == [b"", b""]
    assert [ref.data for ref in caller] == [jpeg(1), jpeg(2)]


def remember(inputs: ProcessorInputs, forks: list[MediaRef[Any]]) -> ProcessorInputs:
    forks += inputs.mm_data_items["image"].get_all_raw()
    return inputs


def test_the_media_pool_is_looked_up_at_each_call(
    monkeypatch: pytest.MonkeyPatch, io: CountingImageIO
) -> None:
    submitted: list[Any] = []

    class Recorder(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            submitted.append((fn, args, kwargs))
            future: Future[Any] = Future()
            future.set_result(fn(*args, **kwargs))
            return future

    processor = PixelProcessor()
    monkeypatch.setattr(media_executor, "global_thread_pool", Recorder())
    state = processor.apply_phase1(make_inputs(processor, [io.ref(jpeg(1))], cache=only_cache()))
    with state:
        fork = state.inputs.mm_data_items["image"].get_raw(0)
        assert submitted == [(fork.decode, (), {})]
    assert fork.data == b""


def test_data_that_nobody_sent_is_named_without_a_cache_too(io: CountingImageIO) -> None:
    processor = PixelProcessor()
    inputs = make_inputs(processor, [io.ref(jpeg(1)), None], uuids=[None, "u"])
    with pytest.raises(InvalidRequestError, match="image at index 1 but data is not provided"):
        processor.apply(inputs)


def test_positions_of_a_selection_are_those_of_the_request(io: CountingImageIO) -> None:
    processor = PixelProcessor()
    inputs = make_inputs(processor, [io.ref(jpeg(0)), io.ref(jpeg(1)), io.ref(jpeg(2)[:300])])
    items = inputs.mm_data_items["image"].select([2])
    inputs = ProcessorInputs(
        [IMAGE_TOKEN], MultiModalDataItems({"image": items}), cache=only_cache()
    )
    with pytest.raises(CorruptMediaError, match="at index 2"):
        processor.apply(inputs)


# -- the steps that families replace


class StartProcessor(BaseMultiModalProcessor):
    """One shared tensor, inserted at the start: the smallest processor there is."""

    def __init__(self, count: int, info: BaseProcessingInfo | None = None) -> None:
        super().__init__(info or make_info(), None)
        self.count = count
        self.calls: list[list[str]] = []

    def _get_hf_mm_inputs(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, Any]) -> Any:
        self.calls.append(sorted(mm_items))
        return super()._get_hf_mm_inputs(mm_items, hf_kwargs)

    def _call_hf_processor(
        self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        self.seen = dict(hf_data), dict(hf_kwargs)
        return {"pixel_values": torch.zeros(1)}

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"pixel_values": MultiModalFieldConfig.shared("image", self.count)}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        return [PromptInsertion("image", PromptIndexTargets.start(), [0])]


def test_the_smallest_processor(io: CountingImageIO) -> None:
    cache = only_cache()
    processor = StartProcessor(2)
    refs = [io.ref(jpeg(1)), io.ref(jpeg(2))]
    inputs = make_inputs(
        processor, refs, cache=cache, prompt=[5, 6], hf_processor_mm_kwargs={"size": 3}
    )
    result = processor.apply(inputs)
    assert result["prompt_token_ids"] == [0, 0, 5, 6]
    assert result["mm_placeholders"] == {"image": [PlaceholderRange(0, 1), PlaceholderRange(1, 1)]}
    assert sorted(processor.seen[0]) == ["images"]
    assert processor.seen[1] == {"size": 3}
    assert processor.calls == [["image"]]
    processor.apply(inputs)
    # The hooks see empty data when nothing is missing, and the model's processor is not called.
    assert processor.calls == [["image"], []]


def test_a_wrong_number_of_results_is_our_own_bug(io: CountingImageIO) -> None:
    processor = StartProcessor(3)
    for cache in (None, only_cache()):
        inputs = make_inputs(processor, [io.ref(jpeg(1)), io.ref(jpeg(2))], cache=cache, prompt=[5])
        with pytest.raises(RuntimeError, match="3 of 2 image items") as caught:
            processor.apply(inputs)
        assert not isinstance(caught.value, LazyDecodeError)


def test_audio_is_called_audio_and_empty_groups_are_skipped() -> None:
    processor = StartProcessor(0)
    items = processor.info.parse_mm_data({"audio": [torch.zeros(4).numpy()], "image": []})
    data, _, passthrough = processor._get_hf_mm_inputs(items, {})
    assert sorted(data) == ["audio"]
    assert passthrough == {}


def test_embeddings_pass_by_the_processor_and_the_cache() -> None:
    class EmbedsProcessor(StartProcessor):
        def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
            return {"image_embeds": MultiModalFieldConfig.batched("image")}

    processor = EmbedsProcessor(0)
    cache = only_cache()
    inputs = ProcessorInputs(
        [5], processor.info.parse_mm_data({"image": torch.ones(2, 3, 4)}), cache=cache
    )
    result = processor.apply(inputs)
    assert len(cache) == 0
    item = result["mm_kwargs"]["image"][1]
    assert item is not None and item["image_embeds"].data.shape == (3, 4)
    assert not hasattr(processor, "seen")


def test_overriding_the_whole_of_apply_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    class WholeProcessor(PixelProcessor):
        def apply(self, inputs: Any, timing_ctx: Any = None) -> Any:
            return super().apply(inputs, timing_ctx)

        def _apply_hf_processor(self, inputs: Any, timing_ctx: Any) -> Any:
            return super()._apply_hf_processor(inputs, timing_ctx)

    assert PixelProcessor().supports_two_phase_apply
    with caplog.at_level(logging.DEBUG, logger="lazydecode.processing"):
        processors = [WholeProcessor(), WholeProcessor()]
        assert not any(processor.supports_two_phase_apply for processor in processors)
    assert [record.message for record in caplog.records] == [
        "WholeProcessor is not run in phases, as it overrides apply, _apply_hf_processor"
    ]


def test_an_override_without_cache_is_honoured(io: CountingImageIO) -> None:
    seen: list[str] = []

    class NoCacheProcessor(PixelProcessor):
        def _apply_hf_processor(self, inputs: Any, timing_ctx: Any) -> Any:
            seen.append("called")
            return super()._apply_hf_processor(inputs, timing_ctx)

    processor = NoCacheProcessor()
    processor.apply(make_inputs(processor, [io.ref(jpeg(1))], cache=only_cache()))
    assert seen == []
    processor.apply(make_inputs(processor, [io.ref(jpeg(1))]))
    assert seen == ["called"]


def test_the_state_is_closed_before_the_prompt_and_open_during_the_merge(
    io: CountingImageIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks: list[MediaRef[Any]] = []
    seen: list[tuple[str, bytes]] = []

    class Watching(PixelProcessor):
        def _process_missing(self, missing: Any, inputs: Any) -> Any:
            forks.extend(missing["image"].get_all_raw())
            return super()._process_missing(missing, inputs)

        def _finish_prompt(self, inputs: Any, mm_kwargs: Any, updates: Any) -> Any:
            seen.append(("prompt", forks[0].data))
            return super()._finish_prompt(inputs, mm_kwargs, updates)

    cache = only_cache()
    get = cache.get_and_update_item

    def get_and_update_item(item: Any, mm_hash: str) -> Any:
        seen.append(("merge", forks[0].data))
        return get(item, mm_hash)

    monkeypatch.setattr(cache, "get_and_update_item", get_and_update_item)
    processor = Watching()
    processor.apply(make_inputs(processor, [io.ref(jpeg(1))], cache=cache))
    assert seen == [("merge", jpeg(1)), ("prompt", b"")]


def test_sender_touches_are_released_also_after_a_failure(
    io: CountingImageIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = sender_cache()
    events: list[str] = []
    monkeypatch.setattr(cache, "release_sender_touches", lambda: events.append("release"))
    monkeypatch.setattr(
        cache, "touch_sender_cache_item", lambda mm_hash: events.append(f"touch {mm_hash}")
    )
    processor = PixelProcessor()
    uuids = ["a", "b"]
    refs = [io.ref(jpeg(1)), io.ref(jpeg(2))]
    processor.apply(make_inputs(processor, refs, cache=cache, uuids=uuids))
    assert events == ["touch a", "touch b", "release"]
    processor.on_call = lambda: (_ for _ in ()).throw(KeyError("x"))  # type: ignore[assignment]
    with pytest.raises(UnprocessableMediaError):
        processor.apply(make_inputs(processor, [io.ref(jpeg(3))], cache=cache))
    assert events[3:] == ["release"]


def test_a_processor_that_is_not_reentrant_runs_alone(io: CountingImageIO) -> None:
    running: list[int] = []
    most: list[int] = []

    class Serial(ItemwisePixelProcessor):
        reentrant = False

        def _process_missing(self, missing: Any, inputs: Any) -> dict[str, list[ItemOutput]]:
            running.append(1)
            most.append(len(running))
            try:
                return super()._process_missing(missing, inputs)
            finally:
                running.pop()

    with ThreadPoolExecutor(4) as processing:
        flights = ItemFlights(processing)
        processor = Serial()
        processor.use_flights(flights)
        refs = [io.ref(jpeg(seed)) for seed in range(12)]
        processor.apply(make_inputs(processor, refs, cache=only_cache()))
        with processor.process_guard():
            assert processor._process_lock.locked()
        flights.close()
    assert max(most) == 1


def test_the_observer_hears_of_every_stage_of_every_item(io: CountingImageIO) -> None:
    heard: list[tuple[int, str, bool | None]] = []

    class Observer:
        def record_item(
            self,
            modality: str,
            index: int,
            stage: str,
            seconds: float,
            *,
            hit: bool | None = None,
            shared: bool = False,
        ) -> None:
            assert modality == "image" and seconds >= 0
            heard.append((index, stage, hit))

    for with_flights in (False, True):
        with ThreadPoolExecutor(1) as processing:
            processor: PixelProcessor = PixelProcessor()
            if with_flights:
                processor = ItemwisePixelProcessor(flights=ItemFlights(processing))
            cache = only_cache()
            processor.apply(make_inputs(processor, [io.ref(jpeg(0))], cache=cache))
            heard.clear()
            refs = [io.ref(jpeg(0)), io.ref(jpeg(1))]
            timing = TimingContext(False, observer=Observer())
            processor.apply(make_inputs(processor, refs, cache=cache), timing)
            assert sorted(heard, key=lambda note: (note[0], note[1])) == [
                (0, "digest", None),
                (0, "lookup", True),
                (1, "decode", None),
                (1, "decode_wait", None),
                (1, "digest", None),
                (1, "lookup", False),
                (1, "process", None),
            ]


# -- many at once


@pytest.mark.stress
async def test_storm(server: Server, io: CountingImageIO) -> None:
    """Hits, misses, evictions, corrupt items, bad prompts and cancellations, all interleaved."""
    rng = random.Random(7)
    capacity = 6 * (34 * 26 * 3 * 4)
    cache = sender_cache(capacity)
    receiver = MultiModalReceiverCache(capacity_bytes=capacity)
    processor = server.processor
    payloads = [jpeg(seed) for seed in range(10)]
    bad = jpeg(3)[:280]
    states: list[MultiModalApplyState] = []
    outcomes: dict[str, int] = {}

    async def request() -> None:
        chosen = [rng.randrange(10) for _ in range(rng.randrange(1, 4))]
        data = [payloads[at] for at in chosen]
        kind = rng.choice(["good"] * 6 + ["bad", "prompt"])
        if kind == "bad":
            data.insert(rng.randrange(len(data) + 1), bad)
        inputs = make_inputs(
            processor,
            [io.ref(payload) for payload in data],
            cache=cache,
            prompt=[1] if kind == "prompt" else None,
        )

        def deliver(result: MultiModalInput) -> None:
            received = receiver.get_and_update_request(result["mm_kwargs"], result["mm_hashes"])
            sizes = [tensors_of(item)["sizes"] for item in received["image"]]
            assert sizes == [[32 + at % 7, 24 + at // 7] for at in chosen]
            assert receiver.snapshot() == cache.snapshot()

        await server.run(inputs, process=rng.random() < 0.5, deliver=deliver, states=states)

    async def client() -> None:
        task = asyncio.create_task(request())
        if rng.random() < 0.3:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0.0005 * rng.random())
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
        try:
            await task
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
        except LazyDecodeError as exc:
            outcome = type(exc).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    for _ in range(8 * REPEATS):
        await asyncio.gather(*(client() for _ in range(25)))
    await asyncio.get_running_loop().run_in_executor(server.worker, lambda: None)
    assert {"done", "cancelled", "CorruptMediaError", "PlaceholderMismatchError"} <= set(outcomes)
    if processor.flights is not None:
        processor.flights.close()
        assert len(processor.flights) == 0
    for state in states:
        assert all(job.future.done() for job in state.decodes)
        assert all(ref.data == b"" for ref in state.inputs.mm_data_items["image"].get_all_raw())
    assert receiver.snapshot() == cache.snapshot()
    assert receiver.used_bytes == cache.used_bytes


async def test_one_item_may_bring_the_data_for_another_of_the_same_identity(
    server: Server, io: CountingImageIO
) -> None:
    images = [None, io.ref(jpeg(1)), None]
    inputs = make_inputs(server.processor, images, cache=sender_cache(), uuids=["u"] * 3)
    result = await server.run(inputs)
    assert [item is None for item in result["mm_kwargs"]["image"]] == [False, True, True]
    assert io.num_decodes == 1


def test_a_state_made_by_hand_is_processed_too(io: CountingImageIO) -> None:
    processor = PixelProcessor()
    inputs = make_inputs(processor, [io.ref(jpeg(0)), io.ref(jpeg(1)[:300])])
    with (
        MultiModalApplyState(inputs, TimingContext(enabled=False), None, []) as state,
        pytest.raises(CorruptMediaError, match="Failed to decode image media at index 1"),
    ):
        processor.apply_phase2(state)
    inputs = make_inputs(processor, [io.ref(jpeg(0))])
    with MultiModalApplyState(inputs, TimingContext(enabled=False), None, []) as state:
        assert processor.apply_phase2(state)["mm_kwargs"]["image"][0] is not None


class MergingTokenizer:
    """A token per letter, but `#b` is one: a target before a `b` is hidden in the tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text.replace("#b", "\u0100")]

    def decode(self, token_ids: Sequence[int], /) -> str:
        return "".join(map(chr, token_ids)).replace("\u0100", "#b")


@pytest.mark.parametrize("prompt", ["a##c", "a##b", "##b##"])
def test_text_prompts_are_matched_by_tokens_or_else_by_text(
    io: CountingImageIO, prompt: str
) -> None:
    class TextProcessor(StartProcessor):
        def _get_prompt_updates(self, *args: Any) -> Sequence[PromptUpdate]:
            return [PromptReplacement("image", "##", "[ii]")]

    count = prompt.count("##")
    info = make_info()
    info.ctx = dataclasses.replace(info.ctx, tokenizer=MergingTokenizer())
    processor = TextProcessor(count, info)
    inputs = make_inputs(processor, [io.ref(jpeg(at)) for at in range(count)])
    inputs.prompt = prompt
    result = processor.apply(inputs)
    text = prompt.replace("##", "[ii]")
    assert MergingTokenizer().decode(result["prompt_token_ids"]) == text
    assert result["prompt"] == prompt
    for place in result["mm_placeholders"]["image"]:
        assert text[place.offset : place.offset + place.length] == "[ii]"
    inputs.prompt = "no place"
    with pytest.raises(PlaceholderMismatchError, match="image at index 0"):
        processor.apply(inputs)
