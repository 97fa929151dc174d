"""What every route has in common: keys, ids, sizes, queues, metrics, timelines, errors."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.builders import make_jpeg, make_png
from tests.origin import Gate, Origin
from tests.server.harness import Server, data_url, image, request, text


@pytest.fixture(scope="module")
def strict_server(tiny_model: Callable[..., Path], shared_origin: Origin) -> Iterator[Server]:
    """A server with a key, small limits and fixed options."""
    with Server(
        tiny_model("qwen2_5_vl", weights=False),
        engine="none",
        api_key="secret",
        max_request_body_mb=1.0,
        max_batch_size=1,
        max_waiting_requests=1,
        request_kwargs=False,
        max_decoded_mb_per_request=1.0,
        max_encoded_mb_per_request=0.5,
        allowed_private_networks=(shared_origin.netloc,),
    ) as server:
        yield server


KEY = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": ""}],
)
def test_without_the_key_nothing_is_answered(
    strict_server: Server, headers: dict[str, str]
) -> None:
    for path in ("/v1/models", "/v1/models/x"):
        response = strict_server.get(path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert "Bearer" in response.json()["error"]["message"]
    assert strict_server.render(request(text()), headers=headers).status_code == 401


def test_with_the_key_it_is(strict_server: Server) -> None:
    assert strict_server.get("/v1/models", headers=KEY).status_code == 200
    assert strict_server.render(request(text()), headers=KEY).status_code == 200
    lower = {"Authorization": "bearer secret"}
    assert strict_server.get("/v1/models", headers=lower).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
def test_operations_need_no_key(strict_server: Server, path: str) -> None:
    assert strict_server.get(path).status_code == 200


def test_a_body_over_the_limit_is_a_413(strict_server: Server) -> None:
    big = request(text("x" * 1_100_000))
    response = strict_server.render(big, headers=KEY)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "RequestTooLargeError"


def test_an_unannounced_body_over_the_limit_is_a_413(strict_server: Server) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 50_000

    response = httpx.post(
        f"{strict_server.url}/v1/chat/completions/render", content=chunks(), headers=KEY
    )
    assert response.status_code == 413


@pytest.mark.parametrize("name", ["media_io_kwargs", "mm_processor_kwargs"])
def test_fixed_options_cannot_be_changed(strict_server: Server, name: str) -> None:
    body = request(text(), **{name: {"image": {"image_mode": "L"}}})
    response = strict_server.render(body, headers=KEY)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


def test_media_over_the_requests_memory_are_a_422(strict_server: Server) -> None:
    large = image(data_url(make_png(size=(800, 800)), "image/png"))
    small = image(data_url(make_png(), "image/png"))
    response = strict_server.render(request(small, large), headers=KEY)
    assert response.status_code == 422
    assert response.json()["error"]["index"] == 1
    encoded = image(data_url(make_jpeg() + bytes(600_000)))
    assert strict_server.render(request(encoded), headers=KEY).status_code == 422
    assert strict_server.call(lambda: strict_server.context.renderer.decoded_budget.held_bytes) == 0
    assert strict_server.call(lambda: strict_server.context.renderer.encoded_budget.held_bytes) == 0


def test_a_full_queue_is_a_503_that_says_when_to_come_back(
    strict_server: Server, shared_origin: Origin
) -> None:
    gate = Gate()
    url = shared_origin.serve("/held.jpg", make_jpeg(), gate=gate)
    statuses: list[int] = []

    def send() -> None:
        statuses.append(strict_server.render(request(image(url)), headers=KEY).status_code)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.wait_arrived()
    while strict_server.context.queue.num_inside < 2:
        pass
    refused = strict_server.render(request(text()), headers=KEY)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["retryable"] is True
    assert strict_server.get("/health").status_code == 200
    gate.open()
    for thread in threads:
        thread.join(120)
    assert statuses == [200, 200]


def test_the_requests_id_is_the_clients_if_it_is_a_word(render_server: Server) -> None:
    given = render_server.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    odd = render_server.get("/health", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] not in ("a b", "")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/health", 405)],
)
def test_unknown_routes_and_methods_are_errors_of_the_same_form(
    render_server: Server, method: str, path: str, status: int
) -> None:
    response = httpx.request(method, f"{render_server.url}{path}")
    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == status
    assert error.keys() == render_server.render(b"{").json()["error"].keys()
    assert error["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff" * 40, b"null"])
def test_a_body_that_is_no_request_is_a_400(render_server: Server, body: bytes) -> None:
    response = render_server.render(body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize(
    "fields",
    [
        {"media_io_kwargs": {"image": {"limits": 1}}},
        {"media_io_kwargs": {"image": {"image_mode": "nonsense"}}},
        {"media_io_kwargs": {"image": {"trust_exif_image_id": True}}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [1, 2]}}},
        {"media_io_kwargs": {"video": {"video_backend": "steam"}}},
        {"mm_processor_kwargs": {"max_pixels": "x"}},
        {"mm_processor_kwargs": {"size": {"a": 1}}},
    ],
)
def test_bad_options_are_a_400(render_server: Server, fields: dict[str, object]) -> None:
    kind = next(iter(fields.get("media_io_kwargs", {"image": None})))  # type: ignore[call-overload]
    url = data_url(make_png(), "image/png")
    part = image(url) if kind == "image" else {"type": "video_url", "video_url": {"url": url}}
    response = render_server.render(request(part, text(), **fields))
    assert response.status_code == 400, response.text


def test_a_timeline_comes_back_when_asked_for(render_server: Server) -> None:
    body = request(image(data_url(make_jpeg(size=(80, 60)))), text())
    plain = render_server.render(body)
    assert "server-timing" not in plain.headers
    assert "timeline" not in plain.json()
    asked = [
        render_server.render(body, headers={"x-lazydecode-timeline": "1"}),
        render_server.render({**body, "timeline": True}),
    ]
    for response in asked:
        assert "image0-fetch;dur=" in response.headers["server-timing"]
        (item,) = response.json()["timeline"]["items"]
        assert (item["modality"], item["index"], item["hit"]) == ("image", 0, True)
        assert item["bytes"] == len(make_jpeg(size=(80, 60)))
        assert "decode_ms" not in item


def test_a_miss_shows_every_stage(render_server: Server) -> None:
    body = request(image(data_url(make_jpeg(size=(81, 61)))), timeline=True)
    (item,) = render_server.render(body).json()["timeline"]["items"]
    assert item["hit"] is False
    for stage in ("fetch", "digest", "lookup", "decode_wait", "decode", "process"):
        assert item[f"{stage}_ms"] >= 0


def test_metrics_count_what_happened(render_server: Server) -> None:
    def counts() -> dict[str, float]:
        render_server.wait_idle()
        return {
            outcome: render_server.metric("items_total", modality="image", outcome=outcome)
            for outcome in ("hit", "miss")
        }

    before = counts()
    body = request(image(data_url(make_jpeg(size=(82, 62)))))
    for _ in range(2):
        assert render_server.render(body).status_code == 200
    after = counts()
    assert after["miss"] == before["miss"] + 1
    assert after["hit"] == before["hit"] + 1
    metrics = render_server.get("/metrics").text
    for name in (
        "lazydecode_requests_total",
        "lazydecode_item_stage_seconds_bucket",
        "lazydecode_event_loop_lag_seconds_count",
        'lazydecode_budget_held_bytes{kind="decoded"} 0.0',
        'lazydecode_cache_entries{cache="render"}',
        "lazydecode_engine_up 1.0",
    ):
        assert name in metrics


def test_many_requests_go_over_one_connection(render_server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", render_server.port)
    body = json.dumps(request(image(data_url(make_png(), "image/png"))))
    for _ in range(3):
        connection.request("POST", "/v1/chat/completions/render", body)
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["features"]
    connection.close()
