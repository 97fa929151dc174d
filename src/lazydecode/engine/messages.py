"""The messages between the front end and its engine process, and their translation.

Front end to engine: `Configure` once, then `Submit`, `Abort`, `ClearCache`, `InvalidateCache` and
`TakeSnapshot`, in the order of the sender cache's updates. Engine to front end: `Ready` or
`StartFailed` once, then `Outputs`, `Failed`, `Released` and `Snapshot`. A front end that closes its
connection is forgotten; the engine ends when its control socket closes (see `child`).
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np

from lazydecode import errors
from lazydecode.engine.protocol import EngineInfo, EngineOutput, EngineRequest, SamplingParams
from lazydecode.errors import CacheMissError, EngineError, LazyDecodeError
from lazydecode.inputs import (
    BatchedField,
    FlatField,
    ItemField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PaddedField,
    PlaceholderRange,
    SharedField,
)

logger = logging.getLogger(__name__)


class _Form(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages."""


class Configure(_Form, frozen=True):
    """What to run; the first message."""

    runner: str
    """`module:function` that returns a `ModelRunner`."""
    runner_options: bytes
    """Its keyword arguments, pickled."""
    cache_bytes: int
    """Capacity of the receiver cache: the sender cache's own."""
    receiver_cache: str
    """`module:class` of the receiver cache: the sender cache's counterpart."""
    max_batch_size: int
    log_level: str


class ItemForm(msgspec.Struct, frozen=True, array_like=True):
    """One item: its fields as (name, data, kind, option, keep_on_cpu)."""

    fields: list[tuple[str, Any, str, int, bool]]


class RangeForm(msgspec.Struct, frozen=True, array_like=True):
    """One placeholder range."""

    offset: int
    length: int
    is_embed: bytes | None = None
    """One byte per position."""


class Submit(_Form, frozen=True):
    """One request."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    mm_kwargs: dict[str, list[ItemForm | None]] = {}
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[RangeForm]] = {}
    num_resumed_tokens: int = 0
    cache_items: bool = True


class Abort(_Form, frozen=True):
    """Nobody wants this request's answer any more."""

    request_id: str


class ClearCache(_Form, frozen=True):
    """Empty the receiver cache."""


class InvalidateCache(_Form, frozen=True):
    """Drop these from the receiver cache, where they are."""

    hashes: list[str]


class TakeSnapshot(_Form, frozen=True):
    """Answer with a `Snapshot` of this number."""

    number: int


class Ready(_Form, frozen=True):
    """The model is loaded."""

    info: EngineInfo


class StartFailed(_Form, frozen=True):
    """The model cannot be loaded; the process ends."""

    reason: str


class Outputs(_Form, frozen=True):
    """Progress of some requests."""

    outputs: list[EngineOutput]


class ErrorForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of our errors."""

    kind: str
    message: str
    modality: str | None = None
    index: int | None = None
    parameter: str | None = None
    value: str | int | float | None = None
    hashes: list[str] | None = None


class Failed(_Form, frozen=True):
    """A request ended with an error."""

    request_id: str
    error: ErrorForm


class Released(_Form, frozen=True):
    """These extents of the shared memory are no longer used."""

    offsets: list[int]


class Snapshot(_Form, frozen=True):
    """The receiver cache's hashes in eviction order."""

    number: int
    hashes: list[str]


Message = (
    Configure
    | Submit
    | Abort
    | ClearCache
    | InvalidateCache
    | TakeSnapshot
    | Ready
    | StartFailed
    | Outputs
    | Failed
    | Released
    | Snapshot
)


def form_of_request(request: EngineRequest) -> Submit:
    """Return the message that submits `request`; tensors are not copied."""
    return Submit(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        mm_kwargs={
            modality: [None if item is None else form_of_item(item) for item in items]
            for modality, items in request.mm_kwargs.items()
        },
        mm_hashes=request.mm_hashes,
        mm_placeholders={
            modality: [_form_of_range(place) for place in places]
            for modality, places in request.mm_placeholders.items()
        },
        num_resumed_tokens=request.num_resumed_tokens,
        cache_items=request.cache_items,
    )


def request_of_form(form: Submit) -> EngineRequest:
    """Return the request that `form` submits."""
    return EngineRequest(
        request_id=form.request_id,
        prompt_token_ids=form.prompt_token_ids,
        mm_kwargs={
            modality: [None if item is None else item_of_form(item) for item in items]
            for modality, items in form.mm_kwargs.items()
        },
        mm_hashes=form.mm_hashes,
        mm_placeholders={
            modality: [_range_of_form(place) for place in places]
            for modality, places in form.mm_placeholders.items()
        },
        sampling=form.sampling,
        num_resumed_tokens=form.num_resumed_tokens,
        cache_items=form.cache_items,
    )


def form_of_error(error: Exception) -> ErrorForm:
    """Return one of our errors as it is, and any other as an EngineError without its text."""
    if not isinstance(error, LazyDecodeError):
        return ErrorForm(
            EngineError.__name__, f"the engine failed on this request: {type(error).__name__}"
        )
    value = error.value
    return ErrorForm(
        kind=type(error).__name__,
        message=error.message,
        modality=error.modality,
        index=error.index,
        parameter=error.parameter,
        value=value if value is None or isinstance(value, str | int | float) else repr(value),
        hashes=error.hashes if isinstance(error, CacheMissError) else None,
    )


def error_of_form(form: ErrorForm) -> LazyDecodeError:
    """Return the error that `form` describes."""
    if form.hashes is not None:
        return CacheMissError(form.hashes)
    kind = getattr(errors, form.kind, EngineError)
    assert issubclass(kind, LazyDecodeError)
    error: LazyDecodeError = kind(
        form.message,
        modality=form.modality,
        index=form.index,
        parameter=form.parameter,
        value=form.value,
    )
    return error


def form_of_item(item: MultiModalKwargsItem) -> ItemForm:
    """Return the form of an item's tensors, which are not copied."""
    return ItemForm([(name, elem.data, *_form_of_field(elem.field)) for name, elem in item.items()])


def _form_of_field(field: ItemField) -> tuple[str, int, bool]:
    match field:
        case BatchedField():
            return "batched", 0, field.keep_on_cpu
        case FlatField() if field.step:
            return "indexed", field.step, field.keep_on_cpu  # along dimension 0 only
        case FlatField():
            return "flat", field.dim, field.keep_on_cpu
        case SharedField():
            return "shared", field.batch_size, field.keep_on_cpu
        case PaddedField():
            return "padded", field.dim, field.keep_on_cpu


def item_of_form(form: ItemForm) -> MultiModalKwargsItem:
    """Return the item that `form` describes."""
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data, _field_of_form(kind, option, keep_on_cpu))
            for name, data, kind, option, keep_on_cpu in form.fields
        }
    )


def _field_of_form(kind: str, option: int, keep_on_cpu: bool) -> ItemField:
    match kind:
        case "batched":
            return BatchedField(keep_on_cpu)
        case "flat":
            return FlatField(option, keep_on_cpu)
        case "indexed":
            return FlatField(0, keep_on_cpu, option)
        case "shared":
            return SharedField(option, keep_on_cpu)
        case "padded":
            return PaddedField(option, keep_on_cpu)
    raise ValueError(f"unknown field kind {kind!r}")


def _form_of_range(place: PlaceholderRange) -> RangeForm:
    mask = None if place.is_embed is None else place.is_embed.tobytes()
    return RangeForm(place.offset, place.length, mask)


def _range_of_form(form: RangeForm) -> PlaceholderRange:
    mask = None if form.is_embed is None else np.frombuffer(form.is_embed, np.bool_)
    return PlaceholderRange(form.offset, form.length, mask)
