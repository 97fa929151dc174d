"""The part of `lazydecode inspect` that loads a model; needs the extra `processing`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from lazydecode.config import Settings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend

_HEADERS: Final = {
    "meta": "yes: the class on tensors of the item's size without content",
    "blank": "yes: the class on a blank item of the same size",
    "silence": "yes: the class on silence of the same length",
    "content": "no: what stands in the prompt depends on the content, so that items are decoded",
}


def inspect_model(model: str, settings: Settings) -> dict[str, Any]:
    """Return what was found out about a model when it was loaded.

    Raises:
        LazyDecodeError: If it cannot be loaded.
    """
    frontend = load_model_frontend(model, settings)
    report: dict[str, Any] = {
        "model_type": getattr(frontend.config, "model_type", None),
        "processor": None if frontend.processor is None else type(frontend.processor).__name__,
        "modalities": list(frontend.modalities),
        "generates": frontend.generates,
        "fingerprint": frontend.fingerprint,
        "media": {m: _modality(frontend, m) for m in frontend.modalities},
    }
    if frontend.findings is not None:
        report["proof"] = asdict(frontend.findings.proof)
        report["probe_seconds"] = round(frontend.findings.seconds, 3)
    return report


def _modality(frontend: ModelFrontend, modality: str) -> dict[str, Any]:
    """Return what holds for one modality, and why."""
    why_random = frontend.random().get(modality)
    found = frontend.findings
    header = None if found is None else found.proof.headers.get(modality, "content")
    processor = frontend.any_processor
    return {
        "max_items": frontend.max_items[modality] or "any",
        "cached": "yes" if why_random is None else f"no: {why_random}",
        "header_only": _HEADERS[header] if header else "nothing of it stands in the prompt",
        "reentrant": (
            "yes"
            if processor is None or processor.reentrant
            else f"no, one thread at a time: {frontend.why_serialized}"
        ),
    }
