from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from lazydecode.media import executor
from lazydecode.media.executor import MediaExecutor


def media_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("lazydecode-media")}


def test_creating_one_starts_nothing_and_shutdown_leaves_nothing() -> None:
    before = media_threads()
    pool = MediaExecutor(2)
    assert media_threads() <= before
    assert pool.submit(lambda a, b: a + b, 1, b=2).result() == 3
    assert (
        pool.quick.submit(lambda: threading.current_thread().name)
        .result()
        .startswith("lazydecode-media-quick")
    )
    assert media_threads() - before
    pool.shutdown()
    assert media_threads() <= before
    for part in (pool, pool.quick):
        with pytest.raises(RuntimeError, match="shut down"):
            part.submit(int)


def test_no_more_decodes_run_than_threads_and_quick_jobs_do_not_wait_for_them() -> None:
    with MediaExecutor(2) as pool:
        go, started = threading.Event(), threading.Semaphore(0)

        def decode() -> None:
            started.release()
            assert go.wait(120)

        jobs = [pool.submit(decode) for _ in range(5)]
        for _ in range(2):
            assert started.acquire(timeout=120)
        assert not started.acquire(blocking=False)
        assert pool.quick.submit(lambda: "identity").result(120) == "identity"
        go.set()
        for job in jobs:
            job.result(120)


@pytest.mark.skipif(sys.platform != "linux", reason="a priority per thread is Linux's alone")
def test_only_decodes_step_back() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    here = niceness()
    with MediaExecutor(2, niceness=3) as pool:
        assert pool.submit(niceness).result() == min(here + 3, 19)
        assert pool.quick.submit(niceness).result() == here
    with MediaExecutor(1) as pool:
        assert pool.submit(niceness).result() == here
    assert niceness() == here


def test_many_threads_create_one_pool() -> None:
    with MediaExecutor(3) as pool:
        barrier = threading.Barrier(8)
        names: set[str] = set()

        def use() -> None:
            barrier.wait()
            names.add(pool.submit(lambda: threading.current_thread().name).result())

        users = [threading.Thread(target=use) for _ in range(8)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert len(names) <= 3


def test_a_pool_has_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        MediaExecutor(0)


def test_the_process_wide_one_is_joined_at_exit() -> None:
    script = (
        "import time; from lazydecode.media.executor import global_thread_pool as pool\n"
        "pool.submit(lambda: (time.sleep(0.2), print('done')))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=180
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_forked_child_has_threads_of_its_own() -> None:
    script = (
        "import os; from lazydecode.media.executor import global_thread_pool as pool\n"
        "assert pool.submit(int).result() == 0\n"
        "child = os.fork()\n"
        "assert pool.submit(int).result(120) == 0\n"
        "if not child: os._exit(0)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=180
    )
    assert (result.returncode, result.stdout) == (0, "0\n")


def test_the_default_has_eight_threads() -> None:
    assert executor.global_thread_pool.max_workers == 8
