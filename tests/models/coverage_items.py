"""What families are compared on: conversations, items of all sizes, and encoded items."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from typing import Any

from lazydecode.media.base import MediaRef
from lazydecode.models.frontend import ModelFrontend
from tests.builders import make_wav
from tests.builders_video import make_video
from tests.models.reference import clip, picture, sound

IMAGE_SIZES = (
    (28, 28), (56, 56), (100, 75), (224, 224), (336, 252), (50, 1500),
    (1500, 50), (640, 480), (777, 1333), (1024, 768), (1920, 1080), (3840, 2160),
)  # fmt: skip
VIDEO_SHAPES = (
    (4, 112, 112), (8, 168, 112), (5, 112, 224), (16, 224, 168), (2, 336, 252), (12, 448, 252),
)  # fmt: skip
ODD_SIZES = ((1, 1), (2, 1), (700, 1), (1, 700), (900, 3), (3, 2))
ODD_SHAPES = ((1, 1, 1), (2, 300, 1), (4, 300, 3), (2, 3, 300), (1, 64, 2))
ODD_SAMPLES = (1, 20, 160)
AUDIO_SECONDS = (0.2, 0.5, 1.0, 3.3, 10.0, 29.99, 31.0, 65.0)

Conversation = tuple[str, list[dict[str, Any]], dict[str, list[Any]]]


def conversations(frontend: ModelFrontend, rate: int) -> Iterator[Conversation]:
    """Yield (name, messages, items): mixed, several turns, twice the same, different sizes."""
    modalities = list(frontend.modalities)
    several = [m for m in modalities if frontend.max_items[m] is None]
    order = [*modalities, *several[:1]]
    yield "mixed", [user_message(order)], items_of(order, rate)
    if several:
        first = several[0]
        turns = [
            {"role": "user", "content": [{"type": first}, text_part("What is it?")]},
            {"role": "assistant", "content": [text_part("A thing.")]},
            {"role": "user", "content": [text_part("And this\n"), {"type": first}]},
        ]
        yield "turns", turns, items_of([first, first], rate)
        twice = items_of([first], rate)[first] * 2
        yield "twice", [user_message([first, first], between="")], {first: twice}
    for modality in several:
        yield f"sizes-{modality}", [user_message([modality] * 3)], items_of([modality] * 3, rate)
    for modality in modalities:
        yield f"one-{modality}", [user_message([modality])], items_of([modality], rate)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user_message(order: Sequence[str], between: str = " part {n}:\n") -> dict[str, Any]:
    content: list[dict[str, str]] = []
    for number, modality in enumerate(order):
        if between:
            content.append(text_part(between.format(n=number)))
        content.append({"type": modality})
    return {"role": "user", "content": [*content, text_part("What now?")]}


def message_of(frontend: ModelFrontend, order: Sequence[str]) -> dict[str, Any]:
    """A user message of these items with text between them, where the model takes both."""
    if is_either_or(frontend):
        return {"role": "user", "content": [{"type": modality} for modality in order]}
    return user_message(order)


def is_either_or(frontend: ModelFrontend) -> bool:
    """Whether the model takes a text or an item, never both."""
    return frontend.findings is not None and frontend.findings.proof.mode == "either_or"


def items_of(order: Sequence[str], rate: int, *, same_size: bool = False) -> dict[str, list[Any]]:
    """One item per entry; sizes differ within a modality unless asked otherwise."""
    sizes = ((300, 200), (112, 140), (420, 90))
    shapes = ((4, 112, 112), (6, 168, 112), (4, 112, 168))
    seconds = (1.3, 0.6, 2.1)
    items: dict[str, list[Any]] = {}
    for modality in order:
        group = items.setdefault(modality, [])
        number = 0 if same_size else len(group)
        seed = len(group)
        if modality == "image":
            group.append(picture(*sizes[number], seed=seed))
        elif modality == "video":
            group.append(clip(*shapes[number]))
        else:
            group.append(sound(seconds[number], rate, seed=seed))
    return items


def sized(modality: str, rate: int, *, family: str, thorough: bool) -> Iterator[Any]:
    """Yield items of all sizes, or of a few that the family's name chooses.

    The families together have all sizes either way; what takes long comes less often.
    """
    chance = random.Random(f"{family} {modality}")
    if modality == "image":
        few = chance.sample(IMAGE_SIZES[:-2], 4)
        if chance.random() < 0.15:
            few.append(chance.choice(IMAGE_SIZES[-2:]))
        yield from (picture(*size) for size in (IMAGE_SIZES if thorough else few))
    elif modality == "video":
        shapes = VIDEO_SHAPES if thorough else chance.sample(VIDEO_SHAPES, 2)
        yield from (clip(*shape) for shape in shapes)
    else:
        some = [*chance.sample(AUDIO_SECONDS[:4], 2), chance.choice(AUDIO_SECONDS[4:])]
        yield from (sound(seconds, rate) for seconds in (AUDIO_SECONDS if thorough else some))


def odd(modality: str, rate: int, *, family: str, thorough: bool) -> Iterator[Any]:
    """Yield items that are tiny or all length, or one or two that the family's name chooses."""
    chance = random.Random(f"odd {family} {modality}")
    if modality == "image":
        sizes = ODD_SIZES if thorough else chance.sample(ODD_SIZES, 2)
        yield from (picture(*size) for size in sizes)
    elif modality == "video":
        shapes = ODD_SHAPES if thorough else [chance.choice(ODD_SHAPES)]
        yield from (clip(*shape) for shape in shapes)
    else:
        counts = ODD_SAMPLES if thorough else [chance.choice(ODD_SAMPLES)]
        yield from (sound((count + 0.5) / rate, rate) for count in counts)


def encoded(
    frontend: ModelFrontend, rate: int, *, first: int = 0
) -> dict[str, list[MediaRef[Any]]]:
    """One encoded item of each modality, as a request brings them; nothing is decoded.

    Args:
        frontend: The model, whose own decoders the items go to.
        rate: Sampling rate in Hz.
        first: Number of the item: other numbers are other items, of other sizes.
    """
    refs: dict[str, list[MediaRef[Any]]] = {}
    for modality in frontend.modalities:
        media_io = frontend.info.get_media_io(modality, {"video": {"num_frames": 4}})
        if modality == "image":
            buffer = io.BytesIO()
            picture(300 - 60 * first, 200, seed=first).save(buffer, "PNG")
            data = buffer.getvalue()
        elif modality == "video":
            data = make_video(12 + 4 * first, 6, (168, 112))
        else:
            data = make_wav(sound(1.3 - 0.4 * first, rate, seed=first)[:, None], rate=rate)
        refs[modality] = [media_io.load_bytes_ref(data)]
    return refs
