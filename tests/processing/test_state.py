"""Waiting for decodes, and how a request's state ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from lazydecode.errors import CorruptMediaError, MediaTooLargeError, UnprocessableMediaError
from lazydecode.media.base import MediaRef
from lazydecode.media.decode import MediaDecodeJob, submit_media_decodes
from lazydecode.parse import MultiModalDataParser
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.state import MultiModalApplyState
from lazydecode.processing.timing import TimingContext


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def make_state(
    pool: ThreadPoolExecutor, decoders: list[Callable[[], Any]], enabled: bool = True
) -> tuple[MultiModalApplyState, list[MediaRef[Any]]]:
    refs = [MediaRef(decode, b"x%d" % at) for at, decode in enumerate(decoders)]
    items = MultiModalDataParser().parse_mm_data({"image": refs})
    state = MultiModalApplyState(ProcessorInputs("", items), TimingContext(enabled), None, [])
    submit_media_decodes([("image", at, ref) for at, ref in enumerate(refs)], pool, state.decodes)
    return state, refs


def raising(exc: BaseException) -> Callable[[], Any]:
    def decode() -> Any:
        raise exc

    return decode


def released(refs: list[MediaRef[Any]]) -> list[bool]:
    return [ref.data == b"" for ref in refs]


def test_waiting_for_nothing_is_not_timed(pool: ThreadPoolExecutor) -> None:
    state, _ = make_state(pool, [])
    state.wait_decodes()
    state.wait_items()
    assert state.timing_ctx.stage_secs == {}
    state, _ = make_state(pool, [lambda: 1])
    state.wait_decodes()
    assert list(state.timing_ctx.stage_secs) == ["decode_mm_items"]
    state.close()


async def test_waiting_for_nothing_is_not_timed_async(pool: ThreadPoolExecutor) -> None:
    state, _ = make_state(pool, [])
    await state.wait_decodes_async()
    await state.wait_items_async()
    assert state.timing_ctx.stage_secs == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_the_first_failure_in_order_of_the_request_is_raised_after_all_ended(
    pool: ThreadPoolExecutor, is_async: bool
) -> None:
    ended: list[int] = []
    failed = threading.Event()

    def late() -> Any:
        assert failed.wait(120)
        ended.append(0)
        raise ValueError("late")

    def early() -> Any:
        failed.set()
        raise ValueError("early")

    state, refs = make_state(pool, [late, early, lambda: 2])
    with pytest.raises(CorruptMediaError) as caught, state:
        if is_async:
            asyncio.run(state.wait_decodes_async())
        else:
            state.wait_decodes()
    assert ended == [0]
    assert str(caught.value) == "Failed to decode image media at index 0: late"
    assert (caught.value.modality, caught.value.index) == ("image", 0)
    assert caught.value.parameter is None
    assert isinstance(caught.value.__cause__, ValueError)
    assert released(refs) == [True] * 3


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (ValueError("bad"), CorruptMediaError, "bad"),
        (OSError("broken"), CorruptMediaError, "broken"),
        (SyntaxError("broken PNG file"), CorruptMediaError, "broken PNG file"),
        (KeyError("x"), UnprocessableMediaError, "'x'"),
        (MediaTooLargeError("too large"), MediaTooLargeError, "too large"),
        (ValueError("<_io.BytesIO object at 0x7f00deadbeef>"), CorruptMediaError, "the data"),
        (OSError("cannot read /home/someone/secret.png"), CorruptMediaError, "cannot read a file"),
        (ValueError(), CorruptMediaError, "ValueError"),
    ],
)
def test_errors_keep_our_classes_and_show_nothing_internal(
    pool: ThreadPoolExecutor, cause: Exception, kind: type, text: str
) -> None:
    state, _ = make_state(pool, [raising(cause)])
    with pytest.raises(kind) as caught, state:
        state.wait_decodes()
    assert type(caught.value) is kind
    assert str(caught.value) == f"Failed to decode image media at index 0: {text}"
    assert caught.value.status == 422
    assert caught.value is not cause


def test_what_is_not_about_the_item_is_raised_as_it_is(pool: ThreadPoolExecutor) -> None:
    state, refs = make_state(pool, [raising(SystemExit(3))])
    with pytest.raises(SystemExit), state:
        state.wait_decodes()
    assert released(refs) == [True]


def test_closing_waits_swallows_and_releases_once(pool: ThreadPoolExecutor) -> None:
    gate = threading.Event()
    seen: list[bytes] = []
    refs: list[MediaRef[Any]] = []

    def held() -> int:
        assert gate.wait(120)
        seen.append(refs[0].data)
        return 1

    state, made = make_state(pool, [held, raising(ValueError())])
    refs += made
    threading.Timer(0.05, gate.set).start()
    state.close()
    assert seen == [b"x0"]
    assert released(refs) == [True, True]
    assert refs[0].decode() == 1
    late: Future[None] = Future()
    late.set_exception(ValueError())
    refs[0]._data = b"kept"
    state.decodes.append(MediaDecodeJob("image", 0, late))
    state.close()
    assert refs[0].data == b"kept"


def test_leaving_the_context_lets_the_error_of_the_body_through(pool: ThreadPoolExecutor) -> None:
    state, refs = make_state(pool, [raising(ValueError("decode"))])
    with pytest.raises(KeyError, match="body"), state:
        raise KeyError("body")
    assert released(refs) == [True]


async def test_a_cancelled_wait_drains_through_repeated_cancellation(
    pool: ThreadPoolExecutor,
) -> None:
    gate, started = threading.Event(), threading.Event()

    def held() -> int:
        started.set()
        assert gate.wait(120)
        return 1

    state, refs = make_state(pool, [held, raising(ValueError("bad"))])

    async def request() -> None:
        with state:
            await state.wait_decodes_async()

    task = asyncio.create_task(request())
    await asyncio.to_thread(started.wait, 30)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        assert released(refs) == [False, False]
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert released(refs) == [True, True]
