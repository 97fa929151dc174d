"""Parsed items and a prompt become engine input, in two phases with the decodes between them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.errors import InvalidRequestError, LazyDecodeError
from lazydecode.inputs import MultiModalInput, MultiModalKwargsItem, PlaceholderRange
from lazydecode.media import executor as media_executor
from lazydecode.media.base import MediaRef
from lazydecode.media.decode import MediaDecodeJob, collect_media_decodes, submit_media_decodes
from lazydecode.parse import MultiModalDataItems, ProcessorBatchItems
from lazydecode.processing.context import BaseProcessingInfo
from lazydecode.processing.failures import decode_error, process_error
from lazydecode.processing.fields import MultiModalFieldConfig, split_into_items
from lazydecode.processing.flights import ItemFlights, ItemOutput, WarmOutputs
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.placement import (
    apply_updates_to_ids,
    apply_updates_to_text,
    find_placeholders,
)
from lazydecode.processing.prompt_updates import (
    PromptUpdate,
    ResolvedPromptUpdate,
    resolve_updates,
)
from lazydecode.processing.state import MultiModalApplyState
from lazydecode.processing.timing import TimingContext

logger = logging.getLogger(__name__)

_ONE_PIECE_METHODS: Final = ("apply", "_cached_apply_hf_processor", "_apply_hf_processor")
"""Methods that do both phases and the wait; who overrides one cannot be run in phases."""

Positions = dict[str, list[int]]
"""Modality -> positions in the inputs."""


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """All items of a request after phase 2, before the prompt."""

    mm_kwargs: dict[str, list[MultiModalKwargsItem | None]]
    """Modality -> per item its tensors; None where the engine holds them."""
    mm_hashes: dict[str, list[str]]
    updates: dict[str, list[Sequence[Any]]]
    """Modality -> per item what its prompt needs."""


class BaseMultiModalProcessor:
    """Runs a model's processor on what a cache lacks, and puts the items into the prompt.

    The two steps that families replace are `_process_missing` and `_finish_prompt`, or the
    hooks that their defaults call. What must be ordered against other requests (`apply_phase1`,
    `apply_phase2`, `apply` with a mirrored cache) is called from one thread at a time;
    `apply_process` may run anywhere, also for several requests at once.

    Args:
        info: What the family says about its media.
        dummy_inputs: Builds inputs for profiling and warm-up; unused here.
        flights: Where requests share the work on items that several of them want. Used if
            `per_item`.
        media_executor: Runs decodes; None is the media pool of the process.
    """

    requires_tokenizer: bool = True
    """Whether the prompt may be text, or have updates in text."""
    reentrant: bool = True
    """Whether the model's processor may run in several threads at once."""
    per_item: bool = False
    """Whether `_process_missing` treats each item by itself, so that its result can be shared
    and its failure names the item."""

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

    # -- the two phases

    def apply_phase1(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext | None = None
    ) -> MultiModalApplyState:
        """Identify the items, look them up and start the decodes that are missing; no waiting.

        The caller's references stay usable: the state works on forks of them.
        """
        return self._apply_hf_processor_phase1(
            inputs, timing_ctx or TimingContext(False), use_cache=inputs.can_use_cache
        )

    def apply_process(self, state: MultiModalApplyState) -> None:
        """Process what is missing now, between the wait and phase 2, off the ordered worker.

        Leaves alone what shared work has not finished yet. Phase 2 does whatever is not done
        here, so calling this is never wrong and never required.

        Raises:
            LazyDecodeError: If an item cannot be decoded or processed.
        """
        if state.mm_hashes is None:
            if state.uncached_outputs is None:
                state.uncached_outputs = self._process_all(state)
            return
        flags = self._lookup(state)
        missing = self._positions_to_process(state, flags, skip_unfinished=True)
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
        self._discard_warm(processed)
        return result

    def apply(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext | None = None
    ) -> MultiModalInput:
        """Both phases and the wait between them, in this thread."""
        timing_ctx = timing_ctx or TimingContext(False)
        with self._transaction(inputs):
            processed = self._cached_apply_hf_processor(inputs, timing_ctx)
            result = self._build_mm_input(inputs, processed, timing_ctx)
        self._discard_warm(processed)
        return result

    @property
    def supports_two_phase_apply(self) -> bool:
        """Whether the phases give what `apply` gives: no class replaced the whole of it."""
        overridden = [
            name
            for name in _ONE_PIECE_METHODS
            if getattr(type(self), name) is not getattr(BaseMultiModalProcessor, name)
        ]
        if overridden and type(self) not in _reported_classes:
            _reported_classes.add(type(self))
            logger.debug(
                "%s is not run in phases, as it overrides %s",
                type(self).__name__,
                ", ".join(overridden),
            )
        return not overridden

    @contextmanager
    def process_guard(self) -> Iterator[None]:
        """Hold whatever a run of the model's processor must hold; warm-up takes it too."""
        if self.reentrant:
            yield
            return
        with self._process_lock:
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
        state = self._apply_hf_processor_phase1(inputs, timing_ctx, use_cache=use_cache)
        with state:
            state.wait_items()
            return self._apply_hf_processor_phase2(state)

    # -- phase 1

    def _apply_hf_processor_phase1(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext, *, use_cache: bool
    ) -> MultiModalApplyState:
        inputs = inputs.fork_media_refs()
        state = MultiModalApplyState(inputs, timing_ctx, None, [])
        state.warm_outputs = self.warm_outputs
        state.salvage_executor = self._decode_executor.submit
        try:
            if not use_cache:
                self._submit_ref_decodes(inputs.mm_data_items, state)
                return state
            with timing_ctx.record("get_mm_hashes"):
                state.mm_hashes = self._hash_mm_items(inputs, timing_ctx)
            with timing_ctx.record("get_cache_missing_items"):
                flags = self._lookup(state, report=True)
            missing = self._positions_to_process(state, flags)
            with timing_ctx.record("decode_mm_items"):
                if self.per_item and self.flights is not None:
                    self._join_flights(state, missing, self.flights)
                else:
                    state.salvage = self._salvage
                    self._submit_ref_decodes(self._select(inputs, missing), state)
        except BaseException:
            state.close()
            raise
        return state

    def _hash_mm_items(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> dict[str, list[str]]:
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        model_id = self.info.model_id
        if timing_ctx.observer is None:
            return inputs.get_mm_hashes(model_id, algorithm)
        hashes: dict[str, list[str]] = {}
        for modality, items in inputs.mm_data_items.items():
            hashes[modality] = []
            for position in range(items.get_count()):
                index = items.get_original_index(position)
                with timing_ctx.record_item(modality, index, "digest"):
                    mm_hash = inputs.get_item_hash(modality, position, model_id, algorithm)
                hashes[modality].append(mm_hash)
        return hashes

    def _lookup(
        self, state: MultiModalApplyState, *, report: bool = False
    ) -> dict[str, list[bool]]:
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
        observer = state.timing_ctx.observer
        if report and observer is not None:
            seconds = time.perf_counter() - start
            for modality, item_flags in flags.items():
                for position, hit in enumerate(item_flags):
                    index = inputs.mm_data_items[modality].get_original_index(position)
                    hit = hit or hashes[modality][position] in state.outputs
                    observer.record_item(modality, index, "lookup", seconds, hit=hit)
        return flags

    def _get_cache_missing_items(
        self,
        cache: BaseMultiModalProcessorCache,
        mm_data_items: MultiModalDataItems,
        mm_hashes: Mapping[str, Sequence[str]],
        *,
        known: Mapping[str, ItemOutput] | None = None,
    ) -> tuple[dict[str, list[bool]], MultiModalDataItems]:
        """Return which items are cached, and the others as selections of their groups.

        Raises:
            InvalidRequestError: If an item is not cached and the client sent no data; a
                `ValueError`. Results in `known` make up for data.
        """
        flags: dict[str, list[bool]] = {}
        missing = MultiModalDataItems()
        for modality, hashes in mm_hashes.items():
            items = mm_data_items[modality]
            flags[modality] = cache.is_cached(list(hashes))
            positions = [at for at, is_hit in enumerate(flags[modality]) if not is_hit]
            for position in positions:
                if items.get_raw(position) is None and hashes[position] not in (known or {}):
                    index = items.get_original_index(position)
                    raise InvalidRequestError(
                        f"Cache miss for {modality} at index {index} but data is not provided.",
                        modality=modality,
                        index=index,
                    )
            if positions:
                missing[modality] = items.select(positions)
        return flags, missing

    def _positions_to_process(
        self,
        state: MultiModalApplyState,
        flags: Mapping[str, Sequence[bool]],
        *,
        skip_unfinished: bool = False,
    ) -> Positions:
        """Return the items that are neither cached nor processed, each hash once."""
        assert state.mm_hashes is not None
        positions: Positions = {}
        seen = set(state.outputs)
        if skip_unfinished:
            for (modality, position), flight in state.flights.items():
                if not flight.result_future.done():
                    seen.add(state.mm_hashes[modality][position])
        for modality, item_flags in flags.items():
            hashes = state.mm_hashes[modality]
            for position, is_hit in enumerate(item_flags):
                if not is_hit and hashes[position] not in seen:
                    seen.add(hashes[position])
                    positions.setdefault(modality, []).append(position)
        return positions

    @staticmethod
    def _select(inputs: ProcessorInputs, positions: Positions) -> MultiModalDataItems:
        return MultiModalDataItems(
            {
                modality: inputs.mm_data_items[modality].select(at)
                for modality, at in positions.items()
            }
        )

    def _submit_ref_decodes(self, items: MultiModalDataItems, state: MultiModalApplyState) -> None:
        """Submit the decode of every reference, under its position in the request."""
        for modality, group in items.items():
            if not isinstance(group, ProcessorBatchItems):
                continue
            for position, item in enumerate(group.get_all_raw()):
                if not isinstance(item, MediaRef):
                    continue
                index = group.get_original_index(position)
                executor = self._decode_executor
                if state.timing_ctx.observer is not None:
                    executor = _ObservedExecutor(executor, state.timing_ctx, modality, index)
                submit_media_decodes([(modality, index, item)], executor, state.decodes)

    def _join_flights(
        self, state: MultiModalApplyState, missing: Positions, flights: ItemFlights
    ) -> None:
        assert state.mm_hashes is not None
        for modality, positions in missing.items():
            items = state.inputs.mm_data_items[modality]
            for position in positions:
                raw = items.get_raw(position)
                flight = flights.join(
                    state.mm_hashes[modality][position],
                    raw if isinstance(raw, MediaRef) else None,
                    self._item_process(state.inputs, modality, position),
                )
                state.flights[modality, position] = flight
                index = items.get_original_index(position)
                state.decodes.append(MediaDecodeJob(modality, index, flight.decode_future))

    def _item_process(
        self, inputs: ProcessorInputs, modality: str, position: int
    ) -> Callable[[MediaRef[Any] | None], ItemOutput]:
        """Return what processes one item, and keeps nothing of its neighbours in memory."""
        group = inputs.mm_data_items[modality].select([position])
        inputs = replace(
            inputs,
            prompt="",
            mm_data_items=MultiModalDataItems({modality: group}),
            mm_uuid_items=None,
            cache=None,
        )

        def process(ref: MediaRef[Any] | None) -> ItemOutput:
            if ref is not None:
                group.data = [ref]
            with self.process_guard():
                return self._process_missing(inputs.mm_data_items, inputs)[modality][0]

        return process

    @property
    def _decode_executor(self) -> Executor:
        # Looked up at each call: the pool of the process can be replaced.
        return self._media_executor or media_executor.global_thread_pool

    # -- processing

    def _process_positions(self, state: MultiModalApplyState, positions: Positions) -> None:
        """Decode what is not decoded, process, and note the results in the state."""
        assert state.mm_hashes is not None
        self._decode_ref_items(self._select(state.inputs, positions), state)
        with state.timing_ctx.record("apply_hf_processor"):
            outputs = self._run_process(self._select(state.inputs, positions), state)
        for modality, at in positions.items():
            for position, output in zip(at, outputs[modality], strict=True):
                state.outputs[state.mm_hashes[modality][position]] = output

    def _process_all(self, state: MultiModalApplyState) -> dict[str, list[ItemOutput]]:
        with state.timing_ctx.record("apply_hf_processor"):
            return self._run_process(state.inputs.mm_data_items, state)

    def _decode_ref_items(self, items: MultiModalDataItems, state: MultiModalApplyState) -> None:
        """Decode now what phase 1 did not: hits that were evicted in between."""
        num_before = len(state.decodes)
        self._submit_ref_decodes(items, state)
        late = state.decodes[num_before:]
        if late:
            with state.timing_ctx.record("decode_mm_items"):
                collect_media_decodes(late, decode_error)

    def _run_process(
        self, items: MultiModalDataItems, state: MultiModalApplyState
    ) -> dict[str, list[ItemOutput]]:
        """Run `_process_missing` and check what it returns; failures name the item if known."""
        if not self.per_item:
            return self._run_process_once(items, state)
        outputs: dict[str, list[ItemOutput]] = {}
        for modality, group in items.items():
            outputs[modality] = []
            for position in range(group.get_count()):
                single = MultiModalDataItems({modality: group.select([position])})
                outputs[modality] += self._run_process_once(single, state)[modality]
        return outputs

    def _run_process_once(
        self, items: MultiModalDataItems, state: MultiModalApplyState
    ) -> dict[str, list[ItemOutput]]:
        counts = {modality: count for modality, count in items.get_all_counts().items() if count}
        start = time.perf_counter()
        try:
            with self.process_guard():
                outputs = self._process_missing(items, state.inputs)
        except LazyDecodeError:
            raise
        except Exception as exc:
            if list(counts.values()) != [1]:
                raise  # One call for several items: whose fault it is cannot be said.
            (modality,) = counts
            raise process_error(modality, items[modality].get_original_index(0), exc) from exc
        observer = state.timing_ctx.observer
        for modality, count in counts.items():
            num_outputs = len(outputs.get(modality, ()))
            if num_outputs != count:
                raise RuntimeError(
                    f"the processor returned {num_outputs} results for {count} {modality} items"
                )
            if observer is not None:
                share = (time.perf_counter() - start) / sum(counts.values())
                for position in range(count):
                    index = items[modality].get_original_index(position)
                    observer.record_item(modality, index, "process", share)
        return {modality: list(outputs.get(modality, ())) for modality in items}

    def _salvage(self, state: MultiModalApplyState) -> None:
        """After another item failed: process what was decoded, and keep it for later requests."""
        failed = {
            (job.modality, job.original_index)
            for job in state.decodes
            if job.future.exception() is not None
        }
        good: Positions = {}
        for modality, positions in self._positions_to_process(state, self._lookup(state)).items():
            items = state.inputs.mm_data_items[modality]
            good[modality] = [
                position
                for position in positions
                if (modality, items.get_original_index(position)) not in failed
            ]
        good = {modality: positions for modality, positions in good.items() if positions}
        if not good:
            return
        try:
            self._process_positions(state, good)
        except Exception:
            # The client hears of the decode failure; this was only for the next request.
            logger.warning("The items beside a corrupt one could not be processed", exc_info=True)

    # -- steps that families replace

    def _process_missing(
        self, missing: MultiModalDataItems, inputs: ProcessorInputs
    ) -> dict[str, list[ItemOutput]]:
        """Return modality -> the result of each item of `missing`, which are decoded.

        Must not depend on the request's other items or its prompt: results are cached. By
        default one call of the model's processor for all, split by `_get_mm_fields_config`.
        `missing` may be empty.
        """
        options = inputs.hf_processor_mm_kwargs
        hf_data, hf_kwargs, passthrough = self._get_hf_mm_inputs(missing, options)
        hf_outputs = dict(self._call_hf_processor(hf_data, hf_kwargs)) if hf_data else {}
        hf_outputs.update(passthrough)
        kwargs = split_into_items(hf_outputs, self._get_mm_fields_config(hf_outputs, options))
        updates = resolve_updates(
            self._get_prompt_updates(missing, options, kwargs), missing.get_all_counts()
        )
        outputs: dict[str, list[ItemOutput]] = {}
        for modality, count in missing.get_all_counts().items():
            items = kwargs.get(modality, [])
            if count == 0:
                outputs[modality] = []
                continue
            if len(items) != count:
                raise RuntimeError(
                    f"the processor returned tensors of {len(items)} {modality} items for {count}"
                )
            outputs[modality] = [
                ItemOutput(item, item_updates)
                for item, item_updates in zip(items, updates[modality], strict=True)
            ]
        return outputs

    def _get_hf_mm_inputs(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return what goes into the HF processor, its options, and what passes it by."""
        data: dict[str, Any] = {}
        passthrough: dict[str, Any] = {}
        for items in mm_items.values():
            if items.get_count():
                data.update(items.get_processor_data())
                passthrough.update(items.get_passthrough_data())
        if "audios" in data:
            data["audio"] = data.pop("audios")
        return data, dict(hf_kwargs), passthrough

    def _call_hf_processor(
        self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Run the model's processor; only called when there is data."""
        processor = self.info.ctx.hf_processor
        if processor is None:
            raise TypeError(f"{type(self).__name__} has no HF processor to call")
        outputs: Mapping[str, Any] = processor(**hf_data, **hf_kwargs, return_tensors="pt")
        return outputs

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """Return output name -> how it splits into items; what has no rule is left out."""
        return {}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem]],
    ) -> Sequence[PromptUpdate]:
        """Return how the items come into the prompt; `mm_items` may be any part of a request."""
        return ()

    def _finish_prompt(
        self,
        inputs: ProcessorInputs,
        mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem | None]],
        updates: dict[str, list[Sequence[Any]]],
    ) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
        """Return the prompt's token ids with all items in it, and where they are.

        Encoded media is gone by now. By default updates are matched by token ids, and by text
        where the text's tokenization hides a target.
        """
        tokenizer = self.info.ctx.tokenizer
        prompt = inputs.prompt
        if not isinstance(prompt, str):
            return apply_updates_to_ids(prompt, updates, tokenizer)
        if tokenizer is None:
            raise TypeError("a text prompt needs a tokenizer")
        try:
            return apply_updates_to_ids(tokenizer.encode(prompt), updates, tokenizer)
        except InvalidRequestError:
            text = apply_updates_to_text(prompt, updates, tokenizer)
            prompt_ids = list(tokenizer.encode(text))
            return prompt_ids, find_placeholders(prompt_ids, updates, tokenizer)

    # -- phase 2

    def _apply_hf_processor_phase2(self, state: MultiModalApplyState) -> ProcessedRequest:
        if state.mm_hashes is None:
            return self._finish_uncached(state)
        cache = state.inputs.cache
        assert cache is not None
        try:
            with state.timing_ctx.record("get_cache_missing_items"):
                flags = self._lookup(state)
            self._take_landed_flights(state)
            # Also when nothing is left to process: the hooks see empty data then.
            self._process_positions(state, self._positions_to_process(state, flags))
            with state.timing_ctx.record("merge_mm_kwargs"):
                return self._merge(state, cache, flags)
        finally:
            cache.release_sender_touches()

    def _finish_uncached(self, state: MultiModalApplyState) -> ProcessedRequest:
        if state.uncached_outputs is None:
            state.uncached_outputs = self._process_all(state)
        outputs = state.uncached_outputs
        with state.timing_ctx.record("get_mm_hashes"):
            hashes = self._hash_mm_items(state.inputs, state.timing_ctx)
        return ProcessedRequest(
            {modality: [item.kwargs for item in items] for modality, items in outputs.items()},
            hashes,
            {
                modality: [_for_item(item.updates, at) for at, item in enumerate(items)]
                for modality, items in outputs.items()
            },
        )

    def _take_landed_flights(self, state: MultiModalApplyState) -> None:
        """Take over shared results if the caller waited for the decodes only."""
        assert state.mm_hashes is not None
        if any(
            state.mm_hashes[modality][position] not in state.outputs
            for modality, position in state.flights
        ):
            state.wait_items()

    def _merge(
        self,
        state: MultiModalApplyState,
        cache: BaseMultiModalProcessorCache,
        flags: Mapping[str, Sequence[bool]],
    ) -> ProcessedRequest:
        hashes, outputs = state.mm_hashes, state.outputs
        assert hashes is not None
        for item_hashes in hashes.values():
            for mm_hash in item_hashes:
                cache.touch_sender_cache_item(mm_hash)
        mm_kwargs: dict[str, list[MultiModalKwargsItem | None]] = {}
        updates: dict[str, list[Sequence[Any]]] = {}
        for modality, item_hashes in hashes.items():
            mm_kwargs[modality], updates[modality] = [], []
            for position, mm_hash in enumerate(item_hashes):
                is_hit = flags[modality][position]
                if is_hit and not cache.is_cached_item(mm_hash):
                    # This request alone is larger than the cache: one of its own items took
                    # the place of another.
                    self._process_evicted(state, modality, position)
                    is_hit = False
                item = None if is_hit else (outputs[mm_hash].kwargs, outputs[mm_hash].updates)
                kwargs, item_updates = cache.get_and_update_item(item, mm_hash)
                mm_kwargs[modality].append(kwargs)
                updates[modality].append(_for_item(item_updates, position))
        return ProcessedRequest(mm_kwargs, hashes, updates)

    def _process_evicted(self, state: MultiModalApplyState, modality: str, position: int) -> None:
        assert state.mm_hashes is not None
        if state.mm_hashes[modality][position] in state.outputs:
            return
        items = state.inputs.mm_data_items[modality]
        if items.get_raw(position) is None:
            index = items.get_original_index(position)
            raise InvalidRequestError(
                f"Cache miss for {modality} at index {index} but data is not provided.",
                modality=modality,
                index=index,
            )
        self._process_positions(state, {modality: [position]})

    def _build_mm_input(
        self, inputs: ProcessorInputs, processed: ProcessedRequest, timing_ctx: TimingContext
    ) -> MultiModalInput:
        with timing_ctx.record("apply_prompt_updates"):
            prompt_ids, placeholders = self._finish_prompt(
                inputs, processed.mm_kwargs, processed.updates
            )
        for modality, count in inputs.mm_data_items.get_all_counts().items():
            for what, parts in (
                ("tensors", processed.mm_kwargs),
                ("prompt updates", processed.updates),
                ("placeholders", placeholders),
            ):
                num_parts = len(parts.get(modality, ()))
                if num_parts != count:
                    raise RuntimeError(
                        f"there are {what} of {num_parts} {modality} items for {count} items"
                    )
        result = MultiModalInput(
            type="multimodal",
            prompt_token_ids=prompt_ids,
            mm_kwargs=processed.mm_kwargs,
            mm_hashes=processed.mm_hashes,
            mm_placeholders=placeholders,
        )
        if isinstance(inputs.prompt, str):
            result["prompt"] = inputs.prompt
        if inputs.cache_salt is not None:
            result["cache_salt"] = inputs.cache_salt
        return result

    @staticmethod
    def _transaction(inputs: ProcessorInputs) -> AbstractContextManager[None]:
        return nullcontext() if inputs.cache is None else inputs.cache.transaction()

    def _discard_warm(self, processed: ProcessedRequest) -> None:
        """The cache had its chance to keep the results: nobody needs to keep them here."""
        for hashes in processed.mm_hashes.values():
            for mm_hash in hashes:
                self.warm_outputs.discard(mm_hash)


_reported_classes: set[type] = set()
"""Classes whose overrides were logged."""


def _for_item(updates: Sequence[Any], item_index: int) -> Sequence[Any]:
    """Return an item's updates for its place in this request: a cached one had another."""
    return [
        update.with_item_index(item_index) if isinstance(update, ResolvedPromptUpdate) else update
        for update in updates
    ]


class _ObservedExecutor(Executor):
    """Hands jobs on, and tells the observer how long an item's job waited and ran."""

    def __init__(
        self, executor: Executor, timing_ctx: TimingContext, modality: str, index: int
    ) -> None:
        self._executor = executor
        self._timing_ctx = timing_ctx
        self._modality = modality
        self._index = index

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        queued_at = time.perf_counter()

        def run() -> Any:
            observer = self._timing_ctx.observer
            assert observer is not None
            waited_s = time.perf_counter() - queued_at
            observer.record_item(self._modality, self._index, "decode_wait", waited_s)
            with self._timing_ctx.record_item(self._modality, self._index, "decode"):
                return fn(*args, **kwargs)

        return self._executor.submit(run)
