"""A form with one file, read while it arrives: the file once in memory, no temporary files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive, Scope

from lazydecode.errors import InvalidRequestError, ValidationError
from lazydecode.renderers.hold import EncodedHold
from lazydecode.server.arriving import (
    ArrivingHold,
    BodyBuffer,
    Pace,
    body_chunks,
    content_length,
)

FILE_FIELD: Final = "file"
_MAX_PARTS: Final = 64
_MAX_TEXT_BYTES: Final = 64 * 1024
_PLAIN_ENCODINGS: Final = frozenset({b"", b"binary", b"8bit", b"7bit"})
_SLACK_BYTES: Final = 1024 * 1024
"""What a form may hold beside its file."""


@dataclass(slots=True)
class Form:
    """A form's text fields and its file."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    """Name and value, in order; a name may stand several times."""
    file: memoryview | None = None
    """None: the form has none."""


async def read_form(
    scope: Scope,
    receive: Receive,
    *,
    max_file_bytes: int,
    max_bytes: int,
    max_stall_s: float | None,
    hold: EncodedHold,
    refuse_file: Callable[[int], None],
) -> Form:
    """Read a form, to its end also if it is wrong: clients read no answer while they write.

    Args:
        scope: The request's.
        receive: The request's.
        max_file_bytes: Largest file; what is beyond is not kept.
        max_bytes: Largest body.
        max_stall_s: As for `read_body`.
        hold: Gets the memory of a large file before it is read.
        refuse_file: Raises the error for a file of that many bytes.

    Raises:
        InvalidRequestError: If it is no form, malformed, or cut off.
        RequestTooLargeError: If the body is larger than `max_bytes`.
    """
    boundary = _boundary(scope)
    stated = content_length(scope)
    expected = min(stated or 0, max_file_bytes + _SLACK_BYTES)
    arriving = ArrivingHold(hold, expected, cost=lambda num_bytes: 2 * num_bytes)
    await arriving.begin()
    reader = _Reader(boundary, max_file_bytes=max_file_bytes, expected=expected)
    chunks = body_chunks(
        scope,
        receive,
        max_bytes=max_bytes,
        pace=Pace(max_stall_s),
        on_slow=arriving.slow_down,
    )
    failure: InvalidRequestError | None = None
    async with aclosing(chunks):
        async for chunk in chunks:
            if failure is not None:
                continue
            try:
                reader.feed(chunk)
            except InvalidRequestError as exc:
                failure = exc
            await arriving.arrived(reader.num_kept)
    if failure is not None:
        raise failure
    form = reader.finish()
    if reader.num_file_bytes > max_file_bytes:
        refuse_file(reader.num_file_bytes)
    return form


def _boundary(scope: Scope) -> bytes:
    value = next((v for n, v in scope["headers"] if n == b"content-type"), b"")
    kind, options = parse_options_header(value)
    if kind != b"multipart/form-data":
        raise InvalidRequestError(
            "send the file as multipart/form-data, in the form field 'file'",
            parameter="content-type",
        )
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise InvalidRequestError(
            "the content type multipart/form-data names no boundary", parameter="content-type"
        )
    return boundary


class _Reader:
    """Takes the body's chunks, and keeps what the parts hold."""

    def __init__(self, boundary: bytes, *, max_file_bytes: int, expected: int) -> None:
        self._max_file_bytes = max_file_bytes
        self._expected = expected
        self._form = Form()
        self._file: BodyBuffer | None = None
        self._text: bytearray | None = None
        self._name = ""
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        self._num_parts = 0
        self._has_ended = False
        self.num_file_bytes = 0
        """Bytes of the file so far, those that were not kept included."""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, a, b: self._header[0].extend(data[a:b]),
                    "on_header_value": lambda data, a, b: self._header[1].extend(data[a:b]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as exc:
            raise _malformed(exc) from exc

    @property
    def num_kept(self) -> int:
        """Bytes of the file that are in memory."""
        return 0 if self._file is None else self._file.filled

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as exc:
            raise _malformed(exc) from exc

    def finish(self) -> Form:
        if not self._has_ended:
            raise InvalidRequestError("the form is cut off: its last boundary is missing")
        if self._file is not None:
            self._form.file = self._file.view()
        return self._form

    # -- what the parser tells

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {_MAX_PARTS} fields")
        self._headers = {}

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise InvalidRequestError("a part of the form has no name")
        self._name = name.decode("utf-8", "replace")[:100]
        encoding = self._headers.get(b"content-transfer-encoding", b"").strip().lower()
        if encoding not in _PLAIN_ENCODINGS:
            raise ValidationError(
                f"the form field {self._name!r} must be sent as it is, without transfer encoding",
                parameter=self._name,
            )
        if self._name == FILE_FIELD:
            if self._file is not None:
                raise ValidationError("send one file, not several", parameter=FILE_FIELD)
            self._file = BodyBuffer(self._expected)
        elif b"filename" in options:
            raise ValidationError(
                f"{self._name} is not supported by this server as a file", parameter=self._name
            )
        else:
            self._text = bytearray()

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._text is not None:
            self._text += data[start:end]
            if len(self._text) > _MAX_TEXT_BYTES:
                raise ValidationError(
                    f"{self._name} is longer than {_MAX_TEXT_BYTES} bytes", parameter=self._name
                )
        elif self._file is not None:
            self.num_file_bytes += end - start
            if self.num_file_bytes <= self._max_file_bytes:
                self._file.append(data[start:end])

    def _end_part(self) -> None:
        if self._text is None:
            return
        try:
            value = self._text.decode()
        except UnicodeDecodeError as exc:
            raise ValidationError(f"{self._name} is not valid UTF-8", parameter=self._name) from exc
        self._form.fields.append((self._name, value))
        self._text = None

    def _end(self) -> None:
        self._has_ended = True


def _malformed(exc: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"the form is malformed: {str(exc)[:200]}")
