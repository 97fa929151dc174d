"""What of a request has to be decoded, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.errors import MediaTooLargeError
from lazydecode.media.base import MediaRef
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.processor import BaseMultiModalProcessor
from lazydecode.renderers.chunks import ChunkResolver

EncodedRef: TypeAlias = "tuple[str, int, MediaRef[Any]]"
"""Modality, the client's index, and the encoded item."""


class UncountedError(Exception):
    """An item was evicted after what has to be decoded was counted."""


class DecodeCounter:
    """Counts what requests have to decode. Threads share it.

    Args:
        processor: The model's.
        max_bytes: Decoded bytes that one request may hold.
        chunks: Cuts videos, for a model that wants chunks; else None.
    """

    def __init__(
        self,
        processor: BaseMultiModalProcessor,
        *,
        max_bytes: int,
        chunks: ChunkResolver | None = None,
    ) -> None:
        self._processor = processor
        self._max_bytes = max_bytes
        self._chunks = chunks

    def find_missing(
        self, inputs: ProcessorInputs, *, trusts_hits: bool = True
    ) -> list[EncodedRef]:
        """Return what would have to be decoded now, each item once.

        Asking changes no order. Other requests may change the answer until it is phase 1's
        turn on the ordered worker.

        Args:
            inputs: The request.
            trusts_hits: Whether what is cached is left out.
        """
        scope = self._processor.info.identity_scope
        missing: dict[tuple[str, int | str], EncodedRef] = {}
        for modality, items in inputs.mm_data_items.items():
            for index in range(items.get_count()):
                ref = items.get_raw(index)
                if not isinstance(ref, MediaRef):
                    continue
                key: int | str = index
                if inputs.cache is not None:
                    key = inputs.get_item_hash(modality, index, *scope)
                    if trusts_hits and self._holds(modality, key, inputs.cache):
                        continue
                number = items.get_original_index(index)
                missing.setdefault((modality, key), (modality, number, ref))
        return list(missing.values())

    def check(self, inputs: ProcessorInputs, counted: Sequence[EncodedRef]) -> None:
        """Check that nothing has to be decoded but what was counted.

        Raises:
            UncountedError: If something has, which was cached when it was counted.
        """
        refs = {id(ref) for _, _, ref in counted}
        if any(id(ref) not in refs for _, _, ref in self.find_missing(inputs)):
            raise UncountedError

    def estimate_bytes(self, missing: Sequence[EncodedRef], options: Mapping[str, Any]) -> int:
        """Return the decoded bytes of items, from their headers.

        Args:
            missing: The items, loaded.
            options: The request's processor options.

        Raises:
            MediaTooLargeError: If they are more than one request may hold; names the item.
        """
        total = 0
        for modality, index, ref in missing:
            total += self._processor.info.estimate_decoded_bytes(modality, ref, options)
            if total > self._max_bytes:
                raise MediaTooLargeError(
                    f"the request's media take more than {self._max_bytes} bytes when decoded; "
                    "send fewer or smaller items",
                    modality=modality,
                    index=index,
                )
        return total

    def _holds(self, modality: str, mm_hash: str, cache: BaseMultiModalProcessorCache) -> bool:
        if self._chunks is not None and modality == "video":
            return self._chunks.holds(mm_hash, cache)
        return cache.is_cached_item(mm_hash) or mm_hash in self._processor.warm_outputs


def all_refs(inputs: ProcessorInputs) -> list[EncodedRef]:
    """Return modality, index and ref of all items that have data."""
    return [
        (modality, items.get_original_index(position), ref)
        for modality, items in inputs.mm_data_items.items()
        for position in range(items.get_count())
        if isinstance(ref := items.get_raw(position), MediaRef)
    ]
