from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.media.addresses import is_public, parse_address, unwrap

# fmt: off
NOT_PUBLIC = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.255",
    "127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.169.254", "172.16.0.1",
    "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1",
    "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.255",
    "240.0.0.1", "255.255.255.255", "::", "::1", "::7f00:1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1", "100::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1",
    "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1", "3fff::1",
    "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1",
    "2600::5efe:a00:1", "2600::200:5efe:808:808",
]

PUBLIC = [
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0",
    "126.255.255.255", "128.0.0.0", "168.63.129.15", "172.15.255.255", "172.32.0.0", "192.0.1.1",
    "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255",
    "::ffff:8.8.8.8", "64:ff9b::808:808", "2001:200::1", "2600::1", "2606:4700:4700::1111",
    "2a00:1450:4001:80b::200e",
]
# fmt: on


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_special_purpose_addresses_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_global_unicast_addresses_are_public(text: str) -> None:
    assert is_public(ip_address(text))


@given(st.ip_addresses(v=4))
def test_every_mapped_form_is_judged_as_the_address_it_stands_for(address: IPv4Address) -> None:
    for prefix in ("::ffff:0:0", "64:ff9b::"):
        mapped = IPv6Address(int(IPv6Address(prefix)) | int(address))
        assert unwrap(mapped) == address
        assert is_public(mapped) == is_public(address)


@given(st.ip_addresses())
def test_nothing_that_python_calls_private_or_special_is_public(
    address: IPv4Address | IPv6Address,
) -> None:
    plain = unwrap(address)
    if (
        plain.is_private
        or plain.is_loopback
        or plain.is_link_local
        or plain.is_multicast
        or plain.is_reserved
        or plain.is_unspecified
    ):
        assert not is_public(address)


def test_a_scope_id_is_dropped() -> None:
    assert parse_address("fe80::1%eth0") == ip_address("fe80::1")
