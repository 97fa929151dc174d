"""Plug-ins at the start of a server: all are imported, and the chosen ones must work."""

from __future__ import annotations

import logging
from typing import Any, Final

from lazydecode.cache import PROCESSOR_CACHE_REGISTRY
from lazydecode.config import Settings
from lazydecode.errors import ValidationError
from lazydecode.media.connector_registry import MEDIA_CONNECTOR_REGISTRY
from lazydecode.media.video_backends import VIDEO_LOADER_REGISTRY
from lazydecode.models.registry import MODEL_FAMILY_REGISTRY
from lazydecode.plugins import Registry

logger = logging.getLogger(__name__)

_REGISTRIES: Final[tuple[Registry[Any], ...]] = (
    MEDIA_CONNECTOR_REGISTRY,
    VIDEO_LOADER_REGISTRY,
    MODEL_FAMILY_REGISTRY,
    PROCESSOR_CACHE_REGISTRY,
)

_CONNECTOR_OPTIONS: Final = frozenset(
    {"connection", "policy", "limits", "download_cache", "executor", "budget"}
)
"""What the server itself gives to a connector."""


def check_plugins(settings: Settings) -> None:
    """Import all plug-ins now, since an import holds up the event loop; check the chosen parts.

    A plug-in that cannot be used and is not chosen is logged, and fails whoever asks for it.

    Raises:
        ValidationError: If the settings name a part that does not exist; says which do.
        PluginError: If they name a plug-in that cannot be used.
    """
    for registry in _REGISTRIES:
        for error in registry.check_plugins():
            logger.error("%s", error)
    MEDIA_CONNECTOR_REGISTRY.get(settings.media_connector)
    if taken := _CONNECTOR_OPTIONS & settings.media_connector_kwargs.keys():
        raise ValidationError(
            f"media_connector_kwargs may not hold {', '.join(sorted(taken))}",
            parameter="media_connector_kwargs",
        )
    PROCESSOR_CACHE_REGISTRY.get(settings.mm_processor_cache)
    VIDEO_LOADER_REGISTRY.get(settings.video_loader_backend)
    backend = settings.media_io_kwargs.get("video", {}).get("video_backend")
    if isinstance(backend, str):
        VIDEO_LOADER_REGISTRY.get(backend)
