"""A conversation to the text of a prompt, by the model's own chat template."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lazydecode.errors import InvalidRequestError, ValidationError
from lazydecode.media.faults import describe
from lazydecode.models.jinja import JinjaTemplate
from lazydecode.models.marks import TextMarker

Message = Mapping[str, Any]
"""A role and a content: a string, or a list of text parts and media parts (type = modality)."""

MODALITIES: Final = ("image", "video", "audio")
_PROBE: Final = "lazydecodeprobe"
_REQUEST_FIELDS: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)
_NOT_VARIABLES: Final = _REQUEST_FIELDS | {
    "chat_template",
    "conversation",
    "conversations",
    "documents",
    "processor_kwargs",
    "return_assistant_tokens_mask",
    "self",
    "tokenize",
}
"""Names that transformers takes for itself: no template can see a value under them."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text of a prompt, with a placeholder per media item."""

    text: str
    """What the template wrote; control tokens that the conversation spells are codes in it."""
    token_ids: list[int] | None = None
    """The prompt as token ids, of a model whose prompts are not written as text; else None."""

    @property
    def prompt(self) -> str | list[int]:
        """What is processed: the text, or token ids with a placeholder per media item."""
        return self.text if self.token_ids is None else self.token_ids


class Chat(Protocol):
    """Writes the prompts of conversations. Threads share it."""

    @property
    def template(self) -> str:
        """What tells one way of writing prompts from another."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RenderedPrompt:
        """Return the prompt of a conversation.

        Raises:
            InvalidRequestError: If the model refuses the conversation.
        """
        ...

    def render_items(self, modalities: Sequence[str]) -> str:
        """Return the prompt of these items and no text."""
        ...


class ChatTemplate:
    """The model's chat template. Immutable after construction; threads share it.

    Args:
        template: Jinja source.
        special_tokens: Names that the template may use, for example `bos_token`.
        marker: Marks control tokens in the conversation.
        processor: The model's processor, if its class may have another template in mind for
            some modalities (SmolVLM has for videos).
    """

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, Any],
        marker: TextMarker,
        *,
        processor: Any = None,
    ) -> None:
        self.template = template
        self._jinja = JinjaTemplate(template)
        self.marker = marker
        self._processor = processor
        self._of_class: frozenset[str] = frozenset()
        self._special_tokens = TextMarker(()).mark(special_tokens)  # of plain types, and no more
        self._takes_text: dict[tuple[str, bool], bool] = {}
        for role in ("system", "user", "assistant", "tool"):
            for as_parts in (False, True):
                self._takes_text[role, as_parts] = self._shows_text(role, as_parts=as_parts)
        if processor is not None and _overrides_rendering(processor):
            self._of_class = frozenset(m for m in MODALITIES if self._differs(m))

    @property
    def takes_parts(self) -> bool:
        """Whether a user message may be a list of parts."""
        return self._takes_text["user", True]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> RenderedPrompt:
        """Return the prompt of a conversation.

        Raises:
            InvalidRequestError: If the template refuses the conversation.
            ValidationError: If `chat_template_kwargs` has a name that is no variable.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other"
            )
        shaped = [self._shape(message) for message in messages]
        for name in _NOT_VARIABLES.intersection(chat_template_kwargs or ()):
            raise ValidationError(
                f"chat_template_kwargs cannot set {name!r}"
                + ("; it is a field of the request" if name in _REQUEST_FIELDS else ""),
                parameter="chat_template_kwargs",
            )
        text = self._run(
            self.marker.mark(shaped),
            tools=self.marker.mark(list(tools)) if tools else None,
            documents=self.marker.mark(list(documents)) if documents else None,
            options=self.marker.mark(chat_template_kwargs) if chat_template_kwargs else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return RenderedPrompt(self.marker.seal(text))

    def render_items(self, modalities: Sequence[str]) -> str:
        """Return the prompt of one user message that holds these items and no text."""
        return self.render([{"role": "user", "content": [{"type": m} for m in modalities]}]).text

    def _run(
        self,
        messages: Any,
        *,
        tools: Any = None,
        documents: Any = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        try:
            if self._of_class and not self._of_class.isdisjoint(count_parts(messages)):
                return self._run_class(
                    messages,
                    tools=tools,
                    documents=documents,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(options or {}),
                )
            return self._jinja.render(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self._special_tokens, **options} if options else self._special_tokens,
            )
        except Exception as exc:
            # A template is a program of the model's; whatever it raises is about these messages.
            raise InvalidRequestError(
                f"the chat template refuses the messages: {describe(exc)}"
            ) from exc

    def _run_class(self, messages: Any, **options: Any) -> str:
        """Render by the class's own method, on a copy: some keep something between calls."""
        processor = copy.copy(self._processor)
        return str(processor.apply_chat_template(messages, tokenize=False, **options))

    def _differs(self, modality: str) -> bool:
        """Whether the class's own method renders items of a modality by another template."""
        for content in (
            [{"type": modality}],
            [{"type": "text", "text": _PROBE}, {"type": modality}],
        ):
            messages = [{"role": "user", "content": content}]
            try:
                plain = self._run(messages)
                if self._run_class(messages, add_generation_prompt=True) != plain:
                    return True
            except Exception:
                # One of them does not know the modality; the probes say so later.
                return False
        return False

    def _shows_text(self, role: str, *, as_parts: bool) -> bool:
        """Whether the template writes the text of a message of this role and form."""
        content: Any = [{"type": "text", "text": _PROBE}] if as_parts else _PROBE
        messages = [{"role": role, "content": content}]
        if role != "user":
            other = [{"type": "text", "text": "x"}] if as_parts else "x"
            user = {"role": "user", "content": other}
            messages = [*messages, user] if role == "system" else [user, *messages]
        try:
            text = self._run(messages, add_generation_prompt=False)
        except InvalidRequestError:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    def _shape(self, message: Message) -> Message:
        """Return the message in a form that the template shows: a string or a list of parts."""
        role = str(message.get("role"))
        content = message.get("content")
        if isinstance(content, str):
            if self._shows(role, False) or not self._shows(role, True):
                return message
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list | tuple):
            if self._shows(role, True) or not self._shows(role, False):
                return message
            if any(_kind(part) != "text" for part in content):
                return message
            return {
                **message,
                "content": "\n".join(
                    str(part.get("text", "") if isinstance(part, Mapping) else part)
                    for part in content
                ),
            }
        return message

    def _shows(self, role: str, as_parts: bool) -> bool:
        return self._takes_text.get((role, as_parts), self._takes_text["user", as_parts])


def _overrides_rendering(processor: Any) -> bool:
    from transformers import ProcessorMixin

    own = getattr(type(processor), "apply_chat_template", None)
    return own is not None and own is not ProcessorMixin.apply_chat_template


def count_parts(messages: Iterable[Message]) -> dict[str, int]:
    """Return how many media parts of each modality the messages hold, in `MODALITIES`' order."""
    counts: dict[str, int] = {}
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            for part in content:
                kind = _kind(part)
                if kind != "text":
                    counts[kind] = counts.get(kind, 0) + 1
    order = {m: i for i, m in enumerate(MODALITIES)}
    return dict(sorted(counts.items(), key=lambda item: order.get(item[0], len(order))))


def _kind(part: Any) -> str:
    return str(part.get("type")) if isinstance(part, Mapping) else "text"


def control_tokens(tokenizer: Any, template: str | None, placeholders: Iterable[Any]) -> list[str]:
    """Return the spellings that stay text when a conversation contains them.

    All special tokens, the placeholders of the processor, and those other added tokens that the
    template writes itself; white space never. A token that the template does not write and
    that is not special (`<tool_call>`, say) keeps its meaning in an assistant's own message.
    """
    literal = _literal_text(template) if template else ""
    found = [str(placeholder) for placeholder in placeholders]
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    for token in decoder.values() if isinstance(decoder, Mapping) else ():
        content = token.content
        if content.strip() and (token.special or content in literal):
            found.append(content)
    return [token for token in dict.fromkeys(found) if token and token.strip()]


def _literal_text(template: str) -> str:
    """Return the strings that a template can write as they stand, joined by null characters."""
    import jinja2
    from jinja2 import nodes

    try:
        tree = jinja2.Environment(  # noqa: S701 - parsed only, nothing is rendered here
            extensions=["jinja2.ext.loopcontrols"]
        ).parse(template)
    except jinja2.TemplateSyntaxError:
        return template  # with `{% generation %}`, say: every token it mentions then counts
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
    return "\0".join(texts)
