"""From a model's name or folder to everything that requests for it need."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lazydecode.config import Settings
from lazydecode.errors import InvalidRequestError
from lazydecode.models import voxtral, whisper
from lazydecode.models.chunks import proven_splitter
from lazydecode.models.containers import container_reader
from lazydecode.models.either_or import EitherOrFamily, TextAloneTemplate
from lazydecode.models.embedding_inputs import ItemEmbeddings
from lazydecode.models.embeds import embed_tokens, named_ids
from lazydecode.models.exclusion import lock_for
from lazydecode.models.expansion import PromptExpander
from lazydecode.models.family import Family
from lazydecode.models.findings import Findings, FindingsStore, file_name
from lazydecode.models.fingerprint import describe_processor, fingerprint
from lazydecode.models.generic import GenericMultiModalProcessor, GenericProcessingInfo
from lazydecode.models.item import ItemProcessor
from lazydecode.models.kimi_fused import REASON as FUSED_REASON
from lazydecode.models.kimi_fused import fused
from lazydecode.models.marks import TextMarker
from lazydecode.models.options import ProcessorOptions
from lazydecode.models.pairing import split_option
from lazydecode.models.pixels import PixelPlan, merge_plans, plan_pixels
from lazydecode.models.pretrained import load_config, load_processor, template_of
from lazydecode.models.probing import FamilyFacts, ModalityFacts, Probes, probe_family
from lazydecode.models.processor_call import ProcessorCall, processor_modalities
from lazydecode.models.proving import Prover
from lazydecode.models.randomness import Random, random_options
from lazydecode.models.registry import FamilyRecord, ModelLoadError, record_for
from lazydecode.models.speech import SpeechModel, speech_model
from lazydecode.models.template import (
    MODALITIES,
    Chat,
    ChatTemplate,
    Message,
    RenderedPrompt,
    control_tokens,
)
from lazydecode.models.token_ids import check_token_ids, vocabulary_size
from lazydecode.models.tokenization import PromptTokenizer
from lazydecode.processing.context import (
    BaseProcessingInfo,
    InputProcessingContext,
    ModelConfig,
    MultiModalConfig,
)
from lazydecode.processing.processor import BaseMultiModalProcessor

logger = logging.getLogger(__name__)


_findings: dict[str, Findings] = {}
_findings_lock = threading.Lock()


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

    @property
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


def load_model_frontend(
    model: str, settings: Settings, *, proven: Callable[[str], Findings | None] | None = None
) -> ModelFrontend:
    """Load a model's configuration, tokenizer and processor, and prove how it is served.

    Args:
        model: A folder, or an id on the Hugging Face hub.
        settings: Server settings.
        proven: Fingerprint -> what somebody else found out for it meanwhile, if anything.

    Raises:
        ModelLoadError: If something that is needed is missing; the message says what.
    """
    config = load_config(model, settings)
    processor, tokenizer = load_processor(model, settings)
    if not tokenizer.encode("hello", add_special_tokens=False):
        # transformers makes an empty one for a folder without its files.
        raise ModelLoadError(f"the tokenizer of {model} is empty: its files are missing")
    template = template_of(processor, tokenizer)
    placeholders = [getattr(processor, f"{m}_token", None) for m in MODALITIES]
    marker = TextMarker(control_tokens(tokenizer, template, [p for p in placeholders if p]))
    prompt_tokenizer = PromptTokenizer(tokenizer, marker)
    chat: Chat | None = None
    if record_for(processor).placement == "either_or":
        chat = TextAloneTemplate(marker, processor_modalities(processor))
    elif type(processor).__name__ == voxtral.PROCESSOR_CLASS:
        chat = voxtral.VoxtralChat(processor)
    elif template is not None:
        chat = ChatTemplate(template, tokenizer.special_tokens_map, marker, processor=processor)
    video_part = getattr(processor, "video_processor", None)
    ctx = InputProcessingContext(
        ModelConfig(
            model,
            config,
            MultiModalConfig(
                settings.mm_processor_cache_gb,
                settings.mm_hasher_algorithm,
                dict(settings.limit_mm_per_prompt),
            ),
            None if video_part is None else type(video_part).__name__,
        ),
        tokenizer,
        decode_limits=settings.decode_limits,
        trust_exif_image_id=settings.trust_exif_image_id,
        video_loader_backend=settings.video_loader_backend,
    )
    if type(processor).__name__ == whisper.PROCESSOR_CLASS:
        return _load_whisper(model, config, processor, tokenizer, ctx)
    if processor is None or chat is None or not processor_modalities(processor):
        info = GenericProcessingInfo(ctx, max_items={}, sampling_rate=None)
        return ModelFrontend(
            model_id=model,
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            info=info,
            mm_processor=None,
            modalities=(),
            max_items={},
            fingerprint="",
            prompt_tokenizer=prompt_tokenizer,
            template=chat,
        )
    return _load_multimodal(
        model, settings, config, processor, tokenizer, chat, prompt_tokenizer, ctx, proven
    )


def _load_whisper(
    model: str, config: Any, processor: Any, tokenizer: Any, ctx: InputProcessingContext
) -> ModelFrontend:
    extractor = processor.feature_extractor
    # Times are added tokens that are not special; in a client's words they are text all the same.
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    prompt_tokenizer = PromptTokenizer(tokenizer, TextMarker(added))
    info = GenericProcessingInfo(ctx, max_items={"audio": 1}, sampling_rate=extractor.sampling_rate)
    description = describe_processor(processor, options={}, texts={}, raw_pixels=False)
    return ModelFrontend(
        model_id=model,
        config=config,
        tokenizer=tokenizer,
        processor=processor,
        info=info,
        mm_processor=None,
        modalities=("audio",),
        max_items={"audio": 1},
        fingerprint=fingerprint(description),
        prompt_tokenizer=prompt_tokenizer,
        template=None,
        encoder_processor=whisper.WhisperMultiModalProcessor(info, extractor, prompt_tokenizer),
        speech=whisper.WhisperSpeech(
            model, config, float(extractor.chunk_length), prompt_tokenizer
        ),
    )


def _load_multimodal(
    model: str,
    settings: Settings,
    config: Any,
    processor: Any,
    tokenizer: Any,
    chat: Chat,
    prompt_tokenizer: PromptTokenizer,
    ctx: InputProcessingContext,
    proven: Callable[[str], Findings | None] | None,
) -> ModelFrontend:
    record = record_for(processor)
    either_or = record.placement == "either_or"
    fast = fused(processor) if settings.fused_preprocessing else None
    if fast is not None:
        processor, record = fast, replace(record, reentrant=False, reason=FUSED_REASON)
    options = ProcessorOptions(processor, split_option(settings.mm_processor_kwargs)[0])
    containers = container_reader(processor, record, settings.decode_limits)
    call_class = voxtral.VoxtralCall if isinstance(chat, voxtral.VoxtralChat) else ProcessorCall
    call = call_class(
        processor,
        prompt_tokenizer,
        options.defaults,
        scalar_metadata=record.scalar_metadata,
        containers=containers,
        either_or=either_or,
        lock=lock_for(processor, reentrant=record.reentrant),
    )
    texts = {m: _item_text(chat, record, m) for m in processor_modalities(processor)}
    description = describe_processor(
        processor, options=options.defaults, texts=texts, raw_pixels=settings.raw_pixels
    )
    named = {m: sorted(named_ids(config, m)) for m in MODALITIES}
    if containers is not None:
        description = {**description, "containers": containers.fingerprint}
    mark = fingerprint({**description, "template": chat.template, "embeds": named})
    folder = settings.proof_cache
    found = _find_out(
        mark,
        call,
        chat,
        record,
        config,
        settings.raw_pixels,
        store=None if folder is None else FindingsStore(folder),
        name=file_name(mark, processor, tokenizer, record),
        proven=proven,
    )
    if found.proof.mode == "unproven":
        logger.error("%s: media are refused: %s", model, found.proof.difference)
    elif found.proof.difference:
        logger.warning(
            "%s: prompts come out as the model's own, by %s; the plain expansion differs %s",
            model,
            "learnt ids around them" if found.proof.mode == "expand" else "whole-request runs",
            found.proof.difference,
        )
    facts, proof = found.facts, found.proof
    modalities = () if proof.mode == "unproven" else tuple(facts.modalities)
    max_items = {m: facts.modalities[m].max_items for m in modalities}
    info = GenericProcessingInfo(
        ctx,
        max_items=max_items,
        sampling_rate=call.sampling_rate,
        embeddings=None if either_or else ItemEmbeddings(processor, config),
        containers=containers,
    )
    plan, disputed = merge_plans(list(found.plans.values()))
    raw = frozenset(
        m for m, own in found.plans.items() if own and not disputed & own.tensors.keys()
    )
    items = _item_processor(call, facts)
    family = (EitherOrFamily if either_or else Family)(
        facts=facts,
        record=record,
        call=call,
        options=options,
        items=items,
        expander=_expander(call, facts, found.embed_ids),
        proof=proof,
        pixel_plan=plan,
        raw_modalities=raw,
    )
    mm_processor = None
    if modalities:
        splitter = proven_splitter(config, Probes(call, chat, record), items)
        mm_processor = GenericMultiModalProcessor(info, family, splitter=splitter)
    return ModelFrontend(
        model_id=model,
        config=config,
        tokenizer=tokenizer,
        processor=processor,
        info=info,
        mm_processor=mm_processor,
        modalities=modalities,
        max_items=max_items,
        fingerprint=mark,
        prompt_tokenizer=prompt_tokenizer,
        template=chat,
        pixel_plan=plan,
        findings=found,
        speech=_speech(processor, chat, prompt_tokenizer) if "audio" in modalities else None,
        generates=not either_or,
    )


def _speech(processor: Any, chat: Chat, tokenizer: PromptTokenizer) -> SpeechModel | None:
    """Return how a model that takes recordings is asked to write them down; None: it is not."""
    if isinstance(chat, voxtral.VoxtralChat):
        return voxtral.VoxtralSpeech(chat)
    return speech_model(processor, chat, tokenizer.marker)


def _find_out(
    mark: str,
    call: ProcessorCall,
    chat: Chat,
    record: FamilyRecord,
    config: Any,
    raw_pixels: bool,
    *,
    store: FindingsStore | None,
    name: str | None,
    proven: Callable[[str], Findings | None] | None,
) -> Findings:
    """Return the findings for a fingerprint; found out once per process, or once per store."""
    with _findings_lock:
        known = _findings.get(mark)
    if known is None and store is not None and name is not None:
        known = store.load(name)
    if known is None and proven is not None:
        known = proven(mark)
    if known is not None:
        return known
    start = time.perf_counter()
    probes = Probes(call, chat, record)
    facts = probe_family(probes)
    items = _item_processor(call, facts)
    embed_ids = embed_tokens(probes, config, facts, items)
    prover = voxtral.VoxtralProver if isinstance(call, voxtral.VoxtralCall) else Prover
    proof = prover(probes, facts, items, _expander(call, facts, embed_ids)).prove()
    plans = {m: plan_pixels(items, m) for m in facts.modalities} if raw_pixels else {}
    found = Findings(facts, proof, plans, embed_ids, time.perf_counter() - start)
    with _findings_lock:
        _findings[mark] = found
    if store is not None and name is not None:
        store.save(name, found)
    return found


def _item_processor(call: ProcessorCall, facts: FamilyFacts) -> ItemProcessor:
    known = facts.modalities
    return ItemProcessor(
        call,
        texts={m: f.text for m, f in known.items()},
        placeholders={m: f.placeholder for m, f in known.items()},
        rules={m: f.rules for m, f in known.items()},
        without_types=frozenset(m for m, f in known.items() if f.can_skip_types),
        takes_planes="image" in known and known["image"].takes_planes,
        without_text=frozenset(m for m, f in known.items() if f.can_skip_text),
    )


def _expander(
    call: ProcessorCall, facts: FamilyFacts, embed_ids: Mapping[str, frozenset[int]]
) -> PromptExpander:
    return PromptExpander(
        call.processor,
        call.tokenizer,
        placeholders={m: f.placeholder for m, f in facts.modalities.items()},
        embed_ids=embed_ids,
        uses_class_search=any(f.reports_offsets for f in facts.modalities.values()),
        edits_layout=_edits_layout(call.processor, next(iter(facts.modalities.values()), None)),
        lock=call.lock,
    )


def _edits_layout(processor: Any, known: ModalityFacts | None) -> bool:
    """Whether the class changes a text before it looks for placeholders in it."""
    from PIL import Image
    from transformers import ProcessorMixin

    own = getattr(type(processor), "prepare_inputs_layout", None)
    if known is None or own is None:
        return False
    if own is getattr(ProcessorMixin, "prepare_inputs_layout", None):
        return False
    try:
        prepared = processor.prepare_inputs_layout(
            images=[Image.new("RGB", (32, 32))], text=[known.text]
        )
    except Exception:
        # It wants more than the text, so it does something else; the proof has the last word.
        return False
    return list(prepared[1]) != [known.text]


def _item_text(chat: Chat, record: FamilyRecord, modality: str) -> str:
    try:
        return record.item_text.get(modality) or chat.render_items([modality])
    except InvalidRequestError:
        return ""
