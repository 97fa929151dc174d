"""What clients are told of a decoder's failure."""

from __future__ import annotations

import errno
import os

import pytest

from lazydecode.errors import (
    CorruptMediaError,
    MediaTooLargeError,
    OverloadedError,
    ValidationError,
)
from lazydecode.media.faults import corrupt_on_failure, describe


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("image file is truncated", "image file is truncated"),
        ("cannot identify <_io.BytesIO object at 0x7f0123456789>", "cannot identify the data"),
        ("[mov @ 0x55d0c0ffee00] moov atom not found", "[mov @ an address] moov atom not found"),
        ("No such file: '/home/user/.cache/x y.png'", "No such file: 'a file y.png'"),
        ("two\nlines\t of  text", "two lines of text"),
        ("byte 0xff of 3/4", "byte 0xff of 3/4"),
        (
            "no type of (<class 'int'>, list[int], <class 'a.b.Size'>) fits",
            "no type of (int, list[int], Size) fits",
        ),
        ("", "ValueError"),
    ],
)
def test_text_is_one_line_without_addresses_and_paths(text: str, told: str) -> None:
    assert describe(ValueError(text)) == told


def test_long_text_is_cut() -> None:
    assert len(describe(ValueError("x" * 10_000))) == 200


def test_failures_are_wrapped_and_ours_pass() -> None:
    with (
        pytest.raises(CorruptMediaError, match=r"^Failed: odd$") as caught,
        corrupt_on_failure("Failed"),
    ):
        raise OddError("odd")
    assert isinstance(caught.value.__cause__, OddError)
    ours = ValidationError("ours")
    with pytest.raises(ValidationError) as passed, corrupt_on_failure("Failed"):
        raise ours
    assert passed.value is ours
    with pytest.raises(MediaTooLargeError), corrupt_on_failure("Failed"):
        raise MemoryError
    with pytest.raises(SystemExit), corrupt_on_failure("Failed"):
        raise SystemExit


def test_what_the_process_lacks_is_no_fault_of_the_file() -> None:
    for failure in (
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/tmp/frames"),
        OSError(errno.ENFILE, os.strerror(errno.ENFILE)),
        RuntimeError("can't start new thread"),
    ):
        with pytest.raises(OverloadedError) as caught, corrupt_on_failure("Failed"):
            raise failure
        assert "try again later" in caught.value.message
        assert "/tmp" not in caught.value.message
    for failure in (OSError("truncated"), OSError(errno.EINVAL, "Invalid"), RuntimeError("odd")):
        with pytest.raises(CorruptMediaError), corrupt_on_failure("Failed"):
            raise failure


class OddError(Exception):
    """An exception of a decoder that nobody has heard of."""
