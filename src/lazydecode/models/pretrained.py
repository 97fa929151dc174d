"""What Transformers loads from a model folder or hub id, and clear words where it cannot."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lazydecode.config import Settings
from lazydecode.later import Later
from lazydecode.models.registry import ModelLoadError

logger = logging.getLogger(__name__)


def load_config(model: str, settings: Settings) -> Any:
    """Return the model's configuration.

    Raises:
        ModelLoadError: If there is none, or it is code that may not run.
    """
    from transformers import AutoConfig

    folder = Path(model)
    if not folder.is_dir() and (folder.is_absolute() or model.startswith((".", "~"))):
        raise ModelLoadError(f"there is no folder {model}")
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
    import transformers
    from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

    trust = settings.trust_remote_code
    problem: Exception | None = None
    processor: Any = None
    try:
        with _later_attribute(transformers, "MistralCommonBackend"):
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


@contextlib.contextmanager
def _later_attribute(module: ModuleType, name: str) -> Iterator[None]:
    """Give a lazy module's attribute inside without importing what it comes from.

    Each processor asks whether its tokenizer is one of two classes. The second is Mistral's, whose
    library takes half of the time in which a processor is loaded, and is not looked at where the
    first one fits.
    """
    if name in vars(module):
        yield
        return

    def fetch() -> Any:
        if vars(module).get(name) is later:
            delattr(module, name)
        return getattr(module, name)

    later = Later(fetch)
    setattr(module, name, later)
    try:
        yield
    finally:
        if vars(module).get(name) is later:
            delattr(module, name)


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


def check_tokenizer(model: str, tokenizer: Any) -> None:
    """Refuse what transformers makes up for a folder without a tokenizer's files.

    Raises:
        ModelLoadError: If the tokenizer knows no text.
    """
    ids = tokenizer.encode("hello", add_special_tokens=False)
    if set(ids) <= {getattr(tokenizer, "unk_token_id", None)}:
        raise ModelLoadError(f"the tokenizer of {model} is empty: its files are missing")


def template_of(processor: Any, tokenizer: Any, *, file: Path | None = None) -> str | None:
    """Return the chat template; some processors take none and leave it to the tokenizer.

    Args:
        processor: The model's processor, if it has one.
        tokenizer: The model's tokenizer.
        file: A template in the place of theirs.

    Raises:
        ModelLoadError: If the file cannot be read, or is no template.
    """
    if file is not None:
        return _read_template(file)
    for owner in (processor, tokenizer):
        template = getattr(owner, "chat_template", None)
        if isinstance(template, Mapping):
            template = template.get("default")
        if isinstance(template, str) and template:
            return template
    return None


def _read_template(file: Path) -> str:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "it is no UTF-8 text"
        raise ModelLoadError(f"the chat template {file} cannot be read: {reason}") from exc
    if not template.strip():
        raise ModelLoadError(f"the chat template {file} is empty")
    try:
        render_jinja_template(conversations=[[]], chat_template=template)
    except TemplateSyntaxError as exc:
        raise ModelLoadError(f"the chat template {file}, line {exc.lineno}: {exc.message}") from exc
    except Exception:
        # It can be compiled; what it makes of no messages at all is its own affair.
        logger.debug("%s cannot be rendered without messages", file)
    return template
