"""A video and the sound that came in the same file, as one text of the prompt.

Omni families can interleave the tokens of both by time. The two stay two items with tensors,
identities and cache entries of their own; only the text is made of both. It follows from the
video's size and from the number of the sound's tokens, so no content is needed to write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from lazydecode.errors import InvalidRequestError
from lazydecode.models.expansion import ItemText, PromptExpander
from lazydecode.models.header_only import Way, stand_in, substitutes
from lazydecode.models.item import ItemProcessor
from lazydecode.models.memo import Memo
from lazydecode.models.processor_call import Media

Pair = tuple[int, int]
"""Position of a video among the videos, and of its sound among the audio items."""

OPTIONS: Final = ("use_audio_in_video", "load_audio_from_video")
"""Names of the processor option that asks for it: the one that clients know, and the class's."""
_SCOPE: Final = "videos_kwargs"


def split_option(options: Mapping[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """Take the option out of a processor's options: what an item gives does not depend on it.

    Returns:
        The other options, and whether the sound in videos is wanted; None: it is not said.

    Raises:
        InvalidRequestError: If the option is neither true nor false.
    """
    rest = {name: value for name, value in options.items() if name not in OPTIONS}
    found = [options[name] for name in OPTIONS if name in options]
    scoped = rest.get(_SCOPE)
    if isinstance(scoped, Mapping) and any(name in scoped for name in OPTIONS):
        found += [scoped[name] for name in OPTIONS if name in scoped]
        rest[_SCOPE] = {name: value for name, value in scoped.items() if name not in OPTIONS}
        if not rest[_SCOPE]:
            del rest[_SCOPE]
    for value in found:
        if not isinstance(value, bool):
            raise InvalidRequestError(
                f"mm_processor_kwargs: {OPTIONS[0]!r} must be true or false",
                parameter="mm_processor_kwargs",
            )
    return rest, any(found) if found else None


def choose_sounds(
    request: Mapping[str, Any], server: Mapping[str, Any], *, has_video: bool, pairs_sound: bool
) -> tuple[dict[str, Any], bool]:
    """Return a request's other options, and whether its videos bring their sound.

    Args:
        request: Processor options of the request.
        server: Those of all requests, for what the request does not say.
        has_video: Whether the request has a video.
        pairs_sound: Whether the model can take one with its sound.

    Raises:
        InvalidRequestError: If it cannot, or the option is neither true nor false.
    """
    rest, wanted = split_option(request) if request else ({}, None)
    if wanted is None and has_video:
        wanted = split_option(server)[1]
    wanted = bool(wanted and has_video)
    if wanted and not pairs_sound:
        raise InvalidRequestError(
            f"mm_processor_kwargs: the model does not take the sound of a video with it "
            f"({OPTIONS[0]})",
            parameter="mm_processor_kwargs",
        )
    return rest, wanted


class SoundPairing:
    """Writes the text of a video with its sound, by the family's own class. Threads share it.

    Args:
        items: Runs the processor.
        expander: Counts the tokens of a sound.
        count_name: Name under which the class counts them.
        way: How a video's text follows from its size.
    """

    def __init__(
        self, items: ItemProcessor, expander: PromptExpander, *, count_name: str, way: Way
    ) -> None:
        self._items = items
        self._expander = expander
        self._count_name = count_name
        self._way = way
        self._parts = substitutes(items.call.processor) if way == "meta" else {}
        self._memo: Memo[ItemText] = Memo()

    def join(
        self,
        texts: Mapping[str, Sequence[ItemText]],
        pairs: Sequence[Pair],
        options: Mapping[str, Any],
    ) -> dict[str, list[ItemText]]:
        """Return the texts of a request's items with every pair as one text of its video."""
        videos, sounds = list(texts["video"]), texts["audio"]
        for video, sound in pairs:
            videos[video] = self.text(videos[video], sounds[sound], options)
        paired = {sound for _, sound in pairs}
        alone = [text for position, text in enumerate(sounds) if position not in paired]
        return {**{m: list(group) for m, group in texts.items()}, "video": videos, "audio": alone}

    def text(self, video: ItemText, sound: ItemText, options: Mapping[str, Any]) -> ItemText:
        """Return what stands in the prompt for a video with its sound.

        Raises:
            InvalidRequestError: If the class refuses them together.
        """
        num_tokens = self._expander.count_embeds(sound)
        key = (video.shape, num_tokens, json.dumps(options, sort_keys=True, default=str))
        return self._memo.get(key, lambda: self._write(video, num_tokens, options))

    def _write(self, video: ItemText, num_tokens: int, options: Mapping[str, Any]) -> ItemText:
        def counted(audio: Any, **_: Any) -> tuple[dict[str, Any], list[str]]:
            # In place of the class's step that extracts features, 14 to 170 ms for silence.
            return {self._count_name: torch.tensor([num_tokens])}, [""]

        frames = stand_in("video", video.shape, self._way)
        output = self._items.run_text(
            self._items.texts["video"],
            Media.of({"video": [frames], "audio": [np.zeros(1, np.float32)]}),
            {**options, "load_audio_from_video": True, "audio_from_video_indices": [0]},
            substitutes={**self._parts, "_process_audio": counted},
        )
        text = self._items.text_of("video", frames, output)
        return replace(text, shape=video.shape, holds=("audio",))
