"""What a server imports, in an order that leaves something to do for a second core.

Imports hold the interpreter's lock from beginning to end, so they take one core however many
there are. What all need comes first; engine and proof go on in copies of the process (see `run`)
while this one imports the rest.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Final

from lazydecode.server.deferring import defer_compiler, deferred

_MODELS: Final = ("lazydecode.models.loading",)
_SERVER: Final = ("uvloop", "lazydecode.server.serving", "lazydecode.server.supervisor")
_LAZY: Final = (
    *("AutoConfig", "AutoProcessor", "AutoTokenizer", "PreTrainedTokenizerBase", "ProcessorMixin"),
)
"""Names that Transformers imports, with what they need, when they are first asked for."""
_LAZY_ENGINE: Final = ("AutoModelForMultimodalLM", "AutoModelForCausalLM", "GenerationMixin")
_DEFERRED: Final = (
    # The code that models are made of, and with it torch's for many machines, for a check of
    # processors that write sound, and for one of an option that names an activation.
    ("transformers.modeling_utils", "PreTrainedAudioTokenizerBase"),
    ("transformers.activations", "ACT2FN"),
)
"""(Module, name in it) that Transformers imports for what a front end does not do."""
_DEFERRED_ENGINE: Final = (
    # The assignment solver, and with it 320 modules of SciPy (0.9 of 9 s of a start), for a loss
    # that is used in training.
    ("scipy.optimize", "linear_sum_assignment"),
    # Part of torch's compiler, for masks that are written as functions.
    ("torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex"),
)


def preload_libraries() -> None:
    """Import torch, torchvision and Transformers, on this thread; no other thread is started."""
    # Read by libgomp when torch loads it. Its threads spin at every barrier by default, which
    # takes the cores from decoders: see `engine.boot`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Read by torch at its first tensor: huge pages for tensors that are too large for the
    # allocator to keep (see `server.allocator`), as numpy asks for. A 4K picture takes a tenth
    # less of the processor's time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with _kept(), contextlib.ExitStack() as stack:
        defer_compiler()
        for module, name in _DEFERRED:
            stack.enter_context(deferred(module, name))
        _import_lazy(_LAZY)
        # For operators on the meta device, which is how models are proven, and for the engine.
        importlib.import_module("torch.fx.experimental.symbolic_shapes")


def preload_models() -> None:
    """Import what loads and proves a model."""
    with _kept():
        for module in _MODELS:
            importlib.import_module(module)


def preload_generation() -> None:
    """Import what an engine needs of Transformers."""
    with _kept(), contextlib.ExitStack() as stack:
        for module, name in _DEFERRED_ENGINE:
            stack.enter_context(deferred(module, name))
        _import_lazy(_LAZY_ENGINE)
        importlib.import_module("transformers.modeling_utils")


def preload_server() -> None:
    """Import everything else that a front end needs."""
    with _kept():
        for module in _SERVER:
            importlib.import_module(module)


def _import_lazy(names: Sequence[str]) -> None:
    import transformers

    for name in names:
        getattr(transformers, name)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Do not collect garbage inside, nor ever look through what was made inside.

    Half a million objects that stay: looking through them again and again took 2 of 12 s. After
    a fork, a collector that wrote into them would copy the shared pages.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_enabled:
            gc.enable()
