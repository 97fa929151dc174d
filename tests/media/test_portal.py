from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from lazydecode.media.portal import Portal


async def double(value: int, *, plus: int = 0) -> int:
    await asyncio.sleep(0)
    return 2 * value + plus


async def fail() -> None:
    raise KeyError("x")


def portal_threads() -> int:
    return sum(t.name == "lazydecode-portal" for t in threading.enumerate())


def test_calls_run_on_one_thread_and_return() -> None:
    before = portal_threads()
    portal = Portal()
    assert not portal.is_running
    assert portal.call(double, 3, plus=1) == 7
    with pytest.raises(KeyError):
        portal.call(fail)
    results: list[int] = []
    callers = [
        threading.Thread(target=lambda i=i: results.append(portal.call(double, i)))  # type: ignore[misc]
        for i in range(20)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(results) == [2 * i for i in range(20)]
    assert portal_threads() == before + 1
    portal.close()
    portal.close()
    assert portal_threads() == before
    with pytest.raises(RuntimeError, match="after close"):
        portal.call(double, 1)


def test_closing_cancels_what_runs_and_then_stops() -> None:
    order: list[str] = []
    started = threading.Event()

    async def endless() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            order.append("cancelled")

    async def on_stop() -> None:
        order.append("stopped")

    portal = Portal(on_stop)
    failures: list[BaseException] = []

    def call() -> None:
        try:
            portal.call(endless)
        except BaseException as exc:
            failures.append(exc)

    caller = threading.Thread(target=call)
    caller.start()
    assert started.wait(120)
    portal.close()
    caller.join(120)
    assert order == ["cancelled", "stopped"]
    assert len(failures) == 1


def test_a_call_from_its_own_thread_is_refused() -> None:
    portal = Portal()

    async def nested() -> int:
        return portal.call(double, 1)

    with pytest.raises(RuntimeError, match="own thread"):
        portal.call(nested)
    portal.close()


def test_an_unclosed_portal_does_not_keep_the_interpreter() -> None:
    script = (
        "import asyncio\n"
        "from lazydecode.media.portal import Portal\n"
        "async def work(): return 7\n"
        "async def stop(): print('stopped')\n"
        "portal = Portal(stop)\n"
        "print(portal.call(work))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", script],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "7\nstopped\n", "")
