"""Name resolution for the HTTP client: every answer is checked, and only checked ones come back.

aiohttp connects to what its resolver returns and keeps the name for the `Host` header and for
TLS. So one answer is both checked and connected to, and a name that resolves differently the
next time changes nothing. aiohttp does not ask its resolver about address literals; those are
checked from the URL.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv6Address
from typing import Final, TypeAlias

from aiohttp.abc import AbstractResolver, ResolveResult

from lazydecode.media.executor import LazyThreadPool
from lazydecode.media.urls import URLPolicy

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host name, port) -> its addresses. Raises `OSError` if there are none."""

_NUM_THREADS: Final = 16


class SystemResolver:
    """Asks the system's resolver, on threads of its own so that slow names delay only names."""

    def __init__(self) -> None:
        self._pool = LazyThreadPool(_NUM_THREADS, "lazydecode-dns")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Return all addresses of `host`.

        Raises:
            OSError: If it has none.
        """
        loop = asyncio.get_running_loop()
        infos = await loop.run_in_executor(self._pool, _getaddrinfo, host, port)
        return list(dict.fromkeys(infos))

    def close(self) -> None:
        """Take no more names. Queries under way end by the system's own time-out."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _getaddrinfo(host: str, port: int) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class GuardedResolver(AbstractResolver):
    """Returns the addresses of a name if the policy allows every one of them.

    Args:
        policy: Decides about the addresses.
        resolve: Finds them.
    """

    def __init__(self, policy: URLPolicy, resolve: Resolve) -> None:
        self._policy = policy
        self._resolve = resolve

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Resolve and check.

        Raises:
            BlockedURLError: If the policy refuses one of the addresses.
            OSError: If there are none.
        """
        checked = self._policy.check_addresses(host, port, await self._resolve(host, port))
        if not checked:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in checked
        ]

    async def close(self) -> None:
        """Do nothing: the resolve function belongs to the connection."""
