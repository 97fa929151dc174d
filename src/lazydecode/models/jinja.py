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


class JinjaTemplate:
    """One template. Threads share it.

    Args:
        source: Jinja source.
    """

    def __init__(self, source: str) -> None:
        from transformers.utils import chat_template_utils

        self._source = source
        self._library = chat_template_utils
        self._compiled: Any = None
        self._globals: dict[str, Any] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return what the template makes of a conversation.

        Args:
            messages: Of JSON's types and no others, as all that follows.
            variables: Further names for the template.
            tools: Descriptions of tools; None: there are none.
            documents: What the answer is to go by; None: there are none.
            add_generation_prompt: Whether the answer's header comes last.
            continue_final_message: Whether the last message is left open.

        Raises:
            Exception: Of any kind: a template is a program.
        """
        is_usual = tools is None and documents is None and not continue_final_message
        if not (is_usual and all(map(_REASONING.isdisjoint, messages)) and self._compile()):
            rendered, _ = self._library.render_jinja_template(
                conversations=[messages],
                tools=tools,
                documents=documents,
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            return str(rendered[0])
        names = {
            **self._globals,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        # As the template's own `render` does, but for the names: it looks each up in two tables.
        context = self._compiled.new_context(names, shared=True)
        return "".join(self._compiled.root_render_func(context))

    def _compile(self) -> bool:
        """Have the template as transformers compiles it; False if it does not say how."""
        if self._compiled is None:
            compile_template = getattr(self._library, "_compile_jinja_template", None)
            if compile_template is None:
                return False
            compiled = compile_template(self._source)
            self._globals = dict(compiled.globals)
            self._compiled = compiled
        return True
