"""What a server imports, in an order that leaves something to do for a second core.

Imports hold the interpreter's lock from beginning to end, so they take one core however many
there are. What the engine and the proof need comes first; both go on in copies of the process
(see `run`) while this one imports the rest.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_MODELS: Final = ("lazydecode.models.loading",)
_SERVER: Final = ("uvloop", "lazydecode.server.serving", "lazydecode.server.supervisor")
_LAZY: Final = (
    *("AutoConfig", "AutoProcessor", "AutoTokenizer", "PreTrainedTokenizerBase", "ProcessorMixin"),
)
"""Names that Transformers imports, with what they need, when they are first asked for."""
_LAZY_ENGINE: Final = ("AutoModelForMultimodalLM", "AutoModelForCausalLM", "GenerationMixin")


def preload_models(*, generates: bool) -> None:
    """Import torch, Transformers and our models, on this thread; no other thread is started.

    Args:
        generates: Whether an engine process is going to be copied from this one.
    """
    # Read by libgomp when torch loads it. Its threads spin at every barrier by default, which
    # takes the cores from decoders: see `engine.boot`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Read by torch at its first tensor: huge pages for tensors that are too large for the
    # allocator to keep (see `server.allocator`), as numpy asks for. A 4K picture takes a tenth
    # less of the processor's time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Transformers imports the assignment solver, and with it 320 modules of SciPy (0.9 of 9 s
    # of a start), for a loss that is used in training. Where there is no SciPy it does without.
    with _kept(), deferred("scipy.optimize", "linear_sum_assignment"):
        import transformers

        for name in (*_LAZY, *(_LAZY_ENGINE if generates else ())):
            getattr(transformers, name)
        for module in _MODELS:
            importlib.import_module(module)


def preload_server() -> None:
    """Import everything else that a front end needs."""
    with _kept():
        for module in _SERVER:
            importlib.import_module(module)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Do not collect garbage inside, nor ever look through what was made inside.

    Half a million objects that stay: looking through them again and again took 2 of 12 s. After
    a fork, a collector that wrote into them would copy the shared pages.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@contextlib.contextmanager
def deferred(module: str, *functions: str) -> Iterator[None]:
    """Let others import functions of a module inside without running it: a call will do that.

    Whoever asks for more of the module inside gets it, and has it run at once.
    """
    spec = None if module in sys.modules else _spec(module)
    if spec is None:  # it was run, or there is none
        yield
        return
    stand_in = ModuleType(module)
    if spec.submodule_search_locations is not None:
        stand_in.__path__ = list(spec.submodule_search_locations)

    def load() -> ModuleType:
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]
        return importlib.import_module(module)

    def forwarding(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(load(), name)(*args, **kwargs)

    for name in functions:
        setattr(stand_in, name, forwarding(name))

    def get(name: str) -> Any:
        if name.startswith("__"):  # who looks through all modules, as `inspect` does, wants nothing
            raise AttributeError(name)
        return getattr(load(), name)

    stand_in.__getattr__ = get  # type: ignore[method-assign]
    sys.modules[module] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the package that it is in
        return None
