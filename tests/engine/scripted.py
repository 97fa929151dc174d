"""A model runner without a model: what it generates follows from the prompt by a rule.

The next token is the last one plus one. Some token ids give orders, wherever they stand in a
prompt; see the constants.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lazydecode.engine.generation import Generation
from lazydecode.engine.protocol import EngineInfo

VOCAB = 1_000_000
EOS = 999_999
FAIL = 900_001
"""Raise in the step after this token was seen."""
DIE = 900_002
"""Kill the process."""
FATAL = 900_003
"""Raise something that the process cannot survive."""
HANG = 900_004
"""Write one token, then hang until the process is killed."""
STEP_MS = 900_100
"""STEP_MS + n: every step takes n milliseconds."""


class FatalError(Exception):
    """What a broken device would raise."""


class ScriptedRunner:
    """Adds one. Batches are whatever waits."""

    def __init__(
        self,
        *,
        max_model_len: int = 1000,
        fail_to_load: str | None = None,
        wait_while: Path | None = None,
        fail_while: Path | None = None,
        die_loading: bool = False,
    ) -> None:
        if fail_to_load is not None:
            raise OSError(fail_to_load)
        while wait_while is not None and wait_while.exists():
            time.sleep(0.01)
        if fail_while is not None and fail_while.exists():
            raise OSError("not yet")
        if die_loading:
            os.kill(os.getpid(), signal.SIGKILL)
        self.info = EngineInfo(
            model="scripted", max_model_len=max_model_len, vocab_size=VOCAB, eos_token_ids=(EOS,)
        )

    def group(self, waiting: Sequence[Generation]) -> list[list[Generation]]:
        return [list(waiting)]

    def generate(self, batch: Sequence[Generation]) -> Iterator[None]:
        while any(not generation.is_done for generation in batch):
            for generation in batch:
                if generation.is_done:
                    continue
                orders = generation.token_ids[: generation.num_prompt_tokens]
                if DIE in orders:
                    os.kill(os.getpid(), signal.SIGKILL)
                if FATAL in orders:
                    raise FatalError("the device is lost")
                if FAIL in orders:
                    raise RuntimeError("out of memory at 0x1234")
                if HANG in orders and generation.num_output_tokens:
                    time.sleep(600)
                for token in orders:
                    if STEP_MS <= token < STEP_MS + 1000:
                        time.sleep((token - STEP_MS) / 1000)
                # The items' first values are part of the answer, to show that they arrived.
                total = sum(
                    int(elem.data.reshape(-1)[0])
                    for item in generation.items
                    for elem in item.tensors.values()
                )
                last = generation.token_ids[-1]
                step = total if generation.num_output_tokens == 0 and total else 1
                generation.emit((last + step) % VOCAB)
            yield

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, FatalError)


def load(**options: object) -> ScriptedRunner:
    """The factory that an `EngineConfig` names."""
    return ScriptedRunner(**options)  # type: ignore[arg-type]
