"""Imports that wait for their first use."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazydecode.server.preloading import deferred

MODULE = "lazydecode_test_heavy"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that can be imported, and leaves a file for each time that it is run."""
    folder = tmp_path / MODULE
    folder.mkdir()
    code = f"with open({str(tmp_path / 'runs')!r}, 'a') as file:\n    file.write('x')\n"
    (folder / "__init__.py").write_text(
        f"{code}VALUE = 7\ndef solve(a, *, b=1):\n    return (a, b)\n"
    )
    (folder / "part.py").write_text("from . import VALUE\nTWICE = 2 * VALUE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in (MODULE, f"{MODULE}.part"):
        sys.modules.pop(name, None)


def runs(tmp_path: Path) -> int:
    path = tmp_path / "runs"
    return len(path.read_text()) if path.exists() else 0


def test_a_function_is_imported_without_running_its_module_and_a_call_runs_it(
    tmp_path: Path,
) -> None:
    names: dict[str, object] = {}
    with deferred(MODULE, "solve"):
        exec(f"from {MODULE} import solve", names)
        assert inspect.getmodule(runs) is sys.modules[__name__]  # looks through all modules
    assert MODULE not in sys.modules
    assert runs(tmp_path) == 0
    solve = names["solve"]
    assert callable(solve)
    assert solve(3, b=4) == (3, 4)
    assert solve(5) == (5, 1)
    assert runs(tmp_path) == 1
    assert sys.modules[MODULE].VALUE == 7


def test_whoever_asks_for_more_gets_the_module_itself(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    with deferred(MODULE, "solve"):
        exec(f"from {MODULE} import solve, VALUE", names)
        assert names["VALUE"] == 7
        exec(f"from {MODULE}.part import TWICE", names)
        assert names["TWICE"] == 14
        real = sys.modules[MODULE]
    assert sys.modules[MODULE] is real
    assert real.__file__ == str(tmp_path / MODULE / "__init__.py")
    assert runs(tmp_path) == 1


def test_its_parts_can_be_imported_inside(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    with deferred(MODULE, "solve"):
        exec(f"import {MODULE}.part", names)
    assert sys.modules[f"{MODULE}.part"].TWICE == 14
    assert runs(tmp_path) == 1


def test_a_module_that_was_run_already_stays(tmp_path: Path) -> None:
    exec(f"import {MODULE}", {})
    real = sys.modules[MODULE]
    with deferred(MODULE, "solve"):
        assert sys.modules[MODULE] is real
    assert sys.modules[MODULE] is real
    assert runs(tmp_path) == 1


def test_a_module_that_is_not_there_stays_so() -> None:
    for missing in ("lazydecode_test_missing", "lazydecode_test_missing.part", f"{MODULE}.none"):
        with deferred(missing, "solve"), pytest.raises(ModuleNotFoundError):
            exec(f"from {missing} import solve", {})
