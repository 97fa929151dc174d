"""The case files, as tests read them: `CASES` has each file's entry with its bytes' path."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "media"
REQUESTS = Path(__file__).parent / "requests.json"


@dataclass(frozen=True)
class Case:
    """One file and what must hold for it."""

    file: str
    kind: int
    modality: str
    trap: str
    expected: dict[str, Any]

    @property
    def path(self) -> Path:
        """Where the file is."""
        return FOLDER / self.file

    def read(self) -> bytes:
        """The file's bytes."""
        return self.path.read_bytes()


CASES = [
    Case(**{name: entry.get(name) for name in ("file", "kind", "modality", "trap", "expected")})
    for entry in json.loads((FOLDER / "cases.json").read_text())["cases"]
]


def cases(*kinds: int, modality: str | None = None) -> list[Any]:
    """The cases of some kinds as pytest parameters, named after their files."""
    import pytest

    return [
        pytest.param(case, id=case.file)
        for case in CASES
        if case.kind in kinds and modality in (None, case.modality)
    ]
