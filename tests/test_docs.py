"""The reference pages say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def _load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["settings.md", "errors.md", "metrics.md", "coverage.md"])
def test_a_generated_page_is_what_the_code_says(page: str) -> None:
    generator = _load_generator()
    written = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert written == generator.PAGES[page](), "run python docs/generate.py"


def test_every_statement_of_the_design_names_code_and_tests_that_exist() -> None:
    statements = _load_generator().read_statements()
    assert len(statements) > 60
    assert [problem for statement in statements for problem in statement.problems()] == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"code": ("lazydecode.media.base:MediaRef.jump",)}, "no such code"),
        ({"code": ("lazydecode.media.nothing",)}, "no such code"),
        ({"tests": ("tests/test_docs.py::test_of_tomorrow",)}, "no such test"),
        ({"tests": ("tests/test_docs.py::_load_generator",)}, "no such test"),
        ({"tests": ("tests/test_nothing.py::test_it",)}, "no such test"),
        ({"tests": ()}, "a word on what is missing"),
        ({"missing": "all of it"}, "a word on what is missing"),
        ({"code": ()}, "no code is named"),
        ({}, ""),
    ],
)
def test_a_statement_that_cannot_be_believed_is_told(fields: dict[str, Any], problem: str) -> None:
    row = {
        "section": "Docs",
        "says": "It is so.",
        "code": ("lazydecode.media.base:MediaRef.decode", "lazydecode.media"),
        "tests": ("tests/test_docs.py::test_every_page_is_in_the_navigation",),
        "missing": "",
    }
    problems = _load_generator().Statement(**{**row, **fields}).problems()
    assert len(problems) == (1 if problem else 0)
    assert all(problem in found for found in problems)


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert len(pages) > 8
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert str(page.relative_to(ROOT / "docs")) in navigation
