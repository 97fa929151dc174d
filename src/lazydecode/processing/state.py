"""What one request carries between its phases, and how that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, wait
from types import TracebackType
from typing import Any, Self

from lazydecode.errors import LazyDecodeError
from lazydecode.media.base import MediaRef
from lazydecode.media.decode import (
    MediaDecodeJob,
    await_with_cancellation_drain,
    collect_media_decodes,
    collect_media_decodes_async,
    wait_for_jobs,
)
from lazydecode.parse import ProcessorBatchItems
from lazydecode.processing.failures import decode_error, process_error
from lazydecode.processing.flights import ItemFlight
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.outputs import ItemOutput, WarmOutputs
from lazydecode.processing.timing import ItemStage, TimingContext


class MultiModalApplyState:
    """Inputs, decodes and results of one request, from phase 1 until it is closed.

    It owns the references that its inputs hold and releases them in `close`, after every
    decode has ended. Use it as a context manager around the wait and phase 2.

    Args:
        inputs: The inputs, over references that the state may release.
        timing_ctx: Where times are noted.
        mm_hashes: Modality -> identities; None if the request goes without the cache.
        decodes: Submitted decodes; later ones are appended.
        waits: Whether the thread that submits decodes also waits for them.
    """

    def __init__(
        self,
        inputs: ProcessorInputs,
        timing_ctx: TimingContext,
        mm_hashes: dict[str, list[str]] | None,
        decodes: list[MediaDecodeJob],
        *,
        waits: bool = False,
    ) -> None:
        self.inputs = inputs
        self.waits = waits
        self.timing_ctx = timing_ctx
        self.mm_hashes = mm_hashes
        self.decodes = decodes
        self.flights: dict[tuple[str, int], ItemFlight] = {}
        """(modality, position in the inputs) -> the shared work that was joined for it."""
        self.outputs: dict[str, ItemOutput] = {}
        """Hash -> result, for items of this request that are processed but not committed."""
        self.uncached_outputs: dict[str, list[ItemOutput]] | None = None
        """Modality -> results of all items, where the request goes without the cache."""
        self.warm_outputs: WarmOutputs | None = None
        """Where results go that this request does not commit."""
        self.salvage: Callable[[MultiModalApplyState], None] | None = None
        """Processes what was decoded although another item of the request failed."""
        self.salvage_executor: Executor | None = None
        """Runs `salvage` off the event loop."""
        self.is_committed = False
        """Whether the results are in the cache, and the prompt is finished."""
        self._has_failed = False
        self._is_closed = False
        self._noted: set[tuple[str, int]] = set()
        """The flights of which the observer was told."""

    @property
    def is_waiting(self) -> bool:
        """Whether work of this or another request is to be waited for before phase 2."""
        return bool(self.decodes or self.flights)

    # -- waiting

    def wait_decodes(self) -> None:
        """Block until every decode has ended.

        Raises:
            LazyDecodeError: For the first item, in request order, that could not be decoded.
        """
        if not self.decodes:
            return
        with self.timing_ctx.record("decode_mm_items"):
            try:
                collect_media_decodes(self.decodes, decode_error)
            except LazyDecodeError:
                self._has_failed = True
                if self.salvage is not None:
                    self.salvage(self)
                raise

    async def wait_decodes_async(self) -> None:
        """As `wait_decodes`, off the event loop; a cancelled caller waits for the decodes too."""
        if not self.decodes:
            return
        with self.timing_ctx.record("decode_mm_items"):
            try:
                await await_with_cancellation_drain(
                    collect_media_decodes_async(self.decodes, decode_error),
                    on_cancel=self.leave_flights,
                )
            except LazyDecodeError:
                self._has_failed = True
                salvage, executor = self.salvage, self.salvage_executor
                if salvage is not None and executor is not None:
                    future = executor.submit(salvage, self)
                    await await_with_cancellation_drain(asyncio.wrap_future(future))
                raise

    def wait_items(self) -> None:
        """Block until every decode has ended and every joined item is processed.

        Raises:
            LazyDecodeError: For the first item that could not be decoded, else for the first
                that could not be processed.
        """
        self.wait_decodes()
        if self.flights:
            with self.timing_ctx.record("apply_hf_processor"):
                wait([flight.result_future for flight in self.flights.values()])
            self._collect_flights()

    async def wait_items_async(self) -> None:
        """As `wait_items`, off the event loop.

        A cancelled caller waits for the decodes, and leaves what is being processed to others.
        """
        await self.wait_decodes_async()
        if not self.flights:
            return
        with self.timing_ctx.record("apply_hf_processor"):
            futures = [
                asyncio.wrap_future(flight.result_future) for flight in self.flights.values()
            ]
            try:
                await asyncio.wait(futures)
            finally:
                for future in futures:
                    # Not the shared work: only our view of it, whose outcome nobody reads.
                    if not future.cancel():
                        future.exception()
        self._collect_flights()

    def _collect_flights(self) -> None:
        outputs: dict[str, list[ItemOutput]] = {m: [] for m in self.inputs.mm_data_items}
        for (modality, position), flight in self.flights.items():
            item = self.inputs.mm_data_items[modality].get_client_position(position)
            cause = flight.result_future.exception()
            if isinstance(cause, Exception):
                self._has_failed = True
                error = process_error(*item, cause)
                if error is cause:
                    raise cause
                raise error from cause
            if cause is not None:
                raise cause
            output = flight.result_future.result()
            if self.mm_hashes is None:
                outputs[modality].append(output)
            else:
                self.outputs[self.mm_hashes[modality][position]] = output
            self._note_flight((modality, position), flight)
        if self.mm_hashes is None:
            self.uncached_outputs = outputs

    def _note_flight(self, key: tuple[str, int], flight: ItemFlight) -> None:
        """Tell the observer, once, what an item's decode and processing took."""
        observer = self.timing_ctx.observer
        if observer is None or key in self._noted:
            return
        self._noted.add(key)
        modality, position = key
        item = self.inputs.mm_data_items[modality].get_client_position(position)
        stages: tuple[tuple[ItemStage, float], ...] = (
            ("decode_wait", flight.wait_s),
            ("decode", flight.decode_s),
            ("process", flight.process_s),
        )
        for stage, seconds in stages:
            # What never ran took no time; what failed or was left alone has no processing.
            if seconds or flight.is_processed:
                observer.record_item(*item, stage, seconds, shared=flight.is_shared)

    # -- the end

    def expire_flights(self) -> None:
        """End the wait for shared work that takes longer than its limit."""
        for flight in self.flights.values():
            flight.expire()

    def leave_flights(self) -> None:
        """Stop waiting for shared work. After a failure, what is good of it still finishes."""
        for flight in self.flights.values():
            flight.leave(finish=self._has_failed)

    def close(self) -> None:
        """Wait for every decode, whatever its outcome, then release the references.

        Blocks; on an event loop only after `wait_decodes_async`. A second call releases nothing.
        """
        self.leave_flights()
        wait_for_jobs(self.decodes)
        if self._is_closed:
            return
        self._is_closed = True
        # A decoder also ran for what failed, and for a client that went away meanwhile.
        for key, flight in self.flights.items():
            self._note_flight(key, flight)
        if self.warm_outputs is not None and not self.is_committed:
            for mm_hash, output in self.outputs.items():
                self.warm_outputs.put(mm_hash, output)
        for ref in self._owned_refs():
            ref.release()

    def _owned_refs(self) -> list[MediaRef[Any]]:
        return [
            item
            for items in self.inputs.mm_data_items.values()
            if isinstance(items, ProcessorBatchItems)
            for item in items.get_all_raw()
            if isinstance(item, MediaRef)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
