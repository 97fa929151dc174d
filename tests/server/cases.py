"""The collected fault cases, with their words filled in."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "cases"
MEDIA = FOLDER / "media"
TREE = MEDIA / "k4_tree"

FILES: dict[str, dict[str, Any]] = {
    case["file"]: case for case in json.loads((MEDIA / "cases.json").read_text())["cases"]
}
REQUESTS: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((FOLDER / "requests.json").read_text())["requests"]
}
_TYPES = {
    ".jpg": "image/jpeg", ".png": "image/png", ".gif": "image/gif", ".webp": "image/webp",
    ".avif": "image/avif", ".tif": "image/tiff", ".svg": "image/svg+xml", ".mp4": "video/mp4",
    ".webm": "video/webm", ".avi": "video/x-msvideo", ".mov": "video/quicktime",
    ".wav": "audio/wav", ".mp3": "audio/mpeg", ".ogg": "audio/ogg", ".m4a": "audio/mp4",
}  # fmt: skip


def read(name: str) -> bytes:
    return (MEDIA / name).read_bytes()


def as_data_url(name: str) -> str:
    """A file as a data URL; some files hold one already."""
    if FILES.get(name, {}).get("expected", {}).get("holds") == "data URL":
        return read(name).decode("latin-1").rstrip("\n")
    media_type = _TYPES.get(Path(name).suffix, "application/octet-stream")
    return f"data:{media_type};base64,{base64.b64encode(read(name)).decode()}"


def fill_in(value: Any, **words: str) -> Any:
    """Replace `{dataurl:F}` by the file and `{word}` by what `words` says."""
    if isinstance(value, dict):
        return {key: fill_in(item, **words) for key, item in value.items()}
    if isinstance(value, list):
        return [fill_in(item, **words) for item in value]
    if not isinstance(value, str):
        return value
    if match := re.fullmatch(r"\{dataurl:(.*)\}", value):
        return as_data_url(match[1])
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), value)


def chat_request(case: dict[str, Any], **words: str) -> dict[str, Any]:
    """The chat request of a case whose request is a list of parts."""
    request = dict(case.get("request", case))
    options = {"num_frames": request.pop("num_frames", None), **(request.pop("media_io", {}))}
    options = {name: value for name, value in options.items() if value is not None}
    body = {"messages": [{"role": "user", "content": request.pop("parts")}], **request}
    if options:
        body["media_io_kwargs"] = {"video": options}
    return fill_in(body, **words)


def matches(status: int, expected: str) -> bool:
    """Whether a status is one of the classes and statuses that a case names."""
    return any(
        str(status) == word or (word.endswith("xx") and str(status)[0] == word[0])
        for word in expected.split()
    )
