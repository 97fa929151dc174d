"""What `bench serve` sends: request bodies per scenario, built before anything is timed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lazydecode.bench.media import encode_clip, encode_picture

RENDER: Final = "/v1/chat/completions/render"
CHAT: Final = "/v1/chat/completions"
_HD: Final = (1280, 720)
_4K: Final = (3840, 2160)
_POOL: Final = 8
_ANSWER_TOKENS: Final = 16
_TURNS: Final = 10


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one measurement."""

    bodies: Sequence[bytes]
    """One per request, in the order in which they are sent."""
    prime: Sequence[bytes] = ()
    """Sent once before, one after the other, unmeasured."""
    media: Sequence[bytes] = ()
    """The encoded media of one request: what must be identified."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of load."""

    name: str
    about: str
    build: Callable[[int, int], Batch]
    """(number of requests, seed) -> requests. Different seeds have no media in common, unless
    the scenario is about media that are known."""
    route: str = RENDER
    concurrency: tuple[int, ...] | None = None
    """Instead of what the run is set to."""
    num_requests: int | None = None
    """Instead of what the run is set to."""
    factor: int = 1
    """So many times as many requests: for cheap ones, whose CPU is near the clock's tick."""
    is_about_lag: bool = False
    """Whether the event loop's lag is what it shows: an idle loop is watched beside it then."""


class MediaPool:
    """Builds media once per (kind, seed); `tiny` makes all of them small."""

    def __init__(self, *, tiny: bool = False) -> None:
        self._tiny = tiny
        self._built: dict[tuple[Any, ...], bytes] = {}

    def picture(self, size: tuple[int, int], seed: int) -> bytes:
        """A JPEG of that size; another seed, other pixels."""
        size = (64, 48) if self._tiny else size
        return self._get(("picture", size, seed), lambda: encode_picture(size, seed=seed))

    def clip(self, seconds: float, size: tuple[int, int], seed: int) -> bytes:
        """An MP4 of that size; another seed, other frames."""
        if self._tiny:
            seconds, size = 0.3, (64, 48)
        key = ("clip", seconds, size, seed)
        return self._get(key, lambda: encode_clip(seconds, size, seed=seed))

    def _get(self, key: tuple[Any, ...], build: Callable[[], bytes]) -> bytes:
        data = self._built.get(key)
        if data is None:
            data = build()
            if key[0] == "clip" or key[2] < _POOL:  # Single-use pictures are not kept.
                self._built[key] = data
        return data


def scenarios(pool: MediaPool, *, chat: bool) -> list[Scenario]:
    """Return all scenarios.

    Args:
        pool: Where the media come from.
        chat: Whether the server generates: then two scenarios run on the chat route too.
    """
    found = [
        Scenario("text", "no media: what any request costs", _text, factor=4),
        Scenario(
            "hot-720p",
            "a pool of eight 720p images, processed before",
            _hot(pool, _HD, "none"),
            factor=4,
        ),
        Scenario(
            "headers-720p",
            "eight 720p images that came before and were never processed, no tensors",
            _hot(pool, _HD, "none", processed=False),
            factor=4,
        ),
        Scenario("hot-720p-tensors", "the same, with tensors", _hot(pool, _HD, "tensors")),
        Scenario("unique-720p", "720p images, never seen, with tensors", _unique(pool, 1)),
        Scenario("hot-4k", "four 4K images, processed before", _hot(pool, _4K, "none"), factor=2),
        Scenario(
            "hot-4k-tensors", "the same, with tensors", _hot(pool, _4K, "tensors"), num_requests=8
        ),
        Scenario("video-cold", "2 s 480p clips, never seen", _video(pool)),
        Scenario("video-hot", "the same clips, known", _video(pool, primed=True)),
        Scenario("unseen-4x720p-none", "four 720p images, never seen, no tensors", _four(pool)),
        Scenario("ten-turns", "ten turns over the same three images", _turns(pool, chat=False)),
    ]
    if chat:
        found += [
            Scenario(
                "chat-hot-720p", "generated answers, known 720p images", _chat(pool), route=CHAT
            ),
            Scenario("chat-ten-turns", "ten turns, generated", _turns(pool, chat=True), route=CHAT),
        ]
    return [*found, *special_scenarios(pool)]


def special_scenarios(pool: MediaPool) -> list[Scenario]:
    """Return those that show one claim each, at a concurrency of their own."""
    return [
        Scenario(
            "storm",
            "64 requests at once for one unseen image",
            _storm(pool),
            concurrency=(64,),
            num_requests=64,
        ),
        Scenario(
            "heavy",
            "32 misses at once: 4K images and 30 s videos",
            _heavy(pool),
            concurrency=(32,),
            num_requests=32,
            is_about_lag=True,
        ),
    ]


def image_part(data: bytes) -> dict[str, Any]:
    """A content part with a data: URL."""
    return {"type": "image_url", "image_url": {"url": _data_url("image/jpeg", data)}}


def video_part(data: bytes) -> dict[str, Any]:
    """A content part with a data: URL."""
    return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", data)}}


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def request_body(parts: list[dict[str, Any]], payload: str | None, number: int = 0) -> bytes:
    """A request with these parts and a question; None as payload: a streamed answer to it."""
    text = {"type": "text", "text": f"Question {number}: what is shown here?"}
    return _request([{"role": "user", "content": [*parts, text]}], payload)


def _request(messages: list[dict[str, Any]], payload: str | None) -> bytes:
    body: dict[str, Any] = {"messages": messages}
    if payload is None:
        body |= {
            "stream": True,
            "max_tokens": _ANSWER_TOKENS,
            "min_tokens": _ANSWER_TOKENS,
            "temperature": 0,
        }
    else:
        body["mm_payload"] = payload
    return json.dumps(body).encode()


def _text(count: int, seed: int) -> Batch:
    return Batch([request_body([], "none", number) for number in range(count)])


def _hot(
    pool: MediaPool, size: tuple[int, int], payload: str | None, *, processed: bool = True
) -> Callable[[int, int], Batch]:
    """Requests about a few pictures that each came once before.

    Args:
        pool: Where they come from.
        size: Theirs.
        payload: See `request_body`.
        processed: Whether the first request wanted tensors, so that what the processor made of
            them is in the cache; else they are pictures that no other scenario has.
    """

    def build(count: int, seed: int) -> Batch:
        num_pictures = min(count, _POOL if size == _HD else _POOL // 2)
        first = 0 if processed else _POOL
        media = [pool.picture(size, first + number) for number in range(num_pictures)]
        parts = [image_part(data) for data in media]
        # A question that came before, about a picture of that size, would not be tokenized again.
        questions = range(seed * count, (seed + 1) * count)
        bodies = [request_body([parts[n % num_pictures]], payload, n) for n in questions]
        before = "tensors" if processed and payload is not None else payload
        return Batch(bodies, [request_body([part], before) for part in parts], media[:1])

    return build


def _chat(pool: MediaPool) -> Callable[[int, int], Batch]:
    return _hot(pool, _HD, None)


def _unique(pool: MediaPool, num_images: int) -> Callable[[int, int], Batch]:
    def build(count: int, seed: int) -> Batch:
        media = [pool.picture(_HD, _fresh(seed, number)) for number in range(count)]
        bodies = [request_body([image_part(data)], "tensors", n) for n, data in enumerate(media)]
        return Batch(bodies, media=media[:1])

    return build


def _four(pool: MediaPool) -> Callable[[int, int], Batch]:
    def build(count: int, seed: int) -> Batch:
        groups = [
            [pool.picture(_HD, _fresh(seed, 4 * number + k)) for k in range(4)]
            for number in range(count)
        ]
        bodies = [
            request_body([image_part(data) for data in group], "none", n)
            for n, group in enumerate(groups)
        ]
        return Batch(bodies, media=groups[0])

    return build


def _video(pool: MediaPool, *, primed: bool = False) -> Callable[[int, int], Batch]:
    def build(count: int, seed: int) -> Batch:
        num_clips = min(count, _POOL)
        # Cold clips are new in each measurement; each is sent once.
        base = 0 if primed else _fresh(seed, 0)
        media = [
            pool.clip(2, (854, 480), base + number)
            for number in range(num_clips if primed else count)
        ]
        parts = [video_part(data) for data in media]
        bodies = [request_body([parts[n % len(parts)]], "tensors", n) for n in range(count)]
        prime = [request_body([part], "tensors") for part in parts] if primed else []
        return Batch(bodies, prime, media[:1])

    return build


def _turns(pool: MediaPool, *, chat: bool) -> Callable[[int, int], Batch]:
    payload = None if chat else "none"

    def build(count: int, seed: int) -> Batch:
        bodies = []
        media: list[bytes] = []
        for conversation in range(-(-count // _TURNS)):
            media = [pool.picture(_HD, _fresh(seed, 3 * conversation + k)) for k in range(3)]
            question = {"type": "text", "text": "Compare these pictures."}
            content = [*(image_part(data) for data in media), question]
            messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
            for turn in range(_TURNS):
                bodies.append(_request(messages, payload))
                messages = [
                    *messages,
                    {"role": "assistant", "content": f"Answer {turn}. " * 20},
                    {"role": "user", "content": f"And what about detail {turn}?"},
                ]
        return Batch(bodies[:count], media=media)

    return build


def _storm(pool: MediaPool) -> Callable[[int, int], Batch]:
    def build(count: int, seed: int) -> Batch:
        data = pool.picture(_HD, _fresh(seed, 0))
        return Batch([request_body([image_part(data)], "tensors")] * count, media=[data])

    return build


def _heavy(pool: MediaPool) -> Callable[[int, int], Batch]:
    def build(count: int, seed: int) -> Batch:
        bodies = []
        for number in range(count):
            if number % 4 == 3:
                # One clip made distinct by a box that no decoder reads: each is a miss.
                clip = pool.clip(30, (1280, 720), 0)
                mark = (16).to_bytes(4, "big") + b"free" + _fresh(seed, number).to_bytes(8, "big")
                part = video_part(clip + mark)
            else:
                part = image_part(pool.picture(_4K, _fresh(seed, number)))
            bodies.append(request_body([part], "tensors", number))
        return Batch(bodies)

    return build


def _fresh(seed: int, number: int) -> int:
    """A picture's seed that no other measurement has."""
    return 2 * _POOL + 1000 * (seed + 1) + number
