"""How a model may be called: found out on the model itself, with prompts of a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import transformers

_LENGTHS: Final = (3, 11)
_NUM_STEPS: Final = 3
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE: Final = 6e-2
"""Of the largest score: rounding in half precision, not another position or mask."""
_CANNOT: Final = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
"""What a forward without media, or with padding, raises if it cannot do that."""


def working_generate(model: Any, pad_token_id: int) -> Callable[..., Any]:
    """Return the `generate` that lets us choose the tokens: the model's own, if it does.

    A class may replace `generate` by one that does not pass logits processors on.
    """
    if model.config.is_encoder_decoder:
        # Whisper's own cuts long audio into windows, chooses tokens by itself and tries again.
        return partial(transformers.GenerationMixin.generate, model)
    calls = 0

    def count(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return scores

    ids = torch.tensor([_prompt(model, 2, pad_token_id)], device=model.device)
    try:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=transformers.GenerationConfig(max_new_tokens=1),
            logits_processor=transformers.LogitsProcessorList([count]),
        )
    except _CANNOT:
        return model.generate  # type: ignore[no-any-return]  # it may need media; let it try
    if calls:
        return model.generate  # type: ignore[no-any-return]
    return partial(transformers.GenerationMixin.generate, model)


def batch_equals_single(model: Any, generate: Callable[..., Any], pad_token_id: int) -> bool:
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
        batched = _scores(model, generate, together, mask)
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            alone = _scores(model, generate, ids, torch.ones_like(ids))
            allowed = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE) * float(alone.abs().max())
            if not float((batched[:, row] - alone[:, 0]).abs().max()) <= allowed:
                return False
    except _CANNOT:
        # Whatever a forward without media or with padding cannot do, it shall not be asked to.
        return False
    return True


def _scores(
    model: Any, generate: Callable[..., Any], input_ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the scores of some steps, shape (step, row, vocabulary); the tokens are given."""
    steps: list[torch.Tensor] = []

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steps.append(scores.float().cpu().clone())
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 5 + len(steps)] = 0.0
        return forced

    generate(
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
