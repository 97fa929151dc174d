"""Where the time goes."""

from __future__ import annotations

import pytest

from lazydecode.processing.timing import TimingContext


class Notes:
    def __init__(self) -> None:
        self.notes: list[tuple[str, int, str]] = []

    def record_item(
        self, modality: str, index: int, stage: str, seconds: float, **_: object
    ) -> None:
        assert seconds >= 0
        self.notes.append((modality, index, stage))


def test_stages_add_up_also_when_they_fail() -> None:
    timing = TimingContext(True)
    for _ in range(2):
        with timing.record("a"):
            pass
    with pytest.raises(KeyError), timing.record("b"):
        raise KeyError
    assert list(timing.stage_secs) == ["a", "b"]
    assert timing.total_secs == sum(timing.stage_secs.values()) > 0


def test_disabled_it_notes_nothing_but_items() -> None:
    notes = Notes()
    timing = TimingContext(False, observer=notes)
    with timing.record("a"), timing.record_item("image", 3, "digest"):
        pass
    assert timing.stage_secs == {}
    assert notes.notes == [("image", 3, "digest")]
    with TimingContext(False).record_item("image", 3, "digest"):
        pass
