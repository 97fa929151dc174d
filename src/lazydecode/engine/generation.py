"""One request while its tokens are generated, and what runs a model for the scheduler."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lazydecode.engine.protocol import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    FinishReason,
    TokenLogprob,
    resolve_max_tokens,
)
from lazydecode.errors import ValidationError
from lazydecode.inputs import MultiModalKwargsItem, PlaceholderRange


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """One item of a prompt, with its tensors and its place."""

    modality: str
    tensors: MultiModalKwargsItem
    place: PlaceholderRange


class Generation:
    """One request's way from prompt to last token. Belongs to the scheduler's thread.

    Only `aborted` is set from another thread; it is looked at between steps.

    Raises:
        ValidationError: If the prompt does not fit the model.
    """

    def __init__(
        self, request: EngineRequest, items: Sequence[PlacedItem], info: EngineInfo
    ) -> None:
        num_resumed = request.num_resumed_tokens
        num_prompt = len(request.prompt_token_ids) - num_resumed
        if num_prompt < 1:
            raise ValidationError("the prompt is empty", parameter="messages")
        sampling = request.sampling
        if info.vocab_size is not None:
            _check_token_ids(request.prompt_token_ids, info.vocab_size, "messages")
            _check_token_ids(sampling.logit_bias, info.vocab_size, "logit_bias")
        self.request_id = request.request_id
        self.sampling = sampling
        self.items = tuple(items)
        """In the order of the prompt."""
        self.token_ids = list(request.prompt_token_ids)
        """Prompt and output so far."""
        self.num_prompt_tokens = num_prompt
        """How many of `token_ids` are the prompt."""
        self.max_tokens = resolve_max_tokens(num_prompt, sampling, info.max_model_len)
        eos = () if sampling.ignore_eos else info.eos_token_ids
        self.stop_token_ids = frozenset((*eos, *sampling.stop_token_ids))
        self.alone = False
        """Must not share a batch: it was in one that failed."""
        self.exclusive = False
        """Must have the model to itself: there was not enough memory beside others."""
        self.aborted = False
        """Nobody waits for the answer any more."""
        self.finish_reason: FinishReason | None = None
        """Set once no more tokens follow."""
        self._seed = os.urandom(8) if sampling.seed is None else _seed_bytes(sampling.seed)
        self._new: list[int] = []
        self._new_logprobs: list[TokenLogprob] = []
        self._stop_token_id: int | None = None
        if self.num_output_tokens >= self.max_tokens:
            self.finish_reason = "length"

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, those of an earlier engine process included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_done(self) -> bool:
        """Whether no more tokens are wanted."""
        return self.aborted or self.finish_reason is not None

    @property
    def must_not_stop(self) -> bool:
        """Whether the next token may not be one of `stop_token_ids`."""
        return self.num_output_tokens < self.sampling.min_tokens

    def uniform(self) -> float:
        """Return this step's random number in [0, 1).

        It depends on the seed and the position alone: not on what shares the batch, nor on
        whether the request was resumed.
        """
        position = self.num_output_tokens.to_bytes(8, "little")
        digest = hashlib.blake2b(position, digest_size=8, key=self._seed).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def emit(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Take the next token; sets `finish_reason` if it is the last."""
        self.token_ids.append(token_id)
        self._new.append(token_id)
        if logprob is not None:
            self._new_logprobs.append(logprob)
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
            self._stop_token_id = token_id
        elif self.num_output_tokens >= self.max_tokens:
            self.finish_reason = "length"

    def take_output(self) -> EngineOutput | None:
        """Return what is new since the last call; None if nothing is."""
        reason: FinishReason | None = "abort" if self.aborted else self.finish_reason
        if not self._new and reason is None:
            return None
        output = EngineOutput(
            request_id=self.request_id,
            new_token_ids=self._new,
            finish_reason=reason,
            stop_token_id=self._stop_token_id,
            logprobs=self._new_logprobs or None,
        )
        self._new, self._new_logprobs = [], []
        return output


class ModelRunner(Protocol):
    """A loaded model. All methods run on the engine's main thread."""

    @property
    def info(self) -> EngineInfo:
        """The model."""
        ...

    def group(self, waiting: Sequence[Generation]) -> list[list[Generation]]:
        """Split what waits into batches that the model can run together, in order."""
        ...

    def generate(self, batch: Sequence[Generation]) -> Iterator[None]:
        """Run one batch: each `next` emits one token to every generation that is not done.

        Continues from `Generation.token_ids`, ends when all are done, and may be closed at any
        time. What it raises concerns this batch alone, unless `is_fatal` says otherwise.
        """
        ...

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether a batch that failed with `error` could succeed with more memory free."""
        ...

    def is_fatal(self, error: Exception) -> bool:
        """Whether the process cannot go on after `error`."""
        ...


def _check_token_ids(token_ids: Collection[int], vocab_size: int, parameter: str) -> None:
    if not token_ids:
        return
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise ValidationError(
            f"{parameter}: there is no token id {low if low < 0 else high}; the model knows 0 to "
            f"{vocab_size - 1}",
            parameter=parameter,
        )


def _seed_bytes(seed: int) -> bytes:
    return seed.to_bytes(8, "little", signed=True)
