"""A connector whose names resolve as the cases say, for servers in tests."""

from __future__ import annotations

from typing import Any

from lazydecode.media.connector import MediaConnector
from lazydecode.media.connector_registry import MEDIA_CONNECTOR_REGISTRY
from lazydecode.media.http import HttpConnection
from tests.origin import StubResolver

NAMES = {
    "mixed.test": ["93.184.216.34", "127.0.0.1"],
    "inside.test": ["127.0.0.1"],
    "example.com": ["127.0.0.1"],
    "example.com.evil.test": ["127.0.0.1"],
    "evil-example.com": ["127.0.0.1"],
}


@MEDIA_CONNECTOR_REGISTRY.register("stub-resolver")
class StubResolverConnector(MediaConnector):
    """Takes every option of the usual connector."""

    def __init__(self, **options: Any) -> None:
        connection = HttpConnection(limits=options.get("limits"), resolve=StubResolver(NAMES))
        super().__init__(connection, **options)
        self._owns_connection = True
