"""Writing the prompt of a request: on the event loop if it is short, else on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.template import RenderedPrompt
from lazydecode.renderers.chat import Conversation
from lazydecode.renderers.text_size import check_text_size, text_size
from lazydecode.renderers.timeline import Timeline

_T = TypeVar("_T")
_THREADS: Final = 2
_QUICK_CHARS: Final = 1024
"""Longest text that is tokenized on the event loop: some 0.3 ms. Templates may write more than a
conversation has."""


@dataclass(slots=True)
class RenderRequest:
    """What of a chat request matters for rendering."""

    request_id: str
    conversation: Conversation
    prompt_token_ids: list[int] | None = None
    """The prompt, with one placeholder per item; None: it is written from the conversation."""
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Modality -> decode options of this request."""
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None
    skip_mm_cache: bool = False
    """Whether the processor caches are passed by: nothing is read from them, nothing stored."""


class PromptWriter:
    """Runs a model's template and tokenizer.

    Args:
        frontend: The model's.
        max_chars: Longest text of a request, and most token ids that come in its place.
    """

    def __init__(self, frontend: ModelFrontend, *, max_chars: int) -> None:
        self._frontend = frontend
        self._max_chars = max_chars
        self._threads = ThreadPoolExecutor(_THREADS, "lazydecode-tokenize")

    def write_at_once(self, request: RenderRequest, timeline: Timeline) -> str | list[int] | None:
        """The prompt of a request with items, if it takes a fraction of a ms; None: see `write`.

        Raises:
            LazyDecodeError: If the model refuses the conversation.
        """
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        if not self._is_quick(request):
            return None
        with timeline.stage("template"):
            return self._write(request).prompt

    async def write(self, request: RenderRequest, timeline: Timeline) -> str | list[int]:
        """The text with placeholders, or token ids if there are no media to be put into it.

        Raises:
            LazyDecodeError: If there is too much text, or the model refuses the conversation.
        """
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        with timeline.stage("template"):
            if not self._is_quick(request):
                return await self.on_thread(lambda: self._write_long(request))
            rendered = self._write(request)
            if request.conversation.has_items or len(rendered.text) <= _QUICK_CHARS:
                return self._finish(request, rendered)
            return await self.on_thread(lambda: self._finish(request, rendered))

    def check_text(self, text: str, *, parameter: str) -> None:
        """Refuse a text that is too long to be tokenized.

        Raises:
            ValidationError: If it is.
        """
        check_text_size(len(text), self._max_chars, parameter=parameter)

    def check_token_count(self, token_ids: Sequence[int], *, parameter: str) -> None:
        """Refuse more token ids than a request may bring.

        Raises:
            ValidationError: If there are more.
        """
        check_text_size(len(token_ids), self._max_chars, parameter=parameter, unit="token ids")

    def _is_quick(self, request: RenderRequest) -> bool:
        """Whether the prompt needs no thread: the event loop writes it in a fraction of a ms."""
        return (
            not request.tools
            and not request.chat_template_kwargs
            and request.conversation.is_short
            and self._frontend.writes_unlocked
        )

    def _write_long(self, request: RenderRequest) -> str | list[int]:
        """Write a prompt of any size, or refuse it for its size."""
        for name, value in (
            ("messages", request.conversation.messages),
            ("tools", request.tools),
            ("chat_template_kwargs", request.chat_template_kwargs),
        ):
            if value:
                size = text_size(value, limit=self._max_chars)
                check_text_size(size, self._max_chars, parameter=name)
        return self._finish(request, self._write(request))

    def _write(self, request: RenderRequest) -> RenderedPrompt:
        return self._frontend.render_chat(
            request.conversation.messages,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )

    def _finish(self, request: RenderRequest, rendered: RenderedPrompt) -> str | list[int]:
        if request.conversation.has_items:
            return rendered.prompt
        return self._frontend.tokenize_prompt(rendered)

    async def on_thread(self, function: Callable[[], _T]) -> _T:
        """Run `function` on a tokenizer thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def shutdown(self) -> None:
        """Take no more prompts; return when the threads are gone."""
        self._threads.shutdown()
