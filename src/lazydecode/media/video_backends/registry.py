"""The table of video decoders by name, with the optional ones imported on first use."""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from lazydecode.errors import ValidationError

_L = TypeVar("_L", bound=type[Any])

ENTRY_POINT_GROUP: Final = "lazydecode.video_backends"
"""Group under which another installed package offers video decoders: name -> loader class."""

_BUILT_IN: Final = {
    "nvdec": "lazydecode.media.video_backends.nvdec:NvdecVideoLoader",
    "opencv": "lazydecode.media.video_backends.opencv:OpenCVVideoLoader",
    "pyav": "lazydecode.media.video_backends.pyav:PyAVVideoLoader",
    "qwen2_vl": "lazydecode.media.video_backends.qwen2_vl:Qwen2VLVideoLoader",
    "torchcodec": "lazydecode.media.video_backends.torchcodec:TorchCodecVideoLoader",
}


class VideoLoaderRegistry:
    """Video decoders by name: registered ones, our own, and those of installed packages.

    Threads may share it: the lock covers the table of classes; importing runs outside it.
    """

    def __init__(self) -> None:
        self._classes: dict[str, type[Any]] = {}
        self._lock = threading.Lock()

    def register(self, name: str) -> Callable[[_L], _L]:
        """Return a class decorator that makes a loader available as `name`; the last one wins.

        The class needs no arguments and has
        `load_bytes(data, num_frames=..., **options) -> (frames, metadata)`.
        """

        def decorate(loader_class: _L) -> _L:
            with self._lock:
                self._classes[name] = loader_class
            return loader_class

        return decorate

    def names(self) -> list[str]:
        """Names that can be asked for, sorted; optional packages may be missing for some."""
        with self._lock:
            known = set(self._classes)
        plugins = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP).names
        return sorted(known | set(_BUILT_IN) | set(plugins))

    def loader_class(self, name: str) -> type[Any]:
        """Return the class that is registered as `name`.

        Raises:
            ValidationError: If there is none, or its package is not installed or broken.
        """
        with self._lock:
            found = self._classes.get(name)
        if found is None:
            found = self._find(name)
            with self._lock:
                found = self._classes.setdefault(name, found)
        return found

    def load(self, name: str) -> Any:
        """Return a new loader of the class that is registered as `name`.

        Raises:
            ValidationError: As `loader_class`.
        """
        return self.loader_class(name)()

    def _find(self, name: str) -> type[Any]:
        target = _BUILT_IN.get(name)
        if target is not None:
            module_name, _, class_name = target.partition(":")
            module = importlib.import_module(module_name)
            built_in: type[Any] = getattr(module, class_name)
            return built_in
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
            try:
                plugin = entry_point.load()
            except Exception as exc:
                raise ValidationError(
                    f"the video backend plug-in {name!r} does not load: {type(exc).__name__}",
                    parameter="video_backend",
                    value=name,
                ) from exc
            if not isinstance(plugin, type) or not hasattr(plugin, "load_bytes"):
                raise ValidationError(
                    f"the video backend plug-in {name!r} is not a class with load_bytes",
                    parameter="video_backend",
                    value=name,
                )
            return plugin
        raise ValidationError(
            f"unknown video backend {name!r}; known are {', '.join(self.names())}",
            parameter="video_backend",
            value=name,
        )


VIDEO_LOADER_REGISTRY: Final = VideoLoaderRegistry()
"""The process's video decoders."""


def backend_fingerprint(name: str) -> str:
    """Return what decodes when `name` is asked for: library and version, for example
    `pyav 18.1.0 (libavcodec 62.28.102)`.

    It is not part of a media key, which is the same on every machine; a cache of processed
    results adds it, so that results are shared only between equal decoders.

    Raises:
        ValidationError: If there is no such backend here.
    """
    loader_class = VIDEO_LOADER_REGISTRY.loader_class(name)
    fingerprint = getattr(loader_class, "fingerprint", None)
    if fingerprint is None:
        return f"{loader_class.__module__}.{loader_class.__qualname__}"
    return str(fingerprint())
