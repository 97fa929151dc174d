"""Options by which a processor makes something else of the same item each time.

What is made of such an item is never taken for what was made of it before: it has an identity
of its own in every request, and no cache keeps it. Noise on every item shows when the same probe
is processed twice; a crop at random shows on items that are larger than the crop, which probes
are not, so that options are known by name as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from lazydecode.models.processor_call import audio_processor_of
from lazydecode.processing.inputs import ProcessorInputs

_SCOPES: Final = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
_SWITCHES: Final = {
    "do_random_crop": "crops at random",
    "random_crop": "crops at random",
    "random_padding": "pads at random",
}
_CUTS: Final = ("rand_trunc", "fusion")
"""Values of `truncation` that take random pieces of what is too long (CLAP)."""

Random = Mapping[str, str]
"""Modality -> why the same item gives other tensors each time."""


def random_options(processor: Any, *layers: Mapping[str, Any]) -> dict[str, str]:
    """Return which options of a processor, or of its call, bring chance in.

    Args:
        processor: The model's.
        layers: Options of a call, the strongest first, flat or by modality.
    """
    parts = {
        "image": getattr(processor, "image_processor", None),
        "video": getattr(processor, "video_processor", None),
        "audio": audio_processor_of(processor),
    }
    found: dict[str, str] = {}
    for modality, part in parts.items():
        if part is None:
            continue

        def value(name: str, modality: str = modality, part: Any = part) -> Any:
            for layer in layers:
                scoped = layer.get(_SCOPES[modality])
                for options in (scoped if isinstance(scoped, Mapping) else {}, layer):
                    if name in options:
                        return options[name]
            return getattr(part, name, None)

        why = _why(value)
        if why:
            found[modality] = f"its {modality} processor {why}"
    return found


def _why(value: Any) -> str:
    dither = value("dither")
    if isinstance(dither, int | float) and dither:
        return f"adds noise (dither={dither})"
    for name, what in _SWITCHES.items():
        if value(name):
            return f"{what} ({name})"
    truncation = value("truncation")
    if truncation in _CUTS:
        return f"cuts long items at random (truncation={truncation})"
    return ""


def set_apart(inputs: ProcessorInputs, random: Random) -> ProcessorInputs:
    """Return the inputs with identities that no other request has, for items with chance in
    them; as they are, if they have been set apart already."""
    modalities = (random.keys() & inputs.mm_data_items.keys()) - inputs.apart.keys()
    if not modalities:
        return inputs
    own = uuid.uuid4().hex
    return replace(inputs, apart={**inputs.apart, **dict.fromkeys(modalities, own)})
