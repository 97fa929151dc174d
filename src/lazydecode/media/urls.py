"""Media URLs: parsing and policy. Pure functions; nothing here resolves, connects or opens.

A URL is parsed once, strictly, into a value whose parts are then used for the check and for the
connection alike, so two parsers cannot disagree about it. What is refused:

- control characters and backslashes anywhere, and percent-encoding, full-width digits or dots
  and other compatibility characters in the host; international names must be in the form that
  IDNA 2008 permits;
- any spelling of an IPv4 address other than four decimal numbers (decimal, octal, hex, short);
- credentials in front of the host of a redirect's target. In the first URL they are accepted
  and sent to that origin only;
- ports of other protocols (mail, shells, ...), so that we are no one's tool to talk to them.
  Any other port is as good as 80 and 443, and every check holds for it too;
- schemes other than `http`, `https`, `data` and `file`.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address
from typing import Final, Literal, NoReturn
from urllib.parse import quote, unquote_to_bytes

import idna

from lazydecode.errors import BlockedURLError
from lazydecode.limits import FetchPolicy
from lazydecode.media.addresses import (
    IPAddress,
    IPNetwork,
    is_public,
    parse_address,
    parse_network,
    unwrap,
)

MAX_URL_CHARS: Final = 16 * 1024
"""Longest `http:` or `file:` URL; signed URLs have a few thousand characters."""

_WRONG_SCHEME: Final = "The URL must be either a HTTP, data or file URL."
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_USERINFO: Final = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*")
_NAME: Final = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
)
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT: Final = re.compile(r"[0-9]{1,5}")
_BARE_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_TARGET_SAFE: Final = "/?%:@!$&'()*+,;=-._~[]"
_BLOCKED_PORTS: Final = frozenset(
    {
        *(1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95),
        *(101, 102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161),
        *(179, 389, 427, 465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563),
        *(587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060),
        *(5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080),
    }
)
"""Source: the "bad port" list of the WHATWG Fetch standard."""


@dataclass(frozen=True, slots=True)
class HttpURL:
    """An `http:` or `https:` URL in normal form."""

    scheme: Literal["http", "https"]
    host: str
    """Lower-case ASCII name without a trailing dot, or the normal spelling of an address."""
    address: IPAddress | None
    """The address, if `host` is one."""
    port: int
    target: str
    """Path and query, percent-encoded; starts with a slash and has no dot segments."""
    userinfo: str = field(default="", repr=False)
    """Credentials in front of the host, percent-encoded as given; mostly empty."""

    @property
    def authority(self) -> str:
        """Host and port as in a `Host` header: brackets around IPv6, no default port."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port: what credentials belong to."""
        return self.scheme, self.host, self.port

    @property
    def without_userinfo(self) -> HttpURL:
        """The same URL without credentials."""
        return replace(self, userinfo="") if self.userinfo else self

    @property
    def redacted(self) -> str:
        """What messages and logs may show: no credentials, no query, at most 200 characters."""
        text = f"{self.scheme}://{self.authority}{self.target.partition('?')[0]}"
        return text if len(text) <= 200 else text[:197] + "..."

    def __str__(self) -> str:
        userinfo = f"{self.userinfo}@" if self.userinfo else ""
        return f"{self.scheme}://{userinfo}{self.authority}{self.target}"


@dataclass(frozen=True, slots=True)
class FileURL:
    """A `file:` URL of this machine."""

    path: str
    """Absolute path, percent-decoded; links and dot segments are not resolved."""

    @property
    def redacted(self) -> str:
        """What messages and logs may show: never the path."""
        return "file:"


def is_data_url(url: str | bytes | memoryview) -> bool:
    """Whether `url` starts with `data:`, in any case."""
    head = url[:5]
    return head.lower() == "data:" if isinstance(head, str) else bytes(head).lower() == b"data:"


def redact_url(url: str | bytes | memoryview) -> str:
    """What messages and logs may show of any text that came as a URL."""
    if is_data_url(url):
        return "data:"
    try:
        return parse_url(as_text(url)).redacted
    except BlockedURLError:
        return "an invalid URL"


def as_text(url: str | bytes | memoryview) -> str:
    """Return a URL other than a data URL as text.

    Raises:
        BlockedURLError: If it is too long or not UTF-8.
    """
    if len(url) > MAX_URL_CHARS:
        _refuse(f"has more than {MAX_URL_CHARS} characters")
    if isinstance(url, str):
        return url
    try:
        return bytes(url).decode("utf-8")
    except UnicodeDecodeError:
        _refuse("is not UTF-8 text")


def parse_url(url: str) -> HttpURL | FileURL:
    """Parse an `http:`, `https:` or `file:` URL; data URLs are `data_urls.parse_data_url`'s.

    Raises:
        BlockedURLError: If it has another scheme or is not well formed. Says why.
    """
    url = _check_text(url)
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else ""
    if scheme == "file":
        return _parse_file(url[5:])
    if scheme not in ("http", "https"):
        raise BlockedURLError(_WRONG_SCHEME)
    rest = url[len(scheme) + 1 :]
    if not rest.startswith("//"):
        _refuse("lacks '//' after its scheme")
    return _parse_http("https" if scheme == "https" else "http", rest[2:])


def resolve_redirect(base: HttpURL, location: str) -> HttpURL:
    """Return where a redirect of `base` to `location` leads (RFC 3986, section 5.2).

    Raises:
        BlockedURLError: If that is not an http(s) URL, has credentials, or leaves https.
    """
    location = _check_text(location)
    if match := _SCHEME.match(location):
        if match[1].lower() not in ("http", "https"):
            _refuse("redirects to another scheme than http and https")
        target = parse_url(location)
        assert isinstance(target, HttpURL)
    elif location.startswith("//"):
        target = _parse_http(base.scheme, location[2:])
    else:
        target = replace(base, userinfo="", target=_join_target(base.target, location))
    if target.userinfo:
        _refuse("redirects to a URL with credentials")
    if base.scheme == "https" and target.scheme == "http":
        _refuse("redirects from https to http")
    return target


def _check_text(url: str) -> str:
    if len(url) > MAX_URL_CHARS:
        _refuse(f"has more than {MAX_URL_CHARS} characters")
    url = url.strip(" ")
    if _CONTROL.search(url):
        _refuse("contains a control character")
    if "\\" in url:
        _refuse("contains a backslash")
    return url


def _parse_http(scheme: Literal["http", "https"], rest: str) -> HttpURL:
    rest = rest.partition("#")[0]
    end = min((i for i in (rest.find("/"), rest.find("?")) if i >= 0), default=len(rest))
    authority, target = rest[:end], rest[end:]
    userinfo, at, hostport = authority.rpartition("@")
    if at and not _USERINFO.fullmatch(userinfo):
        _refuse("has malformed credentials")
    host, port_text = _split_port(hostport)
    port = int(port_text) if port_text else _DEFAULT_PORTS[scheme]
    if not 1 <= port <= 65535:
        _refuse("has a port outside 1..65535")
    name, address = normalize_host(host)
    return HttpURL(scheme, name, address, port, _normalize_target(target), userinfo)


def _split_port(hostport: str) -> tuple[str, str]:
    """Split off the port; the brackets of an IPv6 address stay on the host."""
    if hostport.startswith("["):
        host, bracket, rest = hostport.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            _refuse("has a malformed IPv6 host")
        host, port = host + bracket, rest[1:]
    else:
        host, _, port = hostport.partition(":")
    if port and not _PORT.fullmatch(port):
        _refuse("has a malformed port")
    return host, port


def normalize_host(host: str) -> tuple[str, IPAddress | None]:
    """Return the normal form of a URL's host, and the address if it is one.

    Raises:
        BlockedURLError: If it is neither a host name nor the normal spelling of an address.
    """
    if not host:
        _refuse("has no host")
    if host.startswith("["):
        try:
            address = IPv6Address(host[1:-1]) if host.endswith("]") and "%" not in host else None
        except ValueError:
            address = None
        if address is None:
            _refuse("has a malformed IPv6 host")
        return str(address), address
    if "%" in host:
        _refuse("has a percent-encoded host")
    name = (_encode_idna(host) if not host.isascii() else host.lower()).removesuffix(".")
    if not _NAME.fullmatch(name):
        _refuse("has a malformed host")
    if not _NUMBER.fullmatch(name.rpartition(".")[2]):
        return name, None
    # A name that ends in a number is an address to every resolver, and nothing else.
    try:
        number = IPv4Address(name)
    except ValueError:
        _refuse("has an IP address that is not written as four decimal numbers")
    return str(number), number


def _encode_idna(host: str) -> str:
    host = host.lower()
    # Characters that a browser would map to others: full-width digits and dots, ligatures, ...
    # The ideographic full stop is left alone by NFKC, but is a dot to IDNA.
    if unicodedata.normalize("NFKC", host) != host or "\u3002" in host:
        _refuse("has a host with compatibility characters")
    try:
        return idna.encode(host).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError):
        _refuse("has a malformed international host")


def _normalize_target(text: str) -> str:
    path, mark, query = text.partition("?")
    return _remove_dot_segments(_quote(path)) + mark + _quote(query)


def _join_target(base: str, location: str) -> str:
    location = location.partition("#")[0]
    base_path = base.partition("?")[0]
    if not location:
        return base
    if location.startswith("?"):
        return base_path + _quote(location)
    if not location.startswith("/"):
        location = base_path[: base_path.rfind("/") + 1] + location
    return _normalize_target(location)


def _quote(text: str) -> str:
    """Percent-encode what may not stand in a URL; what may is left exactly as it is."""
    try:
        # Header values come with undecodable bytes as lone surrogates.
        return quote(_BARE_PERCENT.sub("%25", text), _TARGET_SAFE, errors="surrogateescape")
    except UnicodeEncodeError:
        _refuse("is not valid Unicode")


def _remove_dot_segments(path: str) -> str:
    kept: list[str] = []
    segments = path.split("/")[1:] or [""]
    for position, segment in enumerate(segments):
        if segment in (".", ".."):
            if segment == ".." and kept:
                kept.pop()
            if position == len(segments) - 1:
                kept.append("")
        else:
            kept.append(segment)
    return "/" + "/".join(kept)


def _parse_file(rest: str) -> FileURL:
    if "?" in rest or "#" in rest:
        _refuse("has a query or fragment; percent-encode '?' and '#' in file names")
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            _refuse("names a file on another host")
        rest = slash + path
    if not rest.startswith("/"):
        _refuse("has no absolute path")
    if "%" not in rest and rest.isascii():
        return FileURL(rest)
    if _BARE_PERCENT.search(rest):
        _refuse("is percent-encoded wrongly")
    try:
        raw = unquote_to_bytes(rest)
    except UnicodeEncodeError:
        _refuse("is not valid Unicode")
    if b"\0" in raw:
        _refuse("contains a control character")
    return FileURL(os.fsdecode(raw))


def _refuse(why: str) -> NoReturn:
    raise BlockedURLError(f"The media URL {why}.")


class URLPolicy:
    """What `FetchPolicy` means, compiled; decides about URLs and about resolved addresses.

    Args:
        policy: `allowed_domains` holds host names, addresses or `host:port` pairs;
            `allowed_private_networks` holds CIDR blocks, addresses or `host:port` pairs. A
            `host:port` pair with a name allows whatever addresses that name has, on that port.

    Raises:
        ValueError: If an entry of the policy is none of these.
    """

    __slots__ = ("_domains", "_networks", "_origins", "policy")

    def __init__(self, policy: FetchPolicy) -> None:
        self.policy = policy
        self._domains = frozenset(_parse_host_entry(entry) for entry in policy.allowed_domains)
        networks: list[IPNetwork] = []
        origins: set[tuple[str, int | None]] = set()
        for entry in policy.allowed_private_networks:
            try:
                networks.append(parse_network(entry))
            except ValueError:
                host, port = _parse_host_entry(entry)
                if port is None:
                    raise ValueError(
                        f"{entry!r} must be a CIDR block such as 10.0.0.0/8, or host:port"
                    ) from None
                origins.add((host, port))
        self._networks = tuple(networks)
        self._origins = frozenset(origins)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, URLPolicy):
            return NotImplemented
        return self.policy == other.policy

    def __hash__(self) -> int:
        return hash(self.policy)

    def check_url(self, url: HttpURL) -> None:
        """Refuse a URL that may not be fetched, as far as its text tells.

        Raises:
            BlockedURLError: If its scheme, host, port or literal address is not allowed.
        """
        if self.policy.https_only and url.scheme != "https":
            _refuse("must use https")
        if self._domains and not self._domains & {(url.host, None), (url.host, url.port)}:
            _refuse("must be from one of the allowed domains")
        if url.port in _BLOCKED_PORTS and (url.host, url.port) not in self._origins:
            _refuse("names a port of another protocol")
        if url.address is not None:
            self.check_addresses(url.host, url.port, [str(url.address)])

    def check_addresses(self, host: str, port: int, addresses: Iterable[str]) -> list[IPAddress]:
        """Return the addresses that `host` resolved to, if a connection may go to each of them.

        The message does not show the addresses: they may be facts about our own network.

        Raises:
            BlockedURLError: If one is neither public nor in an allowed private network.
        """
        checked = [parse_address(text) for text in addresses]
        if (host, port) not in self._origins:
            for address in checked:
                if not is_public(address) and not self._is_allowed_private(address):
                    _refuse("leads to an address that is not public")
        return checked

    def _is_allowed_private(self, address: IPAddress) -> bool:
        plain = unwrap(address)
        return any(plain in block or address in block for block in self._networks)


def _parse_host_entry(entry: str) -> tuple[str, int | None]:
    """Parse `host` or `host:port` of a setting; an IPv6 address may lack its brackets."""
    try:
        if ":" in entry and not entry.startswith("["):
            try:
                return str(IPv6Address(entry)), None
            except ValueError:
                pass
        host, port = _split_port(entry)
        return normalize_host(host)[0], int(port) if port else None
    except BlockedURLError as exc:
        raise ValueError(f"{entry!r} must be a host name, an address, or host:port") from exc
