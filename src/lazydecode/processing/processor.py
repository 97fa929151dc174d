"""Parsed items and a prompt become engine input, in two phases with the decodes between them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Final

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.inputs import MultiModalInput
from lazydecode.media import executor as media_executor
from lazydecode.media.base import MediaRef
from lazydecode.media.decode import MediaDecodeJob, collect_media_decodes
from lazydecode.parse import MultiModalDataItems
from lazydecode.processing.context import BaseProcessingInfo
from lazydecode.processing.decoding import submit_ref_decodes
from lazydecode.processing.failures import decode_error
from lazydecode.processing.flights import ItemFlights
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.merge import (
    ProcessedRequest,
    build_mm_input,
    merge_uncached,
    merge_with_cache,
)
from lazydecode.processing.missing import (
    Flags,
    Positions,
    find_missing,
    is_decoded,
    require_all_data,
    require_data,
    select_positions,
    unfinished_positions,
)
from lazydecode.processing.outputs import ItemOutput, WarmOutputs
from lazydecode.processing.remote import item_job
from lazydecode.processing.running import process_items
from lazydecode.processing.state import MultiModalApplyState
from lazydecode.processing.steps import ProcessingSteps
from lazydecode.processing.timing import TimingContext

logger = logging.getLogger(__name__)

_ONE_PIECE_METHODS: Final = ("apply", "_cached_apply_hf_processor", "_apply_hf_processor")
"""Methods that do both phases and the wait; who overrides one cannot be run in phases."""

_reported_classes: Final[set[type]] = set()
"""Classes whose overrides of those were logged."""


class BaseMultiModalProcessor(ProcessingSteps):
    """Runs a model's processor on what a cache lacks, and puts the items into the prompt.

    What must be ordered against other requests (`apply_phase1`, `apply_phase2`, and `apply`) is
    called from one thread at a time for each cache; `apply_process` may run anywhere, also for
    several requests at once.

    Args:
        info: What the family says about its media.
        dummy_inputs: Builds inputs for profiling and warm-up; unused here.
        flights: As for `use_flights`.
        media_executor: Runs decodes; None is the media pool of the process.
    """

    requires_tokenizer: bool = True
    """Whether the prompt may be text, or have updates in text."""
    reentrant: bool = True
    """Whether the model's processor may run in several threads at once."""
    per_item: bool = False
    """Whether `_process_missing` treats each item by itself, so that its result can be shared
    and its failure names the item."""
    items_in_prompt: bool = True
    """Whether an item stands for tokens of the prompt; False: only an encoder reads it."""

    def __init__(
        self,
        info: BaseProcessingInfo,
        dummy_inputs: Any = None,
        *,
        flights: ItemFlights | None = None,
        media_executor: Executor | None = None,
    ) -> None:
        self.info = info
        self.dummy_inputs = dummy_inputs
        self.flights = flights
        self.warm_outputs = WarmOutputs() if flights is None else flights.outputs
        self._media_executor = media_executor
        self._process_lock = threading.Lock()

    def use_flights(
        self, flights: ItemFlights | None, *, media_executor: Executor | None = None
    ) -> None:
        """Share the work on items between requests from here on; only if `per_item`.

        Args:
            flights: The table that all requests of this processor share; None: no sharing.
            media_executor: Runs decodes outside flights; None leaves it as it is.
        """
        self.flights = flights
        if flights is not None:
            self.warm_outputs = flights.outputs
        if media_executor is not None:
            self._media_executor = media_executor

    # -- the two phases

    def apply_phase1(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext | None = None
    ) -> MultiModalApplyState:
        """Identify the items, look them up and start the decodes that are missing; no waiting.

        The caller's references stay usable: the state works on forks of them.
        """
        timing_ctx = timing_ctx or TimingContext(False)
        use_cache = inputs.can_use_cache
        if self.per_item and self.flights is not None and not use_cache:
            return self._begin(inputs, timing_ctx, self._begin_alone)
        return self._apply_hf_processor_phase1(inputs, timing_ctx, use_cache=use_cache)

    def apply_process(self, state: MultiModalApplyState) -> None:
        """Process what is missing now, between the wait and phase 2, off the ordered worker.

        Leaves alone what shared work has not finished yet. Phase 2 does whatever is not done
        here, so calling this is never wrong and never required.

        Raises:
            LazyDecodeError: If an item cannot be decoded or processed.
        """
        if state.mm_hashes is None:
            self._process_uncached(state)
            return
        hashes = state.mm_hashes
        in_flight = {
            hashes[modality][position]
            for (modality, position), flight in state.flights.items()
            if not flight.result_future.done()
        }
        flags = self._lookup(state)
        done = state.outputs.keys() | in_flight
        missing = unfinished_positions(state.inputs.mm_data_items, flags, hashes, done)
        if missing:
            self._process_positions(state, missing)

    def apply_phase2(self, state: MultiModalApplyState) -> MultiModalInput:
        """Merge results and cache, and put the items into the prompt.

        If it raises, the cache is as it was before.

        Raises:
            LazyDecodeError: If an item cannot be decoded or processed, or has no place in the
                prompt.
        """
        with self._transaction(state.inputs):
            processed = self._apply_hf_processor_phase2(state)
            result = self._build_mm_input(state.inputs, processed, state.timing_ctx)
        state.is_committed = True
        self._discard_warm(state.inputs, processed)
        return result

    def apply(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext | None = None
    ) -> MultiModalInput:
        """Both phases and the wait between them, in this thread."""
        timing_ctx = timing_ctx or TimingContext(False)
        with self._transaction(inputs):
            processed = self._cached_apply_hf_processor(inputs, timing_ctx)
            result = self._build_mm_input(inputs, processed, timing_ctx)
        self._discard_warm(inputs, processed)
        return result

    @property
    def supports_two_phase_apply(self) -> bool:
        """Whether the phases give what `apply` gives: no class replaced the whole of it."""
        kind = type(self)
        overridden = [
            name
            for name in _ONE_PIECE_METHODS
            if getattr(kind, name) is not getattr(BaseMultiModalProcessor, name)
        ]
        if overridden and kind not in _reported_classes:
            _reported_classes.add(kind)
            names = ", ".join(overridden)
            logger.debug("%s is not run in phases, as it overrides %s", kind.__name__, names)
        return not overridden

    @contextmanager
    def process_guard(self) -> Iterator[None]:
        """Hold whatever a run of the model's processor must hold; warm-up takes it too."""
        with nullcontext() if self.reentrant else self._process_lock:
            yield

    def clear_outputs(self) -> None:
        """Forget results that no cache has; to be called when the cache is cleared."""
        self.warm_outputs.clear()

    # -- synchronous path

    def _cached_apply_hf_processor(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> ProcessedRequest:
        if not inputs.can_use_cache:
            return self._apply_hf_processor(inputs, timing_ctx)
        return self._run_phases(inputs, timing_ctx, use_cache=True)

    def _apply_hf_processor(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> ProcessedRequest:
        return self._run_phases(inputs, timing_ctx, use_cache=False)

    def _run_phases(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext, *, use_cache: bool
    ) -> ProcessedRequest:
        state = self._apply_hf_processor_phase1(inputs, timing_ctx, use_cache=use_cache, waits=True)
        with state:
            state.wait_items()
            return self._apply_hf_processor_phase2(state)

    # -- phase 1

    def _apply_hf_processor_phase1(
        self,
        inputs: ProcessorInputs,
        timing_ctx: TimingContext,
        *,
        use_cache: bool,
        waits: bool = False,
    ) -> MultiModalApplyState:
        begin = self._begin_cached if use_cache else self._begin_uncached
        return self._begin(inputs, timing_ctx, begin, waits=waits)

    def _begin(
        self,
        inputs: ProcessorInputs,
        timing_ctx: TimingContext,
        begin: Callable[[MultiModalApplyState], None],
        *,
        waits: bool = False,
    ) -> MultiModalApplyState:
        state = MultiModalApplyState(inputs.fork_media_refs(), timing_ctx, None, [], waits=waits)
        state.warm_outputs = self.warm_outputs
        try:
            begin(state)
        except BaseException:
            state.close()
            raise
        return state

    def _begin_uncached(self, state: MultiModalApplyState) -> None:
        require_all_data(state.inputs.mm_data_items)
        self._submit(state, state.inputs.mm_data_items)

    def _submit(self, state: MultiModalApplyState, items: MultiModalDataItems) -> None:
        executor, timing_ctx = self._decode_executor, state.timing_ctx
        submit_ref_decodes(items, executor, state.decodes, timing_ctx, waits=state.waits)

    def _begin_alone(self, state: MultiModalApplyState) -> None:
        """Without a cache, and off the ordered worker all the same: flights for this request."""
        items = state.inputs.mm_data_items
        require_all_data(items)
        positions = {m: list(range(count)) for m, count in items.get_all_counts().items()}
        assert self.flights is not None
        self._join_flights(state, positions, self.flights)

    def _begin_cached(self, state: MultiModalApplyState) -> None:
        timing_ctx = state.timing_ctx
        with timing_ctx.record("get_mm_hashes"):
            hashes = state.mm_hashes = self._hash_mm_items(state)
        with timing_ctx.record("get_cache_missing_items"):
            flags = self._lookup(state, report=True)
        missing = unfinished_positions(state.inputs.mm_data_items, flags, hashes, state.outputs)
        with timing_ctx.record("decode_mm_items"):
            if self.per_item and self.flights is not None:
                self._join_flights(state, missing, self.flights)
            else:
                state.salvage = self._salvage
                state.salvage_executor = self._decode_executor
                items = select_positions(state.inputs.mm_data_items, missing)
                self._submit(state, items)

    def _hash_mm_items(self, state: MultiModalApplyState) -> dict[str, list[str]]:
        """Return modality -> the identity of each item."""
        inputs, timing_ctx = self.set_apart(state.inputs), state.timing_ctx
        model_id, algorithm = self.info.identity_scope
        if timing_ctx.observer is None:
            return inputs.get_mm_hashes(model_id, algorithm)
        hashes: dict[str, list[str]] = {}
        for modality, items in inputs.mm_data_items.items():
            hashes[modality] = []
            for position in range(items.get_count()):
                with timing_ctx.record_item(*items.get_client_position(position), "digest"):
                    mm_hash = inputs.get_item_hash(modality, position, model_id, algorithm)
                hashes[modality].append(mm_hash)
        return hashes

    def _lookup(self, state: MultiModalApplyState, *, report: bool = False) -> Flags:
        """Return which items are cached now; results that are warm come into the state."""
        inputs, hashes = state.inputs, state.mm_hashes
        assert inputs.cache is not None and hashes is not None
        start = time.perf_counter()
        for item_hashes in hashes.values():
            for mm_hash in item_hashes:
                if mm_hash not in state.outputs and not inputs.cache.is_cached_item(mm_hash):
                    output = self.warm_outputs.get(mm_hash)
                    if output is not None:
                        state.outputs[mm_hash] = output
        flags, _ = self._get_cache_missing_items(
            inputs.cache, inputs.mm_data_items, hashes, known=state.outputs
        )
        if report and (observer := state.timing_ctx.observer) is not None:
            seconds = time.perf_counter() - start
            for modality, item_flags in flags.items():
                for position, is_hit in enumerate(item_flags):
                    item = inputs.mm_data_items[modality].get_client_position(position)
                    hit = is_hit or hashes[modality][position] in state.outputs
                    observer.record_item(*item, "lookup", seconds, hit=hit)
        return flags

    def _get_cache_missing_items(
        self,
        cache: BaseMultiModalProcessorCache,
        mm_data_items: MultiModalDataItems,
        mm_hashes: Mapping[str, Sequence[str]],
        *,
        known: Mapping[str, ItemOutput] | None = None,
    ) -> tuple[Flags, MultiModalDataItems]:
        return find_missing(cache, mm_data_items, mm_hashes, known or {})

    def _join_flights(
        self, state: MultiModalApplyState, missing: Positions, flights: ItemFlights
    ) -> None:
        hashes = state.mm_hashes
        for modality, positions in missing.items():
            items = state.inputs.mm_data_items[modality]
            for position in positions:
                raw = items.get_raw(position)
                flight = flights.join(
                    None if hashes is None else hashes[modality][position],
                    raw if isinstance(raw, MediaRef) else None,
                    self._item_process(state.inputs, modality, position),
                    item_job(state.inputs, modality, position),
                )
                state.flights[modality, position] = flight
                item = items.get_client_position(position)
                state.decodes.append(MediaDecodeJob(*item, flight.decode_future))

    def _item_process(
        self, inputs: ProcessorInputs, modality: str, position: int
    ) -> Callable[[MediaRef[Any] | None], ItemOutput]:
        """Return what processes one item, and keeps nothing of its neighbours in memory."""
        inputs = inputs.single(modality, position)

        def process(ref: MediaRef[Any] | None) -> ItemOutput:
            if ref is not None:
                inputs.mm_data_items[modality].data = [ref]
            with self.process_guard():
                return self.process_single(inputs)

        return process

    @property
    def _decode_executor(self) -> Executor:
        # Looked up at each call: the pool of the process can be replaced.
        return self._media_executor or media_executor.global_thread_pool

    # -- processing

    def _process_uncached(self, state: MultiModalApplyState) -> dict[str, list[ItemOutput]]:
        if state.uncached_outputs is None:
            items = state.inputs.mm_data_items
            outputs: dict[str, list[ItemOutput]] = {modality: [] for modality in items}

            def keep(modality: str, position: int, output: ItemOutput) -> None:
                # Called in order of position.
                outputs[modality].append(output)

            self._decode_ref_items(items, state.decodes, state.timing_ctx)
            self._run_process(items, state, keep)
            state.uncached_outputs = outputs
        return state.uncached_outputs

    def _process_positions(self, state: MultiModalApplyState, positions: Positions) -> None:
        """Decode what is not decoded, process, and note the results in the state."""
        hashes = state.mm_hashes
        assert hashes is not None
        items = select_positions(state.inputs.mm_data_items, positions)
        self._decode_ref_items(items, state.decodes, state.timing_ctx)

        def keep(modality: str, position: int, output: ItemOutput) -> None:
            state.outputs[hashes[modality][positions[modality][position]]] = output

        self._run_process(items, state, keep)

    def _decode_ref_items(
        self,
        items: MultiModalDataItems,
        decodes: list[MediaDecodeJob],
        timing_ctx: TimingContext | None = None,
    ) -> None:
        """Decode now what phase 1 did not: mostly hits that were evicted in between."""
        timing_ctx = timing_ctx or TimingContext(False)
        num_before = len(decodes)
        submit_ref_decodes(items, self._decode_executor, decodes, timing_ctx, waits=True)
        late = decodes[num_before:]
        if late:
            with timing_ctx.record("decode_mm_items"):
                collect_media_decodes(late, decode_error)

    def _run_process(
        self,
        items: MultiModalDataItems,
        state: MultiModalApplyState,
        keep: Callable[[str, int, ItemOutput], None],
    ) -> None:
        def process(missing: MultiModalDataItems) -> dict[str, list[ItemOutput]]:
            with self.process_guard():
                return self._process_missing(missing, state.inputs)

        with state.timing_ctx.record("apply_hf_processor"):
            process_items(process, items, state.timing_ctx, keep, per_item=self.per_item)

    def _salvage(self, state: MultiModalApplyState) -> None:
        """After another item failed: process what was decoded, for the requests to come."""
        cache, hashes = state.inputs.cache, state.mm_hashes
        assert cache is not None and hashes is not None
        flags = {modality: cache.is_cached(group) for modality, group in hashes.items()}
        unfinished = unfinished_positions(state.inputs.mm_data_items, flags, hashes, state.outputs)
        for modality, positions in unfinished.items():
            items = state.inputs.mm_data_items[modality]
            # Only what is decoded: this may run on a media thread, which must not wait for one.
            good = [position for position in positions if is_decoded(items.get_raw(position))]
            try:
                if good:
                    self._process_positions(state, {modality: good})
            except Exception:
                # The client hears of the failed decode; this was only for the next request.
                logger.warning("Items beside a corrupt one were not processed", exc_info=True)

    # -- phase 2

    def _apply_hf_processor_phase2(self, state: MultiModalApplyState) -> ProcessedRequest:
        if state.mm_hashes is None:
            outputs = self._process_uncached(state)
            with state.timing_ctx.record("get_mm_hashes"):
                return merge_uncached(outputs, self._hash_mm_items(state))
        cache, hashes = state.inputs.cache, state.mm_hashes
        assert cache is not None
        try:
            if any(hashes[modality][at] not in state.outputs for modality, at in state.flights):
                state.wait_items()  # The caller has waited for the decodes only.
            with state.timing_ctx.record("get_cache_missing_items"):
                flags = self._lookup(state)
            # Also when nothing is left to process: the hooks see empty data then.
            missing = unfinished_positions(state.inputs.mm_data_items, flags, hashes, state.outputs)
            self._process_positions(state, missing)
            with state.timing_ctx.record("merge_mm_kwargs"):
                return merge_with_cache(
                    cache,
                    hashes,
                    flags,
                    state.outputs,
                    lambda modality, position: self._process_evicted(state, modality, position),
                )
        finally:
            cache.release_sender_touches()

    def _process_evicted(self, state: MultiModalApplyState, modality: str, position: int) -> None:
        """A request that alone is larger than the cache has pushed out a hit of its own."""
        assert state.mm_hashes is not None
        if state.mm_hashes[modality][position] not in state.outputs:
            require_data(state.inputs.mm_data_items, modality, position)
            self._process_positions(state, {modality: [position]})

    def _build_mm_input(
        self, inputs: ProcessorInputs, processed: ProcessedRequest, timing_ctx: TimingContext
    ) -> MultiModalInput:
        with timing_ctx.record("apply_prompt_updates"):
            prompt_ids, placeholders = self._finish_prompt(
                inputs, processed.mm_kwargs, processed.updates
            )
        return build_mm_input(inputs, processed, prompt_ids, placeholders)

    @staticmethod
    def _transaction(inputs: ProcessorInputs) -> AbstractContextManager[None]:
        return nullcontext() if inputs.cache is None else inputs.cache.transaction()

    def _discard_warm(self, inputs: ProcessorInputs, processed: ProcessedRequest) -> None:
        """The cache had its chance to keep the results: nobody needs to keep them here."""
        if inputs.cache is None or inputs.cache.keeps_items:
            for mm_hash in chain.from_iterable(processed.mm_hashes.values()):
                self.warm_outputs.discard(mm_hash)
