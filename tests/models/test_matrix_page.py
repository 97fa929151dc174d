"""The page about models says what the matrix found, and nothing is missing from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lazydecode.models.registry import MODEL_FAMILY_REGISTRY
from lazydecode.tiny_models import FAMILIES
from tests.models.matrix_page import NOT_SERVED, is_good, is_served, page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def results() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))
    return found


def test_the_page_is_what_the_results_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(results())


def test_the_page_has_every_family_and_no_other() -> None:
    assert {r["family"] for r in results()} == set(FAMILIES)


def test_the_page_has_each_familys_modalities_and_record() -> None:
    for result in results():
        family = FAMILIES[result["family"]]
        if is_served(result):
            assert set(result["modalities"]) == set(family.modalities), family.name
        else:
            assert family.name in NOT_SERVED
        if family.processor is not None and is_served(result):
            has_record = MODEL_FAMILY_REGISTRY.find(family.processor) is not None
            assert result["has_record"] == has_record, family.name


def test_nearly_all_families_need_no_code_of_their_own() -> None:
    assert all(is_good(r) for r in results())
    assert sum(1 for r in results() if is_served(r) and not r["has_record"]) >= 70
