"""What loading found out about a family by running its processor, as text and on disk.

The proof takes from half a second to several. It is the same as long as everything that it
depends on is: the processor's fingerprint, the tokenizer's content, the family's record, the
interpreter and our own code. All of that is in the name of the file, so nothing is ever taken for
what it was not found out about. What cannot be described so is not kept: processors that come
with a model folder, and tokenizers that cannot be written down.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lazydecode import inputs, models
from lazydecode.models.field_inference import FieldRules
from lazydecode.models.pixels import ChannelPlan, PixelPlan
from lazydecode.models.probing import FamilyFacts, ModalityFacts
from lazydecode.models.proof import BeforeText, PromptEdit, Proof, TextRule
from lazydecode.models.registry import FamilyRecord

logger = logging.getLogger(__name__)

_KNOWN_PACKAGES: Final = frozenset({"transformers", "tokenizers"})
"""Their versions are in the fingerprint."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What loading found out about a family by running its processor."""

    facts: FamilyFacts
    proof: Proof
    plans: Mapping[str, PixelPlan]
    embed_ids: Mapping[str, frozenset[int]]
    seconds: float = 0.0
    """Time that finding it out took."""


_CLASSES: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        *(Findings, FamilyFacts, ModalityFacts, FieldRules),
        *(inputs.BatchedField, inputs.FlatField, inputs.SharedField, inputs.PaddedField),
        *(Proof, PromptEdit, TextRule, BeforeText, PixelPlan, ChannelPlan),
    )
}
"""What a file may hold, by name; it can make nothing else happen."""


class FindingsStore:
    """Files of findings in one folder, for any number of processes.

    Args:
        folder: Made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str) -> Findings | None:
        """Return what is kept under a name; None if nothing is, or it is damaged."""
        path = self._folder / name
        try:
            return read_findings(path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            logger.warning("a kept proof cannot be read (%s); proving anew", type(exc).__name__)
            return None

    def save(self, name: str, findings: Findings) -> None:
        """Keep findings under a name; a folder that cannot be written is a warning."""
        try:
            text = write_findings(findings)
        except TypeError as exc:
            logger.debug("the proof is not kept: %s", exc)
            return
        temporary = self._folder / f".{secrets.token_hex(8)}.part"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, "utf-8")
            os.replace(temporary, self._folder / name)
        except OSError as exc:
            logger.warning("the proof cannot be kept: %s", exc.strerror)
            temporary.unlink(missing_ok=True)


def write_findings(findings: Findings) -> str:
    """Return findings as text that `read_findings` makes the same of.

    Raises:
        TypeError: If there is no way to write them.
    """
    return json.dumps(_encode(findings))


def read_findings(text: str) -> Findings:
    """Return the findings that `write_findings` wrote.

    Raises:
        ValueError: If the text is not such.
    """
    try:
        found = _decode(json.loads(text))
    except (TypeError, KeyError, IndexError, AttributeError) as exc:
        raise ValueError(f"no findings: {exc!r}") from exc
    if not isinstance(found, Findings):
        raise ValueError("no findings")
    return found


def file_name(mark: str, processor: Any, tokenizer: Any, record: FamilyRecord) -> str | None:
    """Return under which name findings are kept; None if they are not to be.

    Args:
        mark: The processor's fingerprint.
        processor: The model's processor.
        tokenizer: Its tokenizer.
        record: How the family differs from the generic way.
    """
    parts = [processor, *(v for n, v in vars(processor).items() if n.endswith("_processor"))]
    if any(type(p).__module__.partition(".")[0] not in _KNOWN_PACKAGES for p in parts):
        return None
    core = getattr(tokenizer, "backend_tokenizer", None)
    described = repr(record)
    if core is None or " at 0x" in described:
        return None
    digest = hashlib.sha256()
    for part in (mark, core.to_str(), described, platform.python_version(), _own_code()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part.encode())
    return f"proof-{digest.hexdigest()[:40]}.json"


@functools.cache
def _own_code() -> str:
    """Return a digest of the sources that find out and use findings."""
    folder = Path(models.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), Path(inputs.__file__)]):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _encode(value: Any) -> Any:
    """Return JSON values that `_decode` makes the same of.

    Raises:
        TypeError: If there is no way to write it.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [name, fields]
    if isinstance(value, Mapping):
        return ["map", [[_encode(k), _encode(v)] for k, v in value.items()]]
    if isinstance(value, tuple | list):
        return ["tuple" if isinstance(value, tuple) else "list", [_encode(v) for v in value]]
    if isinstance(value, frozenset):
        return ["set", sorted(value)]
    raise TypeError(f"a {name} cannot be kept")


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    match kind:
        case "map":
            return {_decode(k): _decode(v) for k, v in content}
        case "tuple":
            return tuple(_decode(v) for v in content)
        case "list":
            return [_decode(v) for v in content]
        case "set":
            return frozenset(content)
    return _CLASSES[kind](**{name: _decode(v) for name, v in content.items()})
