from __future__ import annotations

import logging

import pytest

from lazydecode.errors import (
    AuthenticationError,
    BlockedURLError,
    CorruptMediaError,
    EngineDeadError,
    EngineError,
    FetchError,
    FetchTimeoutError,
    MediaTooLargeError,
    NotFoundError,
    OriginRefusedError,
    OverloadedError,
    RequestTooLargeError,
    TooManyItemsError,
    ValidationError,
)
from lazydecode.server.error_mapping import map_error


@pytest.mark.parametrize(
    ("exc", "status", "retryable"),
    [
        (ValidationError("m"), 400, False),
        (BlockedURLError("m"), 400, False),
        (TooManyItemsError("m"), 400, False),
        (AuthenticationError("m"), 401, False),
        (NotFoundError("m"), 404, False),
        (RequestTooLargeError("m"), 413, False),
        (CorruptMediaError("m"), 422, False),
        (MediaTooLargeError("m"), 422, False),
        (OriginRefusedError("m"), 422, False),
        (FetchError("m"), 502, True),
        (OverloadedError("m"), 503, True),
        (EngineDeadError("m"), 503, True),
        (FetchTimeoutError("m"), 504, True),
    ],
)
def test_every_class_has_its_status(exc: Exception, status: int, retryable: bool) -> None:
    answer = map_error(exc, request_id="r")
    error = answer.body["error"]
    assert answer.status == error["code"] == status
    assert error["retryable"] is retryable
    assert ("Retry-After" in answer.headers) is retryable
    assert {"message", "type", "param", "code"} <= error.keys()


def test_the_item_is_named_in_the_message_and_in_fields() -> None:
    answer = map_error(
        OriginRefusedError("the origin answered with status 404", modality="image", index=1),
        request_id="r",
    )
    error = answer.body["error"]
    assert error["message"] == "image 1: the origin answered with status 404"
    assert (error["modality"], error["index"]) == ("image", 1)


def test_a_message_that_names_the_item_is_left_as_it_is() -> None:
    message = "Failed to decode image media at index 0: truncated"
    answer = map_error(CorruptMediaError(message, modality="image", index=0), request_id="r")
    assert answer.body["error"]["message"] == message


def test_retry_after_is_a_whole_number_of_seconds() -> None:
    answer = map_error(OverloadedError("full", retry_after_s=2.2), request_id="r")
    assert answer.headers["Retry-After"] == "3"


@pytest.mark.parametrize("exc", [RuntimeError("secret /path"), EngineError("secret"), KeyError(1)])
def test_our_fault_shows_the_request_id_and_nothing_else(
    exc: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = map_error(exc, request_id="req-7")
    assert answer.status == 500
    assert "req-7" in answer.body["error"]["message"]
    assert "secret" not in str(answer.body)
    assert "req-7" in caplog.text


def test_a_missing_key_says_how_to_authenticate() -> None:
    answer = map_error(AuthenticationError("key"), request_id="r")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_clients_own_words_come_back_shortened() -> None:
    long = "k" * 1_000_000
    exc = ValidationError(long, parameter=long, value=long, modality="image", index=1)
    error = map_error(exc, request_id="r").body["error"]
    assert error["message"] == f"image 1: {long[:2000]}…"
    assert error["param"] == error["value"] == f"{long[:2000]}…"
