"""A template run by ourselves gives what transformers' own function gives for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils

from lazydecode.models.jinja import JinjaTemplate
from lazydecode.models.marks import TextMarker

TEMPLATE = """
{%- set seen = namespace(image=0) -%}
{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}D{% endif %}
{%- for message in messages -%}
{%- if message['role'] == 'skipped' %}{% continue %}{% endif -%}
[{{ message['role'] }}]
{%- if message['reasoning_content'] is defined %}({{ message['reasoning_content'] }}){% endif -%}
{%- if message['thinking'] is defined %}<{{ message['thinking'] }}>{% endif -%}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{% if part['type'] == 'image' -%}
{% set seen.image = seen.image + 1 %}<img{{ seen.image }}>{% else %}{{ part['text'] | trim }}
{%- endif %}{% endfor %}{% endif -%}
{%- endfor -%}
{{ mood | default('calm') }}{{ range(3) | list }}{{ dict(a=1) }}
{%- if add_generation_prompt %}[go]{% endif -%}
"""
USER = {
    "role": "user",
    "content": [{"type": "image"}, {"type": "text", "text": " hé "}, {"type": "image"}],
}
ANSWER = {"role": "assistant", "content": "so far"}
THOUGHT = {"role": "assistant", "content": "so", "reasoning": "why"}


def theirs(source: str, messages: list[Any], variables: dict[str, Any], **options: Any) -> str:
    rendered, _ = chat_template_utils.render_jinja_template(
        conversations=[messages], chat_template=source, **options, **variables
    )
    return str(rendered[0])


@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "tools": [{"type": "function", "n": 1.5}]},
        {"add_generation_prompt": True, "documents": [{"title": "t", "text": "x"}]},
    ],
)
@pytest.mark.parametrize("last", [ANSWER, THOUGHT])
def test_the_text_is_that_of_transformers(options: dict[str, Any], last: dict[str, Any]) -> None:
    messages = [{"role": "skipped", "content": "x"}, USER, last]
    own_range = TEMPLATE.replace("range(3)", "range")
    cases: list[tuple[str, dict[str, Any]]] = [
        (TEMPLATE, {"bos_token": "<s>"}),
        (own_range, {"bos_token": "<s>", "mood": "glad", "range": [4, 5], "unused": None}),
    ]
    for source, variables in cases:
        ours = JinjaTemplate(source).render(messages, variables=variables, **options)
        assert ours == theirs(source, messages, variables, **options)
        assert "<img2>" in ours


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages.append(1) }}",
        "{{ missing.name }}",
        "{% if %}",
        "{{ 1 / 0 }}",
    ],
)
def test_the_error_is_that_of_transformers(source: str) -> None:
    with pytest.raises(Exception) as expected:
        theirs(source, [USER], {})
    with pytest.raises(type(expected.value)) as caught:
        JinjaTemplate(source).render([USER], variables={})
    assert str(caught.value) == str(expected.value)


def test_a_usual_conversation_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = theirs(TEMPLATE, [USER], {}, add_generation_prompt=True)
    monkeypatch.delattr(chat_template_utils, "render_jinja_template")
    assert JinjaTemplate(TEMPLATE).render([USER], variables={}) == expected


def test_a_library_that_hides_how_it_compiles_renders_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = JinjaTemplate(TEMPLATE).render([USER], variables={})
    compile_template = chat_template_utils._compile_jinja_template
    monkeypatch.delattr(chat_template_utils, "_compile_jinja_template")

    def render(conversations: list[Any], *, chat_template: str, **names: Any) -> Any:
        del names["continue_final_message"]
        return [compile_template(chat_template).render(messages=conversations[0], **names)], []

    monkeypatch.setattr(chat_template_utils, "render_jinja_template", render)
    assert JinjaTemplate(TEMPLATE).render([USER], variables={}) == expected


class Name(str):
    """A text that can do more."""

    def leak(self) -> str:
        return "leaked"


class Thing:
    def leak(self) -> str:
        return "leaked"


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (Name("a"), "a"),
        ({Name("a"): (Name("b"), np.float32(0.5))}, {"a": ["b", 0.5]}),
        (np.bool_(False), False),
        (Thing(), "<Thing>"),
        (None, None),
    ],
)
def test_templates_see_nothing_that_can_be_called(value: Any, seen: Any) -> None:
    marked = TextMarker(["<x>"]).mark(value)
    assert marked == seen
    assert type(marked) is type(seen)
