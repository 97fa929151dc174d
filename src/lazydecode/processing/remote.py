"""What an item's work is when another process does it: the job, and who takes such jobs.

The other process has the same model loaded. It rebuilds the decoder from the recipe, parses the
item as this process did, and must arrive at the same spec; then it decodes and processes. What
comes back is bit for bit what this process would have made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lazydecode.media.base import DecodeSpec, MediaRef
from lazydecode.media.rebuild import can_rebuild
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.outputs import ItemOutput


class RefusedError(Exception):
    """No other process can do the job; it is for this one to do."""


@dataclass(frozen=True, slots=True)
class ItemJob:
    """One item to be decoded and processed elsewhere; its payload comes beside it."""

    modality: str
    """Of the client's item: `image`, `video` or `audio`."""
    recipe: DecodeSpec
    """Rebuilds the decoder."""
    spec: DecodeSpec
    """Of the reference as the parser mapped it."""
    options: Mapping[str, Any]
    """The request's processor options."""


class ItemWorker(Protocol):
    """Does one job at a time. Used on one thread."""

    def run(
        self, job: ItemJob, data: bytes, on_decoded: Callable[[float], None]
    ) -> tuple[ItemOutput, float]:
        """Return what the item becomes, and the seconds that processing it took.

        Args:
            job: What to do.
            data: The payload.
            on_decoded: Called with the seconds of the decode once that has ended; again if the
                work is begun anew.

        Raises:
            RefusedError: If it is to be done in this process.
            Exception: What the decode or the processing raised, as one of our errors.
        """
        ...


class ItemWorkers(Protocol):
    """Worker processes. Methods are thread-safe."""

    @property
    def is_ready(self) -> bool:
        """Whether jobs are taken now."""
        ...

    def submit(self, task: Callable[[ItemWorker], None]) -> None:
        """Call `task` with the next worker that is free, on a thread of its own.

        Raises:
            RuntimeError: If no more jobs are taken.
        """
        ...


def item_job(inputs: ProcessorInputs, modality: str, position: int) -> ItemJob | None:
    """Return the job that an item is; None if only this process can do it.

    Chunks of videos are cut from one decode that they share, so they stay where that is.
    """
    items = inputs.mm_data_items[modality]
    ref = items.get_raw(position)
    origin, _ = items.get_client_position(position)
    if not isinstance(ref, MediaRef) or (modality != origin and origin != "image"):
        return None
    if ref.recipe is None or ref.is_decoded or not can_rebuild(ref.recipe):
        return None
    return ItemJob(origin, ref.recipe, ref.spec, inputs.hf_processor_mm_kwargs)
