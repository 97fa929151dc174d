"""What decoders of optional packages share: the import, and PyAV where they cannot serve."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lazydecode.errors import ValidationError
from lazydecode.media.video_backends.base import (
    DecodedFrames,
    VideoLoader,
    allocate_frames,
)
from lazydecode.media.video_backends.frame_index import FrameIndex
from lazydecode.media.video_backends.pyav import PyAVVideoLoader, read_frames

logger = logging.getLogger(__name__)


class UnsuitableError(Exception):
    """The library cannot give exactly the wanted frames of this video; PyAV can.

    Args:
        reason: Why, for the log.
        is_logged: Whether that was logged already.
    """

    def __init__(self, reason: str, *, is_logged: bool = False) -> None:
        super().__init__(reason)
        self.is_logged = is_logged


class OptionalVideoLoader(VideoLoader):
    """A decoder whose package is an extra.

    Frames are told by number in display order. Where the library counts or turns otherwise (a
    mirrored display matrix, times that say nothing or do not fit), or leaves out a frame, PyAV
    decodes instead, with a log line: the frame choice is the same with every backend.
    """

    module: ClassVar[str]
    """Name of the module to import."""
    distribution: ClassVar[str]
    """Name of the package to install."""
    extra: ClassVar[str]
    """Extra of lazydecode that brings it."""

    def __init__(self) -> None:
        self.require()

    @classmethod
    def require(cls) -> None:
        """Check that the package is installed.

        Raises:
            ValidationError: If it is not; the text names the extra.
        """
        if importlib.util.find_spec(cls.module) is None:
            raise ValidationError(
                f"the video backend {cls.name!r} needs the package {cls.distribution}: install "
                f"lazydecode[{cls.extra}]",
                parameter="video_backend",
                value=cls.name,
            )

    @classmethod
    def import_module(cls) -> Any:
        """Import the library.

        Raises:
            ValidationError: If it is not installed or does not load.
        """
        cls.require()
        try:
            return importlib.import_module(cls.module)
        except (ImportError, OSError, RuntimeError) as exc:
            raise ValidationError(
                f"the video backend {cls.name!r} does not load here: the package "
                f"{cls.distribution} is installed, but not the libraries that it needs",
                parameter="video_backend",
                value=cls.name,
            ) from exc

    @classmethod
    def fingerprint(cls) -> str:
        """The package and its version."""
        cls.require()
        return f"{cls.name} {importlib.metadata.version(cls.distribution)}"

    def read_frames(
        self,
        data: bytes,
        index: FrameIndex,
        wanted: Sequence[int],
        recover: bool,
        options: dict[str, Any],
    ) -> DecodedFrames:
        """Decode the wanted frames with this library, or with PyAV where it cannot."""
        try:
            if index.by_order:
                raise UnsuitableError("the container has no frame times")
            if index.orientation.is_mirrored:
                raise UnsuitableError("the display matrix mirrors the frames")
            if recover:
                raise UnsuitableError("damaged frames are to be replaced")
            collector = FrameCollector(wanted, self)
            self.decode(data, index, collector, options)
            if not collector.is_complete:
                raise UnsuitableError("some frames do not decode")
            return collector.result()
        except UnsuitableError as exc:
            if not exc.is_logged:
                logger.info("%s cannot decode this video (%s); pyav decodes it", self.name, exc)
            decoded = read_frames(data, index, wanted, recover=recover, limits=self.limits)
            return dataclasses.replace(decoded, backend=PyAVVideoLoader.name)

    @abstractmethod
    def decode(
        self, data: bytes, index: FrameIndex, collector: FrameCollector, options: dict[str, Any]
    ) -> None:
        """Hand the collector the frames it wants; those that do not decode are left out.

        Raises:
            UnsuitableError: If this library cannot open the video or tell its frames apart.
        """


class FrameCollector:
    """Takes upright RGB frames by number and puts them where they are wanted."""

    def __init__(self, numbers: Sequence[int], loader: VideoLoader) -> None:
        self.wanted = sorted(set(numbers))
        """Numbers of the wanted frames, ascending."""
        self._numbers = list(numbers)
        self._slots = {number: slot for slot, number in enumerate(self.wanted)}
        self._found: set[int] = set()
        self._limits = loader.limits
        self._frames: NDArray[np.uint8] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every wanted frame came."""
        return len(self._found) == len(self._slots)

    def lacks(self, number: int) -> bool:
        """Whether the frame `number` is wanted and did not come yet."""
        return number in self._slots and number not in self._found

    def slot(self, number: int, width: int, height: int) -> NDArray[np.uint8]:
        """Return where the wanted frame `number` goes, shape (height, width, 3).

        Raises:
            MediaTooLargeError: If the frames are over the limit; nothing was allocated then.
            UnsuitableError: If the size differs from the first frame's.
        """
        if self._frames is None:
            self._frames = allocate_frames(
                len(self.wanted), width, height, self._limits, num_returned=len(self._numbers)
            )
        if self._frames.shape[1:3] != (height, width):
            raise UnsuitableError("the stream changes its resolution")
        self._found.add(number)
        target: NDArray[np.uint8] = self._frames[self._slots[number]]
        return target

    def result(self) -> DecodedFrames:
        """Return the frames that came, in the order in which they were asked for."""
        assert self._frames is not None
        slots = [self._slots[number] for number in self._numbers]
        if slots == list(range(len(self.wanted))):
            return DecodedFrames(self._frames, self._numbers)
        return DecodedFrames(self._frames[slots], self._numbers)
