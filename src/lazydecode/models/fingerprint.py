"""What the result of a processor depends on besides the item: part of every cache identity."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any, Final

from lazydecode.models.processor_call import audio_processor_of

RESULT_VERSION: Final = 1
"""Raised whenever our own code makes something else of the same processor output."""

_LIBRARIES: Final = (
    "transformers",
    "tokenizers",
    "torch",
    "torchvision",
    "numpy",
    "pillow",
    "pillow-heif",
    "av",
    "torchcodec",
    "soundfile",
    "soxr",
)


def describe_processor(
    processor: Any,
    *,
    options: Mapping[str, Any],
    texts: Mapping[str, str],
    raw_pixels: bool,
) -> dict[str, Any]:
    """Return everything that tells one processor's results from another's, as JSON values.

    Args:
        processor: The model's processor.
        options: Options of every call.
        texts: Modality -> prompt of one item alone.
        raw_pixels: Whether pixels are handed over as uint8 where that is exact.
    """
    parts: dict[str, Any] = {}
    for name in ("image_processor", "video_processor"):
        part = getattr(processor, name, None)
        if part is not None:
            parts[name] = _describe_part(part)
    audio = audio_processor_of(processor)
    if audio is not None:
        parts["audio_processor"] = _describe_part(audio)
    tokenizer = getattr(processor, "tokenizer", None)
    return {
        "version": RESULT_VERSION,
        "class": _class_name(processor),
        "own": _own_settings(processor),
        "parts": parts,
        "tokenizer": {"class": _class_name(tokenizer), "size": _size(tokenizer)},
        "options": json.loads(json.dumps(dict(options), sort_keys=True, default=str)),
        "texts": dict(texts),
        "raw_pixels": raw_pixels,
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }


def fingerprint(description: Mapping[str, Any]) -> str:
    """Return 32 hex digits that stand for a description."""
    canonical = json.dumps(description, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _describe_part(part: Any) -> dict[str, Any]:
    to_dict = getattr(part, "to_dict", None)
    settings = to_dict() if callable(to_dict) else vars(part)
    return {
        "class": _class_name(part),
        "backend": getattr(part, "backend", None),
        "settings": json.loads(json.dumps(settings, sort_keys=True, default=repr_without_address)),
    }


def _own_settings(processor: Any) -> dict[str, Any]:
    plain = (str, int, float, bool, list, dict, tuple, type(None))
    settings = {k: v for k, v in vars(processor).items() if isinstance(v, plain)}
    settings.pop("chat_template", None)
    own: dict[str, Any] = json.loads(
        json.dumps(settings, sort_keys=True, default=repr_without_address)
    )
    return own


def repr_without_address(value: object) -> str:
    """Return what a value is, the same in every process."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        flat = hashlib.sha256(repr(getattr(value, "tolist", list)()).encode()).hexdigest()
        return f"{type(value).__name__}{tuple(shape)}:{flat[:16]}"
    text = repr(value)
    return _class_name(value) if " at 0x" in text else text


def _class_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _size(tokenizer: Any) -> int:
    try:
        return len(tokenizer)
    except TypeError:
        return 0


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
