"""Loading the embeddings of a request: fetched or decoded from base64, checked, joined.

They take no part in the caches: an item of the request that came as embeddings makes the whole
request pass them by, since what is not processed cannot be spared by a hit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import torch

from lazydecode.errors import InvalidRequestError, LazyDecodeError, MediaTooLargeError
from lazydecode.limits import DecodeLimits, RequestLimits
from lazydecode.media.base import MediaRef
from lazydecode.media.connector import MediaConnector
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.media.embeddings import EmbeddingMediaIO, Embeddings
from lazydecode.models.embedding_inputs import ItemEmbeddings
from lazydecode.renderers.chat import EmbedsRequest, MediaRequest
from lazydecode.renderers.hold import EncodedHold

_T = TypeVar("_T")
_MEDIA_TYPE = "application/octet-stream"
_SCHEMES = ("data:", "http:", "https:", "file:")


def check_embeds(
    embeds: Sequence[EmbedsRequest], media: Sequence[MediaRequest], *, enabled: bool
) -> None:
    """Refuse embeddings that the server does not take, before anything is fetched.

    Raises:
        InvalidRequestError: If they are turned off, or a request has embeddings and media of
            one modality.
    """
    modalities = {item.modality for item in media}
    for item in embeds:
        if not enabled:
            raise InvalidRequestError(
                f"{item.where}: this server does not take embeddings in the place of media",
                modality=item.modality,
                index=item.index,
                parameter=item.where,
            )
        if item.modality in modalities:
            raise InvalidRequestError(
                f"{item.where}: a request cannot have both {item.modality} items and "
                f"{item.modality} embeddings",
                modality=item.modality,
                index=item.index,
                parameter=item.where,
            )


class EmbeddingLoader:
    """Loads the embeddings of requests for one model.

    Args:
        connector: Brings encoded bytes.
        embeddings: Which embeddings the model takes; None: none.
        executor: Threads for what is linear in a payload.
        limits: What one file may become.
        request_limits: What one request may hold.
    """

    def __init__(
        self,
        connector: MediaConnector,
        embeddings: ItemEmbeddings | None,
        *,
        executor: Executor,
        limits: DecodeLimits,
        request_limits: RequestLimits,
    ) -> None:
        self._connector = connector
        self._embeddings = embeddings
        self._executor = executor
        self._media_io = EmbeddingMediaIO(limits=limits)
        self._max_bytes = request_limits.max_decoded_bytes_per_request

    async def load(self, embeds: Sequence[EmbedsRequest], *, hold: EncodedHold) -> dict[str, Any]:
        """Return modality -> its embeddings in the form that the model's data parser takes.

        Args:
            embeds: Dropped views of the request body when they were read.
            hold: Sets aside what is loaded.

        Raises:
            LazyDecodeError: The first failure in the order of the request, naming its item.
        """
        if not embeds:
            return {}
        embeddings = self._embeddings
        if embeddings is None:
            first = embeds[0]
            raise InvalidRequestError(
                f"{first.where}: the model takes no embeddings in the place of media",
                modality=first.modality,
                index=first.index,
            )
        await hold.set_aside(sum(_known_bytes(item) for item in embeds))
        tasks = [
            asyncio.create_task(self._load_item(item, embeddings), name=f"embeds-{item.where}")
            for item in embeds
        ]
        loaded = await await_with_cancellation_drain(
            asyncio.gather(*tasks, return_exceptions=True),
            on_cancel=lambda: [task.cancel() for task in tasks],
        )
        groups: dict[str, list[dict[str, torch.Tensor]]] = {}
        total = 0
        for item, tensors in zip(embeds, loaded, strict=True):
            if isinstance(tensors, BaseException):
                raise tensors
            total += sum(tensor.nbytes for tensor in tensors.values())
            if total > self._max_bytes:
                raise MediaTooLargeError(
                    f"the request's embeddings take more than {self._max_bytes} bytes",
                    modality=item.modality,
                    index=item.index,
                )
            groups.setdefault(item.modality, []).append(tensors)
        await hold.set_aside(total)
        join = embeddings.join
        return await self._on_executor(lambda: {m: join(m, group) for m, group in groups.items()})

    async def _load_item(
        self, item: EmbedsRequest, embeddings: ItemEmbeddings
    ) -> dict[str, torch.Tensor]:
        try:
            sources, item.sources = item.sources, {}
            refs = {name: await self._fetch(item, source) for name, source in sources.items()}
            return await self._on_executor(lambda: _decode(item, refs, embeddings))
        except LazyDecodeError as exc:
            raise exc.at(item.modality, item.index) from exc.__cause__
        except (ValueError, NotImplementedError) as exc:
            raise InvalidRequestError(str(exc), modality=item.modality, index=item.index) from exc

    async def _fetch(self, item: EmbedsRequest, source: str | memoryview) -> MediaRef[Embeddings]:
        start = source[:6] if isinstance(source, str) else str(source[:6], "latin-1")
        if start.lower().startswith(_SCHEMES):
            limits = self._connector.limits
            timeout_s = {
                "image": limits.image_timeout_s,
                "video": limits.video_timeout_s,
                "audio": limits.audio_timeout_s,
            }[item.modality]
            with self._connector.contained():
                return await self._connector.load_from_url_async(
                    source, self._media_io, timeout_s=timeout_s
                )
        return await self._connector.load_base64_async(_MEDIA_TYPE, source, self._media_io)

    async def _on_executor(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)


def _known_bytes(item: EmbedsRequest) -> int:
    """Encoded bytes that came with the request, as base64."""
    return sum(len(source) * 3 // 4 for source in item.sources.values())


def _decode(
    item: EmbedsRequest, refs: dict[str, MediaRef[Embeddings]], embeddings: ItemEmbeddings
) -> dict[str, torch.Tensor]:
    arrays: dict[str, Any] = {}
    for name, ref in refs.items():
        found = ref.decode()
        ref.release()
        if name and isinstance(found, dict):
            if len(found) != 1:
                where = f"{item.where}.{name}"
                raise InvalidRequestError(f"{where} holds {len(found)} tensors, not one")
            (found,) = found.values()
        arrays[name] = found
    return embeddings.item(item.modality, arrays.get("", arrays), index=item.index)
