"""Where the time of the last requests went, as spans, a trace and a page."""

from __future__ import annotations

import os

from lazydecode.renderers.timeline import Timeline
from lazydecode.server.recent import FinishedRequest, RecentRequests, trace_events, write_page
from tests.builders import make_jpeg
from tests.server.harness import Server, data_url, image, request, text


def finished(name: str = "r") -> FinishedRequest:
    """Ten seconds; a fetch of two that ended at three, and three stages told of at nine."""
    timeline = Timeline(started=100.0)
    timeline.seconds, timeline.noted = {"template": 1.0}, {"template": 102.0}
    item = timeline.item("image", 0)
    item.seconds = {"fetch": 2.0, "decode_wait": 0.5, "decode": 3.0, "process": 1.0}
    item.noted = {"fetch": 103.0, "decode_wait": 109.0, "decode": 109.0, "process": 109.0}
    item.hit = False
    return FinishedRequest(name, "render", 200, 10.0, timeline, ended=1000.0)


def test_stages_lie_where_they_were() -> None:
    spans = [(span.lane, span.stage, span.start_s, span.seconds) for span in finished().spans()]
    assert spans == [
        ("request", "template", 1.0, 1.0),
        ("image 0", "fetch", 1.0, 2.0),
        ("image 0", "decode_wait", 4.5, 0.5),
        ("image 0", "decode", 5.0, 3.0),
        ("image 0", "process", 8.0, 1.0),
    ]


def test_a_trace_has_a_lane_for_each_item() -> None:
    events = trace_events([finished()])["traceEvents"]
    assert (events[0]["name"], events[0]["ts"], events[0]["dur"]) == ("r", 990e6, 10e6)
    assert [(e["name"], e["ts"], e["tid"]) for e in events[1:3]] == [
        ("template", 991e6, 0),
        ("fetch", 991e6, 1),
    ]


def test_the_oldest_makes_room_and_names_are_text() -> None:
    recent = RecentRequests(2)
    for name in ("a", "b", "<b>"):
        recent.add(finished(name))
    assert [kept.request_id for kept in recent] == ["b", "<b>"]
    page = write_page(tuple(recent))
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert page.index("&lt;b&gt;") < page.index(", b</h2>")
    assert "left:50.00%;width:30.00%" in page and "image 0, miss" in page
    none = RecentRequests(0)
    none.add(finished())
    assert list(none) == []


def test_the_last_requests_are_a_page_and_a_trace(render_server: Server) -> None:
    name = os.urandom(8).hex()
    body = request(image(data_url(make_jpeg() + os.urandom(8))), text())
    assert render_server.render(body, headers={"x-request-id": name}).status_code == 200
    (kept,) = [r for r in render_server.get("/timeline.json").json() if r["request_id"] == name]
    assert (kept["route"], kept["status"]) == ("render", 200)
    stages = {span["stage"] for span in kept["spans"] if span["lane"] == "image 0"}
    assert {"digest", "lookup", "decode", "process"} <= stages
    for span in kept["spans"]:
        assert 0 <= span["start_ms"] <= span["start_ms"] + span["duration_ms"]
        assert span["start_ms"] + span["duration_ms"] <= kept["total_ms"] + 1
    trace = render_server.get("/timeline.json?form=trace").json()
    assert any(event["args"].get("request") == name for event in trace["traceEvents"])
    page = render_server.get("/timeline")
    assert page.headers["content-type"].startswith("text/html") and name in page.text
    assert render_server.get("/timeline.json?form=xml").status_code == 400
