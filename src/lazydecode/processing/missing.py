"""Which items of a request still need work."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.errors import MissingMediaError
from lazydecode.media.base import MediaRef
from lazydecode.parse import MultiModalDataItems

Positions = dict[str, list[int]]
"""Modality -> positions in the inputs."""
Flags = dict[str, list[bool]]
"""Modality -> per item whether the cache has it."""


def find_missing(
    cache: BaseMultiModalProcessorCache,
    mm_data_items: MultiModalDataItems,
    mm_hashes: Mapping[str, Sequence[str]],
    known: Container[str] = (),
) -> tuple[Flags, MultiModalDataItems]:
    """Return which items are cached, and the others as selections of their groups.

    Args:
        cache: Is only asked; its order stays.
        mm_data_items: The items.
        mm_hashes: Their identities.
        known: Hashes whose results are at hand although no cache has them.

    Raises:
        MissingMediaError: If the client sent no data for an item that is neither cached nor
            known.
    """
    flags: Flags = {}
    missing = MultiModalDataItems()
    for modality, hashes in mm_hashes.items():
        items = mm_data_items[modality]
        flags[modality] = cache.is_cached(list(hashes))
        positions = [at for at, is_hit in enumerate(flags[modality]) if not is_hit]
        if positions:
            sent = {hashes[at] for at in positions if items.get_raw(at) is not None}
            for position in positions:
                if hashes[position] not in known and hashes[position] not in sent:
                    require_data(mm_data_items, modality, position)
            missing[modality] = items.select(positions)
    return flags, missing


def require_data(mm_data_items: MultiModalDataItems, modality: str, position: int) -> None:
    """Check that an item has data.

    Raises:
        MissingMediaError: If it has none; it is a `ValueError`.
    """
    items = mm_data_items[modality]
    if items.get_raw(position) is None:
        modality, index = items.get_client_position(position)
        raise MissingMediaError(
            f"Cache miss for {modality} at index {index} but data is not provided.",
            modality=modality,
            index=index,
        )


def is_decoded(item: object) -> bool:
    """Whether an item as stored can be processed without a decode."""
    return item.is_decoded if isinstance(item, MediaRef) else item is not None


def require_all_data(mm_data_items: MultiModalDataItems) -> None:
    """Check that every item has data.

    Raises:
        MissingMediaError: For the first that has none.
    """
    for modality, group in mm_data_items.items():
        for position in range(group.get_count()):
            require_data(mm_data_items, modality, position)


def unfinished_positions(
    mm_data_items: MultiModalDataItems,
    flags: Flags,
    mm_hashes: Mapping[str, Sequence[str]],
    done: Container[str],
) -> Positions:
    """Return the items that are neither cached nor done, each hash once: where it has data."""
    chosen: Positions = {}
    for modality, item_flags in flags.items():
        items, hashes = mm_data_items[modality], mm_hashes[modality]
        of_hash: dict[str, int] = {}
        for position, is_hit in enumerate(item_flags):
            mm_hash = hashes[position]
            if is_hit or mm_hash in done:
                continue
            earlier = of_hash.get(mm_hash)
            if earlier is None or items.get_raw(earlier) is None:
                of_hash[mm_hash] = position
        if of_hash:
            chosen[modality] = sorted(of_hash.values())
    return chosen


def select_positions(
    mm_data_items: MultiModalDataItems, positions: Positions
) -> MultiModalDataItems:
    """Return the items at `positions`, which keep their places in the request."""
    return MultiModalDataItems(
        {modality: mm_data_items[modality].select(at) for modality, at in positions.items()}
    )
