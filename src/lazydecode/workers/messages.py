"""The messages between a server and its worker processes, and their translation.

Server to worker: `Job`. Worker to server: `Hello` once, then for each job `Decoded` and `Done`, or
`Failed` or `Refused` in the place of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lazydecode.engine.messages import ErrorForm, ItemForm, form_of_item, item_of_form
from lazydecode.models.expansion import ItemText
from lazydecode.models.tokenization import CollapsedText, Run
from lazydecode.processing.outputs import ItemOutput


class _Form(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages."""


class Job(_Form, frozen=True):
    """One item to decode and process."""

    modality: str
    recipe: bytes
    """Canonical spec of the decoder."""
    spec: bytes
    """Canonical spec that the parsed item must have."""
    options: dict[str, Any]
    payload: Any
    """A `Blob`."""
    released: list[int] = []
    """Extents of earlier results that are no longer used."""


class Hello(_Form, frozen=True):
    """The worker waits for jobs."""

    pid: int


class Decoded(_Form, frozen=True):
    """The decode has ended."""

    seconds: float


class TextForm(msgspec.Struct, frozen=True, array_like=True):
    """What stands in a prompt for an item."""

    modality: str
    text: str | None
    runs: list[tuple[int, str, int]]
    token_ids: list[int] | None
    shape: Any
    holds: list[str]


class Done(_Form, frozen=True):
    """The item is processed."""

    item: ItemForm
    texts: list[TextForm]
    seconds: float
    """Time that processing took."""
    released: list[int] = []
    """Extents of the payload that are no longer used."""


class Failed(_Form, frozen=True):
    """The decode or the processing failed."""

    error: ErrorForm
    released: list[int] = []


class Refused(_Form, frozen=True):
    """The item cannot be done here."""

    reason: str
    released: list[int] = []


Answer = Hello | Decoded | Done | Failed | Refused


def form_of_output(output: ItemOutput, seconds: float, released: list[int]) -> Done:
    """Return the message that carries a result; tensors are not copied.

    Raises:
        TypeError: If it has updates of a kind that only one process knows.
    """
    return Done(
        form_of_item(output.kwargs),
        [_form_of_text(update) for update in output.updates],
        seconds,
        released,
    )


def output_of_form(form: Done) -> ItemOutput:
    """Return the result that a message carries."""
    return ItemOutput(item_of_form(form.item), tuple(map(_text_of_form, form.texts)))


def _form_of_text(update: object) -> TextForm:
    if not isinstance(update, ItemText):
        raise TypeError(f"a {type(update).__name__} stays in its process")
    replacement = update.replacement
    return TextForm(
        update.modality,
        None if replacement is None else replacement.text,
        [] if replacement is None else [(r.start, r.token, r.count) for r in replacement.runs],
        None if update.token_ids is None else list(update.token_ids),
        _plain(update.shape),
        list(update.holds),
    )


def _text_of_form(form: TextForm) -> ItemText:
    runs = tuple(Run(start, token, count) for start, token, count in form.runs)
    return ItemText(
        form.modality,
        None if form.text is None else CollapsedText(form.text, runs),
        None if form.token_ids is None else tuple(form.token_ids),
        _as_tuples(form.shape),
        tuple(form.holds),
    )


def _plain(value: Any) -> Any:
    """Return a shape with numbers of Python only."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def _as_tuples(value: Any) -> Any:
    """Return a shape as it was: all of it hashable."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
