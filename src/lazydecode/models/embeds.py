"""Which token ids of an item's text take an embedding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from lazydecode.models.item import ItemProcessor
from lazydecode.models.probing import FamilyFacts, Probes


def embed_tokens(
    probes: Probes, config: Any, facts: FamilyFacts, items: ItemProcessor
) -> dict[str, frozenset[int]]:
    """Return modality -> ids of the tokens that the model replaces by its embeddings.

    What the model's configuration names counts, if the text of an item is made of it;
    otherwise the control token that the text has most of.
    """
    return {
        modality: frozenset(_of_modality(probes, config, items, modality))
        for modality in facts.modalities
    }


def _of_modality(probes: Probes, config: Any, items: ItemProcessor, modality: str) -> Iterator[int]:
    text = items.text_of(modality, probes.item(modality, 0), probes.output(modality, 0))
    tokenizer = probes.call.tokenizer
    ids = (
        list(text.token_ids)
        if text.token_ids is not None
        else tokenizer.encode_collapsed(text.replacement, add_special_tokens=False).token_ids
        if text.replacement is not None
        else []
    )
    by_config = set(named_ids(config, modality))
    # A placeholder may be an entry of the vocabulary instead of an added token (Fuyu's is).
    counts = Counter(i for i in ids if i in tokenizer.added_ids or i in by_config)
    if not counts:
        return
    most, number = counts.most_common(1)[0]
    named = {i for i in by_config if counts[i] * 2 >= number}
    yield from named or {most}


def named_ids(config: Any, modality: str) -> Iterator[int]:
    """Yield the ids that a configuration names for a modality, and for images in videos."""
    for kind in (modality, "image") if modality == "video" else (modality,):
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            value = getattr(config, name, None)
            if isinstance(value, int):
                yield value
