"""Encoded bytes become `MediaRef`s: fetched, identified, with the decode deferred.

In: URLs, bytes, files. Out: `MediaRef`s and, on demand, decoded media. Imports neither torch
nor transformers; what needs a decoder or the network is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lazydecode.media.base import (
    AudioHeader,
    DecodeSpec,
    ImageHeader,
    MediaHeader,
    MediaIO,
    MediaRef,
    PayloadDigest,
    VideoHeader,
    derive_media_key,
)

if TYPE_CHECKING:
    from lazydecode.media.audio import AudioMediaIO, normalize_channels, resample
    from lazydecode.media.budget import ByteBudget
    from lazydecode.media.connector import MediaConnector
    from lazydecode.media.connector_registry import MEDIA_CONNECTOR_REGISTRY
    from lazydecode.media.decode import (
        MediaDecodeJob,
        collect_media_decodes,
        collect_media_decodes_async,
        submit_media_decodes,
    )
    from lazydecode.media.download_cache import DownloadCache
    from lazydecode.media.embeddings import EmbeddingMediaIO
    from lazydecode.media.estimate import estimate_decoded_bytes
    from lazydecode.media.executor import MediaExecutor
    from lazydecode.media.http import HttpConnection
    from lazydecode.media.image import ImageMediaIO
    from lazydecode.media.payloads import MediaPayload
    from lazydecode.media.rebuild import rebuild_decoder
    from lazydecode.media.video import VideoMediaIO, plan_frames

__all__ = [
    "MEDIA_CONNECTOR_REGISTRY",
    "AudioHeader",
    "AudioMediaIO",
    "ByteBudget",
    "DecodeSpec",
    "DownloadCache",
    "EmbeddingMediaIO",
    "HttpConnection",
    "ImageHeader",
    "ImageMediaIO",
    "MediaConnector",
    "MediaDecodeJob",
    "MediaExecutor",
    "MediaHeader",
    "MediaIO",
    "MediaPayload",
    "MediaRef",
    "PayloadDigest",
    "VideoHeader",
    "VideoMediaIO",
    "collect_media_decodes",
    "collect_media_decodes_async",
    "derive_media_key",
    "estimate_decoded_bytes",
    "normalize_channels",
    "plan_frames",
    "rebuild_decoder",
    "resample",
    "submit_media_decodes",
]

_LAZY = {
    "AudioMediaIO": "audio",
    "ByteBudget": "budget",
    "DownloadCache": "download_cache",
    "EmbeddingMediaIO": "embeddings",
    "HttpConnection": "http",
    "ImageMediaIO": "image",
    "MEDIA_CONNECTOR_REGISTRY": "connector_registry",
    "MediaConnector": "connector",
    "MediaDecodeJob": "decode",
    "MediaExecutor": "executor",
    "MediaPayload": "payloads",
    "VideoMediaIO": "video",
    "collect_media_decodes": "decode",
    "collect_media_decodes_async": "decode",
    "estimate_decoded_bytes": "estimate",
    "normalize_channels": "audio",
    "plan_frames": "video",
    "rebuild_decoder": "rebuild",
    "resample": "audio",
    "submit_media_decodes": "decode",
}
"""Public name -> module of this package that has it."""


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
