"""A connector for `bucket:` URLs, which a folder of this machine answers.

It stands for an object store: take its shape, and put your client's call where the file is read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from lazydecode.errors import BlockedURLError, FetchTimeoutError, MediaTooLargeError
from lazydecode.media import MediaConnector, MediaPayload
from lazydecode.media.base import PayloadDigest
from lazydecode.media.local_files import LocalFiles
from lazydecode.media.urls import FileURL

_SCHEME: Final = "bucket:"
_URL: Final = re.compile(r"bucket://([a-z0-9][a-z0-9-]{1,62})/([^?#\\\x00-\x20]+)")


class BucketConnector(MediaConnector):
    """Serves `bucket://NAME/KEY` from the folder NAME; other URLs are fetched as ever.

    Args:
        folder: Holds a folder per bucket.
        buckets: Names of the buckets that URLs may name; none given: all that are there now.
        options: Those of `MediaConnector`; the server gives them.

    Raises:
        ValueError: If one of the folders does not exist.
    """

    def __init__(self, *, folder: str | Path, buckets: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        root = Path(folder)
        if not root.is_dir():
            raise ValueError(f"the folder of buckets does not exist: {root}")
        names = buckets or [entry.name for entry in root.iterdir() if entry.is_dir()]
        # One reader per bucket: a link that leads out of its bucket is refused.
        self._buckets = {name: LocalFiles(root / name) for name in names}

    async def fetch_payload_async(
        self, url: str, *, max_bytes: int, timeout_s: float
    ) -> MediaPayload:
        """Return the object that a `bucket:` URL names.

        Raises:
            BlockedURLError: If the URL is malformed or its bucket is not allowed.
            UnprocessableMediaError: If there is no such object, or it is empty or too large.
            FetchTimeoutError: If reading it takes too long.
        """
        if not url.lower().startswith(_SCHEME):
            return await super().fetch_payload_async(url, max_bytes=max_bytes, timeout_s=timeout_s)
        # What a URL may name is settled before anything is opened.
        bucket, path = self._locate(url)

        def read() -> MediaPayload:
            data = bucket.read(path, check_size)
            return MediaPayload(data, PayloadDigest(data))

        def check_size(num_bytes: int) -> None:
            if num_bytes > max_bytes:
                raise MediaTooLargeError(f"the object is larger than {max_bytes} bytes")

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                # Reading and hashing are linear in the object: never on the event loop.
                return await loop.run_in_executor(self.executor.quick, read)
        except TimeoutError:
            raise FetchTimeoutError(f"the bucket took longer than {timeout_s:g} s") from None

    def _locate(self, url: str) -> tuple[LocalFiles, FileURL]:
        match = _URL.fullmatch(url)
        if match is None:
            raise BlockedURLError("The URL is not of the form bucket://NAME/KEY.")
        name = match[1]
        try:
            key = unquote(match[2], errors="strict")
        except UnicodeDecodeError:
            raise BlockedURLError("The object's key is not UTF-8.") from None
        if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
            raise BlockedURLError("The object's key has empty, '.' or '..' parts.")
        bucket = self._buckets.get(name)
        if bucket is None:
            raise BlockedURLError(f"The bucket {name!r} is not one that URLs may name.")
        return bucket, FileURL(str(bucket.root / key))
