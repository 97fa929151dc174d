"""Random weights for tiny models, the same for the same seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazydecode.tiny_models.records import Family

SPREAD = 0.15
"""Standard deviation of weight matrices. With the usual 0.02 a network this narrow passes almost
nothing from attention on, and answers would not depend on the media."""

_AUTO_CLASSES = (
    "AutoModelForMultimodalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModelForPreTraining",
    "AutoModel",
)


def model_class(family: Family) -> Any:
    """Return the transformers class that answers for this family."""
    import transformers

    if family.architecture is not None:
        return getattr(transformers, family.architecture)
    config_class = transformers.CONFIG_MAPPING[family.model_type]
    for name in _AUTO_CLASSES:
        mapping = getattr(transformers, name)._model_mapping
        if config_class in mapping:
            return mapping[config_class]
    raise LookupError(f"transformers has no model class for {family.model_type}")


def write_weights(family: Family, out_dir: Path, *, seed: int) -> None:
    """Initialize the model of `out_dir`'s configuration at random and save it there.

    The process's random state is left as it was.
    """
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(out_dir)
    dtype = getattr(torch, family.dtype)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(family)(config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                parameter.normal_(0.0, SPREAD, generator=generator)
        model.tie_weights()
        with _quiet():
            model.to(dtype).eval().save_pretrained(out_dir)
    if family.voices_file:
        torch.save({}, out_dir / family.voices_file)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing a progress bar for a file of one megabyte."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
