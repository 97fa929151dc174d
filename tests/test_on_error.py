"""Blocks whose errors become other errors."""

from __future__ import annotations

import pytest

from lazydecode.on_error import OnError


def _as_key_error(exc: BaseException) -> None:
    if isinstance(exc, ValueError):
        raise KeyError("k") from exc


def test_an_error_becomes_another_one_passes_or_never_was() -> None:
    with pytest.raises(KeyError) as caught, OnError(_as_key_error):
        raise ValueError("v")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(OSError, match="o"), OnError(_as_key_error):
        raise OSError("o")
    with OnError(_as_key_error):
        pass
