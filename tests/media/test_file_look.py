"""Looks at files from an event loop: right if they tell anything, and never off the way."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazydecode.media import file_look
from lazydecode.media.file_look import FileLook
from lazydecode.media.local_files import FileState, LocalFiles
from lazydecode.media.urls import FileURL

_IN_MEMORY = Path("/dev/shm")


def learned(path: Path) -> FileLook:
    """A look that knows the file system of `path`."""
    look = FileLook()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        look.learn(descriptor, os.fstat(descriptor).st_dev)
    finally:
        os.close(descriptor)
    return look


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A file whose state can be told without waiting: in containers that is one in memory."""
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as folder:
        for root in (tmp_path, Path(folder)):
            path = root / "sub" / "a.png"
            path.parent.mkdir()
            path.write_bytes(b"content")
            if learned(path)(str(path)) is not None:
                yield path
                return
        pytest.skip("this kernel may have to wait")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_look_tells_what_stat_does(file: Path) -> None:
    look, before = learned(file), num_descriptors()
    for _ in range(3):
        assert look(str(file)) == os.stat(file)
        with file.open("ab") as opened:
            opened.write(b"more")
        os.utime(file, ns=(1, 1))
    assert look(f"{file}ü") is None
    file.rename(f"{file}ü")
    assert look(f"{file}ü") == os.stat(f"{file}ü")
    assert look(str(file)) is None
    assert num_descriptors() == before


def test_no_look_goes_through_a_link(file: Path) -> None:
    root = file.parent.parent
    (root / "folder").symlink_to("sub", target_is_directory=True)
    (root / "link.png").symlink_to(file)
    look = learned(file)
    assert look(f"{root}/folder/a.png") is None
    assert look(f"{root}/link.png") is None
    assert look(f"/proc/self/fd/../root{file}") is None


def test_a_file_system_nobody_told_of_is_not_asked(file: Path) -> None:
    before = num_descriptors()
    assert FileLook()(str(file)) is None
    status = Path("/proc/self/status")  # made by the kernel when it is asked for
    assert learned(status)(str(status)) is None
    assert num_descriptors() == before


def test_nothing_is_known_where_the_kernel_cannot_be_asked(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = learned(file)
    monkeypatch.setattr(file_look, "_OPENAT2", 1 << 20)  # no such system call
    assert look(str(file)) is None


def test_without_descriptors_nothing_is_known(file: Path) -> None:
    look = learned(file)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert look(str(file)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_of_an_allowed_folder_only_plain_paths_to_files_are_looked_at(file: Path) -> None:
    root = file.parent.parent
    (root / "out.png").write_bytes(b"outside")
    os.mkfifo(file.parent / "pipe")
    files = LocalFiles(file.parent)
    assert files.look(FileURL(str(file))) is None  # nothing was opened so far
    with files.open(FileURL(str(file))) as opened:
        assert files.look(FileURL(str(file))) == opened.state == FileState.of(os.stat(file))
    for path in (
        f"{file.parent}/./a.png",
        f"{file.parent}//a.png",
        f"{file.parent}/../sub/a.png",
        f"{file.parent}/../out.png",
        f"{root}/out.png",
        f"{file.parent}/pipe",
        f"{file.parent}/",
        f"{file.parent}",
        f"{file}/a",
    ):
        assert files.look(FileURL(path)) is None
