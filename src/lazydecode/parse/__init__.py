"""A request's media become item groups with two views: decoded, and as stored.

In: modality -> items as a user or the fetcher gives them. Out: `MultiModalDataItems`.
May import: media, inputs.
"""

from lazydecode.parse.embeddings import (
    AudioEmbeddingItems,
    DictEmbeddingItems,
    EmbeddingItems,
    ImageEmbeddingItems,
    ItemFields,
    VideoEmbeddingItems,
)
from lazydecode.parse.items import (
    AudioProcessorItems,
    ImageProcessorItems,
    ImageSize,
    ModalityDataItems,
    MultiModalDataItems,
    ProcessorBatchItems,
    VideoProcessorItems,
    VisionChunkProcessorItems,
)
from lazydecode.parse.parser import MultiModalDataParser, parse_mm_uuids

__all__ = [
    "AudioEmbeddingItems",
    "AudioProcessorItems",
    "DictEmbeddingItems",
    "EmbeddingItems",
    "ImageEmbeddingItems",
    "ImageProcessorItems",
    "ImageSize",
    "ItemFields",
    "ModalityDataItems",
    "MultiModalDataItems",
    "MultiModalDataParser",
    "ProcessorBatchItems",
    "VideoEmbeddingItems",
    "VideoProcessorItems",
    "VisionChunkProcessorItems",
    "parse_mm_uuids",
]
