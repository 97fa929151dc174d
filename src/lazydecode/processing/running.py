"""Running a model's processor over items, so that a failure names the one that caused it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lazydecode.errors import LazyDecodeError
from lazydecode.parse import MultiModalDataItems
from lazydecode.processing.failures import ItemCountError, check_count, process_error
from lazydecode.processing.outputs import ItemOutput
from lazydecode.processing.timing import TimingContext

logger = logging.getLogger(__name__)

Process = Callable[[MultiModalDataItems], dict[str, list[ItemOutput]]]
"""Returns modality -> the result of each item."""
Keep = Callable[[str, int, ItemOutput], None]
"""Takes modality, position and result of one item."""


def process_items(
    process: Process,
    items: MultiModalDataItems,
    timing_ctx: TimingContext,
    keep: Keep,
    *,
    per_item: bool,
) -> None:
    """Process `items` and hand each result to `keep`, in order of position.

    If one run for several items fails, each is run alone: the error names the item that is at
    fault, and the results of the others are kept.

    Args:
        process: Runs the model's processor; also called once if there are no items.
        items: Decoded items.
        timing_ctx: Its observer is told what each item took.
        keep: Takes the results.
        per_item: Whether to run each item alone from the start.

    Raises:
        LazyDecodeError: For the first item that the processor did not take.
        ItemCountError: If `process` returned more or fewer results than items.
    """
    num_items = sum(items.get_all_counts().values())
    if num_items == 0 or (num_items > 1 and not per_item):
        try:
            outputs = _run(process, items, timing_ctx)
        except (LazyDecodeError, ItemCountError):
            raise
        except Exception:
            if num_items == 0:
                raise
            logger.debug("One processor call for %d items failed", num_items, exc_info=True)
        else:
            for modality, results in outputs.items():
                for position, output in enumerate(results):
                    keep(modality, position, output)
            return
    failure: Exception | None = None
    for modality, group in items.items():
        for position in range(group.get_count()):
            single = MultiModalDataItems({modality: group.select([position])})
            try:
                keep(modality, position, _run(process, single, timing_ctx)[modality][0])
            except Exception as exc:
                error = process_error(*group.get_client_position(position), exc)
                if error is not exc:
                    error.__cause__ = exc
                failure = failure or error
    if failure is not None:
        raise failure


def _run(
    process: Process, items: MultiModalDataItems, timing_ctx: TimingContext
) -> dict[str, list[ItemOutput]]:
    start = time.perf_counter()
    outputs = process(items)
    seconds = time.perf_counter() - start
    counts = items.get_all_counts()
    for modality, count in counts.items():
        check_count("results", modality, len(outputs.get(modality, ())), count)
        if timing_ctx.observer is not None:
            for position in range(count):
                item = items[modality].get_client_position(position)
                share_s = seconds / sum(counts.values())
                timing_ctx.observer.record_item(*item, "process", share_s)
    return {modality: outputs[modality] for modality, count in counts.items() if count}
