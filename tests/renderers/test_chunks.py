"""Pictures and videos as chunks of one modality: equal to the class, cached one by one."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from lazydecode.config import Settings
from lazydecode.errors import (
    CorruptMediaError,
    InvalidRequestError,
    MissingMediaError,
    TimeLimitError,
)
from lazydecode.inputs import MultiModalInput
from lazydecode.media.executor import MediaExecutor
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.rebuild import rebuild_decoder
from lazydecode.media.transforms import MEDIA_TRANSFORMS
from lazydecode.media.video import VideoMediaIO
from lazydecode.models.joining import join_items
from lazydecode.models.loading import load_model_frontend
from lazydecode.models.pixels import finish_pixels
from lazydecode.renderers.base import BaseRenderer
from lazydecode.renderers.chunks import ChunkResolver
from lazydecode.renderers.timeline import Timeline
from lazydecode.server.loading import build_context
from tests.builders import make_jpeg
from tests.builders_video import make_audio_only_mp4, make_mp4
from tests.models.reference import Reference
from tests.origin import wait_until
from tests.renderers.test_renderer import make_request, nothing_is_held
from tests.server.harness import data_url, image, text, video

OpenKimi = Callable[..., AbstractAsyncContextManager[BaseRenderer]]


@pytest.fixture
def open_kimi(tiny_model: Callable[..., Path]) -> OpenKimi:
    """Return `async with open_kimi(**settings) as renderer` for the tiny model with chunks."""

    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[BaseRenderer]:
        given = Settings(**{"engine": "none", **settings})
        model = load_model_frontend(str(tiny_model("kimi_k25", weights=False)), given)
        renderer = build_context(model, given).renderer
        try:
            yield renderer
        finally:
            await renderer.close()

    return opened


class Decodes:
    """Counts the decodes of videos, and holds them while its gate is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.gate = threading.Event()
        self.gate.set()
        original = VideoMediaIO.load_bytes

        def counted(io: VideoMediaIO, data: bytes) -> Any:
            self.count += 1
            assert self.gate.wait(120)
            return original(io, data)

        monkeypatch.setattr(VideoMediaIO, "load_bytes", counted)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Decodes:
    return Decodes(monkeypatch)


def clip(frames: int = 40, size: tuple[int, int] = (112, 84), **fields: Any) -> dict[str, Any]:
    """A part with a video that no cache knows."""
    data = make_mp4(frames, 10, size) + b"\x00\x00\x00\x10free" + os.urandom(8)
    return video(data_url(data, "video/mp4"), **fields)


def photo(size: tuple[int, int] = (90, 70)) -> dict[str, Any]:
    return image(data_url(make_jpeg(size) + os.urandom(8)))


async def render(
    renderer: BaseRenderer,
    *parts: dict[str, Any],
    with_payload: bool = True,
    timeline: Timeline | None = None,
    **fields: Any,
) -> MultiModalInput:
    timeline = timeline or Timeline()
    async with renderer.open(make_request(*parts, **fields), timeline=timeline) as rendered:
        return await rendered.render(with_payload=with_payload)


def hashes(prompt: MultiModalInput) -> list[str]:
    assert set(prompt["mm_hashes"]) == {"vision_chunk"}
    return prompt["mm_hashes"]["vision_chunk"]


def joined(renderer: BaseRenderer, prompt: MultiModalInput) -> dict[str, Any]:
    items = prompt["mm_kwargs"]["vision_chunk"]
    plan = renderer.frontend.pixel_plan
    return join_items([finish_pixels(item, plan) for item in items if item is not None])


def same_tensors(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])) for name in theirs
    )


async def test_ids_and_tensors_are_those_of_the_class_on_the_whole_request(
    open_kimi: OpenKimi, tiny_model: Callable[..., Path]
) -> None:
    sizes = [(90, 70), (56, 200)]
    pictures = [make_jpeg(size) for size in sizes]
    clips = [make_mp4(20, 10, (112, 84)), make_mp4(9, 30, (56, 140))]
    parts: list[dict[str, Any]] = [text("look ")]
    for number in range(2):
        parts += [image(data_url(pictures[number])), text(f" and {number}")]
        parts.append(video(data_url(clips[number], "video/mp4")))
    options = {"video": {"num_frames": 13}}
    async with open_kimi(media_io_kwargs=options) as renderer:
        ours = await render(renderer, *parts)
        info = renderer.frontend.info
        items = {
            "image": [info.get_media_io("image").load_bytes(data) for data in pictures],
            "video": [info.get_media_io("video", options).load_bytes(data) for data in clips],
        }
        tensors = joined(renderer, ours)
    reference = Reference(str(tiny_model("kimi_k25", weights=False)))
    content = [{"type": p["type"].removesuffix("_url"), "text": p.get("text", "")} for p in parts]
    theirs = reference(reference.text([{"role": "user", "content": content}]), items)
    assert ours["prompt_token_ids"] == theirs["input_ids"][0].tolist()
    assert same_tensors(tensors, reference.tensors(theirs))
    # 13 frames are 4 chunks, 9 are 3; a chunk's range is its run of embeddings.
    assert len(hashes(ours)) == 1 + 4 + 1 + 3
    ids = np.array(ours["prompt_token_ids"])
    covered = np.zeros(len(ids), dtype=bool)
    for place in ours["mm_placeholders"]["vision_chunk"]:
        assert (
            place.is_embed is None and not covered[place.offset : place.offset + place.length].any()
        )
        covered[place.offset : place.offset + place.length] = True
    processor = reference.processor
    embeds = np.isin(ids, [processor.image_token_id, processor.video_token_id])
    assert (covered == embeds).all()


async def test_the_class_may_choose_among_the_frames_before_they_are_cut(
    open_kimi: OpenKimi, tiny_model: Callable[..., Path]
) -> None:
    data = make_mp4(40, 10, (56, 56))
    sampling = {"do_sample_frames": True, "num_frames": 10, "fps": None}
    async with open_kimi() as renderer:
        part = video(data_url(data, "video/mp4"))
        sketched = await render(renderer, part, with_payload=False, mm_processor_kwargs=sampling)
        ours = await render(renderer, part, mm_processor_kwargs=sampling)
        frames, metadata = renderer.frontend.info.get_media_io("video").load_bytes(data)
        tensors = joined(renderer, ours)
    assert sketched["prompt_token_ids"] == ours["prompt_token_ids"]
    assert hashes(sketched) == hashes(ours)
    assert len(hashes(ours)) == 3
    reference = Reference(str(tiny_model("kimi_k25", weights=False)))
    decoded = VideoMetadata(total_num_frames=32)
    picked = reference.processor.video_processor.sample_frames(decoded, num_frames=10)
    clip_ = (frames[picked], metadata)
    theirs = reference(
        reference.text([{"role": "user", "content": [{"type": "video"}]}]),
        {"video": [(clip_[0], {**metadata, "frames_indices": [0] * 10})]},
    )
    assert same_tensors(tensors, reference.tensors(theirs))


async def test_a_hit_decodes_nothing_and_an_evicted_chunk_costs_itself(
    open_kimi: OpenKimi, decodes: Decodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_kimi() as renderer:
        parts = [photo(), clip()]
        first = await render(renderer, *parts)
        assert decodes.count == 1
        again = await render(renderer, *parts)
        assert decodes.count == 1
        assert hashes(again) == hashes(first)
        video_hash = hashes(first)[1].removesuffix("-0")
        assert hashes(first)[1:] == [f"{video_hash}-{n}" for n in range(8)]
        cache, processor = renderer.render_cache, renderer.frontend.mm_processor
        assert cache is not None and processor is not None
        cache.invalidate([hashes(first)[3], hashes(first)[8]])
        processed: list[Any] = []
        original = processor.family.process

        def counted(modality: str, item: Any, *args: Any) -> Any:
            processed.append((modality, len(item[0])))
            return original(modality, item, *args)

        monkeypatch.setattr(processor.family, "process", counted)
        partly = await render(renderer, *parts)
        assert processed == [("video", 4), ("video", 4)]
        assert decodes.count == 2
        assert same_tensors(joined(renderer, partly), joined(renderer, first))
        assert partly["prompt_token_ids"] == first["prompt_token_ids"]
        assert nothing_is_held(renderer)


async def test_headers_alone_give_what_decoding_gives(
    open_kimi: OpenKimi, decodes: Decodes
) -> None:
    async with open_kimi() as renderer:
        parts = [clip(23, (140, 56)), photo(), text(" x "), clip(3)]
        sketched = await render(renderer, *parts, with_payload=False)
        assert decodes.count == 0
        full = await render(renderer, *parts)
        assert decodes.count == 2
        for name in ("prompt_token_ids", "mm_hashes", "mm_placeholders"):
            assert sketched[name] == full[name]  # type: ignore[literal-required]


async def test_concurrent_requests_decode_an_unseen_video_once(
    open_kimi: OpenKimi, decodes: Decodes
) -> None:
    async with open_kimi() as renderer:
        decodes.gate.clear()
        part = clip()
        tasks = [asyncio.create_task(render(renderer, part, text(str(n)))) for n in range(6)]
        await wait_until(lambda: decodes.count == 1)
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        decodes.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        kept = [r for r in results[1:] if not isinstance(r, BaseException)]
        assert len(kept) == 5
        assert len({tuple(hashes(r)) for r in kept}) == 1
        assert decodes.count == 1
        assert renderer.runner._chunks is not None and len(renderer.runner._chunks) == 0
        assert nothing_is_held(renderer)


async def test_failures_count_as_the_client_does(open_kimi: OpenKimi, decodes: Decodes) -> None:
    async with open_kimi() as renderer:
        bad_picture = image(data_url(make_jpeg((64, 48))[:200]))
        bad_video = video(data_url(make_audio_only_mp4(), "video/mp4"))
        good = clip()
        for parts, named in (
            ([photo(), good, bad_picture, good], ("image", 1)),
            ([photo(), photo(), bad_video], ("video", 0)),
            ([good, photo(), bad_video, bad_picture], ("video", 1)),
        ):
            with pytest.raises(CorruptMediaError) as caught:
                await render(renderer, *parts)
            assert (caught.value.modality, caught.value.index, caught.value.status) == (*named, 422)
            assert f"Failed to decode {named[0]} media at index {named[1]}" in str(caught.value)
        # What was good beside the bad is there for the next.
        before = decodes.count
        await render(renderer, good)
        assert decodes.count == before
        await wait_until(lambda: nothing_is_held(renderer))


async def test_a_cancelled_request_drains_its_decodes_and_releases_all(
    open_kimi: OpenKimi, decodes: Decodes
) -> None:
    async with open_kimi() as renderer:
        decodes.gate.clear()
        task = asyncio.create_task(render(renderer, clip(), clip(), photo()))
        await wait_until(lambda: decodes.count == 2)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        done, _ = await asyncio.wait((task,), timeout=0.05)
        assert not done  # Threads still read the payloads.
        assert renderer.decoded_budget.held_bytes > 0
        decodes.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert renderer.runner._chunks is not None and len(renderer.runner._chunks) == 0
        assert nothing_is_held(renderer)


async def test_a_video_that_takes_too_long_fails_for_those_who_wait(
    open_kimi: OpenKimi, decodes: Decodes
) -> None:
    async with open_kimi(media_decode_timeout=0.2) as renderer:
        decodes.gate.clear()
        part = clip()
        with pytest.raises(TimeLimitError, match=r"longer than the 0\.2 s") as caught:
            await render(renderer, part)
        assert (caught.value.modality, caught.value.index) == ("video", 0)
        chunks = renderer.runner._chunks
        assert chunks is not None and len(chunks) == 0
        await wait_until(lambda: nothing_is_held(renderer))
        assert decodes.count == 1
        decodes.gate.set()  # nobody waits for it any more
        chunks._time_limit_s = renderer._flights.time_limit_s = 60.0
        assert len(hashes(await render(renderer, part))) > 0
        assert decodes.count == 2


async def test_a_decode_that_cannot_be_submitted_fails_after_the_others_have_ended(
    open_kimi: OpenKimi, decodes: Decodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_kimi() as renderer:
        decodes.gate.clear()
        submit, num_calls = MediaExecutor.submit, 0

        def second_fails(self: MediaExecutor, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:
                raise RuntimeError("no more threads")
            return submit(self, *args, **kwargs)

        parts = [clip(), clip()]
        async with renderer.open(make_request(*parts), timeline=Timeline()) as rendered:
            monkeypatch.setattr(MediaExecutor, "submit", second_fails)
            task = asyncio.create_task(rendered.render(with_payload=True))
            await wait_until(lambda: decodes.count == 1)
            done, _ = await asyncio.wait((task,), timeout=0.05)
            assert not done
            decodes.gate.set()
            with pytest.raises(RuntimeError, match="no more threads"):
                await task
        assert nothing_is_held(renderer)


async def test_a_uuid_stands_for_all_chunks_of_its_video(
    open_kimi: OpenKimi, decodes: Decodes
) -> None:
    async with open_kimi() as renderer:
        with pytest.raises(MissingMediaError) as caught:
            await render(renderer, photo(), {"type": "video_url", "video_url": None, "uuid": "v"})
        assert (caught.value.modality, caught.value.index) == ("video", 0)
        sent = await render(renderer, clip(uuid="v"))
        alone = {"type": "video_url", "video_url": None, "uuid": "v"}
        named = await render(renderer, alone, photo())
        assert hashes(named)[:-1] == hashes(sent)
        assert decodes.count == 1
        assert renderer.render_cache is not None
        renderer.render_cache.invalidate(hashes(sent)[2:3])
        with pytest.raises(MissingMediaError, match="video at index 0") as caught:
            await render(renderer, alone)
        assert (caught.value.modality, caught.value.index) == ("video", 0)


async def test_without_a_cache_everything_works_the_same(
    open_kimi: OpenKimi, decodes: Decodes
) -> None:
    part = clip()
    async with open_kimi() as renderer:
        cached = await render(renderer, part)
        tensors = joined(renderer, cached)
    async with open_kimi(mm_processor_cache_gb=0) as renderer:
        for _ in range(2):
            plain = await render(renderer, part)
            assert plain["prompt_token_ids"] == cached["prompt_token_ids"]
            assert same_tensors(joined(renderer, plain), tensors)
        assert decodes.count == 3
        assert nothing_is_held(renderer)


async def test_the_timeline_tells_of_the_clients_items(open_kimi: OpenKimi) -> None:
    async with open_kimi() as renderer:
        parts = [photo(), clip()]
        for hit in (False, True):
            timeline = Timeline()
            await render(renderer, *parts, timeline=timeline)
            assert [(i.modality, i.index, i.hit) for i in timeline.items] == [
                ("image", 0, hit),
                ("video", 0, hit),
            ]
            assert all(("decode" in item.seconds) is not hit for item in timeline.items)


async def test_an_option_that_the_class_refuses_is_the_clients(open_kimi: OpenKimi) -> None:
    async with open_kimi() as renderer:
        both = {"do_sample_frames": True, "fps": 1, "num_frames": 4}
        for with_payload in (False, True):
            with pytest.raises(InvalidRequestError, match="mutually exclusive"):
                await render(renderer, clip(), with_payload=with_payload, mm_processor_kwargs=both)
        assert nothing_is_held(renderer)


async def test_pictures_are_decoded_as_lazily_as_ever(
    open_kimi: OpenKimi, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, num_decodes = ImageMediaIO._decode, 0

    def counted(io: ImageMediaIO, *args: Any) -> Image.Image:
        nonlocal num_decodes
        num_decodes += 1
        return original(io, *args)

    monkeypatch.setattr(ImageMediaIO, "_decode", counted)
    async with open_kimi() as renderer:
        part = photo()
        await render(renderer, part, part, part)
        await render(renderer, part)
        assert num_decodes == 1


@pytest.mark.slow
async def test_requests_and_warm_up_never_meet_inside_the_fused_kernel(
    tiny_model: Callable[..., Path],
) -> None:
    """Threads of numba's workqueue layer abort the process if they do; the child ends so."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.renderers.workqueue_session", str(tiny_model("kimi_k25", weights=False))),
        env={**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await child.communicate()
    assert output, errors.decode()
    found = json.loads(output)
    assert (found["layer"], found["most"]) == ("workqueue", 1)
    # Warm-up has a picture and a video, each request two pictures and three chunks.
    threads = found["threads"]
    assert sum("lazydecode-mm" in name for name in threads) >= 2
    assert sum("lazydecode-process" in name for name in threads) == 3 * 5
    assert len({name for name in threads if "lazydecode-process" in name}) > 1
    # The proof that this layer would have noticed: the child then went past the lock.
    assert child.returncode == -signal.SIGABRT
    assert b"Concurrent access has been detected" in errors


async def test_a_chunk_is_rebuilt_from_payload_and_spec(open_kimi: OpenKimi) -> None:
    async with open_kimi() as renderer:
        processor = renderer.frontend.mm_processor
        assert processor is not None
        resolver = ChunkResolver(processor, renderer.executor)
        clip_ref = renderer.frontend.info.get_media_io("video").load_bytes_ref(make_mp4(20))
        chunk = resolver.transform.map(clip_ref, video_chunk=1, video_chunk_options={})
        known = MEDIA_TRANSFORMS.with_own([resolver.transform])
        rebuilt = rebuild_decoder(chunk.spec, transforms=known).ref(clip_ref.data)
        assert rebuilt.key == chunk.key != clip_ref.key
        ours, theirs = rebuilt.decode(), chunk.decode()
    assert len(theirs) > 0
    assert pickle.dumps(ours) == pickle.dumps(theirs)
