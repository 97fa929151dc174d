"""What a processor's call does with media, without what it does with the text around them.

Most classes take their call from transformers' mixin, which runs one method per modality and
then writes, tokenizes and checks the text. For one item by itself only the first half counts:
its tensors and its replacement come from that method. The other half costs about 1 ms.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, Final

from lazydecode.models.memo import Memo

_STEPS: Final = {
    "image": ("images", "_process_images", "images_kwargs"),
    "video": ("videos", "_process_videos", "videos_kwargs"),
    "audio": ("audio", "_process_audio", "audio_kwargs"),
}
"""Modality -> the mixin's name of its argument, its method, and its group of options."""
_TEXT_HALF: Final = ("__call__", "get_text_with_replacements")
"""Methods of the mixin that are left out: who overrides one does something else there."""
_NO_OPTIONS: Final = frozenset({*(name for name, _, _ in _STEPS.values()), "audios", "text"})


class MediaSteps:
    """Runs the media half of one class's calls. Threads share it.

    Args:
        processor: The model's processor.
    """

    def __init__(self, processor: Any) -> None:
        self._merged: Memo[Mapping[str, Any]] = Memo(256)
        self.is_known = _calls_as_the_mixin(type(processor))
        """Whether the class's calls are the mixin's, so that there is such a half."""

    def run(
        self, processor: Any, modality: str, text: str, arguments: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str] | None:
        """Return what the class makes of one item: outputs, and what replaces its placeholder.

        None if it gives not one replacement for it.

        Args:
            processor: The processor for this call.
            modality: `image`, `video` or `audio`.
            text: A prompt with the item's placeholder: the class checks it against the item.
            arguments: Those of the class's call.

        Raises:
            Exception: Whatever the class raises.
        """
        from transformers import BatchFeature

        name, method, group = _STEPS[modality]
        options = {k: v for k, v in arguments.items() if k not in _NO_OPTIONS}
        media = {name: arguments.get(name)}
        images, texts, videos, audio = processor.prepare_inputs_layout(
            **media, text=[text], **options
        )
        given = {"images": images, "videos": videos, "audio": audio}
        processor.validate_inputs(**given, text=texts, **options)
        merged = self._merge(processor, modality, options)[group]
        # A copy: a class may write into what it is given.
        outputs, replacements = getattr(processor, method)(given[name], **copy.deepcopy(merged))
        if len(replacements) != 1:
            return None
        data = {k: v for k, v in outputs.items() if k not in processor.unused_input_names}
        feature = BatchFeature(
            data, tensor_type="pt", skip_tensor_conversion=processor.skip_tensor_conversion
        )
        return dict(feature), replacements[0]

    def _merge(
        self, processor: Any, modality: str, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the class's options over its defaults; those of a video hold its metadata."""

        def merge() -> Mapping[str, Any]:
            tokenizer = getattr(processor, "tokenizer", None)
            defaults = {} if tokenizer is None else tokenizer.init_kwargs
            merged: Mapping[str, Any] = processor._merge_kwargs(
                tokenizer_init_kwargs=defaults, **options
            )
            return merged

        if modality == "video":
            return merge()
        key = json.dumps(options, sort_keys=True, default=str)
        return self._merged.get(key, merge)


def _calls_as_the_mixin(kind: type) -> bool:
    from transformers import ProcessorMixin

    return all(
        getattr(kind, name, None) is getattr(ProcessorMixin, name, kind) for name in _TEXT_HALF
    )
