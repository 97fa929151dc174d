"""Which positions of a prompt a model's processor marks, and with what.

Some models take a number per token beside the ids: 0 for text, 1, 2 or 3 for what stands for
image, video or audio. Processors list the ids that count, which may be more than those that
take an embedding (row ends, borders); where a list does not tell, the placeholder ranges do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lazydecode.engine.generation import Generation

NAMES: Final[tuple[str, ...]] = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""Names under which models take them."""
_TYPES: Final = {"image": 1, "video": 2, "audio": 3}
_PREFIX_TYPES: Final = frozenset({"paligemma"})
"""Models whose `token_type_ids` tell prompt (0) from answer (1) and know no modalities."""


@dataclass(frozen=True, slots=True)
class TokenTypes:
    """A processor's rule. Small, and made to be sent to the engine."""

    marked: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Modality -> ids that count, wherever they stand in the prompt."""
    borders: Mapping[int, int] = field(default_factory=dict)
    """Token id -> its number in `moe_mm_token_type_ids`, wherever it stands."""

    @classmethod
    def of_processor(cls, processor: Any) -> TokenTypes:
        """Read the rule off a Hugging Face processor; None has the plain rule."""
        marked = {}
        for modality in _TYPES:
            ids = getattr(processor, f"{modality}_token_ids", None) or ()
            known = frozenset(token for token in ids if isinstance(token, int))
            if known:
                marked[modality] = known
        borders: dict[int, int] = {}
        if hasattr(processor, "create_moe_mm_token_type_ids"):
            for modality in ("image", "video"):
                for end in ("start", "end"):
                    borders[getattr(processor, f"{modality}_{end}_token_id")] = _TYPES[modality]
        return cls(marked, borders)

    def number(self, name: str, model_type: str, generation: Generation) -> NDArray[np.int64]:
        """Return one number per token of a request's prompt and output.

        Args:
            name: Which of `NAMES`.
            model_type: The model's type in Transformers.
            generation: The request.
        """
        token_ids = np.array(generation.token_ids)
        numbers = np.zeros_like(token_ids)
        if name == "token_type_ids" and model_type in _PREFIX_TYPES:
            return numbers
        prompt = slice(0, generation.num_prompt_tokens)
        for modality, ids in self.marked.items():
            numbers[prompt][np.isin(token_ids[prompt], list(ids))] = _TYPES[modality]
        for item in generation.items:
            place, kind = item.place, _TYPES.get(item.modality, 0)
            span = slice(place.offset, place.offset + place.length)
            if not (numbers[span] == kind).any():
                # The processor names no ids, or the frames of a video are made of images' ids.
                numbers[span] = (
                    kind if place.is_embed is None else np.where(place.is_embed, kind, 0)
                )
        if name == "moe_mm_token_type_ids":
            for token, kind in self.borders.items():
                numbers[prompt][token_ids[prompt] == token] = kind
        return numbers
