"""Requests that no client should send: always an answer, never a 500."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders import make_png
from tests.server.harness import Server, data_url, image, request, text

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Any JSON value."""
FIELDS = st.sampled_from(
    [
        "messages", "model", "max_tokens", "temperature", "stop", "stream", "stream_options",
        "media_io_kwargs", "mm_processor_kwargs", "chat_template_kwargs", "tools", "cache_salt",
        "mm_payload", "logit_bias", "n", "seed", "timeline", "add_generation_prompt",
        "continue_final_message", "metadata", "unknown",
    ]
)  # fmt: skip
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "image_url", "video_url", "input_audio", "x"]) | JUNK,
        "text": JUNK,
        "image_url": JUNK | st.fixed_dictionaries({"url": JUNK | st.text()}),
        "video_url": JUNK | st.fixed_dictionaries({"url": JUNK}),
        "input_audio": JUNK | st.fixed_dictionaries({"data": JUNK, "format": JUNK}),
        "uuid": JUNK,
    },
)
FUZZ = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(server: Server, body: Any) -> None:
    response = server.render(json.dumps(body).encode())
    assert response.status_code in (200, 400, 404, 422), (body, response.text)
    assert response.json()


@FUZZ
@given(changes=st.dictionaries(FIELDS, JUNK, min_size=1, max_size=3))
def test_fields_of_any_value(render_server: Server, changes: dict[str, Any]) -> None:
    picture = image(data_url(make_png(), "image/png"))
    check(render_server, {**request(picture, text()), **changes})


@FUZZ
@given(parts=st.lists(PARTS, max_size=3))
def test_parts_of_any_form(render_server: Server, parts: list[Any]) -> None:
    check(render_server, request(*parts))


@FUZZ
@given(
    options=st.dictionaries(
        st.sampled_from(["image", "video", "audio"]),
        st.dictionaries(
            st.sampled_from(
                ["image_mode", "rgba_background_color", "num_frames", "fps", "video_backend", "x"]
            ),
            JUNK,
            max_size=2,
        ),
    ),
    processor=st.dictionaries(
        st.sampled_from(
            ["min_pixels", "max_pixels", "do_resize", "size", "fps", "patch_size", "y"]
        ),
        JUNK,
        max_size=2,
    ),
)
def test_options_of_any_value(
    render_server: Server, options: dict[str, Any], processor: dict[str, Any]
) -> None:
    picture = image(data_url(make_png(), "image/png"))
    check(
        render_server,
        request(picture, text(), media_io_kwargs=options, mm_processor_kwargs=processor),
    )


@FUZZ
@given(data=st.binary(max_size=300), head=st.booleans())
def test_media_of_any_bytes(render_server: Server, data: bytes, head: bool) -> None:
    payload = make_png()[:60] + data if head else data
    for kind in ("image_url", "video_url"):
        part = {"type": kind, kind: {"url": data_url(payload, "application/octet-stream")}}
        check(render_server, request(part, text()))


@FUZZ
@given(body=st.binary(max_size=60))
def test_bodies_of_any_bytes(render_server: Server, body: bytes) -> None:
    assert render_server.render(body).status_code == 400
