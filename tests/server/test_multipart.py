"""Forms as they arrive: in any pieces, held once, bounded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazydecode.errors import InvalidRequestError, RequestTooLargeError, ValidationError
from lazydecode.media.budget import ByteBudget
from lazydecode.renderers.hold import EncodedHold
from lazydecode.server.multipart import Form, read_form

MAX_FILE = 3 * 1024 * 1024


def body(file: bytes | None, boundary: bytes = b"x1", **fields: str) -> bytes:
    parts = [
        b'Content-Disposition: form-data; name="%s"\r\n\r\n%s' % (name.encode(), value.encode())
        for name, value in fields.items()
    ]
    if file is not None:
        head = b'Content-Disposition: form-data; name="file"; filename="a"\r\n'
        parts.append(head + b"Content-Type: audio/wav\r\n\r\n" + file)
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + (
        b"--" + boundary + b"--\r\n"
    )


def refuse(num_bytes: int) -> None:
    raise ValidationError(f"{num_bytes} are too many", parameter="audio_filesize_mb")


async def read(
    chunks: list[bytes], *, boundary: bytes = b"x1", stated: int | None = None, hold: Any = None
) -> Form:
    headers = [(b"content-type", b"multipart/form-data; boundary=" + boundary)]
    if stated is not None:
        headers.append((b"content-length", str(stated).encode()))
    messages = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
        for number, chunk in enumerate(chunks)
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    try:
        return await read_form(
            {"type": "http", "headers": headers},
            receive,
            max_file_bytes=MAX_FILE,
            max_bytes=8 * 1024 * 1024,
            max_stall_s=5.0,
            hold=hold or EncodedHold(ByteBudget(1 << 26)),
            refuse_file=refuse,
        )
    finally:
        assert not messages or messages[-1]["body"] == b"unread"


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(1, 40))
async def test_the_file_is_the_same_however_the_body_arrives(data: Any, size: int) -> None:
    # Pieces of the boundary within the file are what parsers stumble over.
    alphabet = st.sampled_from([b"\r", b"\n", b"--", b"x1", b"\r\n--x", b"a", b"\r\n--", b"\0"])
    file = b"".join(data.draw(st.lists(alphabet, max_size=30)))
    if b"\r\n--x1" in b"\r\n" + file:
        file = file.replace(b"x1", b"x2")
    whole = body(file, model="m", prompt="größer")
    chunks = [whole[at : at + size] for at in range(0, len(whole), size)]
    form = await read(chunks)
    assert form.file is not None
    assert bytes(form.file) == file
    assert form.fields == [("model", "m"), ("prompt", "größer")]


async def test_a_large_file_has_its_memory_before_it_is_read() -> None:
    budget = ByteBudget(1 << 26)
    whole = body(bytes(2 * 1024 * 1024))
    async with EncodedHold(budget) as hold:
        form = await read([whole[:1000], whole[1000:]], stated=len(whole), hold=hold)
        assert form.file is not None and len(form.file) == 2 * 1024 * 1024
        assert budget.held_bytes >= 2 * len(form.file)
    assert budget.held_bytes == 0


async def test_a_file_over_the_limit_is_read_to_its_end_and_not_kept() -> None:
    whole = body(bytes(MAX_FILE + 10))
    chunks = [whole[at : at + 65536] for at in range(0, len(whole), 65536)]
    with pytest.raises(ValidationError, match=f"{MAX_FILE + 10} are too many"):
        await read(chunks)


async def test_a_body_over_the_limit_is_given_up() -> None:
    with pytest.raises(RequestTooLargeError):
        await read([b"unread"], stated=9 * 1024 * 1024)


@pytest.mark.parametrize(
    ("whole", "says"),
    [
        (body(b"abc")[:-6], "cut off"),
        (b"junk" + body(b"abc"), "malformed"),
        (body(None, prompt="x" * 70_000), "prompt is longer than 65536 bytes"),
        (body(None, **{f"f{n}": "1" for n in range(65)}), "more than 64 fields"),
        (body(b"abc").replace(b'name="file"; ', b""), "has no name"),
        (body(None, prompt="p").replace(b"\r\n\r\np", b"\r\n\r\n\xff"), "not valid UTF-8"),
    ],
)
async def test_a_wrong_form_says_what_is_wrong(whole: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        await read([whole])
