# ruff: noqa: RUF001  # full-width characters are what is tested
from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.errors import BlockedURLError
from lazydecode.limits import FetchPolicy
from lazydecode.media.addresses import is_public
from lazydecode.media.urls import (
    MAX_URL_CHARS,
    FileURL,
    HttpURL,
    URLPolicy,
    as_text,
    is_data_url,
    parse_url,
    redact_url,
    resolve_redirect,
)


def http(text: str) -> HttpURL:
    url = parse_url(text)
    assert isinstance(url, HttpURL)
    return url


# -- parsing


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTP://EXAMPLE.com:80/a", "http://example.com/a"),
        ("https://example.com:443/a?b#c", "https://example.com/a?b"),
        ("http://example.com:8080?x=1", "http://example.com:8080/?x=1"),
        ("http://example.com./a", "http://example.com/a"),
        ("http://example.com:/a", "http://example.com/a"),
        ("http://a_b.example.com/", "http://a_b.example.com/"),
        ("  http://example.com/a  ", "http://example.com/a"),
        ("http://example.com/a b/ü?q=ü&r=a b", "http://example.com/a%20b/%C3%BC?q=%C3%BC&r=a%20b"),
        ("http://example.com/%7Ea/%2f%2F", "http://example.com/%7Ea/%2f%2F"),
        ("http://example.com/100%/x", "http://example.com/100%25/x"),
        ("http://example.com/a/./b/../c/..", "http://example.com/a/"),
        ("http://example.com/../../a", "http://example.com/a"),
        ("http://example.com/?u=http://user@host/..", "http://example.com/?u=http://user@host/.."),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://xn--bcher-kva.example/", "http://xn--bcher-kva.example/"),
        ("http://8.8.8.8/", "http://8.8.8.8/"),
        ("http://8.8.8.8./", "http://8.8.8.8/"),
        ("http://[2606:4700:4700:0::1111]:8080/", "http://[2606:4700:4700::1111]:8080/"),
        ("http://1.example.com/", "http://1.example.com/"),
        ("https://user:p%40ss@example.com/", "https://user:p%40ss@example.com/"),
        (
            "https://s3.example.com/b/k.png?X-Amz-Signature=a%2Fb%3D&X=(1)'*~!",
            "https://s3.example.com/b/k.png?X-Amz-Signature=a%2Fb%3D&X=(1)'*~!",
        ),
        (
            "http://example.com/👩\u200d🚀.png",
            "http://example.com/%F0%9F%91%A9%E2%80%8D%F0%9F%9A%80.png",
        ),
    ],
)
def test_http_urls_have_one_normal_form(text: str, normal: str) -> None:
    assert str(http(text)) == normal
    assert http(normal) == http(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "example.com/a.png",
        "//x.test/a.png",
        "/etc/passwd",
        "ftp://x.test/a.png",
        "gopher://x.test",
        "javascript:alert(1)",
        "httpx://x.test/",
        "http:/x.test/",
        "http:x.test",
        "http:///a",
        "http://?a",
        "http://:80/",
        "http://@/",
        "http://x.test:0/",
        "http://x.test:65536/",
        "http://x.test:８０/",
        "http://x.test:80a/",
        "http://x.test:-1/",
        "http://x.test:80:80/",
        "http://x..test/",
        "http://.x.test/",
        "http://-x.test/",
        "http://x test/",
        "http://x<.test/",
        "http://" + "a" * 64 + ".test/",
        "http://" + "a." * 127 + "test/",
        "http://x.test/" + "a" * MAX_URL_CHARS,
        "http://x.test/\ud800",
    ],
)
def test_malformed_urls_are_refused(text: str) -> None:
    with pytest.raises(BlockedURLError):
        parse_url(text)


@pytest.mark.parametrize("char", ["\t", "\r", "\n", "\0", "\x7f", "\x85", "\u2028", "\\"])
@pytest.mark.parametrize(
    "template",
    ["http://127.0.0.1{}.x.test/", "{}http://x.test/", "http://x.test/{}", "ht{}tp://x/"],
)
def test_control_characters_and_backslashes_are_refused_anywhere(char: str, template: str) -> None:
    with pytest.raises(BlockedURLError, match=r"control character|backslash"):
        parse_url(template.format(char))


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "017700000001",
        "127.1",
        "127.0.1",
        "127.0.0.1.1",
        "127.0.0.01",
        "127.0.0.256",
        "127.0.0.0x1",
        "127.0.0.%31",
        "１２７.0.0.1",
        "127。0。0。1",
        "127．0．0．1",
        "127｡0｡0｡1",
        "①②⑦.0.0.1",
        "localhos\u017f",  # long s: NFKC maps it to s
        "ⓛocalhost",
        "[::1",
        "[::1]x",
        "[127.0.0.1]",
        "[fe80::1%25eth0]",
        "[fe80::1%eth0]",
        "[v1.fe80]",
        "::1",
        "foo.0x",
        "foo.1",
    ],
)
def test_odd_spellings_of_an_address_do_not_reach_it(host: str) -> None:
    with pytest.raises(BlockedURLError):
        parse_url(f"http://{host}/secret.png")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("http://inside.test@media.test/", "media.test"),
        ("http://inside.test:80@media.test/", "media.test"),
        ("http://inside.test%2f@media.test/", "media.test"),
        ("http://media.test/@inside.test/", "media.test"),
        ("http://media.test?@inside.test/", "media.test"),
        ("http://media.test#@inside.test/", "media.test"),
    ],
)
def test_the_host_is_what_stands_after_the_credentials(text: str, host: str) -> None:
    assert http(text).host == host


@pytest.mark.parametrize(
    "text", ["http://a@b@c.test/", "http://a\u00e9@c.test/", "http://a[@c.test/"]
)
def test_malformed_credentials_are_refused(text: str) -> None:
    with pytest.raises(BlockedURLError):
        parse_url(text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:///a/b.png", "/a/b.png"),
        ("FILE:///a/with%20space.png", "/a/with space.png"),
        ("file:///a/with space.png", "/a/with space.png"),
        ("file://localhost/a", "/a"),
        ("file:/a", "/a"),
        ("file:///a/%C3%BC", "/a/ü"),
        ("file:///a/../b", "/a/../b"),
        ("file:///a/%2e%2e/b", "/a/../b"),
    ],
)
def test_file_urls_are_percent_decoded(text: str, path: str) -> None:
    assert parse_url(text) == FileURL(path)


@given(st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Zs")), max_size=40))
def test_a_plain_file_url_has_the_path_that_it_has_percent_encoded(text: str) -> None:
    plain = "".join(character for character in text if character not in "\\%?#").strip(" ")
    encoded = "".join(f"%{ord(character):02X}" for character in plain)
    for start in ("file:/", "file:///", "file://localhost/"):
        if start == "file:/" and plain.startswith("/"):
            continue  # there it would be a host
        assert parse_url(start + plain) == parse_url(start + encoded) == FileURL(f"/{plain}")


@pytest.mark.parametrize(
    "text",
    [
        "file:",
        "file:a",
        "file://host/a",
        "file://../a",
        "file:///a%00",
        "file:///a%2",
        "file:///a?b",
        "file:///a#b",
    ],
)
def test_malformed_file_urls_are_refused(text: str) -> None:
    with pytest.raises(BlockedURLError):
        parse_url(text)


def test_data_urls_are_recognized_in_any_case_and_form() -> None:
    assert is_data_url("data:,x")
    assert is_data_url(b"DATA:,x")
    assert is_data_url(memoryview(b"dAtA:,x"))
    assert not is_data_url("dat:")
    assert not is_data_url(b"")


def test_bytes_that_are_no_text_are_no_url() -> None:
    assert as_text(b"http://x.test/") == "http://x.test/"
    with pytest.raises(BlockedURLError):
        as_text(b"http://x.test/\xff")


# -- properties

_SPLICED = st.text(
    alphabet=st.sampled_from("htpsfileda:/\\@[]%.#?0123456789xabc\t\n -_１。é"), max_size=40
)


@given(st.one_of(st.text(max_size=40), _SPLICED, _SPLICED.map(lambda text: "http://" + text)))
def test_any_text_is_parsed_to_a_sound_url_or_refused(text: str) -> None:
    try:
        url = parse_url(text)
    except BlockedURLError:
        return
    if isinstance(url, FileURL):
        assert url.path.startswith("/")
        assert "\0" not in url.path
        return
    assert str(url).isascii()
    assert not re.search(r"[\x00-\x20\x7f\\#]", str(url))
    assert url.target.startswith("/")
    assert 1 <= url.port <= 65535
    # What Python's own parser, and so a naive library behind us, sees is the same host.
    assert parse_url(str(url)) == url
    if url.address is None:
        assert not re.fullmatch(r"[0-9]+|0x[0-9a-f]*", url.host.rpartition(".")[2])


@given(st.ip_addresses(v=4), st.data())
def test_no_spelling_of_a_private_ipv4_address_passes(address, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    number = int(address)
    octets = list(number.to_bytes(4, "big"))
    spelled = data.draw(
        st.sampled_from(
            [
                str(number),
                hex(number),
                oct(number).replace("0o", "0"),
                ".".join(hex(octet) for octet in octets),
                ".".join(oct(octet).replace("0o", "0") for octet in octets),
                f"{octets[0]}.{number & 0xFFFFFF}",
                f"{octets[0]}.{octets[1]}.{number & 0xFFFF}",
                f"[::ffff:{address}]",
                f"[64:ff9b::{address}]",
                f"[::{address}]",
                f"[2002:{number >> 16:x}:{number & 0xFFFF:x}::]",
                str(address),
                f"{address}.",
            ]
        )
    )
    policy = URLPolicy(FetchPolicy())
    try:
        url = http(f"http://{spelled}/")
        policy.check_url(url)
    except BlockedURLError:
        return
    assert url.address is not None
    assert is_public(address)


# -- redirects


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("../k1_gray.jpg", "http://x.test/k1_gray.jpg"),
        ("e", "http://x.test/d/e"),
        ("./e?f=1", "http://x.test/d/e?f=1"),
        ("?f=1", "http://x.test/d/r?f=1"),
        ("", "http://x.test/d/r?q=1"),
        ("#frag", "http://x.test/d/r?q=1"),
        ("/e", "http://x.test/e"),
        ("//y.test/e", "http://y.test/e"),
        ("http://y.test", "http://y.test/"),
        ("https://y.test:8443/e", "https://y.test:8443/e"),
        ("/caf\udcc3\udca9", "http://x.test/caf%C3%A9"),  # raw bytes of the header
        ("/a:b", "http://x.test/a:b"),
    ],
)
def test_redirects_resolve_as_the_standard_says(location: str, target: str) -> None:
    assert str(resolve_redirect(http("http://user:pw@x.test/d/r?q=1"), location)) == target


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/hostname",
        "data:,x",
        "ftp://y.test/",
        "http://user@y.test/",
        "http:\\\\y.test/",
        "//y.test\\@z.test/",
        "http://y.test/\r\nX: y",
        "http://2130706433/",
        "mailto:a",
    ],
)
def test_redirects_elsewhere_are_refused(location: str) -> None:
    with pytest.raises(BlockedURLError):
        resolve_redirect(http("http://x.test/"), location)


def test_a_redirect_does_not_leave_https() -> None:
    with pytest.raises(BlockedURLError, match="https to http"):
        resolve_redirect(http("https://x.test/"), "http://x.test/")
    assert resolve_redirect(http("https://x.test/"), "//y.test/").scheme == "https"


# -- what may be shown


def test_what_is_shown_has_neither_credentials_nor_query_nor_path() -> None:
    secret = "https://me:pw@x.test/a.png?sig=secret#frag"
    assert redact_url(secret) == "https://x.test/a.png"
    assert "pw" not in repr(http(secret))
    assert redact_url("file:///home/me/a.png") == "file:"
    assert redact_url("data:image/png;base64,AAAA") == "data:"
    assert redact_url("\\\\nonsense") == "an invalid URL"
    assert len(redact_url("http://x.test/" + "a" * 1000)) == 200


# -- policy


def check(text: str, **policy: object) -> None:
    URLPolicy(FetchPolicy(**policy)).check_url(http(text))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1/",
        "http://127.0.0.1:8080/",
        "http://10.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://0.0.0.0/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[fd00::1]:8443/",
    ],
)
def test_literal_addresses_are_checked_on_every_port(text: str) -> None:
    with pytest.raises(BlockedURLError, match="not public"):
        check(text)
    with pytest.raises(BlockedURLError, match="not public"):
        check(text, allowed_domains=(http(text).host,))


@pytest.mark.parametrize("port", [22, 25, 143, 6000, 6667])
def test_ports_of_other_protocols_are_refused(port: int) -> None:
    with pytest.raises(BlockedURLError, match="port"):
        check(f"http://x.test:{port}/")
    check(f"http://x.test:{port}/", allowed_private_networks=(f"x.test:{port}",))


def test_other_ports_are_fine() -> None:
    for port in (80, 443, 8000, 8080, 9000, 65535):
        check(f"http://8.8.8.8:{port}/")


def test_domains_match_whole_names() -> None:
    domains = ("Example.com", "bücher.example", "other.test:8080", "[2606:4700::1]:80")
    for good in (
        "http://example.com/",
        "https://EXAMPLE.com.:8443/",
        "http://xn--bcher-kva.example/",
        "http://other.test:8080/",
        "http://[2606:4700::1]/",
    ):
        check(good, allowed_domains=domains)
    for bad in (
        "http://example.com.evil.test/a.png",
        "http://evil-example.com/a.png",
        "http://sub.example.com/",
        "http://example.com@evil.test/",
        "http://evil.test/?example.com",
        "http://other.test/",
        "http://[2606:4700::2]/",
    ):
        with pytest.raises(BlockedURLError, match="allowed domains"):
            check(bad, allowed_domains=domains)


def test_https_only_refuses_http() -> None:
    check("https://x.test/", https_only=True)
    with pytest.raises(BlockedURLError, match="https"):
        check("http://x.test/", https_only=True)


def test_private_networks_are_reachable_if_allowed() -> None:
    networks = ("10.1.0.0/16", "192.168.7.7", "fd00::/8", "media.internal:9000", "127.0.0.1:8080")
    policy = URLPolicy(FetchPolicy(allowed_private_networks=networks))
    assert policy.check_addresses("x.test", 80, ["10.1.2.3", "8.8.8.8", "fd00::7"])
    assert policy.check_addresses("x.test", 80, ["::ffff:10.1.2.3", "64:ff9b::10.1.2.3"])
    assert policy.check_addresses("x.test", 80, ["192.168.7.7"])
    assert policy.check_addresses("media.internal", 9000, ["172.16.0.1", "127.0.0.1"])
    policy.check_url(http("http://127.0.0.1:8080/"))
    for host, port, addresses in (
        ("x.test", 80, ["10.2.0.1"]),
        ("x.test", 80, ["192.168.7.8"]),
        ("media.internal", 9001, ["172.16.0.1"]),
        ("x.test", 8080, ["127.0.0.1"]),
        ("127.0.0.1", 8081, ["127.0.0.1"]),
    ):
        with pytest.raises(BlockedURLError):
            policy.check_addresses(host, port, addresses)


def test_one_private_answer_among_public_ones_refuses_all() -> None:
    policy = URLPolicy(FetchPolicy())
    assert len(policy.check_addresses("x.test", 80, ["8.8.8.8", "2606:4700::1"])) == 2
    for addresses in (["8.8.8.8", "127.0.0.1"], ["::1", "8.8.8.8"], ["8.8.8.8", "fe80::1%eth0"]):
        with pytest.raises(BlockedURLError) as caught:
            policy.check_addresses("x.test", 80, addresses)
        assert "127" not in str(caught.value)


@pytest.mark.parametrize(
    "policy",
    [
        FetchPolicy(allowed_private_networks=("10.0.0.1/8",)),
        FetchPolicy(allowed_private_networks=("media.internal",)),
        FetchPolicy(allowed_private_networks=("media.internal:x",)),
        FetchPolicy(allowed_domains=("*.example.com",)),
        FetchPolicy(allowed_domains=("http://example.com",)),
        FetchPolicy(allowed_domains=("",)),
    ],
)
def test_malformed_settings_are_refused_with_the_entry(policy: FetchPolicy) -> None:
    with pytest.raises(ValueError, match="must be"):
        URLPolicy(policy)


def test_policies_are_equal_if_their_settings_are() -> None:
    one, same = (URLPolicy(FetchPolicy(allowed_domains=("x.test",))) for _ in range(2))
    other = URLPolicy(FetchPolicy(allowed_local_media_path=Path("/x")))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
