"""The table of video decoders by name, with the optional ones imported on first use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from lazydecode.plugins import Registry, contain, is_foreign

ENTRY_POINT_GROUP: Final = "lazydecode.video_backends"
"""Group under which another installed package offers video decoders: name -> loader class."""

_BUILT_IN: Final = {
    "nvdec": "lazydecode.media.video_backends.nvdec:NvdecVideoLoader",
    "opencv": "lazydecode.media.video_backends.opencv:OpenCVVideoLoader",
    "pyav": "lazydecode.media.video_backends.pyav:PyAVVideoLoader",
    "qwen2_vl": "lazydecode.media.video_backends.qwen2_vl:Qwen2VLVideoLoader",
    "torchcodec": "lazydecode.media.video_backends.torchcodec:TorchCodecVideoLoader",
}


class VideoLoaderRegistry(Registry[type[Any]]):
    """Video decoders by name: registered ones, our own, and those of installed packages.

    A decoder is a class that needs no arguments and has
    `load_bytes(data, num_frames=..., **options) -> (frames, metadata)`.
    """

    def __init__(self) -> None:
        super().__init__(
            "video backend",
            group=ENTRY_POINT_GROUP,
            check=_check_loader,
            parameter="video_backend",
            built_in=_BUILT_IN,
        )

    def loader_class(self, name: str) -> type[Any]:
        """Return the class that is known as `name`.

        Raises:
            ValidationError: If there is none, or its package is not installed or broken.
        """
        return self.get(name)

    def load(self, name: str) -> Any:
        """Return a new loader of the class that is known as `name`.

        Raises:
            ValidationError: As `loader_class`.
            PluginFailedError: If it comes from another package and cannot be made.
        """
        loader_class = self.get(name)
        with self.contained(name, loader_class):
            return loader_class()

    def contained(self, name: str, loader_class: type[Any]) -> AbstractContextManager[None]:
        """Let nothing but our errors out of the block, if `loader_class` is a plug-in.

        `ValueError` and `OSError` pass: with them decoders say that a video is damaged.
        """
        if not is_foreign(loader_class):
            return nullcontext()
        return contain(self.noun, name, declared=(ValueError, OSError))


def _check_loader(value: object) -> None:
    if not isinstance(value, type) or not hasattr(value, "load_bytes"):
        raise TypeError("it is not a class with load_bytes")


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
    with VIDEO_LOADER_REGISTRY.contained(name, loader_class):
        return str(fingerprint())
