"""Running a chat template as transformers runs it, without the copies that it makes for others.

Its own function takes what any caller has. It builds messages and variables anew from plain types,
and joins the template's global names with them in a slow way; both together take as long as a
short conversation's template. Messages of plain types give the same text without that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_REASONING: Final = frozenset({"reasoning_content", "thinking", "reasoning"})
"""Fields that transformers writes under each other's names, as each template knows one of them."""


def render_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return what a template makes of a conversation.

    Args:
        source: Jinja source. transformers remembers what it compiled.
        messages: Of JSON's types and no others, as all that follows.
        variables: Further names for the template.
        tools: Descriptions of tools; None: there are none.
        documents: What the answer is to go by; None: there are none.
        add_generation_prompt: Whether the answer's header comes last.
        continue_final_message: Whether the last message is left open.

    Raises:
        Exception: Of any kind: a template is a program.
    """
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    is_usual = tools is None and documents is None and not continue_final_message
    if compile_template is None or not (is_usual and all(map(_REASONING.isdisjoint, messages))):
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[messages],
            tools=tools,
            documents=documents,
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return str(rendered[0])
    template = compile_template(source)
    names = {
        **template.environment.globals,
        "messages": messages,
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **variables,
    }
    # As `template.render` does, but for the names: it looks up each global in two tables.
    return "".join(template.root_render_func(template.new_context(names, shared=True)))
