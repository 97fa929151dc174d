"""From a model's name or folder to everything that requests for it need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lazydecode.config import Settings
from lazydecode.errors import InvalidRequestError
from lazydecode.models import voxtral, whisper
from lazydecode.models.chunks import proven_splitter
from lazydecode.models.containers import container_reader
from lazydecode.models.discovery import expander, find_out, item_processor
from lazydecode.models.either_or import EitherOrFamily, TextAloneTemplate
from lazydecode.models.embedding_inputs import ItemEmbeddings
from lazydecode.models.embeds import named_ids
from lazydecode.models.exclusion import lock_for
from lazydecode.models.family import Family
from lazydecode.models.findings import Findings, FindingsStore, file_name
from lazydecode.models.fingerprint import describe_processor, fingerprint
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.generic import GenericMultiModalProcessor, GenericProcessingInfo
from lazydecode.models.kimi_fused import REASON as FUSED_REASON
from lazydecode.models.kimi_fused import fused
from lazydecode.models.marks import TextMarker
from lazydecode.models.options import ProcessorOptions
from lazydecode.models.pairing import split_option
from lazydecode.models.pixels import merge_plans
from lazydecode.models.pretrained import (
    check_tokenizer,
    load_config,
    load_processor,
    template_of,
)
from lazydecode.models.probing import Probes
from lazydecode.models.processor_call import ProcessorCall, processor_modalities
from lazydecode.models.registry import FamilyRecord, record_for
from lazydecode.models.speech import SpeechModel, speech_model
from lazydecode.models.template import (
    MODALITIES,
    Chat,
    ChatTemplate,
    control_tokens,
)
from lazydecode.models.tokenization import PromptTokenizer
from lazydecode.processing.context import (
    InputProcessingContext,
    ModelConfig,
    MultiModalConfig,
)

logger = logging.getLogger(__name__)


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
    check_tokenizer(model, tokenizer)
    template = template_of(processor, tokenizer, file=settings.chat_template)
    placeholders = [getattr(processor, f"{m}_token", None) for m in MODALITIES]
    marker = TextMarker(control_tokens(tokenizer, template, [p for p in placeholders if p]))
    prompt_tokenizer = PromptTokenizer(tokenizer, marker)
    chat: Chat | None = None
    if record_for(processor).placement == "either_or":
        chat = TextAloneTemplate(marker, processor_modalities(processor))
    elif type(processor).__name__ == voxtral.PROCESSOR_CLASS:
        chat = voxtral.VoxtralChat(processor)
    elif template is not None:
        # A class may prefer a template of its own; a file that was given wins over that too.
        other = None if settings.chat_template is not None else processor
        chat = ChatTemplate(template, tokenizer.special_tokens_map, marker, processor=other)
    elif processor_modalities(processor):
        logger.warning(
            "%s has no chat template, so that chat and media are off; --chat-template FILE gives "
            "it one",
            model,
        )
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
    found = find_out(
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
    _say(model, found)
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
    items = item_processor(call, facts)
    family = (EitherOrFamily if either_or else Family)(
        facts=facts,
        record=record,
        call=call,
        options=options,
        items=items,
        expander=expander(call, facts, found.embed_ids),
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


def _say(model: str, found: Findings) -> None:
    """Log what a client of this model may wonder about, whoever found it out and when."""
    facts, proof = found.facts, found.proof
    for modality, why in facts.refused.items():
        logger.warning("%s: %s input is off: %s", model, modality, why)
    for modality, why in facts.alone.items():
        logger.info("%s: one %s per prompt: two are refused (%s)", model, modality, why)
    if proof.mode == "unproven":
        logger.error("%s: media are refused: %s", model, proof.difference)
    elif proof.difference:
        logger.warning(
            "%s: prompts come out as the model's own, by %s; the plain expansion differs %s",
            model,
            "learnt ids around them" if proof.mode == "expand" else "whole-request runs",
            proof.difference,
        )
    for remark in proof.remarks:
        logger.warning("%s: %s", model, remark)


def _item_text(chat: Chat, record: FamilyRecord, modality: str) -> str:
    try:
        return record.item_text.get(modality) or chat.render_items([modality])
    except InvalidRequestError:
        return ""
