"""An object that is fetched at its first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Later"]


class Later:
    """Stands for a class, a function or a mapping of a module that takes long to import.

    It can be called, subclassed, used with `isinstance` and `issubclass`, looked up in and asked
    for attributes; each fetches the object itself and forwards. Threads may share it.

    Args:
        fetch: Returns the object; called at each use.
    """

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._fetch()(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        """Answer `isinstance`."""
        return isinstance(instance, self._fetch())

    def __subclasscheck__(self, subclass: type) -> bool:
        """Answer `issubclass`."""
        return issubclass(subclass, self._fetch())

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        """Return what a subclass has for its base."""
        return (self._fetch(),)

    def __contains__(self, key: object) -> bool:
        """Whether a key is in it."""
        return key in self._fetch()

    def __getitem__(self, key: Any) -> Any:
        """Return the value of a key."""
        return self._fetch()[key]

    def __iter__(self) -> Iterator[Any]:
        """Go through it."""
        return iter(self._fetch())

    def __len__(self) -> int:
        """How many there are."""
        return len(self._fetch())

    def __bool__(self) -> bool:
        """Whether it is true."""
        return bool(self._fetch())

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of it."""
        if name.startswith("__"):  # what looks through all objects, as `inspect` does
            raise AttributeError(name)
        return getattr(self._fetch(), name)
