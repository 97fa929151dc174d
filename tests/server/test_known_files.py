"""Local files that were seen before, through the server: nothing is read, no change is missed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lazydecode.media import local_files
from lazydecode.media.known_payloads import KnownPayloads
from tests.builders import make_jpeg, make_png
from tests.builders_video import make_mp4
from tests.server.harness import Server, data_url, image, request, text, video

SETTLED_S = 0.05


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the payloads that were read from files."""
    lengths: list[int] = []
    read_up_to = local_files.read_up_to

    def read(descriptor: int, num_bytes: int) -> bytes:
        lengths.append(num_bytes)
        return read_up_to(descriptor, num_bytes)

    monkeypatch.setattr(local_files, "read_up_to", read)
    monkeypatch.setattr(local_files, "_SETTLED_NS", int(SETTLED_S * 1e9))
    return lengths


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path], folder: Path) -> Iterator[Server]:
    model = tiny_model("qwen2_5_vl", weights=False)
    with Server(
        model, engine="none", allowed_local_media_path=folder, max_media_download_mb=1.0
    ) as started:
        yield started


def picture(size: tuple[int, int] = (64, 48)) -> bytes:
    return make_jpeg(size=size) + os.urandom(8)


def place(folder: Path, *contents: bytes) -> list[Path]:
    """New files, old enough to be remembered once they were read."""
    paths = [folder / os.urandom(8).hex() for _ in contents]
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    time.sleep(SETTLED_S * 1.2)
    return paths


def replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)


def url(path: Path) -> str:
    return f"file://{path}"


def post(server: Server, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    return server.render(request(*parts, text(), timeline=True, **fields))


def render(server: Server, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = post(server, *parts, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def rendered(answer: dict[str, Any]) -> Any:
    return answer["token_ids"], answer["features"]


def clear_caches(server: Server) -> None:
    renderer = server.context.renderer
    assert renderer.render_cache is not None
    renderer._mm_executor.submit(renderer.render_cache.clear_cache).result(120)
    processor = renderer.frontend.mm_processor
    assert processor is not None
    processor.clear_outputs()


@pytest.mark.parametrize("payload", ["tensors", "none"])
def test_a_hit_on_a_known_file_reads_nothing_and_decodes_nothing(
    server: Server, folder: Path, reads: list[int], payload: str
) -> None:
    data, clip = picture(), make_mp4()
    paths = place(folder, data, clip)
    parts = image(url(paths[0])), video(url(paths[1]))
    first = render(server, *parts)
    assert sorted(reads) == sorted([len(data), len(clip)])
    decodes = server.decodes("image"), server.decodes("video")
    for _ in range(2):
        answer = render(server, *parts, mm_payload=payload)
        assert answer["token_ids"] == first["token_ids"]
        assert answer["features"]["mm_hashes"] == first["features"]["mm_hashes"]
        if payload == "tensors":
            assert rendered(answer) == rendered(first)
        items = answer["timeline"]["items"]
        assert [(item["bytes"], item["hit"]) for item in items if item["hit"] is not None] == [
            (len(data), True),
            (len(clip), True),
        ]
    assert len(reads) == 2
    assert (server.decodes("image"), server.decodes("video")) == decodes
    # The files need not even be readable, as long as they are there unchanged.
    same = render(server, image(data_url(data)), video(data_url(clip, "video/mp4")))
    assert same["features"]["mm_hashes"] == first["features"]["mm_hashes"]


def test_a_changed_file_is_another_item(server: Server, folder: Path) -> None:
    (path,) = place(folder, picture())
    first = render(server, image(url(path)))
    assert rendered(render(server, image(url(path)))) == rendered(first)
    status, changed = path.stat(), picture((96, 48))
    path.write_bytes(changed)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    answer = render(server, image(url(path)))
    assert rendered(answer) != rendered(first)
    assert rendered(answer) == rendered(render(server, image(data_url(changed))))
    path.unlink()
    gone = post(server, image(data_url(picture())), image(url(path)))
    assert (gone.status_code, gone.json()["error"]["index"]) == (422, 1)
    assert "does not exist" in gone.json()["error"]["message"]


@pytest.mark.parametrize("payload", ["tensors", "none"])
def test_an_item_that_the_cache_lost_is_read_again(
    server: Server, folder: Path, reads: list[int], payload: str
) -> None:
    paths = place(folder, picture(), picture((96, 48)))
    parts = [image(url(path)) for path in (*paths, paths[0])]
    first, _ = (render(server, *parts, mm_payload=payload) for _ in range(2))
    clear_caches(server)
    reads.clear()
    again = render(server, *parts, mm_payload=payload)
    assert rendered(again) == rendered(first)
    if payload == "tensors":
        assert len(reads) == 2
    server.wait_idle()
    assert server.context.renderer.encoded_budget.held_bytes == 0


def test_hits_beside_an_unseen_item_are_not_read(
    server: Server, folder: Path, reads: list[int]
) -> None:
    (path,) = place(folder, picture())
    first = render(server, image(url(path)))
    for payload in ("none", "tensors"):
        new = image(data_url(picture()))
        answer = render(server, image(url(path)), new, mm_payload=payload)
        hashes = answer["features"]["mm_hashes"]["image"]
        assert hashes[0] == first["features"]["mm_hashes"]["image"][0]
    assert len(reads) == 1


@pytest.fixture
def before_reading(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is to happen, once each, when a known payload is about to be read again."""
    todo: list[Callable[[], object]] = []
    original = KnownPayloads._read_again

    def read_again(known: KnownPayloads, *args: Any) -> Any:
        if todo:
            todo.pop()()
        return original(known, *args)

    monkeypatch.setattr(KnownPayloads, "_read_again", read_again)
    return todo


@pytest.mark.parametrize("payload", ["tensors", "none"])
def test_a_file_that_changes_before_it_is_loaded_is_identified_anew(
    server: Server,
    folder: Path,
    before_reading: list[Callable[[], object]],
    payload: str,
) -> None:
    (path,) = place(folder, make_mp4())
    other = image(data_url(picture()))
    parts = other, video(url(path))
    for _ in range(2):
        render(server, *parts)
    clear_caches(server)
    changed = make_mp4(size=(96, 64))
    before_reading.append(lambda: replace(path, changed))
    answer = render(server, *parts, mm_payload=payload)
    assert before_reading == []
    truth = render(server, other, video(data_url(changed, "video/mp4")), mm_payload=payload)
    assert rendered(answer) == rendered(truth)


def test_a_picture_whose_size_is_known_is_not_read_for_a_prompt(
    server: Server, folder: Path, reads: list[int]
) -> None:
    (path,) = place(folder, picture())
    first = render(server, image(url(path)), mm_payload="none")
    clear_caches(server)
    reads.clear()
    assert rendered(render(server, image(url(path)), mm_payload="none")) == rendered(first)
    assert reads == []


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (Path.unlink, 422, "does not exist"),
        (lambda path: replace(path, bytes(2**20 + 1)), 422, "larger than 1048576 bytes"),
        (lambda path: replace(path, b""), 422, "is empty"),
        (lambda path: replace(path, b"no picture"), 422, "Failed to decode image media at index 1"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), 400, "subpath"),
    ],
    ids=["gone", "larger", "empty", "corrupt", "elsewhere"],
)
def test_what_fails_when_a_known_file_is_loaded_names_the_item(
    server: Server,
    folder: Path,
    before_reading: list[Callable[[], object]],
    change: Callable[[Path], object],
    status: int,
    message: str,
) -> None:
    (path,) = place(folder, picture())
    for _ in range(2):
        render(server, image(url(path)))
    clear_caches(server)
    before_reading.append(lambda: change(path))
    response = post(server, image(data_url(picture())), image(url(path)))
    error = response.json()["error"]
    assert (response.status_code, error["modality"], error["index"]) == (status, "image", 1)
    assert message in error["message"]
    server.wait_idle()
    renderer = server.context.renderer
    assert (renderer.encoded_budget.held_bytes, renderer.decoded_budget.held_bytes) == (0, 0)


def test_a_file_that_is_replaced_all_the_time_is_always_one_of_its_contents(
    server: Server, folder: Path
) -> None:
    contents = [make_png(size=size) + os.urandom(8) for size in ((64, 48), (128, 96))]
    truths = [rendered(render(server, image(data_url(data)))) for data in contents]
    (path,) = place(folder, contents[0])
    stop = threading.Event()

    def answer() -> Any:
        """Sends the request again as long as it is told to: the file changes while it is read."""
        while (response := post(server, image(url(path)))).status_code != 200:
            assert response.json()["error"]["retryable"], response.text
        return rendered(response.json())

    def replace_again_and_again() -> None:
        turn = 0
        while not stop.wait(SETTLED_S * 1.5):
            turn += 1
            replace(path, contents[turn % 2])
            if turn % 3 == 0:
                clear_caches(server)

    thread = threading.Thread(target=replace_again_and_again)
    thread.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(answer) for _ in range(24)]
            answers = [job.result(120) for job in jobs]
    finally:
        stop.set()
        thread.join()
    assert all(answer in truths for answer in answers)
    server.wait_idle()
    assert server.context.renderer.encoded_budget.held_bytes == 0


def test_an_item_that_the_engine_lost_is_read_again(
    chat_server: Server, tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = chat_server.context.renderer._connector
    monkeypatch.setattr(connector, "_local_files", local_files.LocalFiles(tmp_path))
    (path,) = place(tmp_path, picture())
    body = request(image(url(path)), text(), max_tokens=2, temperature=0)
    answers = [chat_server.post("/v1/chat/completions", body).json() for _ in range(2)]
    assert len(reads) == 1
    chat_server.context.engine.clear_cache()
    answers.append(chat_server.post("/v1/chat/completions", body).json())
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert len(reads) == 2
