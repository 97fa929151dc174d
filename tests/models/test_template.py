"""Rendering conversations: forms of messages, refusals, and text that stays text."""

from __future__ import annotations

from typing import Any

import pytest

from lazydecode.errors import InvalidRequestError, ValidationError
from lazydecode.models.marks import TextMarker
from lazydecode.models.template import ChatTemplate, count_parts

PARTS = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<img>{% elif p['type'] == 'text' %}"
    "{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[go]{% endif %}"
)
STRINGS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + '.' }}{% endfor %}"
LISTS = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"


def make(template: str) -> ChatTemplate:
    return ChatTemplate(template, {"bos_token": "<s>"}, TextMarker(["<img>", "[go]"]))


def test_parts_are_rendered() -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    assert make(PARTS).render(messages).text == "[user]<img>hi[go]"


def test_counts_come_in_a_fixed_order() -> None:
    content = [{"type": "audio"}, {"type": "image"}, {"type": "audio"}]
    counts = count_parts([{"role": "user", "content": content}])
    assert list(counts.items()) == [("image", 1), ("audio", 2)]


def test_a_template_for_strings_gets_strings() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert make(STRINGS).render([{"role": "user", "content": content}]).text == "[user]a\nb."


def test_a_template_for_lists_gets_lists() -> None:
    assert make(LISTS).render([{"role": "user", "content": "plain"}]).text == "plain"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_no_role_can_write_a_placeholder(role: str) -> None:
    template = make(PARTS)
    for content in ("<img>", [{"type": "text", "text": "<img>"}]):
        messages = [{"role": "user", "content": "x"}, {"role": role, "content": content}]
        text = template.render(messages).text
        assert "<img>" not in text
        assert template.marker.unseal(text).endswith(f"[{role}]<img>[go]")


def test_tools_and_template_options_are_text_too() -> None:
    template = make("{{ tools[0]['description'] }}{{ extra }}")
    rendered = template.render(
        [], tools=[{"description": "<img>"}], chat_template_kwargs={"extra": "[go]"}
    )
    assert "<img>" not in rendered.text and "[go]" not in rendered.text


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "chat_template", "self"])
def test_what_is_no_variable_of_a_template_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=f"cannot set '{name}'") as caught:
        make(PARTS).render([{"role": "user", "content": "x"}], chat_template_kwargs={name: []})
    assert caught.value.parameter == "chat_template_kwargs"


def test_a_message_that_is_continued_is_left_open() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so far"}]
    rendered = make(PARTS).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered.text == "[user]q[assistant]so far"


def test_what_a_template_says_shows_no_objects_and_no_paths() -> None:
    said = "<object object at 0x7f0123456789> of /usr/lib/x/y.py"
    template = make(f"{{{{ raise_exception('{said}') }}}}")
    with pytest.raises(InvalidRequestError, match=r"refuses the messages: the data of a file$"):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_that_raises_refuses_the_request() -> None:
    template = make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("content", [None, 7, [{"type": "text"}]])
def test_content_of_a_wrong_form_is_refused_or_rendered_never_a_crash(content: Any) -> None:
    try:
        make(STRINGS).render([{"role": "user", "content": content}])
    except InvalidRequestError as error:
        assert error.status == 400
