"""Which item a request means: by its bytes, or by a uuid under which bytes were seen before.

    before fetching   `find_held`: a uuid whose item the cache holds needs no bytes
    after fetching    `resolve`: bytes give the identity; a uuid alone is looked up
    in phase 2        `bind`: what was processed is what its uuid stands for from now on

Bytes always win: an item that came with bytes is those bytes, whatever was seen under its uuid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lazydecode.cache import (
    CONTESTED,
    BaseMultiModalProcessorCache,
    Bindings,
    UuidBindings,
)
from lazydecode.errors import MissingMediaError, UuidConflictError
from lazydecode.media.urls import is_data_url
from lazydecode.processing.context import BaseProcessingInfo
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.renderers.chat import MediaRequest
from lazydecode.renderers.media import EncodedItem

ConflictPolicy: TypeAlias = Literal["miss", "error"]
"""What other bytes under a known uuid are: items of their own, or the client's error."""


@dataclass(frozen=True, slots=True)
class NamedItem:
    """An item that came with a uuid."""

    modality: str
    index: int
    name: str
    """The uuid with all that tells its uses apart."""
    mm_hash: str


@dataclass(frozen=True, slots=True)
class ResolvedItems:
    """The identities of a request's items."""

    hashes: dict[str, list[str]]
    """Modality -> per item the identity of its processed result."""
    named: list[NamedItem]
    """What uuids are to stand for once the request was processed."""


class ItemIdentities:
    """Finds the identities of items for one model. Threads share it.

    Args:
        info: Names the model and the digest.
        conflict: What becomes of other bytes under a known uuid.
        holds_video: Says whether a cache has all of a video, for models that take chunks.
        bindings: What uuids stand for; all caches of a front end share it, and all front ends
            of a server, as it says nothing about what they hold.
    """

    def __init__(
        self,
        info: BaseProcessingInfo,
        *,
        conflict: ConflictPolicy = "miss",
        holds_video: Callable[[str, BaseMultiModalProcessorCache], bool] | None = None,
        bindings: Bindings | None = None,
    ) -> None:
        self._scope = info.identity_scope
        self._conflict = conflict
        self._holds_video = holds_video
        self.bindings: Bindings = UuidBindings() if bindings is None else bindings

    def named_hashes(self, media: Sequence[MediaRequest], options: ProcessorInputs) -> list[str]:
        """Return the identities that the uuids of a request stand for, as far as they are known."""
        names = (
            self._name(item.modality, item.uuid, options) for item in media if item.uuid is not None
        )
        return [mm_hash for mm_hash in map(self.bindings.peek, names) if mm_hash]

    def find_held(
        self,
        media: Sequence[MediaRequest],
        options: ProcessorInputs,
        cache: BaseMultiModalProcessorCache | None,
    ) -> None:
        """Mark the items whose URL can be left alone, since `cache` holds what their uuid names.

        Args:
            media: Of one request. A URL that brings its own bytes (`data:`) is never marked:
                they are compared.
            options: Inputs without items, with the options of the request.
            cache: The one that will be asked; None: no cache is used.

        Raises:
            MissingMediaError: If an item is a uuid alone that nothing is known of; before
                anything is fetched in vain.
        """
        sent = {
            (item.modality, item.uuid)
            for item in media
            if item.uuid is not None and item.source is not None
        }
        for item in media:
            if item.uuid is None:
                continue
            mm_hash = self.bindings.peek(self._name(item.modality, item.uuid, options))
            holds = bool(cache is not None and mm_hash and self._holds(item, mm_hash, cache))
            if _is_remote(item):
                item.is_held = holds
            elif item.source is None and not holds and (item.modality, item.uuid) not in sent:
                raise _missing(item.modality, item.index, mm_hash, has_cache=cache is not None)

    def resolve(self, items: Sequence[EncodedItem], inputs: ProcessorInputs) -> ResolvedItems:
        """Return the identities of all items, in the order of `inputs`.

        Raises:
            MissingMediaError: If an item has no bytes and its uuid stands for nothing.
            UuidConflictError: If that is an error and an item's uuid stands for other media.
        """
        hashes: dict[str, list[str]] = {}
        named: list[NamedItem] = []
        own: dict[str, str] = {}
        without: list[tuple[EncodedItem, int]] = []
        for item in items:
            group = hashes.setdefault(item.modality, [])
            position = len(group)
            if item.ref is None:
                without.append((item, position))
                group.append(CONTESTED)
                continue
            mm_hash = inputs.get_item_hash(item.modality, position, *self._scope)
            group.append(mm_hash)
            if item.uuid is not None:
                name = self._name(item.modality, item.uuid, inputs)
                known = own.setdefault(name, mm_hash)
                if known != mm_hash:
                    own[name] = CONTESTED
                found = NamedItem(item.modality, item.index, name, mm_hash)
                self._check(found, known, self.bindings.peek(name))
                named.append(found)
        for item, position in without:
            assert item.uuid is not None
            name = self._name(item.modality, item.uuid, inputs)
            # What came with the request itself, then what came before.
            mm_hash_of_name = own.get(name, self.bindings.peek(name))
            if not mm_hash_of_name:
                raise _missing(item.modality, item.index, mm_hash_of_name)
            hashes[item.modality][position] = mm_hash_of_name
            named.append(NamedItem(item.modality, item.index, name, mm_hash_of_name))
        return ResolvedItems(hashes, named)

    def bind(self, named: Sequence[NamedItem]) -> None:
        """Let the uuids of items stand for them, and be remembered longest.

        Raises:
            UuidConflictError: As `resolve`, if another request was faster.
        """
        for item in named:
            is_own = self.bindings.bind(item.name, item.mm_hash, contest=self._conflict == "miss")
            if not is_own and self._conflict == "error":
                raise _conflict(item)

    def _holds(self, item: MediaRequest, mm_hash: str, cache: BaseMultiModalProcessorCache) -> bool:
        if item.modality == "video" and self._holds_video is not None:
            return self._holds_video(mm_hash, cache)
        return cache.is_cached_item(mm_hash)

    def _check(self, item: NamedItem, *known: str | None) -> None:
        if self._conflict == "error" and any(
            mm_hash is not None and mm_hash != item.mm_hash for mm_hash in known
        ):
            raise _conflict(item)

    def _name(self, modality: str, uuid: str, options: ProcessorInputs) -> str:
        return options.get_uuid_hash(modality, uuid, *self._scope)


def _is_remote(item: MediaRequest) -> bool:
    """Whether the bytes are elsewhere; those that came with the request are at hand."""
    if not isinstance(item.source, str) or item.media_type is not None:
        return False
    return not is_data_url(item.source)


def _missing(
    modality: str, index: int, mm_hash: str | None, *, has_cache: bool = True
) -> MissingMediaError:
    why = ""
    if not has_cache:
        why = (
            " An item with a uuid alone needs the processor cache, which this request does not use."
        )
    elif mm_hash == CONTESTED:
        why = " Different media were sent under its uuid: send the data, or a uuid of its own."
    elif mm_hash is not None:
        why = " What was sent under its uuid is not kept here any more: send the data again."
    return MissingMediaError(
        f"Cache miss for {modality} at index {index} but data is not provided.{why}",
        modality=modality,
        index=index,
    )


def _conflict(item: NamedItem) -> UuidConflictError:
    return UuidConflictError(
        f"the uuid of the {item.modality} at index {item.index} stands for other media, which "
        "were sent under it before; a uuid names one item for good",
        modality=item.modality,
        index=item.index,
        parameter="uuid",
    )
