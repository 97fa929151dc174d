"""The engine that the settings ask for."""

from __future__ import annotations

from typing import Any, Final

from lazydecode.cache import PROCESSOR_CACHE_REGISTRY
from lazydecode.config import Settings
from lazydecode.engine.child import Child
from lazydecode.engine.client import EngineClient
from lazydecode.engine.null import NullEngine
from lazydecode.engine.process import EngineConfig
from lazydecode.engine.protocol import Engine, EngineInfo
from lazydecode.engine.shared import EngineBroker
from lazydecode.engine.token_types import TokenTypes
from lazydecode.models.pixels import PixelPlan

GIB: Final = 1024**3

IN_FLIGHT_BYTES: Final = GIB // 2
"""Shared memory beyond the cache's size, for tensors that are sent or used and not cached."""

TRANSFORMERS_RUNNER: Final = "lazydecode.engine.transformers:TransformersRunner"
"""Named by text: the front end needs no model code."""


def create_engine(
    model: str,
    settings: Settings,
    *,
    pixel_plan: PixelPlan | None = None,
    token_types: TokenTypes | None = None,
    child: Child | None = None,
    broker: EngineBroker | None = None,
) -> Engine:
    """Return the engine for `settings`, not started yet.

    Args:
        model: A local folder or a hub id.
        settings: Which engine, on which device, with how much cache.
        pixel_plan: How the model's uint8 patches are finished, if the front end sends such.
        token_types: `TokenTypes.of_processor` of the model's processor.
        child: An engine process that waits for its front end; None: one is spawned.
        broker: Whose engine it is, if several front ends share one.
    """
    if settings.engine == "none":
        return NullEngine(EngineInfo(model=model, max_model_len=settings.max_model_len))
    cache_bytes = int(settings.mm_processor_cache_gb * GIB)
    return EngineClient(
        EngineConfig(
            runner=TRANSFORMERS_RUNNER,
            runner_options={
                **_model_options(model, settings),
                "max_model_len": settings.max_model_len,
                "pixel_plan": pixel_plan,
                "token_types": token_types,
                "batching": settings.max_batch_size > 1,
            },
            cache_bytes=cache_bytes,
            receiver_cache=PROCESSOR_CACHE_REGISTRY.get(settings.mm_processor_cache).receiver_path,
            max_batch_size=settings.max_batch_size,
            log_level=settings.log_level,
            shared_bytes=cache_bytes + IN_FLIGHT_BYTES if settings.engine_shared_memory else 0,
        ),
        child=child,
        broker=broker,
    )


def load_early(model: str, settings: Settings) -> dict[str, Any]:
    """Load the weights, in an engine process that does not know yet what else it is to run.

    Returns:
        Options of the runner beside those that `create_engine` names.

    Raises:
        LazyDecodeError: If they cannot be loaded.
        OSError: If files are missing.
    """
    # The front end, which this module is for, needs no model code.
    from lazydecode.engine.loading import load_model

    return {"loaded": load_model(**_model_options(model, settings))}


def _model_options(model: str, settings: Settings) -> dict[str, Any]:
    return {
        "model": model,
        "device": settings.device,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
    }
