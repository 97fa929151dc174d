"""What a loaded model answers about prompts and media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lazydecode.errors import InvalidRequestError
from lazydecode.models.embedding_inputs import ItemEmbeddings
from lazydecode.models.findings import Findings
from lazydecode.models.generic import GenericMultiModalProcessor, GenericProcessingInfo
from lazydecode.models.pixels import PixelPlan
from lazydecode.models.randomness import Random, random_options
from lazydecode.models.speech import SpeechModel
from lazydecode.models.template import Chat, ChatTemplate, Message, RenderedPrompt
from lazydecode.models.token_ids import check_token_ids, vocabulary_size
from lazydecode.models.tokenization import PromptTokenizer
from lazydecode.processing.context import BaseProcessingInfo
from lazydecode.processing.processor import BaseMultiModalProcessor


@dataclass(frozen=True)
class ModelFrontend:
    """A loaded model, as far as prompts and media are concerned. Threads share it."""

    model_id: str
    config: Any
    """The Hugging Face configuration."""
    tokenizer: Any
    """The Hugging Face tokenizer. Not for padding or truncation: threads share it."""
    processor: Any
    """The Hugging Face processor; None for a text-only model."""
    info: BaseProcessingInfo
    mm_processor: GenericMultiModalProcessor | None
    """None: text only."""
    modalities: tuple[str, ...]
    max_items: dict[str, int | None]
    """Modality -> items per request that the family takes; None: any number."""
    fingerprint: str
    """Stands for the classes, libraries, back ends and options that results depend on."""
    prompt_tokenizer: PromptTokenizer
    template: Chat | None
    """None: the model has no chat template."""
    pixel_plan: PixelPlan = field(default_factory=PixelPlan)
    """How an engine finishes raw pixels."""
    findings: Findings | None = None
    """What was proven when the model was loaded."""
    encoder_processor: BaseMultiModalProcessor | None = None
    """Processes items of a model that has no place for them in its prompt."""
    speech: SpeechModel | None = None
    """How the model is asked to write down speech; None: it is not."""
    generates: bool = True
    """Whether the model writes text; False: it embeds."""

    @property
    def media_are_off(self) -> bool:
        """Whether the model has media that are refused, since nothing could be proven of them."""
        return self.findings is not None and not self.modalities

    @property
    def any_processor(self) -> BaseMultiModalProcessor | None:
        """What processes the model's items; None: text only."""
        return self.mm_processor or self.encoder_processor

    def random(self, options: Mapping[str, Any] | None = None) -> Random:
        """Return modality -> why the same item gives other tensors each time, so that no cache
        keeps it; what is absent is cached.

        Args:
            options: The request's processor options.
        """
        processor = self.any_processor
        if isinstance(processor, GenericMultiModalProcessor):
            return processor.family.random(options or {})
        return {} if self.processor is None else random_options(self.processor, options or {})

    @property
    def why_serialized(self) -> str:
        """Why one thread at a time is let into the processor's class; empty if any number is."""
        processor = self.mm_processor
        return "" if processor is None or processor.reentrant else processor.family.record.reason

    @property
    def embeddings(self) -> ItemEmbeddings | None:
        """Which embeddings the model takes in the place of media; None: none."""
        return self.info.embeddings if isinstance(self.info, GenericProcessingInfo) else None

    @property
    def pairs_sound(self) -> bool:
        """Whether a video can be given with the sound in it, as one part of the prompt."""
        return self.mm_processor is not None and self.mm_processor.family.pairing is not None

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RenderedPrompt:
        """Return the text of a conversation's prompt; what the conversation spells stays text.

        Args:
            messages: As Hugging Face templates take them; media parts are `{"type": modality}`.
            tools: Descriptions of tools, as JSON schemas.
            chat_template_kwargs: Further names for the template.
            add_generation_prompt: Whether the answer's header comes last.
            continue_final_message: Whether the last message is left open.

        Raises:
            InvalidRequestError: If the model has no chat template, or it refuses the messages.
        """
        if self.template is None:
            instead = "send token ids" if self.speech is None else "use /v1/audio/transcriptions"
            raise InvalidRequestError(
                f"the model {self.model_id} has no chat template; {instead} instead"
            )
        return self.template.render(
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        )

    def tokenize_prompt(self, rendered: RenderedPrompt) -> list[int]:
        """Return the token ids of a prompt without media."""
        if rendered.token_ids is not None:
            return rendered.token_ids
        if self.mm_processor is not None:
            return self.mm_processor.family.encode_text(rendered.text)
        bos = getattr(self.tokenizer, "bos_token", None)
        has_bos = isinstance(bos, str) and bool(bos) and rendered.text.startswith(bos)
        return self.prompt_tokenizer.encode(rendered.text, add_special_tokens=not has_bos)

    @cached_property
    def writes_unlocked(self) -> bool:
        """Whether prompts are written and tokenized without waiting for another thread."""
        if not isinstance(self.template, ChatTemplate):
            return False
        if self.mm_processor is not None and self.mm_processor.family.edits_text_layout:
            return False
        return self.prompt_tokenizer.is_lock_free

    def plain_text(self, rendered: RenderedPrompt) -> str:
        """Return the prompt as a reader expects to see it."""
        return self.prompt_tokenizer.marker.unseal(rendered.text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; control tokens in it count as such."""
        return self.prompt_tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.prompt_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def check_prompt_tokens(self, token_ids: Sequence[int], counts: Mapping[str, int]) -> None:
        """Check a prompt that came as token ids.

        Args:
            token_ids: With one placeholder per item.
            counts: Modality -> number of items.

        Raises:
            InvalidRequestError: If it has a number that is no id, or not these placeholders.
        """
        check_token_ids(token_ids, self.vocabulary_size, parameter="prompt_token_ids")
        if self.mm_processor is not None:
            self.mm_processor.family.check_tokens(token_ids, counts)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are less than this."""
        return vocabulary_size(self.config, self.tokenizer)
