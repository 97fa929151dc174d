"""Video decoders, one small class each, chosen by name.

In: encoded bytes and sampling options. Out: RGB frames and what they are. The frame choice is
common to all of them; a backend turns the chosen frames into pixels.
"""

from lazydecode.media.video_backends.registry import (
    VIDEO_LOADER_REGISTRY,
    VideoLoaderRegistry,
    backend_fingerprint,
)

__all__ = ["VIDEO_LOADER_REGISTRY", "VideoLoaderRegistry", "backend_fingerprint"]
