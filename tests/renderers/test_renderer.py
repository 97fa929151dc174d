"""The renderer without a server: what a cancelled, late or failing request leaves behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from lazydecode.cache.ring import CacheStats
from lazydecode.errors import (
    CorruptMediaError,
    MediaTooLargeError,
    OverloadedError,
    TimeLimitError,
)
from lazydecode.inputs import MultiModalInput
from lazydecode.media.image import ImageMediaIO
from lazydecode.models.generic import GenericMultiModalProcessor
from lazydecode.renderers.base import BaseRenderer
from lazydecode.renderers.chat import parse_messages
from lazydecode.renderers.messages import ChatMessage
from lazydecode.renderers.prompts import RenderRequest
from lazydecode.renderers.timeline import Timeline
from tests.builders import make_jpeg
from tests.origin import wait_until
from tests.renderers.conftest import OpenRenderer
from tests.server.harness import data_url, image, request, text


def unique(size: tuple[int, int] = (64, 48)) -> dict[str, Any]:
    return image(data_url(make_jpeg(size=size) + os.urandom(16)))


def make_request(*parts: dict[str, Any], **fields: Any) -> RenderRequest:
    body = msgspec.json.encode(request(*parts)["messages"])
    messages = msgspec.json.decode(body, type=list[ChatMessage])
    return RenderRequest("test", parse_messages(messages), **fields)


async def render(renderer: BaseRenderer, *parts: dict[str, Any], **fields: Any) -> Timeline:
    timeline = Timeline()
    async with renderer.open(make_request(*parts, **fields), timeline=timeline) as rendered:
        await rendered.render(with_payload=True)
    return timeline


def nothing_is_held(renderer: BaseRenderer) -> bool:
    return (
        renderer.encoded_budget.held_bytes == 0
        and renderer.decoded_budget.held_bytes == 0
        and len(renderer._flights) == 0
    )


class GatedDecodes:
    """Holds every image decode until it is opened; counts what was begun and processed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.num_begun = 0
        self._gate = threading.Event()
        original = ImageMediaIO._decode

        def gated(io: ImageMediaIO, *args: Any) -> Image.Image:
            self.num_begun += 1
            self.begun.release()
            assert self._gate.wait(120)
            return original(io, *args)

        monkeypatch.setattr(ImageMediaIO, "_decode", gated)

    def open(self) -> None:
        self._gate.set()

    async def wait_begun(self) -> None:
        await wait_until(lambda: self.num_begun > 0)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedDecodes]:
    gated = GatedDecodes(monkeypatch)
    yield gated
    gated.open()


def count_processing(renderer: BaseRenderer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    processor = renderer.frontend.mm_processor
    assert processor is not None
    calls: list[str] = []
    original = processor.family.process

    def counted(modality: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(modality)
        return original(modality, *args, **kwargs)

    monkeypatch.setattr(processor.family, "process", counted)
    return calls


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_a_cancelled_request_waits_for_its_decode_and_processes_nothing(
    open_renderer: OpenRenderer,
    decodes: GatedDecodes,
    monkeypatch: pytest.MonkeyPatch,
    num_cancels: int,
) -> None:
    async with open_renderer() as renderer:
        processed = count_processing(renderer, monkeypatch)
        task = asyncio.create_task(render(renderer, unique(), text()))
        await decodes.wait_begun()
        for _ in range(num_cancels):
            task.cancel()
            await asyncio.sleep(0)
        done, _ = await asyncio.wait((task,), timeout=0.05)
        assert not done  # A thread still reads the payload.
        assert renderer.decoded_budget.held_bytes > 0
        decodes.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert renderer.decoded_budget.held_bytes == renderer.encoded_budget.held_bytes == 0
        await wait_until(lambda: nothing_is_held(renderer))
        assert processed == []


async def test_who_waits_for_the_same_item_is_not_hurt_by_the_first_ones_cancellation(
    open_renderer: OpenRenderer, decodes: GatedDecodes
) -> None:
    async with open_renderer() as renderer:
        picture = unique()
        first = asyncio.create_task(render(renderer, picture, text()))
        await decodes.wait_begun()
        others = [asyncio.create_task(render(renderer, picture, text())) for _ in range(3)]
        (flight,) = renderer._flights._flights.values()
        await wait_until(lambda: flight.num_waiting == 4)
        first.cancel()
        decodes.open()
        with pytest.raises(asyncio.CancelledError):
            await first
        timelines = await asyncio.gather(*others)
        assert decodes.num_begun == 1
        assert all("process" in t.items[0].seconds or t.items[0].hit for t in timelines)
        assert nothing_is_held(renderer)


async def test_a_request_that_waits_for_memory_can_be_cancelled(
    open_renderer: OpenRenderer, decodes: GatedDecodes
) -> None:
    picture_bytes = 64 * 48 * 4
    async with open_renderer(max_decoded_mb=1.5 * picture_bytes / 2**20) as renderer:
        first = asyncio.create_task(render(renderer, unique(), text()))
        await decodes.wait_begun()
        second = asyncio.create_task(render(renderer, unique(), text()))
        await wait_until(lambda: renderer.decoded_budget.num_waiting == 1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert renderer.decoded_budget.num_waiting == 0
        assert decodes.num_begun == 1
        decodes.open()
        await first
        assert nothing_is_held(renderer)


async def test_requests_queue_for_memory_and_are_all_served(
    open_renderer: OpenRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture_bytes = 64 * 48 * 4
    most = 0
    async with open_renderer(max_decoded_mb=2.5 * picture_bytes / 2**20) as renderer:
        original = ImageMediaIO._decode

        def watched(io: ImageMediaIO, *args: Any) -> Image.Image:
            nonlocal most
            most = max(most, renderer.decoded_budget.held_bytes)
            return original(io, *args)

        monkeypatch.setattr(ImageMediaIO, "_decode", watched)
        await asyncio.gather(*(render(renderer, unique(), text()) for _ in range(20)))
        assert most <= renderer.decoded_budget.capacity
        assert nothing_is_held(renderer)


async def test_no_memory_in_time_is_a_retryable_503(
    open_renderer: OpenRenderer, decodes: GatedDecodes
) -> None:
    picture_bytes = 64 * 48 * 4
    settings = {"max_decoded_mb": 1.5 * picture_bytes / 2**20, "max_budget_wait": 0.05}
    async with open_renderer(**settings) as renderer:
        first = asyncio.create_task(render(renderer, unique(), text()))
        await decodes.wait_begun()
        with pytest.raises(OverloadedError):
            await render(renderer, unique(), text())
        decodes.open()
        await first
        assert nothing_is_held(renderer)


async def test_an_item_that_can_never_fit_is_a_422_that_names_it(
    open_renderer: OpenRenderer,
) -> None:
    small = unique()
    large = unique((600, 600))
    async with open_renderer(max_decoded_mb=1.0) as renderer:
        for parts, index in (((large,), 0), ((small, large, small), 1)):
            with pytest.raises(MediaTooLargeError) as caught:
                await render(renderer, *parts, text())
            assert (caught.value.status, caught.value.modality, caught.value.index) == (
                422,
                "image",
                index,
            )
            assert nothing_is_held(renderer)
        await render(renderer, small, text())


async def test_a_payload_that_can_never_fit_is_a_422_that_names_it(
    open_renderer: OpenRenderer,
) -> None:
    large = image(data_url(make_jpeg() + os.urandom(100_000)))
    async with open_renderer(max_encoded_mb=0.05) as renderer:
        for parts, index in (((large,), 0), ((unique(), large), 1)):
            with pytest.raises(MediaTooLargeError) as caught:
                await render(renderer, *parts, text())
            assert (caught.value.modality, caught.value.index) == ("image", index)
            assert nothing_is_held(renderer)
        await render(renderer, unique(), text())


async def test_a_request_that_takes_too_long_is_given_up_and_drains_by_itself(
    open_renderer: OpenRenderer, decodes: GatedDecodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit_s in (0.3, 3.0, 30.0):
        async with open_renderer(max_render_time=limit_s) as renderer:
            processed = count_processing(renderer, monkeypatch)
            with pytest.raises(TimeLimitError) as caught:
                await render(renderer, unique(), text())
            assert caught.value.status == 504
            if not decodes.num_begun:
                continue  # the machine took all of the time for what comes before the decode
            assert renderer.decoded_budget.held_bytes > 0  # The decode still runs.
            decodes.open()
            await renderer.runner.drain()
            await wait_until(lambda: nothing_is_held(renderer))
            assert processed == []
            return
    pytest.fail("no decode was begun")


async def test_a_corrupt_item_releases_everything(open_renderer: OpenRenderer) -> None:
    async with open_renderer() as renderer:
        cut = image(data_url(make_jpeg(size=(300, 300))[:900]))
        with pytest.raises(CorruptMediaError) as caught:
            await render(renderer, unique(), cut, text())
        assert (caught.value.modality, caught.value.index) == ("image", 1)
        await wait_until(lambda: nothing_is_held(renderer))


async def test_a_hit_decodes_and_processes_nothing(
    open_renderer: OpenRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_renderer() as renderer:
        picture = unique()
        processed = count_processing(renderer, monkeypatch)
        for expected in (False, True):
            timeline = await render(renderer, picture, text())
            assert timeline.items[0].hit is expected
        assert processed == ["image"]


async def test_a_processor_that_replaces_apply_runs_in_one_piece_on_the_worker(
    open_renderer: OpenRenderer,
) -> None:
    threads: list[str] = []

    class Whole(GenericMultiModalProcessor):
        def apply(self, inputs: Any, timing_ctx: Any = None) -> MultiModalInput:
            threads.append(threading.current_thread().name)
            return super().apply(inputs, timing_ctx)

    async with open_renderer() as renderer:
        processor = renderer.frontend.mm_processor
        assert processor is not None
        answers = []
        picture = image(data_url(make_jpeg(size=(100, 80))))
        for kind in (Whole, Whole, GenericMultiModalProcessor):
            processor.__class__ = kind
            if kind is GenericMultiModalProcessor:
                assert renderer.render_cache is not None
                renderer.render_cache.clear_cache()
            async with renderer.open(
                make_request(picture, text()), timeline=Timeline()
            ) as rendered:
                answers.append(await rendered.render(with_payload=True))
        assert {name.rpartition("_")[0] for name in threads} == {"lazydecode-mm"}
        assert len(threads) == 2
        miss, hit, in_phases = answers
        for answer in (hit, in_phases):
            for field in ("prompt_token_ids", "mm_hashes", "mm_placeholders"):
                assert answer[field] == miss[field]  # type: ignore[literal-required]
            ours, theirs = answer["mm_kwargs"]["image"][0], miss["mm_kwargs"]["image"][0]
            assert ours is not None and theirs is not None
            assert all(torch.equal(ours[name].data, theirs[name].data) for name in theirs)  # type: ignore[arg-type]
        assert nothing_is_held(renderer)


async def test_an_evicted_item_is_decoded_again(open_renderer: OpenRenderer) -> None:
    """The cache holds one picture: each of two in turn is a miss, and both are right."""
    async with open_renderer(mm_processor_cache_gb=0.00003) as renderer:
        pictures = [unique(), unique()]
        answers: list[Any] = []
        for picture in (*pictures, *pictures):
            timeline = Timeline()
            async with renderer.open(make_request(picture, text()), timeline=timeline) as rendered:
                answers.append((await rendered.render(with_payload=True))["mm_hashes"])
        assert answers[:2] == answers[2:]
        assert renderer.render_cache is not None
        assert len(renderer.render_cache) == 1


async def test_without_a_cache_every_request_is_processed(
    open_renderer: OpenRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_renderer(mm_processor_cache_gb=0) as renderer:
        processed = count_processing(renderer, monkeypatch)
        picture = unique()
        for _ in range(2):
            await render(renderer, picture, text())
        assert processed == ["image", "image"]
        assert nothing_is_held(renderer)


async def test_the_body_can_go_as_soon_as_the_media_are_fetched(
    open_renderer: OpenRenderer,
) -> None:
    async with open_renderer() as renderer:
        parsed = make_request(image(data_url(make_jpeg(size=(400, 400)))), text())
        assert isinstance(parsed.conversation.media[0].source, memoryview)
        async with renderer.open(parsed, timeline=Timeline()):
            assert parsed.conversation.media[0].source is None


async def test_an_item_over_the_limit_of_a_request_is_named(
    open_renderer: OpenRenderer, tmp_path: Path
) -> None:
    small, large = make_jpeg(), make_jpeg() + bytes(40_000)
    (tmp_path / "large.jpg").write_bytes(large)
    async with open_renderer(
        max_encoded_mb_per_request=0.03, allowed_local_media_path=tmp_path
    ) as renderer:
        for url in (data_url(large), (tmp_path / "large.jpg").as_uri()):
            with pytest.raises(MediaTooLargeError, match="the item has") as raised:
                await render(renderer, image(data_url(small)), image(url), text())
            assert (raised.value.modality, raised.value.index) == ("image", 1)
            assert nothing_is_held(renderer)
        many = [image(data_url(make_jpeg() + bytes(9000 + n))) for n in range(4)]
        with pytest.raises(MediaTooLargeError, match="in all") as raised:
            await render(renderer, *many, text())
        assert raised.value.modality is None
        assert nothing_is_held(renderer)


async def test_a_short_prompt_is_written_without_a_thread(open_renderer: OpenRenderer) -> None:
    async with open_renderer() as renderer:
        short = make_request(text("hello"))
        async with renderer.open(short, timeline=Timeline()) as rendered:
            prompt = await rendered.render(with_payload=False)
        assert renderer.frontend.decode(prompt["prompt_token_ids"]).count("hello") == 1
        assert not renderer.prompts._threads._threads
        assert not renderer._mm_executor._pool._threads
        long = make_request(text("hello " * 200))
        async with renderer.open(long, timeline=Timeline()) as rendered:
            prompt = await rendered.render(with_payload=False)
        assert renderer.frontend.decode(prompt["prompt_token_ids"]).count("hello") == 200
        assert len(renderer.prompts._threads._threads) == 1


async def test_a_request_whose_items_are_all_known_is_one_job_of_the_ordered_worker(
    open_renderer: OpenRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_renderer() as renderer:
        picture = unique()
        jobs: list[Any] = []
        submit = renderer._mm_executor.submit
        monkeypatch.setattr(
            renderer._mm_executor, "submit", lambda job, *args: (jobs.append(job), submit(job))[1]
        )
        timeline = await render(renderer, picture, text())
        assert timeline.items[0].hit is False
        assert len(jobs) == 2
        timeline = await render(renderer, picture, text())
        assert timeline.items[0].hit is True
        assert {"phase1", "phase2"} <= timeline.seconds.keys()
        assert len(jobs) == 3


async def test_known_items_without_tensors_wait_for_no_worker_and_count_as_used(
    open_renderer: OpenRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_renderer() as renderer:
        first, second = unique(), unique((96, 64))
        full: list[MultiModalInput] = []
        for picture in (first, second):
            async with renderer.open(
                make_request(picture, text()), timeline=Timeline()
            ) as rendered:
                full.append(await rendered.render(with_payload=True))
        cache = renderer.render_cache
        assert cache is not None
        youngest = cache.snapshot()
        assert youngest == [prompt["mm_hashes"]["image"][0] for prompt in full]
        stats = cache.make_stats()
        phases: list[str] = []
        processor = renderer.frontend.any_processor
        assert processor is not None
        phase1 = processor.apply_phase1
        monkeypatch.setattr(
            processor, "apply_phase1", lambda *args: (phases.append("1"), phase1(*args))[1]
        )

        async def known(picture: dict[str, Any], words: str = "x") -> tuple[Any, Timeline]:
            timeline = Timeline()
            asked = make_request(picture, text(words))
            async with renderer.open(asked, timeline=timeline) as rendered:
                return await rendered.render(with_payload=False), timeline

        prompt, timeline = await known(first)
        assert (timeline.items[0].hit, timeline.items[0].seconds.keys() >= {"lookup"}) == (
            True,
            True,
        )
        for name in ("prompt_token_ids", "mm_placeholders", "mm_hashes"):
            assert prompt[name] == full[0][name]  # type: ignore[literal-required]
        (small,), (item,) = prompt["mm_kwargs"]["image"], full[0]["mm_kwargs"]["image"]
        assert small is not None and item is not None
        assert small.keys() == {"image_grid_thw"}
        assert torch.equal(small["image_grid_thw"].data, item["image_grid_thw"].data)
        await renderer.on_worker(lambda: None)  # what was handed over before has happened
        assert cache.snapshot() == youngest[::-1]
        assert cache.make_stats() - stats == CacheStats(1, 1)
        assert not phases
        await known(first, "hello " * 300)  # is written and tokenized by threads
        assert phases == ["1"]


async def test_an_image_of_a_size_met_before_is_sketched_without_a_thread(
    open_renderer: OpenRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_renderer() as renderer:
        jobs: list[Any] = []
        submit = renderer._processing.submit
        monkeypatch.setattr(
            renderer._processing, "submit", lambda job, *args: (jobs.append(job), submit(job))[1]
        )

        async def sketch(*parts: dict[str, Any]) -> MultiModalInput:
            asked = make_request(*parts, text())
            async with renderer.open(asked, timeline=Timeline()) as rendered:
                return await rendered.render(with_payload=False)

        first = await sketch(unique())
        assert len(jobs) == 1
        second = await sketch(unique())
        assert len(jobs) == 1
        assert second["prompt_token_ids"] == first["prompt_token_ids"]
        assert second["mm_placeholders"] == first["mm_placeholders"]
        assert second["mm_hashes"] != first["mm_hashes"]
        assert renderer.executor.quick._pool is None  # type: ignore[attr-defined]
        await sketch(unique(), unique((96, 64)))
        assert len(jobs) == 2
        assert not renderer._mm_executor._pool._threads
        assert renderer.executor.quick._pool is None  # type: ignore[attr-defined]


async def test_who_cannot_render_from_headers_decodes_and_says_so(
    open_renderer: OpenRenderer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_renderer() as renderer:
        processor = renderer.frontend.mm_processor
        assert processor is not None
        seen: list[str] = []
        prompts = []
        for width in (64, 640):
            timeline = Timeline()
            parsed = make_request(unique((width, 480)), text())
            with caplog.at_level("INFO", logger="lazydecode.renderers.timeline"):
                async with renderer.open(parsed, timeline=timeline) as rendered:
                    prompts.append(await rendered.render(with_payload=False))
            seen.append(timeline.fallback)
            assert ("fallback" in timeline.to_dict()) == (
                "fallback;desc=" in timeline.server_timing()
            )
            # As of a family whose count follows from the content.
            monkeypatch.setattr(processor.family, "sketch", lambda *_: None)
        assert seen[0] == ""
        assert seen[1].startswith("headers do not say")
        said = [r.getMessage() for r in caplog.records if r.name.startswith("lazydecode.renderers")]
        assert said == [f"request test: {seen[1]}"]
        first, second = (prompt["mm_placeholders"]["image"][0].length for prompt in prompts)
        assert 0 < first < second
