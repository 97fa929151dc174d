from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lazydecode.errors import MediaTooLargeError
from lazydecode.limits import MIB, DownloadCacheLimits
from lazydecode.media import download_cache
from lazydecode.media.base import PayloadDigest
from lazydecode.media.download_cache import DownloadCache

URL = "https://media.test/a.png"


@pytest.fixture
def limits(tmp_path: Path) -> DownloadCacheLimits:
    return DownloadCacheLimits(tmp_path / "cache", max_bytes=10_000, max_age_s=3600)


@pytest.fixture
def cache(limits: DownloadCacheLimits) -> DownloadCache:
    return DownloadCache(limits)


def put(cache: DownloadCache, url: str, data: bytes) -> None:
    cache.put(url, data, PayloadDigest(data))


def get(cache: DownloadCache, url: str, max_bytes: int = MIB) -> bytes | None:
    found = cache.get(url, max_bytes)
    if found is None:
        return None
    data, digest = found
    assert digest.content() == PayloadDigest(data).content()
    return data


def files(limits: DownloadCacheLimits) -> list[Path]:
    assert limits.folder is not None
    return sorted(limits.folder.iterdir())


def set_age(limits: DownloadCacheLimits, seconds: float) -> None:
    for file in files(limits):
        os.utime(file, (time.time() - seconds,) * 2)


def test_what_was_put_is_found_by_its_exact_url(cache: DownloadCache) -> None:
    assert get(cache, URL) is None
    put(cache, URL, b"picture")
    assert get(cache, URL) == b"picture"
    for other in (URL.upper(), URL + "?", URL + "/", URL[:-1]):
        assert get(cache, other) is None
    put(cache, URL, b"newer")
    assert get(cache, URL) == b"newer"


def test_another_process_finds_it(cache: DownloadCache, limits: DownloadCacheLimits) -> None:
    put(cache, URL, b"picture")
    assert get(DownloadCache(limits), URL) == b"picture"


def test_the_cap_holds_on_reads_too(cache: DownloadCache) -> None:
    put(cache, URL, bytes(1000))
    assert get(cache, URL, 1000) == bytes(1000)
    with pytest.raises(MediaTooLargeError, match="999"):
        cache.get(URL, 999)
    assert get(cache, URL, 1000) == bytes(1000)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"x" + data[1:],
        lambda data: data[:-1] + b"x",
        lambda data: data[:40] + b"x" + data[41:],  # within the digest
    ],
)
def test_a_damaged_entry_is_dropped(
    cache: DownloadCache, limits: DownloadCacheLimits, damage: object
) -> None:
    put(cache, URL, b"picture")
    (file,) = files(limits)
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    assert get(cache, URL) is None
    assert files(limits) == []
    put(cache, URL, b"picture")
    assert get(cache, URL) == b"picture"


def test_what_is_no_file_is_no_entry(
    cache: DownloadCache, limits: DownloadCacheLimits, tmp_path: Path
) -> None:
    put(cache, URL, b"picture")
    (file,) = files(limits)
    content = file.read_bytes()
    (tmp_path / "elsewhere").write_bytes(content)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert get(cache, URL) is None
    file.unlink()
    os.mkfifo(file)
    assert get(cache, URL) is None
    assert (tmp_path / "elsewhere").read_bytes() == content


def test_old_entries_expire(cache: DownloadCache, limits: DownloadCacheLimits) -> None:
    put(cache, URL, b"picture")
    set_age(limits, 3599)
    assert get(cache, URL) == b"picture"
    set_age(limits, 3601)
    assert get(cache, URL) is None
    assert files(limits) == []


def test_use_does_not_keep_an_entry_from_expiring(
    cache: DownloadCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, URL, b"picture")
    now = time.time()
    for hours, expected in ((0.9, b"picture"), (1.1, None)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
        assert get(cache, URL) == expected


def test_the_least_recently_used_make_room(
    cache: DownloadCache, limits: DownloadCacheLimits
) -> None:
    for number in range(4):
        put(cache, f"{URL}{number}", bytes(2000))
        set_age(limits, 100)
    for number, age in ((0, 40), (1, 30), (2, 20), (3, 10)):
        file = cache._path(f"{URL}{number}")
        os.utime(file, (time.time() - age,) * 2)
    assert get(cache, URL + "0") is not None  # Now the youngest.
    put(cache, URL + "new", bytes(5000))
    kept = [n for n in ("0", "1", "2", "3", "new") if get(cache, URL + n) is not None]
    assert kept == ["0", "3", "new"]
    assert sum(file.stat().st_size for file in files(limits)) <= 10_000


def test_what_does_not_fit_at_all_is_not_kept(
    cache: DownloadCache, limits: DownloadCacheLimits
) -> None:
    put(cache, URL, b"picture")
    put(cache, URL + "big", bytes(10_001))
    assert get(cache, URL) == b"picture"
    assert len(files(limits)) == 1


def test_expired_entries_go_before_younger_ones(
    cache: DownloadCache, limits: DownloadCacheLimits
) -> None:
    put(cache, URL + "old", bytes(500))
    set_age(limits, 4000)
    put(cache, URL + "a", bytes(4000))
    put(cache, URL + "b", bytes(4000))
    put(cache, URL + "c", bytes(1600))
    assert len(files(limits)) == 3
    assert get(cache, URL + "a") is not None


def test_leftovers_of_dead_writers_are_removed_and_others_let_be(
    cache: DownloadCache, limits: DownloadCacheLimits
) -> None:
    assert limits.folder is not None
    dead, writing, foreign = (limits.folder / name for name in (".0.part", ".1.part", ".keep"))
    for file in (dead, writing, foreign):
        file.write_bytes(bytes(100))
    os.utime(dead, (0, 0))
    os.utime(foreign, (0, 0))
    put(cache, URL, b"picture")
    assert not dead.exists()
    assert writing.exists()
    assert foreign.exists()


def test_a_full_disk_is_no_error_and_leaves_nothing(
    cache: DownloadCache, limits: DownloadCacheLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download_cache.os, "replace", full)
    put(cache, URL, b"picture")
    assert files(limits) == []


def test_entries_are_private(cache: DownloadCache, limits: DownloadCacheLimits) -> None:
    put(cache, URL, b"picture")
    (file,) = files(limits)
    assert file.stat().st_mode & 0o777 == 0o600
    assert limits.folder is not None
    assert limits.folder.stat().st_mode & 0o777 == 0o700
    assert "media.test" not in file.name


def test_clear_drops_everything(cache: DownloadCache, limits: DownloadCacheLimits) -> None:
    put(cache, URL, b"picture")
    cache.clear()
    assert files(limits) == []


def test_a_folder_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder"):
        DownloadCache(DownloadCacheLimits())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="folder"):
        DownloadCache(DownloadCacheLimits(tmp_path / "file"))


_WRITER = """
import random, sys
from pathlib import Path
from lazydecode.limits import DownloadCacheLimits
from lazydecode.media.base import PayloadDigest
from lazydecode.media.download_cache import DownloadCache
cache = DownloadCache(DownloadCacheLimits(Path(sys.argv[1]), max_bytes=200_000))
rng = random.Random(sys.argv[2])
hits = 0
for _ in range(400):
    key = rng.randrange(20)
    data = bytes([key]) * (1000 * key + 1)
    found = cache.get(f"u{key}", 10**6)
    if found is None:
        cache.put(f"u{key}", data, PayloadDigest(data))
    else:
        assert found[0] == data
        hits += 1
assert hits
"""


@pytest.mark.stress
def test_processes_and_threads_share_a_folder(tmp_path: Path) -> None:
    """A small cache under churn: every hit is whole, and the folder ends up within its size."""
    folder = tmp_path / "cache"
    writers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", _WRITER, str(folder), str(seed)])
        for seed in range(3)
    ]
    cache = DownloadCache(DownloadCacheLimits(folder, max_bytes=200_000))
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            for turn in range(200):
                key = (seed + turn) % 20
                data = bytes([key]) * (1000 * key + 1)
                found = cache.get(f"u{key}", 10**6)
                if found is None:
                    put(cache, f"u{key}", data)
                else:
                    assert found[0] == data
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert failures == []
    last = DownloadCache(DownloadCacheLimits(folder, max_bytes=200_000))
    put(last, "last", b"x")
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 200_000
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


def test_a_smaller_limit_applies_to_an_old_folder(
    cache: DownloadCache, limits: DownloadCacheLimits
) -> None:
    for number in range(3):
        put(cache, f"{URL}{number}", bytes(3000))
    small = DownloadCache(replace(limits, max_bytes=4000))
    put(small, URL + "new", bytes(100))
    assert sum(file.stat().st_size for file in files(limits)) <= 4000
