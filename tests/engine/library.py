"""One tiny model three times: in our engine, in our front end, and in the library alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lazydecode.cache import MultiModalReceiverCache
from lazydecode.config import Settings
from lazydecode.engine.generation import Generation
from lazydecode.engine.loading import load_model
from lazydecode.engine.protocol import EngineRequest, SamplingParams
from lazydecode.engine.receiver import Receiver
from lazydecode.engine.token_types import TokenTypes
from lazydecode.engine.transformers import TransformersRunner
from lazydecode.inputs import MultiModalInput
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.processing.inputs import ProcessorInputs
from tests.models.reference import Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@dataclass
class Case:
    """One conversation with media."""

    text: str
    items: dict[str, list[Any]]

    @property
    def messages(self) -> list[dict[str, Any]]:
        parts = [{"type": m} for m, items in self.items.items() for _ in items]
        content = [*parts, {"type": "text", "text": self.text}]
        return [{"role": "user", "content": content if parts else self.text}]


class Model:
    """A tiny model three times: ours, our front end, and the library alone."""

    def __init__(self, path: Path) -> None:
        self.frontend: ModelFrontend = load_model_frontend(str(path), Settings())
        self.runner = TransformersRunner(
            model=str(path),
            dtype="float32",
            pixel_plan=self.frontend.pixel_plan,
            token_types=TokenTypes.of_processor(self.frontend.processor),
        )
        self.reference = Reference.of(str(path))
        self.library = load_model(str(path), device="cpu", dtype="float32", trust_remote_code=False)
        taken = inspect.signature(self.library.forward).parameters
        self._wants_types = "mm_token_type_ids" in taken and self.frontend.modalities != ()

    def expected(self, case: Case, num_tokens: int = 12) -> list[int]:
        """What the library generates from its own processor's output."""
        options = {name: True for name in ("return_mm_token_type_ids",) if self._wants_types}
        text = self.reference.text(case.messages)
        inputs = self.reference(text, case.items, **options)
        inputs.pop("video_metadata", None)
        inputs = {
            name: value.to(self.library.dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in inputs.items()
        }
        tokens = self.library.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            forced_eos_token_id=None,
            pad_token_id=0,
        )
        is_encoder_decoder = self.library.config.is_encoder_decoder
        start = 1 if is_encoder_decoder else inputs["input_ids"].shape[1]
        return [int(token) for token in tokens[0, start:]]

    def input(self, case: Case) -> MultiModalInput:
        """What our own front end makes of the case."""
        rendered = self.frontend.render_chat(case.messages)
        if not case.items or self.frontend.mm_processor is None:
            return MultiModalInput(
                type="multimodal",
                prompt_token_ids=self.frontend.tokenize_prompt(rendered),
                mm_kwargs={},
                mm_hashes={},
                mm_placeholders={},
            )
        items = self.frontend.info.parse_mm_data(case.items)
        return self.frontend.mm_processor.apply(ProcessorInputs(rendered.prompt, items))

    def generation(self, case: Case, sampling: SamplingParams = GREEDY) -> Generation:
        """The case, ready to run."""
        return self.ready(self.input(case), sampling)

    def ready(self, one: MultiModalInput, sampling: SamplingParams = GREEDY) -> Generation:
        """What a front end made of a request, ready to run."""
        request = EngineRequest(
            "r",
            one["prompt_token_ids"],
            one["mm_kwargs"],
            one["mm_hashes"],
            one["mm_placeholders"],
            sampling,
        )
        placed, _ = Receiver(MultiModalReceiverCache(capacity_bytes=2**28)).receive(request)
        return Generation(request, placed, self.runner.info)

    def run(self, batches: Sequence[Sequence[Generation]]) -> None:
        """Run batches, one token each in turn."""
        running = [iter(self.runner.generate(batch)) for batch in batches]
        while running:
            for steps in list(running):
                if next(steps, "ended") == "ended":
                    running.remove(steps)
