"""Whether a model may be given several requests at once: found out on the model itself."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers

_LENGTHS: Final = (3, 11)
_NUM_STEPS: Final = 3
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE: Final = 6e-2
"""Of the largest score: rounding in half precision, not another position or mask."""


def batch_equals_single(model: Any, pad_token_id: int) -> bool:
    """Run two prompts of unequal length together and alone, and compare their scores.

    A model whose positions, masks or states do not know padding differs by far more than
    rounding does.
    """
    if model.config.is_encoder_decoder:
        return False
    prompts = [_prompt(model, length, pad_token_id) for length in _LENGTHS]
    width = max(_LENGTHS)
    together = torch.full((len(prompts), width), pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(together)
    for row, prompt in enumerate(prompts):
        together[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    try:
        batched = _scores(model, together, mask)
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            alone = _scores(model, ids, torch.ones_like(ids))
            allowed = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE) * float(alone.abs().max())
            if not float((batched[:, row] - alone[:, 0]).abs().max()) <= allowed:
                return False
    except (RuntimeError, ValueError, TypeError, IndexError):
        # Whatever a forward without media or with padding cannot do, it shall not be asked to.
        return False
    return True


def _scores(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the scores of some steps, shape (step, row, vocabulary); the tokens are given."""
    steps: list[torch.Tensor] = []

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steps.append(scores.float().cpu().clone())
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 5 + len(steps)] = 0.0
        return forced

    model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=transformers.GenerationConfig(max_new_tokens=_NUM_STEPS),
        logits_processor=transformers.LogitsProcessorList([force]),
    )
    return torch.stack(steps)


def _prompt(model: Any, length: int, pad_token_id: int) -> list[int]:
    """Return ordinary token ids: small ones that mean nothing special to the model."""
    special = {value for value in model.config.to_dict().values() if type(value) is int}
    size = int(model.get_input_embeddings().num_embeddings)
    usable = [token for token in range(size) if token not in special and token != pad_token_id]
    return [usable[(7 * position) % len(usable)] for position in range(1, length + 1)]
