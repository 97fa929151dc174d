"""The part of `lazydecode inspect` that loads a model; needs the extra `processing`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lazydecode.config import Settings
from lazydecode.models.loading import load_model_frontend


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
        "max_items": frontend.max_items,
        "cacheable": frontend.is_cacheable,
        "fingerprint": frontend.fingerprint,
    }
    if frontend.findings is not None:
        report["proof"] = asdict(frontend.findings.proof)
        report["probe_seconds"] = round(frontend.findings.seconds, 3)
    return report
