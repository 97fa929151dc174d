from __future__ import annotations

import os
import resource
import shutil
import socket
import threading
from pathlib import Path

import pytest

from lazydecode.errors import (
    BlockedURLError,
    CorruptMediaError,
    LazyDecodeError,
    MediaTooLargeError,
    OverloadedError,
    UnprocessableMediaError,
)
from lazydecode.media import local_files
from lazydecode.media.local_files import FileState, LocalFiles
from lazydecode.media.urls import FileURL, parse_url

CASES = Path(__file__).parent.parent / "cases" / "media" / "k4_tree"
PICTURE = (CASES / "allowed" / "ok.png").read_bytes()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the case tree with links as links."""
    return Path(shutil.copytree(CASES, tmp_path / "tree", symlinks=True))


def read(root: Path, url: str, max_bytes: int = 10_000) -> bytes:
    def check_size(num_bytes: int) -> None:
        if num_bytes > max_bytes:
            raise MediaTooLargeError(f"{num_bytes} bytes")

    parsed = parse_url(url)
    assert isinstance(parsed, FileURL)
    return LocalFiles(root).read(parsed, check_size)


def test_files_below_the_folder_are_read(tree: Path) -> None:
    root = tree / "allowed"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "sub" / "deep" / "ü#?.png").write_bytes(PICTURE)
    for path in (
        "ok.png",
        "with%20space.png",
        "sub/../ok.png",
        "sub/%2e%2e/ok.png",
        "sub%2Fdeep/../../ok.png",
        "./ok.png",
        "sub/deep/%C3%BC%23%3F.png",
    ):
        assert read(root, f"file://{root}/{path}") == PICTURE


def test_links_that_stay_inside_are_followed(tree: Path) -> None:
    root = tree / "allowed"
    (root / "sub").mkdir()
    (root / "sub" / "link.png").symlink_to("../ok.png")
    (root / "folder").symlink_to("sub", target_is_directory=True)
    assert read(root, f"file://{root}/sub/link.png") == PICTURE
    assert read(root, f"file://{root}/folder/link.png") == PICTURE
    linked_root = tree / "linked"
    linked_root.symlink_to(root, target_is_directory=True)
    assert read(linked_root, f"file://{linked_root}/ok.png") == PICTURE
    assert read(linked_root, f"file://{root}/ok.png") == PICTURE


@pytest.mark.parametrize(
    "path",
    [
        "allowed/../secret/secret.png",
        "allowed/%2e%2e/secret/secret.png",
        "allowed/..%2fsecret%2fsecret.png",
        "allowed_evil/secret.png",
        "allowed/link_out.png",
        "allowed/folder_out/secret.png",
        "allowed/../allowed",
        "allowed",
        "secret/secret.png",
        "secret/missing.png",
        "missing/missing.png",
        "allowed/../missing.png",
    ],
)
def test_what_is_outside_is_refused_alike_whether_it_exists_or_not(tree: Path, path: str) -> None:
    (tree / "allowed" / "folder_out").symlink_to("../secret", target_is_directory=True)
    with pytest.raises(BlockedURLError, match="must be a subpath") as caught:
        read(tree / "allowed", f"file://{tree}/{path}")
    assert str(tree) not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.png", "ok.png/x", "sub", "x" * 300, "broken", "loop"])
def test_what_is_inside_but_no_file_is_an_error(tree: Path, path: str) -> None:
    root = tree / "allowed"
    (root / "sub").mkdir()
    (root / "broken").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    with pytest.raises(LazyDecodeError) as caught:
        read(root, f"file://{root}/{path}")
    assert 400 <= caught.value.status < 500
    chain: BaseException | None = caught.value
    while chain is not None:
        assert str(tree) not in str(chain)
        chain = chain.__cause__


def test_devices_pipes_and_sockets_are_refused_without_blocking(tree: Path) -> None:
    root = tree / "allowed"
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(root)  # Socket paths are short.
        try:
            listener.bind("socket")
        finally:
            os.chdir("/")
        for name in ("pipe", "socket"):
            with pytest.raises(LazyDecodeError) as caught:
                read(root, f"file://{root}/{name}")
            assert 400 <= caught.value.status < 500
    with pytest.raises(BlockedURLError, match="regular"):
        read(Path("/dev"), "file:///dev/zero")
    with pytest.raises(BlockedURLError, match="regular"):
        read(Path("/dev"), "file:///dev/null")


def test_size_is_checked_before_reading(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree / "allowed"
    os.truncate(root / "ok.png", 1 << 40)  # A terabyte of nothing.
    monkeypatch.setattr(local_files, "read_up_to", lambda *_: pytest.fail("was read"))
    with pytest.raises(MediaTooLargeError):
        read(root, f"file://{root}/ok.png")


def test_an_empty_file_is_an_error(tree: Path) -> None:
    root = tree / "allowed"
    (root / "empty.png").touch()
    with pytest.raises(CorruptMediaError, match="empty"):
        read(root, f"file://{root}/empty.png")


def test_an_unreadable_file_does_not_show_its_path(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree / "allowed"

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error", str(root / "ok.png"))

    monkeypatch.setattr(local_files, "read_up_to", fail)
    with pytest.raises(UnprocessableMediaError) as caught:
        read(root, f"file://{root}/ok.png")
    assert caught.value.__cause__ is None
    assert str(root) not in str(caught.value)


@pytest.mark.parametrize("swapped", ["file", "folder"])
def test_what_is_exchanged_between_check_and_open_does_not_lead_out(
    tree: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    root = tree / "allowed"
    (root / "sub").mkdir()
    target = root / "sub" / "secret.png"
    target.write_bytes(PICTURE)
    resolve = os.path.realpath

    def resolve_and_swap(path: str) -> str:
        resolved = resolve(path)
        if swapped == "file":
            target.unlink()
            target.symlink_to(tree / "secret" / "secret.png")
        else:
            (root / "sub").rename(root / "moved")
            (root / "sub").symlink_to(tree / "secret", target_is_directory=True)
        return resolved

    files = LocalFiles(root)
    monkeypatch.setattr(os.path, "realpath", resolve_and_swap)
    # With a dot in it: a plain path is not resolved before it is walked.
    with pytest.raises(BlockedURLError, match="regular"):
        files.read(FileURL(f"{root}/./sub/secret.png"), lambda _: None)


@pytest.mark.stress
def test_a_path_that_changes_all_the_time_never_leads_out(tree: Path) -> None:
    root = tree / "allowed"
    (tree / "secret" / "secret.png").write_bytes(b"secret")
    for folder in ("real", "sub"):
        (root / folder).mkdir()
        (root / folder / "secret.png").write_bytes(PICTURE)
    stop, files = threading.Event(), LocalFiles(root)
    plain = FileURL(f"{root}/sub/secret.png")
    with files.open(plain):
        pass  # now looks are possible, if they are here at all
    outside = FileState.of(os.stat(tree / "secret" / "secret.png"))

    def swap() -> None:
        while not stop.is_set():
            (root / "sub").rename(root / "aside")
            (root / "sub").symlink_to(tree / "secret", target_is_directory=True)
            (root / "sub").unlink()
            (root / "aside").rename(root / "sub")

    swapper = threading.Thread(target=swap)
    swapper.start()
    outcomes = set()
    try:
        for _ in range(500):
            assert files.look(plain) != outside
            try:
                outcomes.add(read(root, f"file://{root}/sub/secret.png"))
            except LazyDecodeError as exc:
                outcomes.add(type(exc).__name__.encode())
    finally:
        stop.set()
        swapper.join()
    assert b"secret" not in outcomes


def test_the_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        LocalFiles(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not a folder"):
        LocalFiles(tmp_path / "file")


def test_a_process_without_descriptors_says_so_and_blames_no_file(tree: Path) -> None:
    root = tree / "allowed"
    files = LocalFiles(root)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OverloadedError, match="try again later"):
            files.open(FileURL(f"{root}/ok.png"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert files.read(FileURL(f"{root}/ok.png"), lambda num_bytes: None) == PICTURE
