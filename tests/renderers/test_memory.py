"""What a request holds is counted, also when it turns out to need more than it seemed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lazydecode.media import local_files
from lazydecode.media.connector import MediaConnector
from lazydecode.media.fetch_trace import current_trace
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.known_payloads import KnownPayloads
from lazydecode.renderers.base import BaseRenderer
from lazydecode.renderers.timeline import Timeline
from tests.builders import make_jpeg
from tests.builders_video import make_mp4
from tests.renderers.conftest import OpenRenderer
from tests.renderers.test_renderer import make_request, nothing_is_held, render
from tests.server.harness import data_url, image, text, video
from tests.server.test_embeds import picture, values

SIZE = (320, 240)


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is remembered at once, and not only when it has been left alone for a while."""
    monkeypatch.setattr(local_files, "_SETTLED_NS", 0)


def evict(renderer: BaseRenderer) -> None:
    assert renderer.render_cache is not None
    renderer._mm_executor.submit(renderer.render_cache.clear_cache).result(120)


@pytest.mark.parametrize("times", [1, 100])
async def test_what_is_evicted_after_it_was_counted_is_counted_anew(
    open_renderer: OpenRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(make_jpeg(SIZE) + os.urandom(8))
    part = image(f"file://{path}")
    held: list[tuple[int, int]] = []
    original_decode = ImageMediaIO._decode
    async with open_renderer(allowed_local_media_path=tmp_path) as renderer:
        await render(renderer, part, text())

        def decode(io: ImageMediaIO, *args: Any) -> Any:
            held.append((renderer.encoded_budget.held_bytes, renderer.decoded_budget.held_bytes))
            return original_decode(io, *args)

        counter = renderer.runner._counter
        count, left = counter.find_missing, times

        def find(*args: Any, **options: Any) -> Any:
            nonlocal left
            found = count(*args, **options)
            if left and threading.current_thread() is threading.main_thread():
                left -= 1
                evict(renderer)
            return found

        monkeypatch.setattr(ImageMediaIO, "_decode", decode)
        monkeypatch.setattr(counter, "find_missing", find)
        await render(renderer, part, text())
        assert nothing_is_held(renderer)
    ((encoded, decoded),) = held
    assert encoded >= path.stat().st_size
    assert decoded >= SIZE[0] * SIZE[1] * 3


@pytest.mark.parametrize("skips_phases", [False, True])
async def test_a_hit_that_is_evicted_while_others_are_decoded_is_counted(
    open_renderer: OpenRenderer, monkeypatch: pytest.MonkeyPatch, skips_phases: bool
) -> None:
    known = image(data_url(make_jpeg(SIZE) + os.urandom(8)))
    new = image(data_url(make_jpeg((64, 48)) + os.urandom(8)))
    held: list[tuple[tuple[int, int], int]] = []
    original_decode = ImageMediaIO._decode
    async with open_renderer() as renderer:
        processor = renderer.frontend.mm_processor
        assert processor is not None
        # As one that takes all items of a request together, off the ordered worker.
        monkeypatch.setattr(processor, "per_item", not skips_phases)
        await render(renderer, known, text())

        def decode(io: ImageMediaIO, data: bytes, facts: Any) -> Any:
            held.append((facts.oriented_size, renderer.decoded_budget.held_bytes))
            if len(held) == 1:
                evict(renderer)
            return original_decode(io, data, facts)

        monkeypatch.setattr(ImageMediaIO, "_decode", decode)
        await render(renderer, known, new, text())
        assert nothing_is_held(renderer)
    assert dict(held).keys() == {(64, 48), SIZE}
    assert dict(held)[SIZE] >= SIZE[0] * SIZE[1] * 3


async def test_embeddings_stay_counted_when_a_file_beside_them_changes(
    open_renderer: OpenRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(make_mp4(4, 2))
    clip = video(f"file://{path}")
    embeds = values(600)
    async with open_renderer(allowed_local_media_path=tmp_path, enable_mm_embeds=True) as renderer:
        await render(renderer, clip, text())
        find = KnownPayloads.find

        def changing(self: KnownPayloads, *args: Any) -> Any:
            found = find(self, *args)
            monkeypatch.setattr(KnownPayloads, "find", find)
            other = path.with_suffix(".new")
            other.write_bytes(make_mp4(6, 2, (96, 64)))
            os.replace(other, path)
            return found

        monkeypatch.setattr(KnownPayloads, "find", changing)
        request = make_request(picture(embeds, [1, 40, 60]), clip, text())
        async with renderer.open(request, timeline=Timeline()) as rendered:
            await rendered.render(with_payload=True)
            assert KnownPayloads.find is find  # it did change
            assert renderer.encoded_budget.held_bytes >= embeds.nbytes + path.stat().st_size
        assert nothing_is_held(renderer)


async def test_what_is_fetched_late_is_fetched_for_its_tenant(
    open_renderer: OpenRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str | None] = []
    data = make_jpeg(SIZE)

    async def load(_: MediaConnector, __: str, media_io: ImageMediaIO, **___: Any) -> Any:
        trace = current_trace()
        tenants.append(trace and trace.tenant)
        return media_io.load_bytes_ref(data)

    monkeypatch.setattr(MediaConnector, "load_from_url_async", load)
    part = image("http://h/a.jpg", uuid="u")
    async with open_renderer() as renderer:
        await render(renderer, part, text(), cache_salt="a")
        request = make_request(part, text(), cache_salt="a")
        async with renderer.open(request, timeline=Timeline()) as rendered:
            assert tenants == ["a"]
            evict(renderer)
            await rendered.render(with_payload=True)
        assert tenants == ["a", "a"]
        assert nothing_is_held(renderer)
