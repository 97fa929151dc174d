"""What every route has in common, driven as an ASGI application."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from lazydecode.config import Settings
from lazydecode.errors import InvalidRequestError
from lazydecode.renderers.timeline import ItemTimeline
from lazydecode.server.context import ServerContext
from lazydecode.server.endpoint import Endpoint
from lazydecode.server.exchange import Exchange
from lazydecode.server.metrics import Metrics
from lazydecode.server.queueing import RequestQueue
from lazydecode.server.recent import RecentRequests

Handler = Callable[[ServerContext, Exchange], Awaitable[None]]


async def _whole(_: ServerContext, exchange: Exchange) -> None:
    await exchange.answer_json(200, {"a": 1})


async def _pieces(_: ServerContext, exchange: Exchange) -> None:
    pieces: Iterator[bytes] = iter([b"[1,", b"2]"])
    await exchange.answer_pieces(pieces, 6 - 1)


async def _events(_: ServerContext, exchange: Exchange) -> None:
    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        exchange.complete()
        yield b"data: [DONE]\n\n"

    await exchange.answer_events(events(), dict)


async def _refuses(_: ServerContext, __: Exchange) -> None:
    raise InvalidRequestError("no")


@pytest.mark.parametrize(
    ("handler", "end", "status"),
    [(_whole, b"}", "200"), (_pieces, b"]", "200"), (_events, b"[DONE]", "200"),
     (_refuses, b"}}", "400")],
)  # fmt: skip
def test_an_answer_is_counted_before_the_client_has_it_whole(
    handler: Handler, end: bytes, status: str
) -> None:
    metrics = Metrics()
    queue = RequestQueue(max_running=1, max_waiting=1)
    recent = RecentRequests(1)
    context = SimpleNamespace(metrics=metrics, queue=queue, settings=Settings(), recent=recent)
    count = metrics.registry.get_sample_value

    async def handle(context: ServerContext, exchange: Exchange) -> None:
        exchange.timeline.items.append(ItemTimeline("image", 0, seconds={"decode": 0.1}))
        await handler(context, exchange)

    counts: list[tuple[float | None, float | None]] = []

    async def send(message: Message) -> None:
        if message.get("body", b"").rstrip().endswith(end):
            counts.append(
                (
                    count("lazydecode_decodes_total", {"modality": "image"}),
                    count("lazydecode_requests_total", {"route": "chat", "status": status}),
                )
            )

    async def receive() -> Message:
        return await asyncio.Future[Any]()

    endpoint = Endpoint(cast(ServerContext, context), "chat", handle, limited=True)
    asyncio.run(endpoint({"type": "http", "headers": []}, receive, send))
    assert counts == [(1.0, 1.0)]
    assert count("lazydecode_decodes_total", {"modality": "image"}) == 1.0
    assert queue.num_inside == 0


class _Connection:
    """A request whose client leaves when the test says so."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self.num_asked = 0
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        self.num_asked += 1
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def exchange(self) -> Exchange:
        return Exchange({"type": "http", "headers": []}, self.receive, self.send)


async def test_work_that_does_not_wait_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    set_timer = loop.call_later

    def call_later(delay: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        timers.append(delay)
        return set_timer(delay, call, *args)

    monkeypatch.setattr(loop, "call_later", call_later)
    done: list[str] = []

    async def at_once() -> None:
        done.append("at once")

    async def waits_twice() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done.append("later")

    await _Connection().exchange().run_while_connected(at_once())
    assert timers == []
    await _Connection().exchange().run_while_connected(waits_twice())
    assert len(timers) == 1
    assert done == ["at once", "later"]


async def test_a_quick_answer_starts_no_task_and_is_not_watched() -> None:
    connection = _Connection()
    tasks: list[set[asyncio.Task[Any]]] = []

    async def work() -> None:
        await asyncio.sleep(0)
        tasks.append(asyncio.all_tasks())

    await connection.exchange().run_while_connected(work())
    assert tasks == [{asyncio.current_task()}]
    assert connection.num_asked == 0


async def test_a_client_that_leaves_cancels_the_work_once_it_takes_a_while() -> None:
    connection = _Connection()
    ended = []

    async def work() -> None:
        connection.leave.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    task = asyncio.create_task(connection.exchange().run_while_connected(work()))
    with pytest.raises(ClientDisconnect):
        await task
    assert ended == ["work"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_end_of_the_server_goes_on_up_after_the_work_has_ended() -> None:
    connection = _Connection()
    started, ended = asyncio.Event(), []

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    task = asyncio.create_task(connection.exchange().run_while_connected(work()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work"]


async def test_a_small_answer_is_one_message() -> None:
    connection = _Connection()
    pieces: Iterator[bytes] = iter([b"[1,", b"2]"])
    await connection.exchange().answer_pieces(pieces, 5)
    assert [message["type"] for message in connection.sent] == [
        "http.response.start",
        "http.response.body",
    ]
    assert connection.sent[1]["body"] == b"[1,2]"


async def test_pieces_of_a_large_answer_are_made_when_the_one_before_was_sent() -> None:
    connection = _Connection()
    sizes = (200_000, 600_000, 7)
    made: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number, size in enumerate(sizes):
            made.append(len(connection.sent))
            yield bytes([number]) * size

    await connection.exchange().answer_pieces(pieces(), sum(sizes))
    bodies = [message["body"] for message in connection.sent[1:]]
    assert b"".join(bodies) == b"".join(bytes([n]) * size for n, size in enumerate(sizes))
    assert made == [1, 2, 5]  # messages before: the head, one piece, and three of the long one
    assert max(map(len, bodies)) <= 256 * 1024
    assert [message["more_body"] for message in connection.sent[1:]] == [True] * 5 + [False]
