"""Connector classes by name, other packages' included."""

from __future__ import annotations

from typing import Any, Final

from lazydecode.errors import PluginBrokenError, ValidationError
from lazydecode.media.connector import MediaConnector
from lazydecode.plugins import Registry, contain

CONNECTOR_GROUP: Final = "lazydecode.connectors"
"""Group of entry points that offer connectors: name -> subclass of `MediaConnector`."""


class MediaConnectorRegistry(Registry[type[MediaConnector]]):
    """Connector classes by name."""

    def __init__(self) -> None:
        super().__init__(
            "media connector",
            group=CONNECTOR_GROUP,
            check=_check_connector,
            parameter="media_connector",
        )

    def load(self, name: str, **options: Any) -> MediaConnector:
        """Return a new connector of the class that is known as `name`.

        Raises:
            ValidationError: If there is none, or it refuses the options. A `ValueError`.
            PluginError: If it comes from another package, and cannot be used.
        """
        connector_class = self.get(name)
        try:
            with contain(self.noun, name, kind=PluginBrokenError, declared=(TypeError, ValueError)):
                connector = connector_class(**options)
        except (TypeError, ValueError) as exc:
            raise ValidationError(
                f"the media connector {name!r} refuses its options: {exc}",
                parameter="media_connector",
                value=name,
            ) from exc
        connector.name = name
        return connector


def _check_connector(value: object) -> None:
    if not (isinstance(value, type) and issubclass(value, MediaConnector)):
        raise TypeError("it is not a subclass of lazydecode.media.MediaConnector")


MEDIA_CONNECTOR_REGISTRY: Final = MediaConnectorRegistry()
"""The process's connectors."""
MEDIA_CONNECTOR_REGISTRY.register("http")(MediaConnector)
