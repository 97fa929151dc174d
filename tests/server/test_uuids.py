"""A client's uuids, through the server: what is fetched, what is answered, what is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazydecode.renderers.identities import ItemIdentities
from tests.builders import make_jpeg, make_wav
from tests.builders_video import make_mp4
from tests.origin import Origin
from tests.server.harness import Server, data_url, image, request, text, video


@pytest.fixture(scope="module")
def strict_server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    model = tiny_model("qwen2_5_vl", weights=False)
    with Server(model, engine="none", uuid_conflict="error") as server:
        yield server


def picture(colour: int = 0) -> bytes:
    return make_jpeg(size=(64, 48)) + bytes([colour]) + os.urandom(8)


def name() -> str:
    return os.urandom(8).hex()


def features(server: Server, *parts: dict[str, Any], **fields: Any) -> Any:
    response = server.render(request(*parts, text(), **fields))
    assert response.status_code == 200, response.text
    return response.json()["features"]


def error(server: Server, *parts: dict[str, Any], **fields: Any) -> Any:
    response = server.render(request(*parts, **fields))
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_other_bytes_under_a_known_uuid_are_never_the_first_picture(render_server: Server) -> None:
    uuid = name()
    sizes = [(64, 48), (96, 48)]
    first, second = (data_url(make_jpeg(size=size) + os.urandom(8)) for size in sizes)
    answers = [features(render_server, image(url, uuid=uuid)) for url in (first, second)]
    assert answers[0]["kwargs_data"] != answers[1]["kwargs_data"]
    assert answers == [features(render_server, image(url)) for url in (first, second)]
    refused = error(render_server, image(first), image(None, uuid=uuid))
    assert (refused["modality"], refused["index"]) == ("image", 1)
    assert "Different media" in refused["message"]


def test_headers_alone_bind_a_uuid_and_a_count_does_not(strict_server: Server) -> None:
    uuid = name()
    first, second, third = (data_url(picture(number)) for number in range(3))
    parts = [image(first, uuid=uuid), text()]
    assert strict_server.post("/v1/chat/completions/count", request(*parts)).status_code == 200
    features(strict_server, image(second, uuid=uuid), mm_payload="none")
    features(strict_server, image(second, uuid=uuid), mm_payload="none")
    for fields in ({}, {"mm_payload": "none"}):
        refused = error(strict_server, image(third, uuid=uuid), **fields)
        assert (refused["modality"], refused["index"]) == ("image", 0)
        assert "stands for other media" in refused["message"]


def test_other_bytes_under_a_known_uuid_can_be_an_error(strict_server: Server) -> None:
    uuid = name()
    known = features(strict_server, image(data_url(picture()), uuid=uuid))
    refused = error(
        strict_server, image(data_url(picture())), image(data_url(picture()), uuid=uuid)
    )
    assert (refused["modality"], refused["index"], refused["param"]) == ("image", 1, "uuid")
    assert features(strict_server, image(None, uuid=uuid)) == known
    # Another tenant has names of its own.
    features(strict_server, image(data_url(picture()), uuid=uuid), cache_salt="other")


def test_bytes_that_cannot_be_used_do_not_take_a_name(strict_server: Server) -> None:
    uuid = name()
    broken = image(data_url(b"no picture" + os.urandom(8)), uuid=uuid)
    assert strict_server.render(request(broken)).status_code == 422
    features(strict_server, image(data_url(picture()), uuid=uuid))


def part(modality: str, url: str | None, **fields: Any) -> dict[str, Any]:
    value = None if url is None else {"url": url}
    return {"type": f"{modality}_url", f"{modality}_url": value, **fields}


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_what_the_cache_holds_under_a_uuid_is_not_fetched(
    modality: str, render_server: Server, audio_render_server: Server, shared_origin: Origin
) -> None:
    server = audio_render_server if modality == "audio" else render_server
    data = {
        "image": picture(),
        "video": make_mp4(frames=4, fps=2, size=(64, 64)),
        "audio": make_wav(),
    }[modality]
    uuid, path = name(), f"/{name()}"
    shared_origin.serve(path, data)
    url = shared_origin.url(path)
    first = features(server, part(modality, url, uuid=uuid))
    assert shared_origin.hits(path) == 1
    assert features(server, part(modality, url, uuid=uuid)) == first
    assert features(server, part(modality, None, uuid=uuid)) == first
    # What stands beside a known uuid is not asked: it is the uuid that counts.
    assert features(server, part(modality, shared_origin.url(f"{path}-2"), uuid=uuid)) == first
    assert shared_origin.hits(path) == 1 and shared_origin.hits(f"{path}-2") == 0
    # Another tenant knows nothing of it.
    features(server, part(modality, url, uuid=uuid), cache_salt="other")
    assert shared_origin.hits(path) == 2


def test_bytes_in_the_request_are_compared_although_the_uuid_is_known(
    render_server: Server,
) -> None:
    uuid = name()
    first = features(render_server, image(data_url(picture()), uuid=uuid))
    second = features(render_server, image(data_url(picture()), uuid=uuid))
    assert first["mm_hashes"] != second["mm_hashes"]


def test_an_item_that_is_evicted_between_lookup_and_use_is_fetched(
    render_server: Server, shared_origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid, path = name(), f"/{name()}"
    shared_origin.serve(path, picture())
    part = image(shared_origin.url(path), uuid=uuid)
    first = features(render_server, part)
    cache = render_server.context.renderer.render_cache
    assert cache is not None
    original = ItemIdentities.find_held

    def evicting(self: ItemIdentities, *args: Any) -> None:
        original(self, *args)
        cache.clear_cache()

    monkeypatch.setattr(ItemIdentities, "find_held", evicting)
    assert (
        features(render_server, part, image(data_url(picture())))["mm_hashes"]["image"][0]
        == (first["mm_hashes"]["image"][0])
    )
    assert shared_origin.hits(path) == 2
    features(render_server, part, mm_payload="none")
    refused = error(render_server, image(None, uuid=uuid))
    assert refused["index"] == 0 and "Cache miss for image at index 0" in refused["message"]
    render_server.wait_idle()
    assert render_server.context.renderer.encoded_budget.held_bytes == 0


def test_an_item_that_the_engine_lost_is_fetched(
    chat_server: Server, shared_origin: Origin
) -> None:
    uuid, path = name(), f"/{name()}"
    shared_origin.serve(path, picture())
    body = request(image(shared_origin.url(path), uuid=uuid), max_tokens=2, temperature=0)

    def answer(**fields: Any) -> Any:
        response = chat_server.post("/v1/chat/completions", {**body, **fields})
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    first = answer()
    assert answer() == first
    assert shared_origin.hits(path) == 1
    chat_server.context.engine.clear_cache()
    asyncio.run_coroutine_threadsafe(
        chat_server.context.engine.cache_snapshot_async(), chat_server.loop
    ).result(60)
    assert answer() == first
    assert shared_origin.hits(path) == 2
    assert answer() == first
    assert shared_origin.hits(path) == 2


@pytest.mark.parametrize("uuid", ["", 7, "a\nb", "u" * 1025, ["u"]])
def test_a_bad_uuid_is_refused_with_its_index(render_server: Server, uuid: Any) -> None:
    url = data_url(picture())
    refused = error(render_server, image(url, uuid="good"), image(url, uuid=uuid))
    assert (refused["modality"], refused["index"]) == ("image", 1)
    assert refused["param"] == "messages[0].content[1].uuid"


def test_one_uuid_for_two_modalities_is_two_names(render_server: Server) -> None:
    uuid = name()
    clip = data_url(make_mp4(frames=4, fps=2, size=(64, 64)), "video/mp4")
    parts = image(data_url(picture()), uuid=uuid), video(clip, uuid=uuid)
    assert features(render_server, *parts) == features(
        render_server, image(None, uuid=uuid), part("video", None, uuid=uuid)
    )
