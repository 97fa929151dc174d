"""The embedded engine's model: any generating model of Transformers, on CPU or GPU.

Each batch is one call of the model's own `generate`, so that every family keeps its own rules
for positions, masks and caches. The call runs in a thread that stops after each token until it
is the batch's turn again. The tokens are chosen by us, per request, in place of `generate`'s
one setting for all.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers

from lazydecode.engine.generation import Generation
from lazydecode.engine.loading import describe_model, load_model
from lazydecode.engine.model_inputs import (
    InputBuilder,
    has_embeddings,
    has_sound_in_video,
    item_shapes,
    joins_across_requests,
    padded_sound_shapes,
)
from lazydecode.engine.probing import batch_equals_single, working_generate
from lazydecode.engine.protocol import EngineInfo
from lazydecode.engine.sampling import TokenChooser
from lazydecode.engine.token_types import TokenTypes
from lazydecode.engine.turns import Stepper
from lazydecode.models.pixels import PixelPlan

logger = logging.getLogger(__name__)


class TransformersRunner:
    """A `ModelRunner` over a model that was loaded with `from_pretrained`.

    Args:
        model: A local folder or a hub id.
        pixel_plan: How uint8 patches become the floats of the model's processor.
        token_types: Which positions the model's processor marks.
        batching: Whether requests may share a batch; it is checked on the model as well.
        loaded: What `load_model` returned for the same options; None: it is called.
        max_model_len: Longest prompt plus output; None is what the model has positions for.
    """

    def __init__(
        self,
        *,
        model: str,
        device: str = "auto",
        dtype: str = "auto",
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
        pixel_plan: PixelPlan | None = None,
        token_types: TokenTypes | None = None,
        batching: bool = True,
        loaded: Any = None,
    ) -> None:
        self._model = loaded
        if loaded is None:
            self._model = load_model(
                model, device=device, dtype=dtype, trust_remote_code=trust_remote_code
            )
        self._info = describe_model(model, self._model, max_model_len)
        pad_token_id = _neutralize(self._model.generation_config, self._info.eos_token_ids)
        self._inputs = InputBuilder.for_model(
            self._model,
            pad_token_id=pad_token_id,
            token_types=token_types,
            pixel_plan=pixel_plan,
        )
        self._state = _ModuleState(self._model)
        self._batch_numbers = itertools.count()
        self._generate = working_generate(self._model, pad_token_id)
        self._batches = batching and batch_equals_single(self._model, self._generate, pad_token_id)
        # A decoder beside an encoder of media: among prompts of one length no row needs padding,
        # so none is changed by another.
        self._batches_equals = (
            batching
            and self._model.config.is_encoder_decoder
            and not self._inputs.encoder_reads_text
        )
        # Some models count images and videos by the same token over the whole batch.
        self._mixes = True
        # Some models take items of unequal sizes as a list, others only as one tensor.
        self._mixes_shapes = True
        if batching and not (self._batches or self._model.config.is_encoder_decoder):
            logger.warning("this model does not give the same scores in a batch; not batching")

    @property
    def info(self) -> EngineInfo:
        """The model."""
        return self._info

    def group(self, waiting: Sequence[Generation]) -> list[list[Generation]]:
        """Put requests of similar length together, if model and items allow it."""
        alone: list[list[Generation]] = []
        kinds: dict[tuple[Any, ...], list[Generation]] = {}
        for generation in waiting:
            batches = self._batches or self._batches_equals
            if not (batches and joins_across_requests(generation)):
                alone.append([generation])
                continue
            key = (
                None if self._mixes else _modalities(generation),
                None if self._mixes_shapes else item_shapes(generation),
                padded_sound_shapes(generation),
                len(generation.token_ids) if self._batches_equals else None,
                # The forward takes one word on sound in videos for the whole batch, and
                # embeddings of all its tokens or of none.
                has_sound_in_video(generation),
                has_embeddings(generation),
            )
            kinds.setdefault(key, []).append(generation)
        return alone + [group for kind in kinds.values() for group in _of_similar_length(kind)]

    def generate(self, batch: Sequence[Generation]) -> Iterator[None]:
        """Run one batch; each `next` emits one token to every generation that is not done."""
        name = f"engine-batch-{next(self._batch_numbers)}"
        stepper = Stepper(lambda pause: self._run(batch, pause), name=name)
        state: _State = []
        try:
            while True:
                self._state.restore(state)
                try:
                    next(stepper)
                except StopIteration:
                    return
                except Exception:
                    if self._mixes and len({_modalities(generation) for generation in batch}) > 1:
                        logger.info("going on without batches of different modalities")
                        self._mixes = False
                    elif self._mixes_shapes and len({item_shapes(g) for g in batch}) > 1:
                        logger.info("going on without batches of items of unequal sizes")
                        self._mixes_shapes = False
                    raise
                state = self._state.save()
                yield
        finally:
            stepper.close()

    def is_fatal(self, error: Exception) -> bool:
        """Whether the GPU is lost to this process: after a device-side fault all calls fail."""
        if isinstance(error, torch.OutOfMemoryError):
            return False
        accelerator_error = getattr(torch, "AcceleratorError", None)
        is_device_error = accelerator_error is not None and isinstance(error, accelerator_error)
        return is_device_error or "CUDA error" in str(error)

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether the same batch could succeed with more memory free."""
        is_cpu = isinstance(error, RuntimeError) and "allocate memory" in str(error)
        return isinstance(error, torch.OutOfMemoryError | MemoryError) or is_cpu

    def _run(self, batch: Sequence[Generation], pause: Callable[[], None]) -> None:
        inputs = self._inputs.build(batch)
        steps = _Steps(batch, pause, pad_token_id=self._inputs.pad_token_id)
        longest = max(generation.max_tokens - generation.num_output_tokens for generation in batch)
        self._generate(
            **inputs,
            generation_config=transformers.GenerationConfig(max_new_tokens=longest),
            logits_processor=transformers.LogitsProcessorList([steps]),
            stopping_criteria=transformers.StoppingCriteriaList([steps.are_done]),
        )


class _Steps:
    """What happens within `generate` after each forward: choose, hand out, wait for the turn.

    The object itself is the logits processor. The library inspects a processor's signature at
    every step, which takes 1 ms for a function or bound method and next to nothing for this.
    """

    def __init__(
        self, batch: Sequence[Generation], pause: Callable[[], None], *, pad_token_id: int
    ) -> None:
        self._batch = batch
        self._pause = pause
        self._pad_token_id = pad_token_id
        self._chooser: TokenChooser | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that leave `generate` no choice but ours."""
        if self._chooser is None:
            self._chooser = TokenChooser(self._batch, scores.shape[-1], scores.device)
        tokens = []
        chosen = self._chooser.choose(scores)
        for generation, (token, logprob) in zip(self._batch, chosen, strict=True):
            if generation.is_done:
                tokens.append(self._pad_token_id)
            else:
                generation.emit(token, logprob)
                tokens.append(token)
        forced = torch.full_like(scores, -torch.inf)
        columns = torch.tensor(tokens, device=scores.device).unsqueeze(-1)
        return forced.scatter_(-1, columns, 0.0)

    def are_done(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Wait for the next turn if anyone wants another token; say who does not."""
        if not all(generation.is_done for generation in self._batch):
            self._pause()
        # After the pause, in which requests may have been aborted.
        done = [generation.is_done for generation in self._batch]
        return torch.tensor(done, device=input_ids.device)


def _modalities(generation: Generation) -> frozenset[str]:
    return frozenset(item.modality for item in generation.items)


def _of_similar_length(generations: Sequence[Generation]) -> list[list[Generation]]:
    """Split where padding would cost more than the batch gains."""
    groups: list[list[Generation]] = []
    for generation in sorted(generations, key=lambda generation: len(generation.token_ids)):
        if groups and len(generation.token_ids) <= 2 * len(groups[-1][0].token_ids) + 256:
            groups[-1].append(generation)
        else:
            groups.append([generation])
    return groups


_State = list[tuple[Any, Any]]


class _ModuleState:
    """What some models keep on their modules between the steps of one `generate`.

    Multimodal rotary embeddings remember the offset between positions and tokens of the batch
    that was prefilled last. With batches in turns, each needs its own back.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [module for module in model.modules() if hasattr(module, "rope_deltas")]

    def save(self) -> _State:
        """Return the current state."""
        return [(module, module.rope_deltas) for module in self._modules]

    def restore(self, state: _State) -> None:
        """Put a saved state back."""
        for module, rope_deltas in state:
            module.rope_deltas = rope_deltas


def _neutralize(config: Any, eos_token_ids: Sequence[int]) -> int:
    """Leave choosing and stopping to us; returns the id to pad with.

    What the model's generation config recommends is in `EngineInfo` for the front end to take.
    """
    pad = config.pad_token_id
    if pad is None:
        pad = eos_token_ids[0] if eos_token_ids else 0
    config.update(
        do_sample=False,
        temperature=None,
        top_k=None,
        top_p=None,
        min_p=None,
        typical_p=None,
        epsilon_cutoff=None,
        eta_cutoff=None,
        repetition_penalty=None,
        no_repeat_ngram_size=None,
        num_beams=None,
        penalty_alpha=None,
        max_length=None,
        max_new_tokens=None,
        min_length=None,
        min_new_tokens=None,
        max_time=None,
        stop_strings=None,
        eos_token_id=None,
        pad_token_id=pad,
        output_logits=None,
        output_scores=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict_in_generate=None,
    )
    return int(pad)
