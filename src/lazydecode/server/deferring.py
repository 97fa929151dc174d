"""Imports that wait until somebody uses what they bring.

For libraries that import far more than a front end ever calls. What is left to them is what they
asked for, in a form that fetches the rest at its first use; whoever asks for more gets the module
itself, run at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from lazydecode.later import Later

_COMPILER: Final = "torch._dynamo"
_COMPILER_UTILS: Final = "torch._dynamo.utils"


@contextlib.contextmanager
def deferred(module: str, *names: str) -> Iterator[None]:
    """Let others import names of a module inside without running it: a use will do that.

    Whoever asks for more of the module inside gets it, and has it run at once. Where it was run
    before, or there is none, nothing is deferred.

    Args:
        module: Full name.
        names: Functions, classes and mappings that `Later` can stand for.
    """
    spec = None if module in sys.modules else _spec(module)
    if spec is None:
        yield
        return
    stand_in = _StandIn(module, spec.submodule_search_locations)
    for name in names:
        _stand_for(stand_in, name)
    stand_in.enter()
    try:
        yield
    finally:
        stand_in.leave()


def defer_compiler() -> None:
    """Let torch's compiler be imported by who compiles, instead of by who does not.

    Torchvision, Transformers, and torch's operators on the meta device import `torch._dynamo` to
    say of a function how it shall be compiled. Where the compiler was not imported, nothing is
    being compiled, and what was said of functions can wait: with the first other use of the
    compiler it is imported, and told.

    No effect where it was imported already.
    """
    if _COMPILER in sys.modules:
        return
    spec = _spec(_COMPILER)
    if spec is None or spec.submodule_search_locations is None:
        return
    compiler = _Compiler(spec.submodule_search_locations)
    utils = _StandIn(_COMPILER_UTILS, first=compiler.load)
    _stand_for(utils, "is_compile_supported")
    for stand_in in (compiler, utils):
        stand_in.enter()


class _StandIn(ModuleType):
    """Has some names of a module; with the first other one the module itself takes its place."""

    def __init__(
        self,
        name: str,
        path: Sequence[str] | None = None,
        *,
        first: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name)
        self._first = first
        """Called before the module is imported."""
        if path is not None:
            self.__path__ = _StandInPath(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who looks through all modules, as `inspect` does, wants nothing
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """Return the module itself, imported if it was not."""
        self.leave()
        if self._first is not None:
            self._first()
        return importlib.import_module(self.__name__)

    def enter(self) -> None:
        """Take the module's place: who imports it by its full name from now on gets this."""
        sys.modules[self.__name__] = self
        # It stays: to take a finder out of the list would hide the next one from another thread
        # that goes through the list at that moment.
        if not any(isinstance(finder, _Parts) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Parts())

    def leave(self) -> None:
        """Make way for the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    @property
    def stands(self) -> bool:
        """Whether the module itself has not been asked for yet."""
        return sys.modules.get(self.__name__) is self


class _Compiler(_StandIn):
    """`torch._dynamo`, as far as it is told of functions."""

    def __init__(self, path: Sequence[str]) -> None:
        super().__init__(_COMPILER, path)
        self._told: list[tuple[str, Callable[..., Any]]] = []

    def load(self) -> ModuleType:
        """Return the compiler, which knows what was said before it was there."""
        utils = sys.modules.get(_COMPILER_UTILS)
        if isinstance(utils, _StandIn):
            utils.leave()
        compiler = super().load()
        while self._told:
            name, fn = self._told.pop(0)
            getattr(compiler, name)(fn)
        return compiler

    def allow_in_graph(self, fn: Any) -> Any:
        """Note that calls of a function are taken into graphs as they are."""
        return self._tell("allow_in_graph", fn)

    def assume_constant_result(self, fn: Any) -> Any:
        """Note that a function returns the same each time."""
        return self._tell("assume_constant_result", fn)

    def disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return a function that is never compiled: where nothing is compiled, any."""
        if fn is None:
            return lambda fn: self.disable(fn, *args, **kwargs)
        if not inspect.isfunction(fn):
            return self.load().disable(fn, *args, **kwargs)
        disabled: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            nonlocal disabled
            if disabled is None and not self.stands:
                # Not yet there while another thread is importing it.
                disable = getattr(sys.modules.get(_COMPILER), "disable", None)
                disabled = None if disable is None else disable(fn, *args, **kwargs)
            return (disabled or fn)(*call_args, **call_kwargs)

        return call

    def _tell(self, name: str, fn: Any) -> Any:
        if not self.stands or not inspect.isfunction(fn):
            return getattr(self.load(), name)(fn)
        self._told.append((name, fn))
        return fn


class _StandInPath(list[str]):
    """The `__path__` of a stand-in, by which a finder knows whose part is asked for."""


class _Parts(MetaPathFinder):
    """Finds modules of a package that has a stand-in: the package itself is imported first.

    The import system has found the parent, and looks for the part alone. The parent's import may
    bring that part, which must not be run twice then.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how the part is loaded, or where it is already."""
        if not isinstance(path, _StandInPath):
            return None
        parent = fullname.rpartition(".")[0]
        stand_in = sys.modules.get(parent)
        if isinstance(stand_in, _StandIn):
            stand_in.load()
        module = sys.modules.get(fullname)
        if module is not None:
            return ModuleSpec(fullname, _AsItIs(module))
        return PathFinder.find_spec(fullname, path, target)


class _AsItIs(Loader):
    """Gives a module that was run already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _stand_for(module: _StandIn, name: str) -> None:
    vars(module)[name] = Later(lambda: getattr(module.load(), name))


def _spec(module: str) -> ModuleSpec | None:
    """Return how a module is found; no package that it is in is imported for that."""
    name, *rest = module.split(".")
    spec = importlib.util.find_spec(name)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec
