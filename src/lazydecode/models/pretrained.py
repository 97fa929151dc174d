"""What Transformers loads from a model folder or hub id, and clear words where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazydecode.config import Settings
from lazydecode.models.registry import ModelLoadError

logger = logging.getLogger(__name__)


def load_config(model: str, settings: Settings) -> Any:
    """Return the model's configuration.

    Raises:
        ModelLoadError: If there is none, or it is code that may not run.
    """
    from transformers import AutoConfig

    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelLoadError(f"{model} is no model folder: it has no config.json")
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=settings.trust_remote_code)
    except Exception as exc:
        raise ModelLoadError(_load_problem(model, "configuration", exc)) from exc


def load_processor(model: str, settings: Settings) -> tuple[Any, Any]:
    """Return (processor or None, tokenizer).

    Raises:
        ModelLoadError: If there is no tokenizer, or a part is code that may not run.
    """
    from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

    trust = settings.trust_remote_code
    problem: Exception | None = None
    processor: Any = None
    try:
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=trust)
    except Exception as exc:
        problem = exc
    if isinstance(processor, PreTrainedTokenizerBase):
        return None, processor
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is not None:
        return processor, tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust)
    except Exception as exc:
        raise ModelLoadError(_load_problem(model, "tokenizer", problem or exc)) from exc
    if problem is not None:
        reason = _load_problem(model, "processor", problem)
        if _is_untrusted(problem):
            raise ModelLoadError(reason) from problem
        logger.warning("%s is served without media: %s", model, reason)
    return None, tokenizer


def _is_untrusted(exc: Exception) -> bool:
    """Whether a part did not load because it is the model's own code."""
    return "trust_remote_code" in str(exc)


def _load_problem(model: str, what: str, exc: Exception) -> str:
    """Return why a part of a model did not load, and what to do about it."""
    text = " ".join(str(exc).split())
    if _is_untrusted(exc):
        return (
            f"the {what} of {model} is code that the model ships; it is run only with "
            "--trust-remote-code"
        )
    return f"the {what} of {model} cannot be loaded: {text[:400]}"


def template_of(processor: Any, tokenizer: Any) -> str | None:
    """Return the chat template; some processors take none and leave it to the tokenizer."""
    for owner in (processor, tokenizer):
        template = getattr(owner, "chat_template", None)
        if isinstance(template, Mapping):
            template = template.get("default")
        if isinstance(template, str) and template:
            return template
    return None
