"""Two front ends over one store: what one of them made is a hit to the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.engine.wire import encode_item
from lazydecode.errors import MissingMediaError, ValidationError
from lazydecode.inputs import MultiModalInput
from lazydecode.renderers.base import BaseRenderer
from lazydecode.renderers.caches import FrontendCaches
from lazydecode.renderers.timeline import Timeline
from tests.builders import make_jpeg
from tests.builders_video import make_mp4
from tests.origin import wait_until
from tests.renderers.conftest import OpenRenderer
from tests.renderers.test_renderer import count_processing, make_request, nothing_is_held
from tests.server.harness import data_url, image, text, video


async def rendered(renderer: BaseRenderer, *parts: dict[str, Any]) -> MultiModalInput:
    async with renderer.open(make_request(*parts, text()), timeline=Timeline()) as request:
        return await request.render(with_payload=True)


def plain(prompt: MultiModalInput) -> Any:
    kwargs = prompt["mm_kwargs"].items()
    tensors = {m: [item and encode_item(item) for item in items] for m, items in kwargs}
    return prompt["prompt_token_ids"], prompt["mm_hashes"], prompt["mm_placeholders"], tensors


async def written(folder: Path, count: int) -> None:
    await wait_until(lambda: len(list(folder.glob("*.item"))) == count)


async def test_what_one_front_end_made_the_other_neither_decodes_nor_processes(
    open_renderer: OpenRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = data_url(make_jpeg() + os.urandom(8))
    parts = [image(picture, uuid="mine"), video(data_url(make_mp4(4, 2), "video/mp4"))]
    async with (
        open_renderer(processor_store=tmp_path) as first,
        open_renderer(processor_store=tmp_path) as second,
    ):
        # As for the workers of one server.
        second.identities.bindings = first.identities.bindings
        calls = count_processing(second, monkeypatch)
        made = await rendered(first, *parts)
        await written(tmp_path, 2)
        assert plain(await rendered(second, *parts)) == plain(made)
        assert calls == []
        # A uuid alone is enough, although the second one never saw its picture.
        assert second.render_cache is not None
        second._mm_executor.submit(second.render_cache.clear_cache).result(120)
        alone = await rendered(second, image(None, uuid="mine"), parts[1])
        assert plain(alone) == plain(made)
        assert calls == []
        assert nothing_is_held(second)
        stored = second.caches.stored
        assert stored is not None and not stored._borrowed
        # Emptying the caches empties the store as well.
        await second.clear_caches(lambda: None)
        assert list(tmp_path.glob("*.item")) == []
        await rendered(second, *parts)
        assert sorted(calls) == ["image", "video"]


async def test_a_uuid_alone_needs_an_item_that_somebody_holds(
    open_renderer: OpenRenderer, tmp_path: Path
) -> None:
    async with open_renderer(processor_store=tmp_path) as renderer:
        await rendered(renderer, image(data_url(make_jpeg() + os.urandom(8)), uuid="mine"))
        await written(tmp_path, 1)
        assert renderer.render_cache is not None
        renderer._mm_executor.submit(renderer.render_cache.clear_cache).result(120)
        (entry,) = tmp_path.glob("*.item")
        entry.write_bytes(b"damaged")
        with pytest.raises(MissingMediaError, match="send the data again"):
            await rendered(renderer, image(None, uuid="mine"))
        assert not entry.exists()
        assert nothing_is_held(renderer)


async def test_a_folder_that_cannot_be_used_is_told_at_the_start(
    open_renderer: OpenRenderer, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(ValidationError, match="processor store cannot create its folder"):
        async with open_renderer(processor_store=file / "below"):
            pass


def test_the_caches_end_with_their_front_end() -> None:
    closed: list[str] = []

    class Outside(MultiModalProcessorOnlyCache):
        def close(self) -> None:
            closed.append("closed")

    FrontendCaches(Outside(capacity_bytes=1), Outside(capacity_bytes=1)).close()
    assert closed == ["closed", "closed"]
