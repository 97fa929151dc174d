"""New results and cached ones become the items of one request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.inputs import MultiModalInput, MultiModalKwargsItem, PlaceholderRange
from lazydecode.processing.failures import check_count
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.missing import Flags
from lazydecode.processing.outputs import ItemOutput
from lazydecode.processing.prompt_updates import ResolvedPromptUpdate


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """All items of a request, before the prompt."""

    mm_kwargs: dict[str, list[MultiModalKwargsItem | None]]
    """Modality -> per item its tensors; None where the engine holds them."""
    mm_hashes: dict[str, list[str]]
    updates: dict[str, list[Sequence[Any]]]
    """Modality -> per item what its prompt needs."""


def merge_with_cache(
    cache: BaseMultiModalProcessorCache,
    mm_hashes: dict[str, list[str]],
    flags: Flags,
    outputs: Mapping[str, ItemOutput],
    process_evicted: Callable[[str, int], None],
) -> ProcessedRequest:
    """Bring the cache up to date and return all items of the request.

    Args:
        cache: Is touched and updated in modality and item order, as its mirror will be.
        mm_hashes: The identities of all items.
        flags: Which of them are cached.
        outputs: Hash -> result, for all others.
        process_evicted: Called with modality and position before a hit is needed that an
            earlier item of this very request pushed out; puts its result into `outputs`.
    """
    for hashes in mm_hashes.values():
        for mm_hash in hashes:
            cache.touch_sender_cache_item(mm_hash)
    mm_kwargs: dict[str, list[MultiModalKwargsItem | None]] = {}
    updates: dict[str, list[Sequence[Any]]] = {}
    for modality, hashes in mm_hashes.items():
        mm_kwargs[modality], updates[modality] = [], []
        for position, mm_hash in enumerate(hashes):
            is_hit = flags[modality][position]
            if is_hit and not cache.is_cached_item(mm_hash):
                process_evicted(modality, position)
                is_hit = False
            item = None if is_hit else (outputs[mm_hash].kwargs, outputs[mm_hash].updates)
            kwargs, item_updates = cache.get_and_update_item(item, mm_hash)
            mm_kwargs[modality].append(kwargs)
            updates[modality].append(updates_for_item(item_updates, position))
    return ProcessedRequest(mm_kwargs, mm_hashes, updates)


def merge_uncached(
    outputs: Mapping[str, Sequence[ItemOutput]], mm_hashes: dict[str, list[str]]
) -> ProcessedRequest:
    """Return all items of a request that goes without the cache."""
    return ProcessedRequest(
        {modality: [item.kwargs for item in items] for modality, items in outputs.items()},
        mm_hashes,
        {
            modality: [updates_for_item(item.updates, at) for at, item in enumerate(items)]
            for modality, items in outputs.items()
        },
    )


def updates_for_item(updates: Sequence[Any], item_index: int) -> Sequence[Any]:
    """Return an item's updates for its place in this request: a cached one had another."""
    return [
        update.with_item_index(item_index) if isinstance(update, ResolvedPromptUpdate) else update
        for update in updates
    ]


def build_mm_input(
    inputs: ProcessorInputs,
    processed: ProcessedRequest,
    prompt_ids: list[int],
    placeholders: Mapping[str, list[PlaceholderRange]],
) -> MultiModalInput:
    """Return what goes to the engine.

    Raises:
        ItemCountError: If tensors, updates or placeholders are not as many as items.
    """
    for modality, count in inputs.mm_data_items.get_all_counts().items():
        for what, parts in (
            ("tensors", processed.mm_kwargs),
            ("prompt updates", processed.updates),
            ("placeholders", placeholders),
        ):
            check_count(what, modality, len(parts.get(modality, ())), count)
    result = MultiModalInput(
        type="multimodal",
        prompt_token_ids=prompt_ids,
        mm_kwargs=processed.mm_kwargs,
        mm_hashes=processed.mm_hashes,
        # In the order of the hashes: the receiver goes through a request in one order.
        mm_placeholders={
            modality: placeholders.get(modality, []) for modality in processed.mm_hashes
        },
    )
    if isinstance(inputs.prompt, str):
        result["prompt"] = inputs.prompt
    if inputs.cache_salt is not None:
        result["cache_salt"] = inputs.cache_salt
    return result
