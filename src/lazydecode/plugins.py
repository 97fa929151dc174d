"""Parts by name: our own, registered ones, and those that other installed packages offer.

A package offers a part by an entry point: the group says what kind of part it is, the name under
which it is asked for, the value where it is. Nothing is looked for when lazydecode is imported.
The installed packages are read when a name is asked for that is neither ours nor registered, or
by `check_plugins`; a plug-in is imported when its own name is asked for, or by `check_plugins`.
One that is broken fails under its own name alone. What one raises later, while a request uses
it, becomes an error of ours where its code is called: see `contain`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, Final, Generic, TypeVar

from lazydecode.errors import (
    LazyDecodeError,
    PluginBrokenError,
    PluginError,
    PluginFailedError,
    ValidationError,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_V = TypeVar("_V")

_ABSENT: Final = object()


@dataclass(slots=True)
class _Plugin:
    """What packages offer under one name, and what became of it."""

    entry_points: list[EntryPoint]
    """More than one: several packages claim the name, so none of them has it."""
    value: Any = _ABSENT
    failure: str = ""
    cause: BaseException | None = field(default=None, repr=False)


class Registry(Generic[_T]):
    """Parts of one kind by name. Threads may share it.

    The lock covers the tables; packages are read and imported outside it.

    Args:
        noun: What a part is called in messages.
        group: The entry point group of such parts.
        check: Raises `TypeError` for what is no such part: the text says what it should be.
        parameter: The setting or request field that names one, for error answers.
        built_in: Our own parts: name -> `module:attribute`, imported when asked for.
    """

    def __init__(
        self,
        noun: str,
        *,
        group: str,
        check: Callable[[object], None],
        parameter: str,
        built_in: Mapping[str, str] | None = None,
    ) -> None:
        self.noun: Final = noun
        self.group: Final = group
        self._check = check
        self._parameter = parameter
        self._built_in = dict(built_in or {})
        self._values: dict[str, _T] = {}
        self._plugins: dict[str, _Plugin] | None = None
        self._lock = threading.Lock()

    # -- registering

    def register(self, name: str) -> Callable[[_V], _V]:
        """Return a decorator that makes a part known as `name`; see `add`."""

        def decorate(value: _V) -> _V:
            self.add(name, value)
            return value

        return decorate

    def add(self, name: str, value: object) -> None:
        """Make `value` known as `name`; once more is no error.

        Raises:
            TypeError: If it is not such a part.
            ValueError: If the name belongs to another part.
        """
        self._check(value)
        with self._lock:
            is_free = name not in self._built_in
            if not is_free or self._values.setdefault(name, value) is not value:  # type: ignore[arg-type]  # checked
                raise ValueError(f"a {self.noun} named {name!r} exists already")

    def remove(self, name: str) -> None:
        """Forget what was registered as `name`; a name that was not is ignored."""
        with self._lock:
            self._values.pop(name, None)

    # -- looking up

    def find(self, name: str) -> _T | None:
        """Return the part that is known as `name`; None if there is none.

        Raises:
            PluginError: If a package offers it, and it cannot be used.
        """
        with self._lock:
            value = self._values.get(name)
        if value is not None:
            return value
        target = self._built_in.get(name)
        if target is not None:
            module, _, attribute = target.partition(":")
            own: _T = getattr(importlib.import_module(module), attribute)
            with self._lock:
                return self._values.setdefault(name, own)
        plugin = self._offered().get(name)
        return None if plugin is None else self._load(name, plugin)

    def get(self, name: str) -> _T:
        """Return the part that is known as `name`.

        Raises:
            ValidationError: If there is none; says which there are.
            PluginError: If a package offers it, and it cannot be used.
        """
        value = self.find(name)
        if value is None:
            raise ValidationError(
                f"unknown {self.noun} {name!r}; known are: {', '.join(self.names())}",
                parameter=self._parameter,
                value=name,
            )
        return value

    def names(self) -> list[str]:
        """Names that can be asked for, sorted, without plug-ins that are known to be broken."""
        offered = self._offered()
        with self._lock:
            names = {*self._values, *self._built_in}
        return sorted(names | {name for name, plugin in offered.items() if not plugin.failure})

    # -- plug-ins

    def check_plugins(self) -> list[PluginError]:
        """Import all plug-ins of this kind; return what is wrong with those that cannot be used.

        A server does so when it starts: an import would hold up requests, and whoever installed
        a broken plug-in is there to see.
        """
        errors = []
        for name, plugin in sorted(self._offered().items()):
            if name in self._built_in:
                plugin.failure = plugin.failure or f"has the name of lazydecode's own {self.noun}"
            try:
                self._load(name, plugin)
            except PluginError as exc:
                errors.append(exc)
        return errors

    def rescan(self) -> None:
        """Read anew, when needed, which packages are installed; for one that came just now."""
        importlib.invalidate_caches()
        with self._lock:
            self._plugins = None

    def _offered(self) -> Mapping[str, _Plugin]:
        with self._lock:
            plugins = self._plugins
        if plugins is None:
            found: dict[str, _Plugin] = {}
            for entry_point in _entry_points(self.group):
                found.setdefault(entry_point.name, _Plugin([])).entry_points.append(entry_point)
            with self._lock:
                if self._plugins is None:
                    self._plugins = found
                plugins = self._plugins
        return plugins

    def _load(self, name: str, plugin: _Plugin) -> _T:
        # Two threads may come here at once: they import the same object.
        if not plugin.failure and plugin.value is _ABSENT:
            if len(plugin.entry_points) > 1:
                plugin.failure = "is offered more than once"
            else:
                self._import(name, plugin)
        if plugin.failure:
            sources = " and ".join(_source(entry_point) for entry_point in plugin.entry_points)
            raise PluginError(
                f"the {self.noun} plug-in {name!r} (group {self.group}, from {sources}) "
                f"{plugin.failure}",
                parameter=self._parameter,
                value=name,
            ) from plugin.cause
        loaded: _T = plugin.value
        return loaded

    def _import(self, name: str, plugin: _Plugin) -> None:
        try:
            value = plugin.entry_points[0].load()
        except (Exception, SystemExit) as exc:
            # Wide: a foreign module may raise anything. Its text is for the log, since it may
            # show paths; the class goes to whoever asked.
            logger.warning(
                "the %s plug-in %r of group %s does not load",
                self.noun,
                name,
                self.group,
                exc_info=exc,
            )
            plugin.failure, plugin.cause = f"does not load: {type(exc).__name__}", exc
            return
        with self._lock:
            registered = self._values.get(name, value)  # its own module may have registered it
        if registered is not value:
            plugin.failure = f"has the name of a registered {self.noun}"
            return
        try:
            self._check(value)
        except TypeError as exc:
            plugin.failure, plugin.cause = f"does not fit: {exc}", exc
            return
        plugin.value = value


def is_foreign(part: type) -> bool:
    """Whether a class comes from another package than ours."""
    return part.__module__.partition(".")[0] != __name__.partition(".")[0]


@contextmanager
def contain(
    noun: str,
    name: str,
    *,
    kind: type[PluginFailedError | PluginBrokenError] = PluginFailedError,
    declared: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Turn what a part from elsewhere raises in the block into an error that names the part.

    Our own errors pass unchanged: with them a part says what the client did wrong. All others
    are logged here, with their text, which may show secrets; the client is told the class.

    Args:
        noun: What the part is called in messages.
        name: Under which it is known.
        kind: What to raise: the part failed on one item, or on no item in particular.
        declared: Classes that a part of this kind may raise about an item; they pass too.

    Raises:
        LazyDecodeError: The part's own, or one of the class `kind`.
    """
    passing: tuple[type[BaseException], ...] = (
        LazyDecodeError,
        KeyboardInterrupt,
        GeneratorExit,
        *declared,
    )
    try:
        yield
    except passing:
        raise
    except BaseException as exc:
        # Wide: a plug-in raises what it likes. `SystemExit` would end the server, and a
        # `CancelledError` of nobody's making would be taken for the server's end.
        if isinstance(exc, asyncio.CancelledError) and _is_cancelled():
            raise
        logger.error("the %s %r failed", noun, name, exc_info=exc)
        raise kind(f"the {noun} {name!r} failed: {type(exc).__name__}") from exc


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task that runs here."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without a loop: nobody can
        return False
    return task is None or task.cancelling() > 0


def _entry_points(group: str) -> Iterator[EntryPoint]:
    try:
        yield from importlib.metadata.entry_points(group=group)
        return
    except Exception as exc:
        # Wide: one package's unreadable metadata fails the whole look-up, in whatever way.
        logger.warning("the entry points of a package cannot be read: %s", type(exc).__name__)
    seen = set()
    for distribution in importlib.metadata.distributions():
        try:
            name = distribution.name
            if name in seen:
                continue  # an older copy, further down the path
            seen.add(name)
            found = distribution.entry_points.select(group=group)
        except Exception:
            logger.warning("the entry points of %r cannot be read", distribution, exc_info=True)
            continue
        yield from found


def _source(entry_point: EntryPoint) -> str:
    distribution = entry_point.dist
    if distribution is None:
        return "an unknown package"
    return f"{distribution.name} {distribution.version}"
