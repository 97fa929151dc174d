"""Offline helpers: a URL in, decoded media out, in one blocking call.

Serving code uses `MediaConnector.fetch_*` and stays lazy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from lazydecode.media.audio import Audio, AudioMediaIO
from lazydecode.media.connector import MediaConnector
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.video import DecodedVideo, VideoMediaIO

__all__ = ["fetch_audio", "fetch_image", "fetch_video"]


def fetch_image(
    image_url: str,
    image_io_kwargs: Mapping[str, Any] | None = None,
    *,
    connector: MediaConnector | None = None,
    allowed_local_media_path: str | Path = "",
) -> Image.Image:
    """Fetch one image and decode it.

    Args:
        image_url: An http(s), `data:` or `file:` URL.
        image_io_kwargs: Options of `ImageMediaIO`.
        connector: What fetches; None is one for this call, for public addresses only.
        allowed_local_media_path: Folder below which `file:` URLs may point, without `connector`.

    Raises:
        LazyDecodeError: If the URL is refused, the fetch fails, or the bytes do not decode.
    """
    media_io = ImageMediaIO(**(image_io_kwargs or {}))
    with _connected(connector, allowed_local_media_path) as fetching:
        return fetching.fetch_image(image_url, media_io).decode()


def fetch_audio(
    audio_url: str,
    audio_io_kwargs: Mapping[str, Any] | None = None,
    *,
    connector: MediaConnector | None = None,
    allowed_local_media_path: str | Path = "",
) -> Audio:
    """Fetch one clip and decode it: mono samples in float32, and their rate in Hz.

    Arguments and errors as for `fetch_image`; options are those of `AudioMediaIO`.
    """
    media_io = AudioMediaIO(**(audio_io_kwargs or {}))
    with _connected(connector, allowed_local_media_path) as fetching:
        return fetching.fetch_audio(audio_url, media_io).decode()


def fetch_video(
    video_url: str,
    video_io_kwargs: Mapping[str, Any] | None = None,
    *,
    image_io_kwargs: Mapping[str, Any] | None = None,
    connector: MediaConnector | None = None,
    allowed_local_media_path: str | Path = "",
) -> DecodedVideo:
    """Fetch one video and decode the sampled frames: (frames, metadata).

    Arguments and errors as for `fetch_image`; options are those of `VideoMediaIO`, and those
    of `ImageMediaIO` for the frames of a jpeg sequence.
    """
    media_io = VideoMediaIO(ImageMediaIO(**(image_io_kwargs or {})), **(video_io_kwargs or {}))
    with _connected(connector, allowed_local_media_path) as fetching:
        return fetching.fetch_video(video_url, media_io).decode()


@contextmanager
def _connected(connector: MediaConnector | None, folder: str | Path) -> Iterator[MediaConnector]:
    if connector is not None:
        yield connector
        return
    with MediaConnector(allowed_local_media_path=folder) as own:
        yield own
