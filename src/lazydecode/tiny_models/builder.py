"""Build one family's folder: tokenizer, processor, template, configuration, weights."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazydecode.tiny_models import tekken
from lazydecode.tiny_models.config import generation_config, tiny_config
from lazydecode.tiny_models.families import get_family
from lazydecode.tiny_models.tokenizer import make_tokenizer
from lazydecode.tiny_models.turns import chat_template

if TYPE_CHECKING:
    from lazydecode.tiny_models.records import Family, Part


class BuildError(Exception):
    """The folder cannot be built here; the message says what is missing."""


def build(family: str, out_dir: str | Path, *, weights: bool = True, seed: int = 0) -> Path:
    """Build the tiny model of `family` in `out_dir`; the same bytes for the same arguments.

    The folder appears whole or not at all; an existing one is replaced.

    Args:
        family: A name in `FAMILIES` or `TEXT_FAMILIES`.
        out_dir: The folder to make.
        weights: Also write random weights, where transformers can run the family.
        seed: What the weights are drawn from.

    Returns:
        `out_dir` as a path.

    Raises:
        ValueError: No family has this name; the text lists those that exist.
        BuildError: A package that the family's processor imports is not installed.
    """
    record = get_family(family)
    _check_packages(record)
    out = Path(out_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        with _quiet():
            _write_folder(record, made, weights=weights and not record.no_weights, seed=seed)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return out


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of a small vocabulary: the real one's token ids are absent."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _check_packages(family: Family) -> None:
    missing = [name for name in family.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(f"{family.name} needs the package {', '.join(missing)}")


def _write_folder(family: Family, out: Path, *, weights: bool, seed: int) -> None:
    template = None
    if family.mistral_tokenizer:
        tokenizer = tekken.write_tokenizer(out)
    elif family.has_template:
        template = chat_template(family.turns, family.slots, bos=_template_bos(family))
        tokenizer = make_tokenizer(family, template=template)
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        tokenizer = make_tokenizer(family)
    processor = None
    if family.processor is None:
        tokenizer.save_pretrained(out)
    else:
        processor = make_processor(family, tokenizer, template)
        processor.save_pretrained(out)
    config = tiny_config(family, tokenizer, processor)
    from lazydecode.tiny_models.weights import model_class

    config["architectures"] = [model_class(family).__name__]
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
    if weights:
        from lazydecode.tiny_models.weights import write_weights

        write_weights(family, out, seed=seed)
    if family.generation or family.generation_tokens:
        # After the weights: saving a model writes a file of this name too.
        text = json.dumps(generation_config(family, tokenizer), indent=2, sort_keys=True) + "\n"
        (out / "generation_config.json").write_text(text, encoding="utf-8")


def _template_bos(family: Family) -> str | None:
    """Return the bos that the template writes; frames without tokens leave it to the tokenizer."""
    return family.bos if family.turns.tokens else None


def make_processor(family: Family, tokenizer: Any, template: str | None) -> Any:
    """Return the family's processor around `tokenizer`, with its published parts."""
    import transformers

    assert family.processor is not None
    parts = {
        "image_processor": family.image,
        "video_processor": family.video,
        family.audio_argument: family.audio,
    }
    made = {name: _make_part(part) for name, part in parts.items() if part is not None}
    cls = getattr(transformers, family.processor)
    options = copy.deepcopy(dict(family.processor_options))
    parameters = inspect.signature(cls.__init__).parameters.values()
    if template is not None and any(
        p.name == "chat_template" or p.kind is p.VAR_KEYWORD for p in parameters
    ):
        options["chat_template"] = template
    return cls(tokenizer=tokenizer, **made, **options)


def _make_part(part: Part) -> Any:
    import transformers

    made = getattr(transformers, part.cls)(**copy.deepcopy(dict(part.options)))
    for name, value in part.attributes.items():
        setattr(made, name, value)
    return made
