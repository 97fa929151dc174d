"""Requests of every kind, many at once: nothing is left, the mirrors are equal.

Two thousand with pictures, and a storm for each other way through the house.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from lazydecode.config import Settings
from lazydecode.engine.client import EngineClient
from lazydecode.engine.protocol import SamplingParams
from lazydecode.errors import LazyDecodeError
from lazydecode.media.video import VIDEO_LOADER_REGISTRY
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.renderers.base import BaseRenderer
from lazydecode.renderers.chat import parse_messages
from lazydecode.renderers.messages import ChatMessage
from lazydecode.renderers.prompts import RenderRequest
from lazydecode.renderers.timeline import Timeline
from lazydecode.server.detokenize import Detokenizer
from lazydecode.server.generation import Generation
from lazydecode.server.loading import build_context
from lazydecode.server.metrics import Metrics
from tests.builders import make_jpeg, make_wav
from tests.builders_video import make_video
from tests.engine.conftest import scripted_config
from tests.origin import wait_until
from tests.server.harness import data_url, image, request, text, video

NUM_REQUESTS = int(os.environ.get("LAZYDECODE_TEST_REPEATS", "2000"))
NUM_OTHERS = max(80, NUM_REQUESTS // 25)
CONCURRENCY = 24
CACHE_BYTES = 120_000
"""About six of the pictures: evictions all the time."""


class Load:
    """Makes requests at random and runs them, some of them cancelled at a random moment."""

    options: ClassVar[dict[str, Any]] = {}
    """Options of every request's processor."""
    statuses: ClassVar[set[int]] = {422}
    """What a bad item may be answered with."""

    def __init__(self, renderer: BaseRenderer, engine: EngineClient, seed: int) -> None:
        self.random = random.Random(seed)
        self.renderer = renderer
        self.engine = engine
        self.metrics = Metrics()
        self.outcomes: Counter[str] = Counter()
        self.good, self.bad = self.make_parts()

    def make_parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return parts that are answered, and parts that are refused."""
        pictures = [make_jpeg(size=(56, 56)) + bytes([n]) for n in range(12)]
        good = [image(data_url(picture)) for picture in pictures]
        bad = [data_url(picture[:400] + bytes([n])) for n, picture in enumerate(pictures)]
        return good, [image(url) for url in bad]

    def make_request(self, number: int) -> RenderRequest:
        parts: list[dict[str, Any]] = [text(f"request {number}")]
        for _ in range(self.random.choice([0, 1, 1, 2, 3])):
            corrupt = self.random.random() < 0.08
            parts.append(self.random.choice(self.bad if corrupt else self.good))
        self.random.shuffle(parts)
        body = msgspec.json.encode(request(*parts)["messages"])
        messages = msgspec.json.decode(body, type=list[ChatMessage])
        return RenderRequest(
            f"stress-{number}",
            parse_messages(messages),
            mm_processor_kwargs=self.options,
            **self.make_fields(),
        )

    def make_fields(self) -> dict[str, Any]:
        """Return further fields of a request."""
        return {}

    async def run(self, render_request: RenderRequest) -> str:
        async with self.renderer.open(render_request, timeline=Timeline()) as rendered:
            generation = Generation(
                self.engine,
                rendered,
                SamplingParams(max_tokens=2),
                Detokenizer(lambda ids: "x" * len(ids)),
                self.metrics,
            )
            text_of_answer = "".join([delta.text async for delta in generation.deltas()])
            assert text_of_answer == "xx"
        return "answered"

    async def run_one(self, number: int) -> None:
        task = asyncio.create_task(self.run(self.make_request(number)))
        if self.random.random() < 0.2:
            await asyncio.sleep(self.random.random() * 0.03)
            for _ in range(self.random.choice([1, 1, 2])):
                task.cancel()
                await asyncio.sleep(0)
        try:
            self.outcomes[await task] += 1
        except asyncio.CancelledError:
            self.outcomes["cancelled"] += 1
        except LazyDecodeError as exc:
            assert exc.status in self.statuses, exc
            self.outcomes["refused"] += 1

    async def run_all(self, count: int, *, forgetting: float = 0.0) -> None:
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await self.run_one(number)
                if self.random.random() < forgetting:
                    # Someone empties the engine's cache behind our back.
                    self.engine.clear_cache()

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(worker())


class PairLoad(Load):
    """Videos with their sound, and recordings."""

    options: ClassVar[dict[str, Any]] = {"use_audio_in_video": True}

    def make_parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        clips = [make_video(4, 4, (56, 56), audio=True) + free_box(n) for n in range(5)]
        good = [video(mp4_url(clip)) for clip in clips]
        good.append({"type": "audio_url", "audio_url": {"url": data_url(make_wav(), "audio/wav")}})
        silent = make_video(4, 4, (56, 56)) + free_box(9)
        return good, [video(mp4_url(clips[0][:-600])), video(mp4_url(silent))]


class ChunkLoad(Load):
    """Videos that are cut into chunks, and pictures."""

    def make_parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        clips = [make_video(6, 2, (56, 56)) + free_box(n) for n in range(5)]
        pictures = [make_jpeg(size=(56, 56)) + bytes([n]) for n in range(5)]
        good = [video(mp4_url(clip)) for clip in clips]
        good += [image(data_url(picture)) for picture in pictures]
        return good, [video(mp4_url(clips[0][:-600])), image(data_url(pictures[0][:400]))]


class RawLoad(Load):
    """Videos that the model opens itself."""

    def make_parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        clips = [make_video(6, 4, (56, 56)) + free_box(n) for n in range(5)]
        return [video(mp4_url(clip)) for clip in clips], [video(mp4_url(clips[0][:-600]))]


class EmbeddingLoad(Load):
    """Embeddings, which pass the caches by, beside pictures."""

    statuses: ClassVar[set[int]] = {400, 422}

    def make_parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        good, bad = super().make_parts()
        good += [embeddings(n, hidden=64) for n in range(6)]
        return good, [*bad, embeddings(0, hidden=8)]


class NamedLoad(Load):
    """Pictures under uuids: their own, one that several share, and uuids alone; two tenants."""

    statuses: ClassVar[set[int]] = {400, 422}

    def make_parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        pictures, bad = super().make_parts()
        good = [{**part, "uuid": f"picture-{n}"} for n, part in enumerate(pictures[:6])]
        good += [{**part, "uuid": "shared"} for part in pictures[6:8]]
        # A cache may hold them or not: they are answered, or refused with 400.
        good += [image(None, uuid=f"picture-{n}") for n in range(6)]
        return good, [*bad[:2], image(None, uuid="nobody's")]

    def make_fields(self) -> dict[str, Any]:
        salt = self.random.choice([None, None, "tenant"])
        return {"cache_salt": salt, "skip_mm_cache": self.random.random() < 0.1}


class BackendLoad(Load):
    """Videos by every backend, some of them by one from elsewhere that fails."""

    statuses: ClassVar[set[int]] = {400, 422}
    """400: torchcodec, where it is not installed."""

    def make_parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        clips = [make_video(6, 4, (56, 56)) + free_box(n) for n in range(4)]
        return [video(mp4_url(clip)) for clip in clips], [video(mp4_url(clips[0][:-600]))]

    def make_fields(self) -> dict[str, Any]:
        names = ["pyav", "pyav", "qwen2_vl", "opencv", "nvdec", "torchcodec", "fails", "leaves"]
        sampling = self.random.choice([{}, {"num_frames": 2}, {"timestamps": [0.0, 0.75]}])
        options = {"video_backend": self.random.choice(names), **sampling}
        return {"media_io_kwargs": {"video": options}}


@pytest.fixture
def failing_backends() -> Iterator[None]:
    for name, exc in (("fails", KeyError("/secret")), ("leaves", SystemExit(1))):

        class Backend:
            def load_bytes(self, data: bytes, exc: BaseException = exc, **options: Any) -> Any:
                raise exc

        VIDEO_LOADER_REGISTRY.add(name, Backend)
    yield
    for name in ("fails", "leaves"):
        VIDEO_LOADER_REGISTRY.remove(name)


def mp4_url(data: bytes) -> str:
    return data_url(data, "video/mp4")


def free_box(number: int) -> bytes:
    """An MP4 box that no decoder reads: another file with the same frames."""
    return (9).to_bytes(4, "big") + b"free" + bytes([number])


def embeddings(number: int, *, hidden: int) -> dict[str, Any]:
    array = np.random.default_rng(number).standard_normal((6, hidden)).astype(np.float32)
    return {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": npy(array), "image_grid_thw": npy(np.array([1, 4, 6]))},
    }


def npy(array: Any) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "family", "settings"),
    [
        (PairLoad, "", {}),
        (ChunkLoad, "kimi_k25", {}),
        (RawLoad, "dots3_note", {}),
        (EmbeddingLoad, "qwen2_5_vl", {"enable_mm_embeds": True}),
        (NamedLoad, "qwen2_5_vl", {}),
        (BackendLoad, "qwen2_5_vl", {}),
    ],
)
@pytest.mark.usefixtures("failing_backends")
async def test_the_other_ways_leave_nothing_either(
    kind: type[Load],
    family: str,
    settings: dict[str, Any],
    tiny_model: Callable[..., Path],
    short_sounds_model: Path,
) -> None:
    """Five items of each kind in a cache for some of them; a fifth of the requests is cancelled."""
    gib = 1_500_000 / 2**30
    given = Settings(mm_processor_cache_gb=gib, **settings)
    folder = tiny_model(family, weights=False) if family else short_sounds_model
    frontend = load_model_frontend(str(folder), given)
    async with mirrored(frontend, given) as (renderer, engine):
        load = kind(renderer, engine, seed=NUM_OTHERS)
        await load.run_all(NUM_OTHERS)
        assert sum(load.outcomes.values()) == NUM_OTHERS
        for outcome in ("answered", "refused", "cancelled"):
            assert load.outcomes[outcome] > 0, load.outcomes
        await check_nothing_is_left(renderer, engine)


@asynccontextmanager
async def mirrored(
    frontend: ModelFrontend, settings: Settings
) -> AsyncIterator[tuple[BaseRenderer, EngineClient]]:
    """A renderer and an engine whose caches are of one size."""
    renderer = build_context(frontend, settings).renderer
    capacity = int(settings.mm_processor_cache_gb * 2**30)
    engine = EngineClient(scripted_config(cache_bytes=capacity, max_model_len=100_000))
    engine.on_restart(lambda: renderer.forget_engine(engine.clear_cache))
    await engine.start()
    try:
        yield renderer, engine
    finally:
        await renderer.close()
        await engine.close()


async def check_nothing_is_left(renderer: BaseRenderer, engine: EngineClient) -> None:
    await wait_until(lambda: len(renderer._flights) == 0)
    assert renderer.decoded_budget.held_bytes == 0
    assert renderer.encoded_budget.held_bytes == 0
    assert renderer.decoded_budget.num_waiting == 0
    assert not engine._streams
    assert not engine._streams_by_wire_id
    cache = renderer.sender_cache
    assert cache is not None
    assert len(cache) > 0
    assert cache.snapshot() == await engine.cache_snapshot_async()


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_nothing_is_left_and_the_mirrors_are_equal(
    load_frontend: Callable[..., ModelFrontend],
) -> None:
    gib = CACHE_BYTES / 2**30
    settings = Settings(mm_processor_cache_gb=gib, max_decoded_mb=0.2)
    frontend = load_frontend(mm_processor_cache_gb=gib)
    async with mirrored(frontend, settings) as (renderer, engine):
        load = Load(renderer, engine, seed=NUM_REQUESTS)
        await load.run_all(NUM_REQUESTS)
        assert sum(load.outcomes.values()) == NUM_REQUESTS
        for outcome in ("answered", "refused", "cancelled"):
            assert load.outcomes[outcome] > 0, load.outcomes
        await check_nothing_is_left(renderer, engine)
        assert (
            load.metrics.registry.get_sample_value(
                "lazydecode_repairs_total", {"reason": "cache_miss"}
            )
            is None
        )
        # Now the engine forgets everything now and then, and every request is still answered.
        await load.run_all(200, forgetting=0.1)
        assert sum(load.outcomes.values()) == NUM_REQUESTS + 200
        assert not engine._streams
