"""Use the media room alone: fetch, identify, look up, decode only what is new.

Needs `pip install lazydecode` and neither torch nor transformers:

    python examples/library_use.py picture.jpg clip.mp4 picture.jpg
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lazydecode.media import ImageMediaIO, MediaConnector, MediaRef, VideoMediaIO

VIDEOS = (".mp4", ".webm", ".mkv", ".mov")


def main(paths: list[str]) -> None:
    """Print each file's key and header, and decode each content once."""
    images = ImageMediaIO()
    videos = VideoMediaIO(images, num_frames=8)
    decoded: dict[bytes, Any] = {}  # a real cache would bound this
    folder = Path(paths[0]).resolve().parent
    with MediaConnector(allowed_local_media_path=str(folder)) as connector:
        for path in paths:
            url = Path(path).resolve().as_uri()
            if path.endswith(VIDEOS):
                ref: MediaRef[Any] = connector.fetch_video(url, videos)
            else:
                ref = connector.fetch_image(url, images)
            outcome = "hit" if ref.key in decoded else "miss"
            if outcome == "miss":
                decoded[ref.key] = ref.decode()
            print(f"{Path(path).name}: {outcome} {ref.key.hex()[:16]} {ref.header}")
            ref.release()
    assert not {"torch", "transformers"} & set(sys.modules)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
