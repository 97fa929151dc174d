"""Fixtures for all tests: tiny models shared by the workers, and checks of what a test leaves."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import inspect
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.origin import inside, origin  # noqa: F401  # fixtures

# Nothing outlives a run: neither what a developer's environment sets, nor what libraries, or we,
# keep in a user's cache folder. Set before any of them is imported; workers of xdist inherit it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    for _name in [name for name in os.environ if name.startswith("LAZYDECODE_")]:
        if not _name.startswith("LAZYDECODE_TEST_"):
            del os.environ[_name]
    for _name in ("HF_HOME", "HF_MODULES_CACHE", "MPLCONFIGDIR", "TORCH_HOME"):
        os.environ.pop(_name, None)
    _caches = tempfile.TemporaryDirectory(prefix="lazydecode-tests-")
    os.environ["XDG_CACHE_HOME"] = _caches.name
    # An empty folder: tests talk to loopback alone, and each call of httpx and each import of
    # aiohttp would read all certificates of the machine (60 ms of CPU, and 3 ms with this).
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = _caches.name

# As `lazydecode serve` does, before torch is loaded: threads that spin at torch's barriers take the
# cores from the other worker. Three families' checks took 27 s of CPU, and 19 with this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Examples are not timed: a machine that stands still for 0.2 s makes any too slow. And they are the
# same in each run, unless more than usual is asked for: who has changed nothing finds nothing new.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize="LAZYDECODE_TEST_REPEATS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

GRACE_S = 60.0
"""How long a test's threads, jobs and descriptors may take to go away after it."""
SPARE_DESCRIPTORS = 8
"""Descriptors that a test may add: an import or a lazily built process-wide object keeps a few."""
PROCESS_WIDE_THREADS = ("lazydecode-media", "lazydecode-portal", "asyncio", "tokio", "pydevd")
"""Name prefixes of threads whose owner lives as long as the process."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Do not look for garbage among half a million objects that stay, now or ever after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# -- tiny models


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _caches.cleanup()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--models-dir",
        type=Path,
        help="keep the tiny models in this folder from run to run; empty it when tiny_models/"
        " changes (default: a temporary folder, built anew)",
    )


@pytest.fixture(scope="session")
def models_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of tiny models, one for all workers of this run."""
    kept: Path | None = request.config.getoption("--models-dir")
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        return kept.resolve()
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = shared / "tiny-models"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def tiny_model(models_dir: Path) -> Callable[..., Path]:
    """Return `tiny_model(family, weights=True) -> Path`: built once per run, by whoever is first.

    The folder is shared: a test that changes one works on a copy.
    """

    def get(family: str, *, weights: bool = True) -> Path:
        from lazydecode.tiny_models import build

        path = models_dir / (family if weights else f"{family}.no-weights")
        with open(models_dir / f"{path.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                build(family, path, weights=weights)
        return path

    return get


@pytest.fixture(scope="session")
def short_sounds_model(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model of pictures, videos and sounds that pads sounds to 5 s.

    The family's own processor pads each to 300 s: sixty times the work, and tensors of 15 MB.
    """
    made = tiny_model("qwen2_5_omni", weights=False)
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("short") / "model"))
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    config["feature_extractor"]["chunk_length"] = 5
    file.write_text(json.dumps(config))
    return folder


# -- engines


@pytest.fixture(scope="session")
def forked_engines() -> Iterator[None]:
    """Engines of this process are forked from one that has imported what they need (Linux).

    Not those of commands that tests run, which start them in their own way.
    """
    if sys.platform != "linux":
        yield
        return
    import lazydecode.engine.process as starting
    from tests.forked_engines import EngineSource

    source = EngineSource()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "SpawnedChild", source.fork)
        yield
    source.close()


# -- what a test leaves behind

_submitted: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
_submitted_lock = threading.Lock()


@pytest.fixture(scope="session", autouse=True)
def _watch_submissions() -> Iterator[None]:
    """Remember the future of every job that any thread pool of this process is given."""
    original = ThreadPoolExecutor.submit

    def submit(self: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Future[Any]:
        future = original(self, *args, **kwargs)
        with _submitted_lock:
            _submitted.add(future)
        return future

    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
    yield
    ThreadPoolExecutor.submit = original  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, pool jobs, file descriptors or another priority; tasks if
    it is async.
    """
    priority_before = _priority()
    threads_before = set(threading.enumerate())
    jobs_before = _jobs()
    descriptors_before = _descriptors()
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_tasks_left")
    yield
    _wait_for(lambda: not _left_threads(threads_before))
    if left := _left_threads(threads_before):
        pytest.fail(f"threads left running: {sorted(t.name for t in left)}")
    _wait_for(lambda: all(job.done() for job in _jobs() - jobs_before))
    if pending := [job for job in _jobs() - jobs_before if not job.done()]:
        pytest.fail(f"pool jobs left undrained: {pending}")
    _wait_for(lambda: len(_new_descriptors(descriptors_before)) <= SPARE_DESCRIPTORS, collect=True)
    if len(opened := _new_descriptors(descriptors_before)) > SPARE_DESCRIPTORS:
        pytest.fail(f"file descriptors left open: {sorted(opened.values())}")
    if _priority() != priority_before:
        pytest.fail("the thread is left with another priority, and so is what it starts")


@pytest.fixture
async def _no_tasks_left() -> AsyncIterator[None]:
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := asyncio.all_tasks() - {asyncio.current_task()}) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    if left:
        pytest.fail(f"tasks left running: {sorted(task.get_name() for task in left)}")


def _priority() -> tuple[int, int]:
    """Policy and niceness of this thread; some encoders make it a real-time one."""
    if sys.platform != "linux":
        return 0, 0
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _jobs() -> set[Future[Any]]:
    with _submitted_lock:  # a server of the session may be submitting
        return set(_submitted)


def _left_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before
        and thread.is_alive()
        and not thread.daemon
        and not thread.name.startswith(PROCESS_WIDE_THREADS)
    ]


def _descriptors() -> dict[int, str]:
    """Open descriptors and what they refer to; empty where the system does not tell."""
    found: dict[int, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def _new_descriptors(before: dict[int, str]) -> dict[int, str]:
    return {fd: target for fd, target in _descriptors().items() if before.get(fd) != target}


def _wait_for(condition: Callable[[], bool], *, collect: bool = False) -> None:
    """Return when `condition` holds or the grace is over; garbage is collected meanwhile."""
    deadline = time.monotonic() + GRACE_S
    while not condition() and time.monotonic() < deadline:
        if collect:
            gc.collect()
        time.sleep(0.01)
