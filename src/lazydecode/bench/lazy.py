"""One item through this library: identify by the encoded bytes, look up, decode if missing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.cache.base import CachedItem, ProcessedItem
from lazydecode.inputs import MultiModalKwargsItem
from lazydecode.media.base import MediaIO, MediaRef
from lazydecode.media.decode import MediaDecodeJob, collect_media_decodes, submit_media_decodes
from lazydecode.parse import MultiModalDataParser
from lazydecode.processing.failures import decode_error
from lazydecode.processing.inputs import ProcessorInputs

NOTHING: ProcessedItem = (MultiModalKwargsItem(), ())
"""Stands for the processor's result where only the work before it is measured."""


def new_cache() -> MultiModalProcessorOnlyCache:
    """Return an empty processor cache."""
    return MultiModalProcessorOnlyCache(capacity_bytes=2**32)


def identify(
    parser: MultiModalDataParser, modality: str, refs: Sequence[MediaRef[Any]]
) -> list[str]:
    """Return the cache keys of parsed references."""
    items = parser.parse_mm_data({modality: list(refs)})
    return ProcessorInputs("", items).get_mm_hashes("bench", "sha256")[modality]


def request(
    media_io: MediaIO[Any],
    modality: str,
    data: bytes,
    cache: MultiModalProcessorOnlyCache,
    parser: MultiModalDataParser,
    executor: Executor,
) -> CachedItem:
    """Do for one item what a request does, in its order; on a hit nothing is decoded."""
    ref = media_io.load_bytes_ref(data)
    (digest,) = identify(parser, modality, [ref])
    if not cache.is_cached_item(digest):
        jobs: list[MediaDecodeJob] = []
        submit_media_decodes([(modality, 0, ref)], executor, jobs)
        collect_media_decodes(jobs, decode_error)
        return cache.get_and_update_item(NOTHING, digest)
    return cache.get_and_update_item(None, digest)
