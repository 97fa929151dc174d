"""Families that take one text or one item, never both: dual encoders and retrievers.

CLIP and its kin read a picture by an encoder of its own, so that it has no place in any prompt.
ColPali and its kin write a fixed prompt around a page themselves, and another one around a
query. There is no conversation in either, and what is embedded must not depend on how one would
be framed: a text is taken as it stands, without the model's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lazydecode.errors import InvalidRequestError
from lazydecode.models.expansion import ExpandedPrompt, ItemText
from lazydecode.models.family import Family, describe_difference
from lazydecode.models.item import ItemProcessor
from lazydecode.models.marks import TextMarker
from lazydecode.models.pairing import Pair
from lazydecode.models.probing import Probes
from lazydecode.models.processor_call import Media, processor_modalities
from lazydecode.models.template import ChatTemplate, Message, RenderedPrompt, count_parts
from lazydecode.models.torch_threads import one_torch_thread

_TEXT_ALONE: Final = """\
{%- set content = messages[0]['content'] -%}
{%- if content is string -%}
{{- content -}}
{%- else -%}
{%- for part in content if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}"""
_PROBES: Final = ("What is it?", "A cat,\n\na hat; " * 40)
"""The second is longer than what such models take, so that it is cut where they cut."""


class TextAloneTemplate(ChatTemplate):
    """In the place of a chat template: one user message, of text or of one item.

    Args:
        marker: Marks control tokens in the text.
        modalities: What the model takes beside text.
    """

    def __init__(self, marker: TextMarker, modalities: Sequence[str]) -> None:
        super().__init__(_TEXT_ALONE, {}, marker)
        self._modalities = tuple(modalities)

    def render(self, messages: Sequence[Message], **options: Any) -> RenderedPrompt:
        """Return the text; empty for an item.

        Raises:
            InvalidRequestError: If it is a conversation, or has both text and items.
        """
        one_of = " or one ".join(("one text", *self._modalities)).removeprefix("one ")
        if len(messages) != 1 or messages[0].get("role") != "user":
            raise InvalidRequestError(
                f"the model embeds one {one_of} and holds no conversation: send one user message",
                parameter="messages",
            )
        if options.get("tools"):
            raise InvalidRequestError("the model embeds and calls no tools", parameter="tools")
        if count_parts(messages) and _text_of(messages[0]).strip():
            raise InvalidRequestError(
                f"the model takes one {one_of}, not both in one request: send them one by one",
                parameter="messages",
            )
        return super().render(messages, **options)


def _text_of(message: Message) -> str:
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return str(parts or "")
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


class EitherOrFamily(Family):
    """A family whose prompt is what its class writes for one item, or for one text."""

    @property
    def items_in_prompt(self) -> bool:
        """Whether the class writes a prompt around an item; a dual encoder has none."""
        return any(self.expander.embed_ids.values())

    def encode_text(self, text: str) -> list[int]:
        """Return the ids that the class gives a text: with its prefix, its padding, its length."""
        return self.items.run_text(text, Media()).input_ids

    def build_prompt(
        self,
        prompt: str | Sequence[int],
        items: Mapping[str, Sequence[ItemText]],
        options: Mapping[str, Any] | None = None,
        *,
        pairs: Sequence[Pair] = (),
        tenant: str | None = None,
    ) -> ExpandedPrompt:
        """Return the prompt that the class wrote for the one item; empty for a dual encoder.

        Raises:
            InvalidRequestError: If there are several items.
        """
        found = [item for group in items.values() for item in group]
        if len(found) != 1:
            raise InvalidRequestError(f"the model takes one item per request, not {len(found)}")
        return self.expander.locate(list(found[0].token_ids or ()), items)

    def check_tokens(self, token_ids: Sequence[int], counts: Mapping[str, int]) -> None:
        """Refuse token ids beside an item: the class writes what stands around it.

        Raises:
            InvalidRequestError: If there are items.
        """
        if any(counts.values()):
            raise InvalidRequestError(
                "the model takes token ids or one item, not both: its processor writes what "
                "stands around an item",
                parameter="prompt_token_ids",
            )


def difference_from_class(probes: Probes, items: ItemProcessor) -> str:
    """Return where our ids differ from those of the class with its own tokenizer; empty if
    nowhere.

    The class runs as it was loaded, on its own tokenizer, on a short and on a long text and on
    two items of each modality.
    """
    call = probes.call
    trials = [(text, Media()) for text in _PROBES]
    trials += [
        ("", Media.single(modality, probes.item(modality, number)))
        for modality in processor_modalities(call.processor)
        for number in (0, 1)
    ]
    for text, media in trials:
        ours = items.run_text(text, media).input_ids
        arguments: dict[str, Any] = {**call.options, "return_tensors": "pt"}
        if media.images:
            arguments["images"] = media.images
        elif media.audios:
            arguments |= {call.audio_name: media.audios, "sampling_rate": call.sampling_rate}
        else:
            arguments["text"] = [text]
        with call.lock, one_torch_thread():
            output = call.processor(**arguments)
        theirs = [int(i) for i in output["input_ids"][0]] if "input_ids" in output else []
        if ours != theirs:
            return describe_difference(call.tokenizer, ours, theirs)
    return ""
