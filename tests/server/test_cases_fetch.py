"""The cases about URLs and fetching, through the render route."""

from __future__ import annotations

import gzip
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.origin import Origin
from tests.server import cases
from tests.server.harness import Server, image, request, text

GRAY = cases.read("k1_gray.jpg")


@pytest.fixture(scope="module")
def inside() -> Iterator[Origin]:
    """A second server that must never be reached."""
    with Origin() as origin:
        origin.serve("/secret.png", GRAY)
        origin.serve("/k1_gray.jpg", GRAY)
        yield origin
        assert origin.num_connections == 0


def check(case_id: str, response: httpx.Response) -> None:
    """Compare with what the case expects, and look for what no error may show."""
    expected = cases.REQUESTS[case_id]["expected"]
    allowed = expected["http"] + (" 2xx" if "or_ok" in expected else "")
    if case_id == "r4-refused":
        allowed = "502"  # Our table: a connection that fails after all retries can be retried.
    assert cases.matches(response.status_code, allowed), response.text
    if "settled_status" in expected and allowed != "502":
        assert response.status_code == expected["settled_status"]
    if response.status_code == 200:
        assert len(response.json()["features"]["mm_hashes"]["image"]) == 1
        return
    error = response.json()["error"]
    assert error["modality"] == "image"
    assert error["index"] == expected.get("names_part", 0)
    assert not re.search(r"0x[0-9a-f]{6,}|Traceback|/root/|/home/|site-packages", error["message"])


def send(server: Server, case_id: str, **words: str) -> httpx.Response:
    response = server.render(cases.chat_request(cases.REQUESTS[case_id], **words))
    check(case_id, response)
    return response


@pytest.mark.parametrize(
    ("case_id", "location"),
    [
        ("r4-redirect-metadata", "http://169.254.169.254/latest/meta-data/"),
        ("r4-redirect-to-file", "file:///etc/hostname"),
    ],
)
def test_a_redirect_to_where_nobody_may_go(
    render_server: Server, shared_origin: Origin, case_id: str, location: str
) -> None:
    shared_origin.redirect("/r", location)
    send(render_server, case_id, media=shared_origin.netloc)


def test_a_relative_redirect(render_server: Server, shared_origin: Origin) -> None:
    shared_origin.redirect("/d/r", "../k1_gray.jpg")
    shared_origin.serve("/k1_gray.jpg", GRAY)
    send(render_server, "r4-redirect-relative", media=shared_origin.netloc)


def test_eleven_redirects(render_server: Server, shared_origin: Origin) -> None:
    shared_origin.redirect_chain("/n", 11, GRAY)
    before = shared_origin.hits()
    send(render_server, "r4-redirect-eleven", media=shared_origin.netloc)
    assert shared_origin.hits() - before <= 11
    assert shared_origin.hits("/n/0") == 0


@pytest.mark.parametrize(
    "case_id",
    [
        "r4-literal-loopback", "r4-literal-rfc1918", "r4-literal-linklocal",
        "r4-literal-v6-loopback", "r4-numeric-decimal", "r4-numeric-percent",
    ],
)  # fmt: skip
def test_a_private_address_in_any_spelling(
    render_server: Server, inside: Origin, case_id: str
) -> None:
    send(render_server, case_id, inside_port=str(inside.port))


@pytest.mark.parametrize("case_id", ["r4-mixed-answer", "r4-name-to-private"])
def test_a_name_with_a_private_address(
    stub_resolver_server: Server, inside: Origin, case_id: str
) -> None:
    send(stub_resolver_server, case_id, inside_port=str(inside.port))


@pytest.mark.parametrize("host", ["example.com.evil.test", "evil-example.com"])
def test_a_name_that_only_contains_an_allowed_one(
    named_hosts_server: Server, inside: Origin, host: str
) -> None:
    response = named_hosts_server.render(
        request(image(f"http://{host}:{inside.port}/secret.png"), text())
    )
    check("r4-allow-suffix", response)


def test_a_backslash_in_the_url(
    render_server: Server, shared_origin: Origin, inside: Origin
) -> None:
    shared_origin.serve("/k1_gray.jpg", GRAY)
    send(render_server, "r4-backslash-a", media=shared_origin.netloc, inside=inside.netloc)


@pytest.mark.parametrize("character", ["\t", "\r", "\n", "\0"])
def test_control_characters_in_the_url(
    render_server: Server, inside: Origin, character: str
) -> None:
    url = f"http://{inside.netloc}{character}.allowed.test/secret.png"
    check("r4-control-chars", render_server.render(request(image(url), text())))


def test_a_length_over_the_cap(small_download_server: Server, shared_origin: Origin) -> None:
    # Slowly, as it fills the system's buffers before anybody has seen its head.
    shared_origin.endless("/big", content_length=1 << 30, pause_s=0.05)
    before = shared_origin.bytes_sent
    send(small_download_server, "r4-length-over-cap", media=shared_origin.netloc)
    assert shared_origin.bytes_sent - before <= 1 << 20


def test_a_compressed_body_that_grows(small_download_server: Server, shared_origin: Origin) -> None:
    body = gzip.compress(bytes(64 << 20))
    shared_origin.serve("/k4_gzip_bomb.gz", body, headers={"Content-Encoding": "gzip"})
    send(small_download_server, "r4-gzip-bomb", media=shared_origin.netloc)


def test_headers_that_never_end(small_download_server: Server, shared_origin: Origin) -> None:
    shared_origin.trickle("/slow", every_s=0.2, in_head=True)
    started = time.monotonic()
    send(small_download_server, "r4-slow-headers", media=shared_origin.netloc)
    assert time.monotonic() - started < 12  # three times what it may take


def test_a_missing_picture(render_server: Server, shared_origin: Origin) -> None:
    before = shared_origin.hits("/s/404")  # another test asks for it too
    send(render_server, "r4-upstream-404", media=shared_origin.netloc)
    assert shared_origin.hits("/s/404") - before == 1


def test_a_passing_failure_is_tried_again(render_server: Server, shared_origin: Origin) -> None:
    shared_origin.serve_in_turn("/flaky", (503, b""), (503, b""), (200, GRAY))
    send(render_server, "r4-upstream-503-then-ok", media=shared_origin.netloc)
    assert shared_origin.hits("/flaky") == 3


def test_nobody_listens(render_server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    # Allowed or not, a port where nothing listens is no 500.
    response = render_server.render(request(image(f"http://127.0.0.1:{port}/a.png"), text()))
    assert response.status_code == 400


def test_an_error_page_instead_of_a_picture(render_server: Server, shared_origin: Origin) -> None:
    shared_origin.serve(
        "/k1_html_error_page.jpg",
        cases.read("k1_html_error_page.jpg"),
        headers={"Content-Type": "image/jpeg"},
    )
    send(render_server, "r4-html-200", media=shared_origin.netloc)


def test_one_of_two_is_missing(render_server: Server, shared_origin: Origin) -> None:
    shared_origin.serve("/k1_gray.jpg", GRAY)
    send(render_server, "r4-all-or-error", media=shared_origin.netloc)


@pytest.mark.parametrize("case_id", [i for i in cases.REQUESTS if i.startswith("r4-file-")])
def test_files(render_server: Server, files_server: Server, case_id: str) -> None:
    config = cases.REQUESTS[case_id]["config"]
    server = render_server if config["local_root"] is None else files_server
    send(server, case_id, tree=str(cases.TREE))


@pytest.mark.parametrize("case_id", ["r4-scheme-ftp", "r4-scheme-none"])
def test_other_schemes(render_server: Server, case_id: str) -> None:
    send(render_server, case_id)


def test_data_urls_of_every_spelling(render_server: Server) -> None:
    for name, case in cases.FILES.items():
        if not name.startswith("k4_dataurl"):
            continue
        expected: dict[str, Any] = case["expected"]
        allowed = expected.get("http", "2xx")
        allowed += " 2xx" if "or_ok" in expected else ""
        allowed += " 4xx" if "or_error" in expected else ""
        response = render_server.render(request(image(cases.as_data_url(name)), text()))
        assert cases.matches(response.status_code, allowed), (name, response.text)


def test_a_client_that_hangs_up_ends_the_download(
    render_server: Server, shared_origin: Origin
) -> None:
    shared_origin.endless("/endless", pause_s=0.005)
    before = render_server.decodes()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{render_server.url}/v1/chat/completions/render",
            json=request(image(shared_origin.url("/endless")), text()),
            timeout=0.3,
        )
    deadline = time.monotonic() + 120
    sent = -1
    while sent != shared_origin.bytes_sent and time.monotonic() < deadline:
        sent = shared_origin.bytes_sent
        time.sleep(0.1)
    assert sent == shared_origin.bytes_sent
    assert render_server.decodes() == before


def test_a_name_that_resolves_differently_the_second_time(
    render_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that was checked is the one connected to; what comes later is checked anew."""
    resolve = socket.getaddrinfo
    answers = {
        "first.rebind.test": [["127.0.0.3"], ["127.0.0.1"]],
        "mixed.rebind.test": [["127.0.0.3", "127.0.0.1"]],
    }

    def rebind(host: Any, *args: Any, **kwargs: Any) -> Any:
        addresses = answers[host].pop(0) if host in answers else [host]
        return [info for address in addresses for info in resolve(address, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", rebind)
    with Origin(host="127.0.0.3") as allowed:
        allowed.serve("/a.jpg", GRAY, headers={"Connection": "close"})
        for name, status in (("first", 200), ("first", 400), ("mixed", 400)):
            url = allowed.url("/a.jpg", host=f"{name}.rebind.test")
            response = render_server.render(request(image(url), text()))
            assert response.status_code == status, response.text
            assert "127.0.0" not in response.text
        assert allowed.hits() == 1
    assert not any(answers.values())
