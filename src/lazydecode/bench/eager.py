"""Today's practice, honestly: decode at fetch, identify by the decoded content, then look up.

The same decoders, the same digest and the same cache as on the other side; only the order
differs. It is the baseline of every table.
"""

from __future__ import annotations

from typing import Any

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.cache.base import CachedItem, ProcessedItem
from lazydecode.hasher import MultiModalHasher
from lazydecode.media.base import MediaIO
from lazydecode.parse import MultiModalDataParser


def decode_and_hash(media_io: MediaIO[Any], modality: str, data: bytes) -> tuple[Any, str]:
    """Return the decoded media, and the digest of its content."""
    media = media_io.load_bytes(data)
    digest = MultiModalHasher.hash_kwargs("sha256", model_id="bench", **{modality: media})
    return media, digest


def request(
    media_io: MediaIO[Any],
    modality: str,
    data: bytes,
    cache: MultiModalProcessorOnlyCache,
    processed: ProcessedItem,
    parser: MultiModalDataParser,
) -> CachedItem:
    """Do for one item what a request does; `processed` stands for the processor's result."""
    media, digest = decode_and_hash(media_io, modality, data)
    if cache.is_cached_item(digest):
        return cache.get_and_update_item(None, digest)
    # As the processor wants it: sound is resampled only if it is missing.
    parser.parse_mm_data({modality: [media]})[modality].get(0)
    return cache.get_and_update_item(processed, digest)
