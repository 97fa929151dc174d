"""The requests of a round, and what the server says of each item."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lazydecode.demo.server import DemoServer

SCHEMES: Final = ("http", "data", "file")
_MEDIA_TYPES: Final = {
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".mp4": "video/mp4",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
}
_QUESTIONS: Final = {
    "image": "What is in the picture?",
    "video": "What happens in the video?",
    "audio": "What does the voice say?",
}
_DECODES: Final = re.compile(r"^lazydecode_decodes_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Item:
    """One media item of the demo and the server that it is sent to."""

    modality: str
    path: Path
    scheme: str
    """http, data or file; or upload, for a recording that is to be written down."""
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its chat request."""

    def url(self, origin: str) -> str:
        """Return the item's URL; `origin` is the host and port that serve its folder."""
        if self.scheme == "http":
            return f"http://{origin}/{self.path.name}"
        if self.scheme == "file":
            return self.path.resolve().as_uri()
        encoded = base64.b64encode(self.path.read_bytes()).decode()
        return f"data:{_MEDIA_TYPES[self.path.suffix]};base64,{encoded}"


@dataclass(frozen=True, slots=True)
class Result:
    """What came back for one item, and the answer."""

    item: Item
    timelines: Sequence[dict[str, Any]]
    """Times in milliseconds of the item; a video with its sound has two, a recording one per
    piece."""
    engine_ms: float
    total_ms: float
    answer: str

    @property
    def hit(self) -> bool:
        """Whether the processor cache held the item, with all that belongs to it."""
        return all(timeline["hit"] is True for timeline in self.timelines)

    @property
    def decoded(self) -> bool:
        """Whether a decoder ran."""
        return any("decode_ms" in timeline for timeline in self.timelines)


def plan_items(media: Mapping[str, Sequence[Path]], models: Mapping[str, str]) -> list[Item]:
    """Return the demo's items: one of each modality by each scheme, then the other ways.

    Args:
        media: Modality -> three files.
        models: Modality or way (`speech`, `sound`, `raw`) -> name of the model.
    """
    items = [
        Item(modality, path, scheme, models[modality])
        for modality, paths in media.items()
        for path, scheme in zip(paths, SCHEMES, strict=True)
    ]
    videos, voices = media["video"], media["audio"]
    with_sound = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    return [
        *items,
        # The sound of a video alone, from the file whose pictures were seen already.
        Item("audio", videos[0], "http", models["audio"]),
        Item("audio", voices[0], "upload", models["speech"]),
        Item("video", videos[1], "http", models["sound"], with_sound),
        Item("video", videos[2], "file", models["raw"]),
    ]


def run_round(
    items: Sequence[Item], servers: dict[str, DemoServer], origin: str, *, max_tokens: int
) -> list[Result]:
    """Send one request per item, one after the other; return what came back."""
    return [
        (_transcribe if item.scheme == "upload" else _ask)(
            item, servers[item.model], origin, max_tokens
        )
        for item in items
    ]


def _ask(item: Item, server: DemoServer, origin: str, max_tokens: int) -> Result:
    kind = f"{item.modality}_url"
    content = [
        {"type": kind, kind: {"url": item.url(origin)}},
        {"type": "text", "text": _QUESTIONS[item.modality]},
    ]
    answer = server.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "timeline": True,
            **item.options,
        },
    )
    return _result(item, answer["timeline"], answer["choices"][0]["message"]["content"])


def _transcribe(item: Item, server: DemoServer, origin: str, max_tokens: int) -> Result:
    answer = server.upload(
        "/v1/audio/transcriptions",
        item.path,
        {"max_completion_tokens": str(max_tokens)},
        headers={"x-lazydecode-timeline": "1"},
    )
    return _result(item, answer["timeline"], answer["text"])


def _result(item: Item, timeline: dict[str, Any], answer: str) -> Result:
    engine_ms = timeline["stages"]["engine_ms"]
    return Result(item, timeline["items"], engine_ms, timeline["total_ms"], answer)


def count_decodes(servers: dict[str, DemoServer]) -> int:
    """Return how many decoder runs the servers' metrics count since they started."""
    texts = (server.get("/metrics") for server in servers.values())
    return int(sum(float(count) for text in texts for count in _DECODES.findall(text)))


def faults(first: Sequence[Result], second: Sequence[Result], second_decodes: int) -> list[str]:
    """Return what the second round should not have done; empty if all is well."""
    found = [f"{r.item.path.name} was not a hit" for r in second if not r.hit]
    found += [f"{r.item.path.name} was decoded again" for r in second if r.decoded]
    if second_decodes:
        found.append(f"the servers' metrics count {second_decodes} decoder runs")
    found += [
        f"{a.item.path.name} got two different answers"
        for a, b in zip(first, second, strict=True)
        if a.answer != b.answer
    ]
    return found
