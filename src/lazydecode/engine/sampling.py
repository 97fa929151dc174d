"""Choosing the next token of each sequence from the model's scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazydecode.engine.generation import Generation
from lazydecode.engine.protocol import TokenLogprob
from lazydecode.engine.timestamps import apply_timestamp_rule


class TokenChooser:
    """Chooses for the sequences of one batch, each by its own sampling parameters.

    Each draw is one number of `Generation.uniform` through the inverse of the cumulated
    distribution, so that it depends on nothing but the request and the scores.
    """

    def __init__(self, batch: Sequence[Generation], vocab_size: int, device: torch.device) -> None:
        self._batch = batch
        self._rows = [_Row(generation, vocab_size, device) for generation in batch]

    def choose(self, scores: torch.Tensor) -> list[tuple[int, TokenLogprob | None]]:
        """Return a token per sequence; for those that are done, any.

        Args:
            scores: Shape (batch, vocabulary), float32: raw logits. Overwritten.
        """
        if all(generation.is_done or row.is_plain for generation, row in self._pairs()):
            return [(token, None) for token in scores.argmax(dim=-1).tolist()]
        return [
            (0, None) if generation.is_done else row.choose(scores[index])
            for index, (generation, row) in enumerate(self._pairs())
        ]

    def _pairs(self) -> list[tuple[Generation, _Row]]:
        return list(zip(self._batch, self._rows, strict=True))


class _Row:
    """One sequence's parameters, and what its penalties count."""

    def __init__(self, generation: Generation, vocab_size: int, device: torch.device) -> None:
        self._generation = generation
        self._device = device
        sampling = generation.sampling
        self._sampling = sampling
        self._has_penalties = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        self._counted = 0
        if self._has_penalties:
            # Placeholder ids may lie beyond the scores' last column.
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._output_counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long, device=device)
        self._biases = torch.tensor(
            list(sampling.logit_bias.values()), dtype=torch.float32, device=device
        )
        stops = sorted(token for token in generation.stop_token_ids if token < vocab_size)
        self._end_id = stops[0] if stops else 0
        self._stop_ids = torch.tensor(stops, dtype=torch.long, device=device)

    @property
    def is_plain(self) -> bool:
        """Whether the most likely token is the answer, and nothing else is asked for."""
        sampling = self._sampling
        return (
            sampling.temperature == 0.0
            and not self._has_penalties
            and not sampling.logit_bias
            and sampling.logprobs is None
            and sampling.timestamps is None
            and not self._generation.must_not_stop
        )

    def choose(self, logits: torch.Tensor) -> tuple[int, TokenLogprob | None]:
        sampling = self._sampling
        raw_logprobs = None
        if sampling.logprobs is not None:
            raw_logprobs = torch.log_softmax(logits, dim=-1)
        if sampling.timestamps is not None:
            output_ids, end_id = self._generation.output_token_ids, self._end_id
            apply_timestamp_rule(logits, output_ids, sampling.timestamps, end_id)
        if self._has_penalties:
            self._apply_penalties(logits)
        if len(self._bias_ids):
            logits[self._bias_ids] += self._biases
        if self._generation.must_not_stop:
            logits[self._stop_ids] = -torch.inf
        token = int(logits.argmax()) if sampling.temperature == 0.0 else self._draw(logits)
        if raw_logprobs is None:
            return token, None
        return token, _describe(token, raw_logprobs, sampling.logprobs or 0)

    def _apply_penalties(self, logits: torch.Tensor) -> None:
        sampling, generation = self._sampling, self._generation
        new = generation.token_ids[self._counted :]
        new_output = generation.token_ids[max(self._counted, generation.num_prompt_tokens) :]
        self._counted = len(generation.token_ids)
        size = len(self._seen)
        known = torch.tensor([t for t in new if t < size], dtype=torch.long, device=self._device)
        self._seen[known] = True
        generated = torch.tensor(new_output, dtype=torch.long, device=self._device)
        self._output_counts.index_add_(
            0, generated, torch.ones(len(generated), device=self._device)
        )
        if sampling.repetition_penalty != 1.0:
            penalty = sampling.repetition_penalty
            scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(self._seen, scaled, logits))
        logits -= sampling.frequency_penalty * self._output_counts
        logits -= sampling.presence_penalty * (self._output_counts > 0)

    def _draw(self, logits: torch.Tensor) -> int:
        sampling = self._sampling
        logits = logits.double() / sampling.temperature
        order: torch.Tensor | None = None
        if 0 < sampling.top_k < len(logits):
            logits, order = torch.topk(logits, sampling.top_k)
        elif sampling.top_p < 1.0:
            logits, order = torch.sort(logits, descending=True, stable=True)
        weights = torch.softmax(logits, dim=-1)
        if sampling.top_p < 1.0:
            # Keep a token if those before it do not reach top_p yet; so the first always stays.
            before = weights.cumsum(dim=-1) - weights
            weights = torch.where(before < sampling.top_p, weights, 0.0)
        if sampling.min_p > 0.0:
            weights = torch.where(weights >= sampling.min_p * weights.max(), weights, 0.0)
        cumulated = weights.cumsum(dim=-1)
        total = cumulated[-1]
        if not torch.isfinite(total):
            raise RuntimeError("the model's scores are not finite")
        target = (total * self._generation.uniform()).reshape(1)
        index = int(torch.searchsorted(cumulated, target, right=True))
        # Rounding may carry the target past the end, onto tokens that were dropped.
        index = min(index, int(torch.searchsorted(cumulated, total.reshape(1))))
        return index if order is None else int(order[index])


def _describe(token: int, logprobs: torch.Tensor, num_top: int) -> TokenLogprob:
    values, ids = torch.topk(logprobs, min(num_top, len(logprobs)))
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
