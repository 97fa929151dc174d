"""How media are decoded, as the server and a request say: options become decoders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from lazydecode.errors import LazyDecodeError, ValidationError
from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.base import MediaIO
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.video import VideoMediaIO
from lazydecode.processing.context import BaseProcessingInfo

MediaIOKwargs: TypeAlias = Mapping[str, Mapping[str, Any]]

_MEDIA_IO: Final[Mapping[str, type[MediaIO[Any]]]] = {
    "image": ImageMediaIO,
    "video": VideoMediaIO,
    "audio": AudioMediaIO,
}


def merge_media_io_kwargs(
    server: MediaIOKwargs, request: MediaIOKwargs
) -> dict[str, dict[str, Any]]:
    """Merge a request's decode options over the server's, by each decoder's own rules.

    Raises:
        ValidationError: If the request sets what only the server may.
    """
    merged = {}
    for modality in sorted({*server, *request}):
        with _naming(modality):
            options = _MEDIA_IO[modality].merge_kwargs(server.get(modality), request.get(modality))
        if options:
            merged[modality] = options
    return merged


def resolve_media_io(
    info: BaseProcessingInfo, modality: str, media_io_kwargs: MediaIOKwargs
) -> MediaIO[Any]:
    """Return the decoder of a modality with the given options, each of which it must know.

    Raises:
        ValidationError: If an option is unknown or wrong.
    """
    given = media_io_kwargs.get(modality, {})
    try:
        with _naming(modality):
            media_io = info.get_media_io(modality, media_io_kwargs)
    except LazyDecodeError:
        raise
    except (TypeError, ValueError) as exc:
        # TypeError: an option that is an argument of ours, which no request may set.
        raise ValidationError(
            f"media_io_kwargs of {modality} are not valid: {exc}",
            parameter="media_io_kwargs",
            modality=modality,
        ) from exc
    known = media_io.option_names()
    if known is not None and (unknown := given.keys() - known):
        name = min(unknown)
        raise ValidationError(
            f"media_io_kwargs of {modality}: {name[:80]!r} is no option; known are "
            f"{', '.join(sorted(known))}",
            parameter="media_io_kwargs",
            modality=modality,
            value=name[:80],
        )
    return media_io


@contextmanager
def _naming(modality: str) -> Iterator[None]:
    try:
        yield
    except LazyDecodeError as exc:
        exc.modality = exc.modality or modality
        raise
