"""Bodies that are parsed without their payloads give what parsing the whole gives."""

import base64
import json
import re
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from lazydecode.errors import InvalidRequestError
from lazydecode.limits import MIB
from lazydecode.media.known_texts import KnownTexts
from lazydecode.renderers.chat import Conversation
from lazydecode.server import body as body_module
from lazydecode.server import payload_cut
from lazydecode.server.body import ReadBody, parse_body
from lazydecode.server.payload_cut import PayloadFinder, cut_payloads
from lazydecode.server.protocol import ChatCompletionRequest, decode_request

PAYLOAD = base64.b64encode(bytes(range(256)) * 400).decode()
URL = f"data:image/jpeg;base64,{PAYLOAD}"


def _body(*parts: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [*parts]}], **fields}).encode()


def _cut(body: bytes) -> ReadBody:
    return ReadBody(memoryview(body), cut_payloads(memoryview(body)))


def _texts() -> KnownTexts:
    return KnownTexts(16)


def _parse(body: ReadBody) -> tuple[ChatCompletionRequest, Conversation]:
    return parse_body(body, _texts())


def _sound(body: bytes | memoryview) -> list[tuple[int, int]]:
    """Where the payloads of a body are."""
    cut = cut_payloads(memoryview(body))
    found = None if cut is None else cut.without_unsound(_texts(), None, between=lambda: None)
    return [] if found is None else [place[:2] for place in found.payloads.values()]


def _image(url: Any = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("parts", "num_parses"),
    [
        ([_image(), _text("what?")], 1),
        ([_image(), _image(uuid="a"), {"type": "video_url", "video_url": {"url": URL}}], 1),
        ([_image("data:;base64,aGk="), _text("too short to be worth it")], 1),
        ([_image(), _text(f"spells one: {URL}")], 2),
        ([{"type": "image_url", "image_url": URL}], 2),
        ([_text('a "quoted" ;base64, in text'), _image()], 1),
    ],
)
def test_a_conversation_is_the_same_with_and_without_the_cut(
    parts: list[dict[str, Any]], num_parses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parses = []

    def counted(given: bytes | memoryview) -> Any:
        parses.append(len(given))
        return decode_request(given)

    monkeypatch.setattr(body_module, "decode_request", counted)
    body = _body(*parts, user="x", metadata={"y": "z"})
    request, conversation = _parse(_cut(body))
    assert len(parses) == num_parses
    whole_request, whole = _parse(ReadBody(memoryview(body)))
    assert msgspec.structs.asdict(request) == msgspec.structs.asdict(whole_request)
    assert conversation == whole
    array = np.frombuffer(body, np.uint8)
    for item in conversation.media:
        if isinstance(item.source, memoryview):
            assert np.shares_memory(np.frombuffer(item.source, np.uint8), array)


def test_a_payload_with_escapes_is_left_to_the_parser() -> None:
    escaped = URL.replace("/", "\\/")
    body = _body(_image("HERE")).replace(b"HERE", escaped.encode())
    assert not _sound(body)
    _, conversation = _parse(_cut(body))
    assert conversation.media[0].source == URL


def test_a_payload_that_is_none_is_none_again() -> None:
    body = memoryview(_body(_image("HERE")).replace(b"HERE", URL.replace("/", "\\/").encode()))
    cut = cut_payloads(body)
    assert cut is not None
    for _ in range(2):
        assert cut.without_unsound(KnownTexts(16), None, between=lambda: None) is None


def test_a_long_payload_is_looked_through_in_pieces() -> None:
    paused: list[None] = []
    size = payload_cut._PIECE_CHARS
    for text, is_plain in (
        (b"A" * 3 * size, True),
        (b"A" * (3 * size - 1) + b"\n", False),
        (b"A" * (3 * size - 1) + b"\\", False),
    ):
        paused.clear()
        found = payload_cut.is_plain(memoryview(text), between=lambda: paused.append(None))
        assert (found, len(paused)) == (is_plain, -(-len(text) // size) - 1)


def test_escapes_before_a_payload_are_read() -> None:
    body = _body(_image("HERE")).replace(b"HERE", URL.replace("e/j", "e\\/j", 1).encode())
    assert cut_payloads(memoryview(body)) is not None
    _, conversation = _parse(_cut(body))
    assert conversation.media[0].source == URL


@pytest.mark.parametrize(
    "body",
    [
        _body(_image(), _text("x"))[:-3],
        _body(_image(), temperature="hot"),
        _body(_image(), nonsense=1),
        b'{"messages": ";base64,' + b"A" * 9000,
        _body(_image("HERE")).replace(b"HERE", URL.encode() + b"\n"),
        _body(_image("HERE")).replace(b"HERE", URL.encode() + b"\0" + PAYLOAD.encode()),
    ],
)
def test_a_wrong_body_is_refused_in_the_same_words(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as cut:
        _parse(_cut(body))
    with pytest.raises(InvalidRequestError) as whole:
        _parse(ReadBody(memoryview(body)))
    assert str(cut.value) == str(whole.value)


@pytest.mark.parametrize("shift", range(12))
def test_a_marker_across_two_pieces_is_found(shift: int) -> None:
    body = b'{"' + b"k" * shift + b'": "data:image/jpeg;base64,' + b"A" * 5000 + b'", "z": 1}'
    finder = PayloadFinder()
    for begin in range(0, len(body), 64):
        finder.feed(body[begin : begin + 64])
    cut = finder.cut(memoryview(body))
    assert cut is not None
    ((word, (start, stop, _)),) = cut.payloads.items()
    assert body[start:stop] == b"A" * 5000
    assert cut.rest == body.replace(b"A" * 5000, word)


@pytest.mark.parametrize("unit", [b";base64,", b';base64,","', b";base64,\\n", b";base64,x"])
def test_a_body_of_markers_costs_no_more_than_its_size(unit: bytes) -> None:
    body = memoryview(b'["' + unit * (4 * MIB // len(unit)) + b'\\n"]')
    began = time.process_time()
    assert not _sound(body)
    # It takes some 0.2 s; it took minutes when each marker began a search of its own.
    assert time.process_time() - began < 5


@pytest.mark.parametrize("size", [1, 16, 1000])
def test_any_mix_of_markers_quotes_and_escapes_is_cut_as_by_hand(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_cut, "_MIN_PAYLOAD", 3)
    random = np.random.default_rng(7)
    words = [b";base64,", b'"', b"\\", b"\n", b"A", b"BBBB", b";base", b"64,", b"C" * 20]
    for _ in range(2000):
        body = b"".join(words[number] for number in random.integers(0, len(words), 20))
        # From a marker to the next quotation mark, with nothing between that no payload has.
        expected = [
            match.span(1)
            for match in re.finditer(rb';base64,([^"]*)"', body)
            if len(match[1]) >= 3 and not re.search(rb"[\\\n]", match[1])
        ]
        finder = PayloadFinder()
        for begin in range(0, len(body), size):
            finder.feed(body[begin : begin + size])
        cut = finder.cut(memoryview(body))
        found = None if cut is None else cut.without_unsound(_texts(), None, between=lambda: None)
        places = [] if found is None else [place[:2] for place in found.payloads.values()]
        assert places == expected
