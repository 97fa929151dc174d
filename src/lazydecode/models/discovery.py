"""Finding out, once, how a model's processor is to be served: by probes, and a proof of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lazydecode.models import voxtral
from lazydecode.models.embeds import embed_tokens
from lazydecode.models.expansion import PromptExpander
from lazydecode.models.findings import Findings, FindingsStore
from lazydecode.models.item import ItemProcessor
from lazydecode.models.pixels import plan_pixels
from lazydecode.models.probing import FamilyFacts, ModalityFacts, Probes, probe_family
from lazydecode.models.processor_call import ProcessorCall
from lazydecode.models.proving import Prover
from lazydecode.models.registry import FamilyRecord
from lazydecode.models.template import Chat

_findings: dict[tuple[str, str], Findings] = {}
"""By fingerprint and record."""
_findings_lock = threading.Lock()


def find_out(
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
    """Return the findings for a fingerprint; found out once per process, or once per store.

    Args:
        mark: The fingerprint.
        call: The processor.
        chat: The model's way to write prompts.
        record: How the family differs from the generic way.
        config: The Hugging Face configuration.
        raw_pixels: Whether pixels may be handed over as uint8.
        store: Where findings are kept; None: nowhere.
        name: Under which name; None: not these.
        proven: Fingerprint -> what somebody else found out for it meanwhile, if anything.
    """
    key = (mark, repr(record))
    with _findings_lock:
        known = _findings.get(key)
    if known is None and store is not None and name is not None:
        known = store.load(name)
    if known is None and proven is not None:
        known = proven(mark)
    if known is not None:
        return known
    start = time.perf_counter()
    probes = Probes(call, chat, record)
    facts = probe_family(probes)
    items = item_processor(call, facts)
    embed_ids = embed_tokens(probes, config, facts, items)
    prover = voxtral.VoxtralProver if isinstance(call, voxtral.VoxtralCall) else Prover
    proof = prover(probes, facts, items, expander(call, facts, embed_ids)).prove()
    plans = {m: plan_pixels(items, m) for m in facts.modalities} if raw_pixels else {}
    found = Findings(facts, proof, plans, embed_ids, time.perf_counter() - start)
    with _findings_lock:
        _findings[key] = found
    if store is not None and name is not None:
        store.save(name, found)
    return found


def item_processor(call: ProcessorCall, facts: FamilyFacts) -> ItemProcessor:
    """Return what runs the processor for one item, by what the probes showed."""
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


def expander(
    call: ProcessorCall, facts: FamilyFacts, embed_ids: Mapping[str, frozenset[int]]
) -> PromptExpander:
    """Return what puts items into prompts, by what the probes showed."""
    return PromptExpander(
        call.processor,
        call.tokenizer,
        placeholders={m: f.placeholder for m, f in facts.modalities.items()},
        embed_ids=embed_ids,
        prompts=[f.text for f in facts.modalities.values()],
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
