"""What every request goes through: its errors in the client's terms, and its time limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final

from lazydecode.errors import InvalidRequestError, LazyDecodeError, TimeLimitError
from lazydecode.inputs import MultiModalInput
from lazydecode.on_error import OnError
from lazydecode.processing.failures import of_sound
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.renderers.chat import MediaRequest
from lazydecode.renderers.media import EncodedItem


def check_placeholders(prompt: MultiModalInput, inputs: ProcessorInputs) -> None:
    """Refuse items of which the model sees nothing: it cannot run with tensors for no token."""
    for modality, places in prompt["mm_placeholders"].items():
        for position, place in enumerate(places):
            if place.num_embeds == 0:
                name, index = inputs.mm_data_items[modality].get_client_position(position)
                raise InvalidRequestError(
                    f"the {name} at index {index} is too short or too small: "
                    "the model makes no tokens of it",
                    modality=name,
                    index=index,
                )


def client_errors() -> OnError:
    """Turn the ValueErrors in which lower rooms state rules on options into the client's error."""
    return _CLIENT_ERRORS


def _as_client_error(exc: BaseException) -> None:
    if isinstance(exc, ValueError) and not isinstance(exc, LazyDecodeError):
        raise InvalidRequestError(str(exc)) from exc


_CLIENT_ERRORS: Final = OnError(_as_client_error)


def time_limit(deadline: float | None) -> OnError:
    """Turn a TimeoutError that a deadline caused into the client's error."""

    def handle(exc: BaseException) -> None:
        if not isinstance(exc, TimeoutError) or deadline is None:
            return
        if asyncio.get_running_loop().time() >= deadline:
            raise TimeLimitError(
                "the request was not rendered within the server's time limit"
            ) from exc

    return OnError(handle)


def until(deadline: float | None) -> AbstractAsyncContextManager[None]:
    """End the block at a time of the event loop, by the client's error; None: at no time."""
    return _UNLIMITED if deadline is None else _until(deadline)


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    with time_limit(deadline):
        async with asyncio.timeout_at(deadline):
            yield


_UNLIMITED: Final = nullcontext()


def naming_videos(items: Sequence[EncodedItem] | Sequence[MediaRequest]) -> OnError:
    """Name the video in errors about a sound that came with it: the client knows no other item."""

    def handle(exc: BaseException) -> None:
        if not isinstance(exc, LazyDecodeError):
            return
        for item in items:
            if item.of_video is not None and (exc.modality, exc.index) == ("audio", item.index):
                raise of_sound(exc, item.index, item.of_video) from exc.__cause__

    return OnError(handle)


def naming_first(media: Sequence[MediaRequest]) -> OnError:
    """Name the first item of the modality in errors about options that all of them have."""

    def handle(exc: BaseException) -> None:
        if not isinstance(exc, LazyDecodeError) or exc.index is not None:
            return
        first = next((item for item in media if item.modality == exc.modality), None)
        if first is not None:
            raise exc.at(first.modality, first.index) from exc.__cause__

    return OnError(handle)
