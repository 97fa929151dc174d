"""Write the reference pages that repeat what the code says: settings, errors, metrics, coverage.

python docs/generate.py           write them
python docs/generate.py --check   exit 1 if one is not what the code says
"""

from __future__ import annotations

import ast
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lazydecode import errors
from lazydecode.config import Settings
from lazydecode.server.counters import Counter, Histogram
from lazydecode.server.metrics import Metrics

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
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
        if not isinstance(metric, Counter | Histogram):
            continue
        name = metric.name + ("_total" if isinstance(metric, Counter) else "")
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
        rows.append(f"| `{name}` | {metric.kind} | {labels} | {metric.help_text} |")
    return (
        "# Metrics\n\n"
        + _NOTE
        + "`GET /metrics` answers in Prometheus' text form. Beside the rows below there are\n"
        "gauges for what is held now: memory budgets, queues, cache entries.\n\n"
        + "\n".join(rows)
        + '\n\nA request that sends `X-Lazydecode-Timeline: 1`, or `"timeline": true` in its\n'
        "body, gets its own timeline in a `Server-Timing` header and, per item, in the answer.\n"
    )


class Statement(NamedTuple):
    """One row of `coverage.toml`: something that the design promises."""

    section: str
    says: str
    code: Sequence[str] = ()
    """What keeps it: `module:qualified.name`, or `module`."""
    tests: Sequence[str] = ()
    """What proves it: pytest's node ids, parametrized ones by the name of the function."""
    missing: str = ""
    """What is not there yet, where no test can prove it."""

    def problems(self) -> list[str]:
        """Return what is wrong with the row; nothing if it can be believed."""
        wrong = [f"no such code: {name}" for name in self.code if not _code_exists(name)]
        wrong += [f"no such test: {name}" for name in self.tests if not _test_exists(name)]
        if bool(self.tests) == bool(self.missing):
            wrong.append("it needs tests, or else a word on what is missing")
        if self.tests and not self.code:
            wrong.append("no code is named")
        return [f"{self.says} ({problem})" for problem in wrong]


def read_statements() -> list[Statement]:
    """Return the rows of `coverage.toml`, in order.

    Raises:
        TypeError: If a row has a field of another name, or lacks its text.
    """
    rows = tomllib.loads((ROOT / "docs" / "coverage.toml").read_text(encoding="utf-8"))
    return [
        Statement(section=group["section"], **row)
        for group in rows["group"]
        for row in group["statement"]
    ]


def coverage_page() -> str:
    """One row per statement of the design: what keeps it, and what proves it."""
    statements = read_statements()
    unproven = sum(not any(map(_test_exists, statement.tests)) for statement in statements)
    lines = [
        "# Coverage of the design\n",
        _NOTE + "What the design promises, the code that keeps it, and the tests that prove it.",
        "Modules are below `lazydecode`, tests below `tests/`.\n",
        f"**{len(statements)} statements; {unproven} of them without a test.** Those are marked as",
        "missing.",
    ]
    for section, group in groupby(statements, key=lambda statement: statement.section):
        lines += [f"\n## {section}\n", "| Statement | Code | Tests |", "| --- | --- | --- |"]
        lines += [_coverage_row(statement) for statement in group]
    return "\n".join(lines) + "\n"


def _coverage_row(statement: Statement) -> str:
    code = _cell(statement.code, _code_exists, "lazydecode.")
    tests = _cell(statement.tests, _test_exists, "tests/")
    if statement.missing:
        tests = f"**missing**: {statement.missing}"
    return f"| {statement.says} | {code} | {tests} |".replace("\n", " ")


def _cell(names: Sequence[str], exists: Callable[[str], bool], prefix: str) -> str:
    return "<br>".join(
        f"`{name.removeprefix(prefix)}`" + ("" if exists(name) else " **missing**")
        for name in names
    )


def _code_exists(name: str) -> bool:
    module, _, attribute = name.partition(":")
    base = ROOT / "src" / Path(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return path.is_file() and (not attribute or attribute in _defined(path))


def _test_exists(node_id: str) -> bool:
    file, _, name = node_id.partition("::")
    path = ROOT / file
    return name.lower().startswith("test") and path.is_file() and name in _defined(path)


@cache
def _defined(path: Path) -> frozenset[str]:
    """Return the qualified names of what a module defines itself."""

    def walk(body: Sequence[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (prefix + t.id for t in targets if isinstance(t, ast.Name))

    return frozenset(walk(ast.parse(path.read_bytes()).body, ""))


PAGES = {
    "settings.md": settings_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "coverage.md": coverage_page,
}


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
