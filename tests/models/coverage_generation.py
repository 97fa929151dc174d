"""Whether the embedded engine generates with a family: the library's own tokens, per modality."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Final

import torch

from tests.engine.library import Case, Model
from tests.models.reference import clip, picture, sound

SAME: Final = "yes"


def check_generation(folder: Path) -> dict[str, str]:
    """Return modality -> `yes`, or why the model does not generate.

    Greedy tokens for one item of each modality, and for one of all together, are compared with
    what the library generates from the output of its own processor.

    Args:
        folder: A model with weights.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's, while it loads
        model = Model(folder)
        found = {m: _compare(model, (m,)) for m in model.frontend.modalities}
        together = _compare(model, model.frontend.modalities) if len(found) > 1 else SAME
    if together != SAME and set(found.values()) == {SAME}:
        found = dict.fromkeys(found, f"alone; in one prompt with the others: {together}")
    return found


def _compare(model: Model, modalities: tuple[str, ...]) -> str:
    rate = model.reference.rate
    items = {
        "image": [picture(120, 90, seed=1)],
        "video": [clip(4, 112, 84)],
        "audio": [sound(1.1, rate, seed=1)],
    }
    case = Case("what is it", {m: items[m] for m in modalities})
    try:
        torch.manual_seed(0)  # VibeVoice draws noise
        expected = model.expected(case, 6)
    except Exception as exc:
        return f"Transformers itself: {_short(exc)}"
    try:
        generation = model.generation(case)
        torch.manual_seed(0)
        model.run([[generation]])
    except Exception as exc:
        return _short(exc)
    got = generation.output_token_ids[:6]
    return SAME if got == expected else f"other tokens: {got} instead of {expected}"


def _short(exc: Exception) -> str:
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}"[:160]
