"""What is processed for a request, and the processor's inputs that it becomes each time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.errors import MissingMediaError
from lazydecode.inputs import MultiModalInput
from lazydecode.media.base import MediaRef
from lazydecode.models.chunks import VISION_CHUNK
from lazydecode.parse import VisionChunkProcessorItems
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.processor import BaseMultiModalProcessor
from lazydecode.renderers.decode_counting import EncodedRef
from lazydecode.renderers.guards import check_placeholders
from lazydecode.renderers.identities import ItemIdentities, NamedItem
from lazydecode.renderers.media import EncodedItem

Load: TypeAlias = "Callable[[Sequence[EncodedRef]], Awaitable[None]]"
"""Takes modality, index and ref of the items whose bytes are needed."""

_SHORT_CHARS: Final = 1024
_FEW_ITEMS: Final = 4
"""Prompts of as many characters and known sizes are built on the event loop, in some 0.3 ms."""


@dataclass(slots=True)
class Job:
    """What is processed: a prompt, and encoded items that outlive each processing."""

    request_id: str
    prompt: str | list[int]
    """Text with placeholders; token ids if there are no items."""
    items: Sequence[EncodedItem]
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    embeddings: Mapping[str, Any] = field(default_factory=dict)
    """Modality -> embeddings in the place of its media, as the data parser takes them."""
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None
    deadline: float | None = None
    """Time of the event loop by which the first processing must have ended; None: no limit."""
    is_paid: bool = False
    """Whether the memory of the decoded items is reserved already, by who made the job."""
    load: Load | None = None
    """Reads payloads that were left unread, within the budget; None: all were read."""

    @property
    def is_short(self) -> bool:
        """Whether the prompt is built in less time than a thread takes to be asked for it."""
        return (
            isinstance(self.prompt, str)
            and len(self.prompt) <= _SHORT_CHARS
            and len(self.items) <= _FEW_ITEMS
            and not self.embeddings
        )


Deliver: TypeAlias = Callable[[MultiModalInput], None]
"""Takes what was rendered. Runs on the ordered worker, must not block; if it raises, the cache
is as it was before the request."""


class JobInputs:
    """Makes a processor's inputs of jobs, and finishes what comes out. Threads share it.

    Args:
        processor: The model's.
        identities: Finds what items are.
        fingerprint: Stands for everything of the processor that results depend on.
    """

    def __init__(
        self, processor: BaseMultiModalProcessor, identities: ItemIdentities, fingerprint: str
    ) -> None:
        self._processor = processor
        self._identities = identities
        self._fingerprint = fingerprint

    def build(
        self,
        job: Job,
        cache: BaseMultiModalProcessorCache | None,
        refs: list[MediaRef[Any]] | None = None,
    ) -> tuple[ProcessorInputs, list[NamedItem]]:
        """Return the inputs, and what uuids stand for once they were processed.

        Args:
            job: What is to be processed.
            cache: The one that it goes by; None: none.
            refs: Gets the references of the inputs, which the caller releases in any case. None:
                the inputs are over the items' own, none of which may be decoded.

        Raises:
            MissingMediaError: If an item has no bytes, and its uuid stands for nothing.
            UuidConflictError: If an item's uuid stands for other media, and that is an error.
        """
        data: dict[str, Any] = {}
        numbers: dict[str, list[int]] = {}
        for item in job.items:
            ref = item.ref if refs is None else item.new_ref()
            if ref is None and cache is None:
                raise MissingMediaError(
                    "an item with a uuid alone needs the processor cache, which is off",
                    modality=item.modality,
                    index=item.index,
                )
            if ref is not None and refs is not None:
                refs.append(ref)
            data.setdefault(item.modality, []).append(ref)
            numbers.setdefault(item.modality, []).append(item.index)
        data.update(job.embeddings)
        groups = self._processor.info.parse_mm_data(data, validate=False)
        for modality, indices in numbers.items():
            groups[modality] = groups[modality].numbered(indices)
        inputs = ProcessorInputs(
            job.prompt,
            groups,
            hf_processor_mm_kwargs=job.mm_processor_kwargs,
            media_io_kwargs=job.media_io_kwargs,
            cache=cache,
            cache_salt=job.cache_salt,
            processor_fingerprint=self._fingerprint,
            sound_pairs=[
                (item.of_video, numbers["audio"].index(item.index))
                for item in job.items
                if item.of_video is not None
            ],
        )
        if cache is None:
            return self._processor.set_apart(inputs), []
        resolved = self._identities.resolve(job.items, inputs)
        inputs.mm_hash_items = resolved.hashes
        return inputs, resolved.named

    def finish(self, prompt: MultiModalInput, inputs: ProcessorInputs) -> None:
        """Say what chunks were cut from, and refuse items of which the model sees nothing."""
        chunks = inputs.mm_data_items.get(VISION_CHUNK)
        if chunks is not None and isinstance(chunks, VisionChunkProcessorItems):
            prompt["mm_origins"] = {VISION_CHUNK: list(chunks.origins)}
        if self._processor.items_in_prompt:
            check_placeholders(prompt, inputs)

    def bind(self, named: Sequence[NamedItem], cache: BaseMultiModalProcessorCache | None) -> None:
        """Let uuids stand for the bytes that were seen, unless the request may change nothing."""
        if named and cache is not None and cache.keeps_items:
            self._identities.bind(named)
