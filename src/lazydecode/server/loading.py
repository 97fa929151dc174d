"""From a model's name and settings to the parts of a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from lazydecode.cache import BaseMultiModalProcessorCache
from lazydecode.config import Settings
from lazydecode.engine.child import Child
from lazydecode.engine.factory import GIB, IN_FLIGHT_BYTES, create_engine
from lazydecode.engine.token_types import TokenTypes
from lazydecode.engine.wire import DTYPES
from lazydecode.media.budget import ByteBudget
from lazydecode.media.connector_registry import MEDIA_CONNECTOR_REGISTRY
from lazydecode.media.download_cache import DownloadCache
from lazydecode.media.executor import MediaExecutor
from lazydecode.models.findings import Findings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.models.registry import ModelLoadError
from lazydecode.renderers.base import BaseRenderer
from lazydecode.renderers.decode_options import resolve_media_io
from lazydecode.server.context import ServerContext
from lazydecode.server.membership import Member
from lazydecode.server.metrics import Metrics
from lazydecode.server.nursery import spawn_nursery
from lazydecode.server.plugin_check import check_plugins
from lazydecode.server.queueing import RequestQueue
from lazydecode.server.recent import RecentRequests
from lazydecode.workers.pool import WorkerPool


def load_context(
    model: str,
    settings: Settings,
    *,
    child: Child | None = None,
    nursery: Child | None = None,
    member: Member | None = None,
    proven: Callable[[str], Findings | None] | None = None,
) -> ServerContext:
    """Load what the front end needs of `model`; the engine is made, and not started yet.

    Blocks for seconds. Nothing runs afterwards: no thread, process or connection.

    Args:
        model: Local folder or hub id.
        settings: What to serve and how.
        child: An engine process that waits for its front end, if there is.
        nursery: A process that workers can be forked from, if there is.
        member: Connection to the supervisor, in a worker.
        proven: Fingerprint -> what somebody else found out for it meanwhile, if anything.

    Raises:
        LazyDecodeError: If the model cannot be served; says why.
    """
    check_plugins(settings)
    frontend = load_model_frontend(model, settings, proven=proven)
    if settings.engine != "none" and not frontend.generates:
        raise ModelLoadError(
            f"{model} embeds and does not generate: serve it with --engine none, to render requests"
        )
    for modality in settings.media_io_kwargs:
        resolve_media_io(frontend.info, modality, settings.media_io_kwargs)
    return build_context(frontend, settings, child=child, nursery=nursery, member=member)


def build_context(
    frontend: ModelFrontend,
    settings: Settings,
    *,
    child: Child | None = None,
    nursery: Child | None = None,
    member: Member | None = None,
) -> ServerContext:
    """Put the parts of a server together around a loaded front end."""
    executor = MediaExecutor(settings.media_loading_thread_count, niceness=settings.worker_niceness)
    limits, cache_limits = settings.request_limits, settings.download_cache_limits
    connector = MEDIA_CONNECTOR_REGISTRY.load(
        settings.media_connector,
        **settings.media_connector_kwargs,
        policy=settings.fetch_policy,
        limits=settings.fetch_limits,
        download_cache=None if cache_limits.folder is None else DownloadCache(cache_limits),
        executor=executor,
        # Apart from the budget of what requests hold: a download never waits for who waits
        # for it.
        budget=ByteBudget(
            limits.max_encoded_bytes,
            max_waiting=limits.max_waiting,
            max_wait_s=limits.max_wait_s,
        ),
    )
    generates = settings.engine != "none"
    workers: WorkerPool | None = None
    if nursery is not None:
        workers = WorkerPool(
            nursery,
            count=settings.num_media_processes,
            result_bytes=int(settings.mm_processor_cache_gb * GIB) + IN_FLIGHT_BYTES,
            time_limit_s=settings.media_decode_timeout,
            spawn=spawn_nursery,
        )
    renderer = BaseRenderer(
        frontend,
        connector,
        settings,
        executor=executor,
        mirrors_engine=generates,
        bindings=None if member is None else member.bindings,
        workers=workers,
    )
    context = ServerContext(
        settings=settings,
        frontend=frontend,
        renderer=renderer,
        engine=create_engine(
            frontend.model_id,
            settings,
            pixel_plan=frontend.pixel_plan,
            token_types=TokenTypes.of_processor(frontend.processor),
            child=child,
            broker=member,
        ),
        member=member,
        workers=workers,
        generates=generates,
        model_names=settings.served_model_name or (frontend.model_id,),
        metrics=Metrics(),
        queue=RequestQueue(
            max_running=settings.max_batch_size, max_waiting=settings.max_waiting_requests
        ),
        recent=RecentRequests(settings.timeline_requests),
        created=int(time.time()),
        stated_dtype=consumer_dtype(frontend.config, settings.dtype),
    )
    add_gauges(context)
    if member is not None:
        member.read_own = context.metrics.read
    return context


def consumer_dtype(config: object, setting: str) -> torch.dtype:
    """Return the dtype in which an engine elsewhere will want floating-point tensors.

    With `auto` it is what the model states; engines run models that state float32, or nothing,
    in float16.
    """
    if setting != "auto":
        return DTYPES[setting]
    stated = getattr(config, "dtype", None)
    if isinstance(stated, str):
        stated = DTYPES.get(stated)
    if not isinstance(stated, torch.dtype) or stated == torch.float32:
        return torch.float16
    return stated


def add_gauges(context: ServerContext) -> None:
    """Let the metrics show what is held and what waits."""
    metrics, renderer = context.metrics, context.renderer
    for kind, budget in (
        ("encoded", renderer.encoded_budget),
        ("decoded", renderer.decoded_budget),
    ):
        for name, help_text, attribute in (
            ("budget_held_bytes", "Bytes of media held", "held_bytes"),
            ("budget_capacity_bytes", "Bytes of media that may be held", "capacity"),
            ("budget_waiting", "Requests that wait for memory", "num_waiting"),
        ):
            metrics.gauge(name, help_text, partial(getattr, budget, attribute), kind=kind)
    for name, cache in (("sender", renderer.sender_cache), ("render", renderer.render_cache)):
        if cache is not None:
            _add_cache_gauges(metrics, name, cache)
    metrics.gauge("requests_inside", "Requests that run or wait", lambda: context.queue.num_inside)
    metrics.gauge(
        "media_processes",
        "Worker processes that decode and process items",
        lambda: 0 if context.workers is None else context.workers.num_alive,
    )
    metrics.gauge("engine_up", "Whether the engine answers", lambda: context.engine.is_alive)


def _add_cache_gauges(
    metrics: Metrics,
    name: str,
    cache: BaseMultiModalProcessorCache,
) -> None:
    metrics.gauge("cache_entries", "Items known", lambda: len(cache), cache=name)
    metrics.gauge("cache_bytes", "Bytes of their tensors", lambda: cache.used_bytes, cache=name)
    metrics.gauge(
        "cache_hits", "Lookups that found the item", lambda: cache.make_stats().hits, cache=name
    )
    metrics.gauge("cache_queries", "Lookups", lambda: cache.make_stats().total, cache=name)
