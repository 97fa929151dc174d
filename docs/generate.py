"""Write the reference pages that repeat what the code says: settings, errors, metrics.

python docs/generate.py           write them
python docs/generate.py --check   exit 1 if one is not what the code says
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from lazydecode import errors
from lazydecode.config import Settings
from lazydecode.server.metrics import Metrics

REFERENCE = Path(__file__).parent / "reference"
_NOTE = "<!-- Written by docs/generate.py. -->\n\n"


def settings_page() -> str:
    """One row per field of `Settings`."""
    rows = ["| Flag | Environment | Default | Meaning |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            flag += "` / `--no-" + name.replace("_", "-")
        default: Any = field.get_default(call_default_factory=True)
        if default in (None, (), {}):
            shown = "none"
        elif isinstance(default, bool):
            shown = "on" if default else "off"
        else:
            shown = f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{flag}` | `LAZYDECODE_{name.upper()}` | {shown} | {meaning} |")
    return (
        "# Settings\n\n"
        + _NOTE
        + "Each setting is a flag of `lazydecode serve`, an environment variable and a key of the\n"
        "TOML or JSON file that `--config` names; the flag wins over the environment, and that\n"
        "over the file.\n\n" + "\n".join(rows) + "\n"
    )


def errors_page() -> str:
    """The error object, and one row per class."""
    rows = ["| Status | Class | `type` | Retry helps | When |", "| --- | --- | --- | --- | --- |"]
    classes = [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.LazyDecodeError) and cls.__module__ == errors.__name__
    ]
    for cls in sorted(classes, key=lambda cls: (cls.status, cls.__name__)):
        when = (inspect.getdoc(cls) or "").split("\n", 1)[0].replace("|", "\\|")
        retry = "yes" if cls.retryable else "no"
        rows.append(f"| {cls.status} | `{cls.__name__}` | `{cls.error_type}` | {retry} | {when} |")
    return (
        "# Errors\n\n"
        + _NOTE
        + "Every error is OpenAI's error object. `modality` and `index` count as the client does:\n"
        "items of one modality, in message order, from 0. Retryable errors carry `Retry-After`.\n"
        "A message never shows credentials, a URL's query or a local path; a 500 names the\n"
        "request id only, and the server's log has the rest.\n\n"
        "```json\n"
        '{"error": {"message": "Failed to decode image media at index 1: …",\n'
        '           "type": "UnprocessableEntityError", "param": null, "code": 422,\n'
        '           "request_id": "…", "retryable": false, "modality": "image", "index": 1}}\n'
        "```\n\n"
        "In the library the same classes are raised; those for bad values are `ValueError`s.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def metrics_page() -> str:
    """One row per metric of the server."""
    rows = ["| Metric | Kind | Labels | Meaning |", "| --- | --- | --- | --- |"]
    for metric in vars(Metrics()).values():
        if not hasattr(metric, "_documentation"):
            continue
        name = metric._name + ("_total" if isinstance(metric, Counter) else "")
        labels = ", ".join(f"`{label}`" for label in metric._labelnames) or "none"
        kind = type(metric).__name__.lower()
        rows.append(f"| `{name}` | {kind} | {labels} | {metric._documentation} |")
    return (
        "# Metrics\n\n"
        + _NOTE
        + "`GET /metrics` answers in Prometheus' text form. Beside the rows below there are\n"
        "gauges for what is held now: memory budgets, queues, cache entries.\n\n"
        + "\n".join(rows)
        + '\n\nA request that sends `X-Lazydecode-Timeline: 1`, or `"timeline": true` in its\n'
        "body, gets its own timeline in a `Server-Timing` header and, per item, in the answer.\n"
    )


PAGES = {"settings.md": settings_page, "errors.md": errors_page, "metrics.md": metrics_page}


def main() -> int:
    """Write or check every page; return the exit status."""
    stale = []
    for name, make in PAGES.items():
        path, text = REFERENCE / name, make()
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run python docs/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
