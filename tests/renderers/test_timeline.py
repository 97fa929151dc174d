from __future__ import annotations

import pytest

from lazydecode.renderers.timeline import Timeline


def test_stages_add_up_and_items_are_kept_in_order_of_first_use() -> None:
    timeline = Timeline()
    timeline.item("image", 0).add("fetch", 0.25)
    timeline.record_item("image", 1, "lookup", 0.5, hit=True)
    timeline.record_item("image", 0, "decode", 1.0, shared=True)
    timeline.add("phase1", 0.125)
    timeline.add("phase1", 0.125)
    form = timeline.to_dict()
    assert form["stages"] == {"phase1_ms": 250.0}
    assert form["items"] == [
        {
            "modality": "image", "index": 0, "bytes": 0, "hit": None, "shared": True,
            "fetch_ms": 250.0, "decode_ms": 1000.0,
        },
        {
            "modality": "image", "index": 1, "bytes": 0, "hit": True, "shared": False,
            "lookup_ms": 500.0,
        },
    ]  # fmt: skip


def test_a_failing_stage_is_counted() -> None:
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.stage("template"):
        raise KeyError
    assert "template" in timeline.seconds


def test_the_header_names_items_by_modality_and_index() -> None:
    timeline = Timeline()
    timeline.add("template", 0.0015)
    timeline.record_item("video", 0, "lookup", 0.001, hit=False)
    header = timeline.server_timing()
    assert header.startswith('template;dur=1.5, video0;desc="miss", video0-lookup;dur=1.0, total;')
