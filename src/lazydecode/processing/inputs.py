"""What goes into a processor: prompt, items, options, and the identities that follow from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.hasher import MultiModalHasher
from lazydecode.media.base import MediaRef
from lazydecode.parse import MultiModalDataItems, ProcessorBatchItems

_SCOPED_KWARGS: Final = {
    "image": "images_kwargs",
    "video": "videos_kwargs",
    "audio": "audio_kwargs",
}
"""Modality -> the group of processor options that is for it alone."""


@dataclass
class ProcessorInputs:
    """One request, parsed, before it is processed."""

    prompt: str | list[int]
    """Text or token ids, with a placeholder for each item where the model has them."""
    mm_data_items: MultiModalDataItems
    mm_uuid_items: Mapping[str, Sequence[str | None]] | None = None
    """Modality -> the client's identity of each item; None where it gave none."""
    hf_processor_mm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model's processor."""
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Modality -> decode options."""
    cache: BaseMultiModalProcessorCache | None = None
    cache_salt: str | None = None
    """Separates tenants: requests share results only if they have the same salt."""
    processor_fingerprint: str = ""
    """Stands for everything else that results depend on: classes, libraries, back ends."""
    apart: Mapping[str, str] = field(default_factory=dict)
    """Modality -> what sets its items apart from those of all other requests; absent: nothing."""
    sound_pairs: Sequence[tuple[int, int]] = ()
    """(position of a video, position of an audio item) of every sound that came out of a video:
    it has no placeholder of its own."""
    mm_hash_items: Mapping[str, Sequence[str]] | None = None
    """Modality -> the identity of each item's processed result, where that is known already."""

    def __copy__(self) -> ProcessorInputs:
        # As `copy` does by itself, at a tenth of the cost.
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    @property
    def can_use_cache(self) -> bool:
        """Whether there is a cache, and every item goes through the processor."""
        return self.cache is not None and not any(
            items.get_passthrough_data() for items in self.mm_data_items.values()
        )

    def get_mm_hashes(self, model_id: str, algorithm: str) -> dict[str, list[str]]:
        """Return modality -> the identity of each item's processed result; decodes nothing.

        A client's uuid is the identity as it is, unless something else is known on which the
        result depends; then that is hashed together with it.
        """
        if self.mm_hash_items is not None:
            return {m: [*self.mm_hash_items[m]] for m in self.mm_data_items}
        return {
            modality: [
                self.get_item_hash(modality, index, model_id, algorithm)
                for index in range(items.get_count())
            ]
            for modality, items in self.mm_data_items.items()
        }

    def get_item_hash(self, modality: str, index: int, model_id: str, algorithm: str) -> str:
        """Return the identity of one item's processed result."""
        if self.mm_hash_items is not None:
            return self.mm_hash_items[modality][index]
        uuids = (self.mm_uuid_items or {}).get(modality)
        uuid = None if uuids is None else uuids[index]
        if uuid is not None:
            return self.get_uuid_hash(modality, uuid, model_id, algorithm)
        item = self.mm_data_items[modality].get_raw(index)
        factors = self._hash_factors(modality)
        if isinstance(item, MediaRef):
            # The decode options are in the spec, and the spec is in the key.
            factors.pop("media_io_kwargs", None)
            if not item.key_covers_spec:
                factors["decode_spec"] = item.spec.canonical_bytes()
        named = {modality: item}
        return MultiModalHasher.hash_kwargs(algorithm, model_id=model_id, **named, **factors)

    def get_uuid_hash(self, modality: str, uuid: str, model_id: str, algorithm: str) -> str:
        """Return what a client's uuid is called among all tenants, models and options."""
        factors = self._hash_factors(modality)
        if not factors:
            return uuid
        named = {modality: uuid}
        return MultiModalHasher.hash_kwargs(algorithm, model_id=model_id, **named, **factors)

    def _hash_factors(self, modality: str) -> dict[str, object]:
        """Return everything besides the item on which its result depends, without the empty."""
        media_io_kwargs: object = self.media_io_kwargs
        processor_kwargs = self.hf_processor_mm_kwargs
        if modality in _SCOPED_KWARGS:
            if processor_kwargs:
                others = {name for other, name in _SCOPED_KWARGS.items() if other != modality}
                processor_kwargs = {n: v for n, v in processor_kwargs.items() if n not in others}
            options = self.media_io_kwargs.get(modality)
            media_io_kwargs = {modality: options} if options else None
        factors = {
            "media_io_kwargs": media_io_kwargs,
            "mm_processor_kwargs": processor_kwargs,
            "cache_salt": self.cache_salt,
            "processor_fingerprint": self.processor_fingerprint,
            "apart": self.apart.get(modality),
        }
        return {name: value for name, value in factors.items() if value}

    def fork_media_refs(self) -> ProcessorInputs:
        """Return the same inputs over forks of all references.

        Releasing the forks leaves the caller's references as they are. Everything else is
        shared.
        """
        forked = MultiModalDataItems()
        for modality, items in self.mm_data_items.items():
            if isinstance(items, ProcessorBatchItems):
                items = copy.copy(items)
                items.data = [
                    item.fork() if isinstance(item, MediaRef) else item
                    for item in items.get_all_raw()
                ]
            forked[modality] = items
        inputs = copy.copy(self)
        inputs.mm_data_items = forked
        return inputs

    def single(self, modality: str, position: int) -> ProcessorInputs:
        """Return one item alone, with the request's options and nothing of its neighbours."""
        group = self.mm_data_items[modality].select([position])
        return replace(
            self,
            prompt="",
            mm_data_items=MultiModalDataItems({modality: group}),
            mm_uuid_items=None,
            mm_hash_items=None,
            cache=None,
        )
