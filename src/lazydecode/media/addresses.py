"""Which IP addresses are public: pure functions over tables of the IANA registries.

Python's own `is_global` changed its answers between patch releases, so the tables are here.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, TypeAlias

IPAddress: TypeAlias = IPv4Address | IPv6Address
IPNetwork: TypeAlias = IPv4Network | IPv6Network

_NOT_PUBLIC_V4: Final = tuple(
    IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # unspecified, "this network"
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared between carrier and customer
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # looks public, but is the host's own agent on Azure
        "169.254.0.0/16",  # link-local, cloud metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112 sink
        "192.52.193.0/24",  # multicast tunnels
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112 sink
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
"""Source: IANA IPv4 Special-Purpose Address Registry (RFC 6890 and later)."""

_GLOBAL_V6: Final = IPv6Network("2000::/3")
"""The only block that is assigned for global unicast (RFC 3513, section 4)."""

_NOT_PUBLIC_V6: Final = tuple(
    IPv6Network(block)
    for block in (
        "2001::/23",  # protocol assignments: Teredo, benchmarking, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: any IPv4 address behind a relay
        "2620:4f:8000::/48",  # AS112 sink
        "3fff::/20",  # documentation
    )
)
"""Source: IANA IPv6 Special-Purpose Address Registry, the part inside 2000::/3."""

_MAPPED: Final = IPv6Network("::ffff:0:0/96")
_NAT64: Final = IPv6Network("64:ff9b::/96")
"""An IPv6-only network reaches every IPv4 host through this prefix (RFC 6052)."""
_ISATAP_MARKS: Final = frozenset({0x0000_5EFE, 0x0200_5EFE})
"""Upper half of an interface identifier that ends in an IPv4 address (RFC 5214)."""


def parse_address(text: str) -> IPAddress:
    """Return the address that `text` spells; a scope id as in `fe80::1%eth0` is dropped.

    Raises:
        ValueError: If `text` is not a canonical spelling of an address.
    """
    return ip_address(text.partition("%")[0])


def unwrap(address: IPAddress) -> IPAddress:
    """Return the IPv4 address that `address` stands for on the wire, else `address`.

    That is so for IPv4-mapped addresses and for the well-known NAT64 prefix. Other translated
    forms (6to4, Teredo, ISATAP, IPv4-compatible) stay as they are; none of them is public.
    """
    if isinstance(address, IPv6Address) and (address in _MAPPED or address in _NAT64):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def is_public(address: IPAddress) -> bool:
    """Whether `address` is globally reachable unicast, and so cannot be inside our network.

    A NAT64 prefix that an operator chose for itself looks like any other global address and
    cannot be told apart.
    """
    address = unwrap(address)
    if isinstance(address, IPv4Address):
        return not any(address in block for block in _NOT_PUBLIC_V4)
    if address not in _GLOBAL_V6 or any(address in block for block in _NOT_PUBLIC_V6):
        return False
    return (int(address) >> 32) & 0xFFFF_FFFF not in _ISATAP_MARKS


def parse_network(text: str) -> IPNetwork:
    """Return the block that `text` spells in CIDR form; a bare address is a block of one.

    Raises:
        ValueError: If it is neither, or has host bits set.
    """
    return ip_network(text)
