from __future__ import annotations

import pytest

from lazydecode.errors import OverloadedError
from lazydecode.server.queueing import RequestQueue


def test_a_full_queue_refuses_the_next_and_takes_it_later() -> None:
    queue = RequestQueue(max_running=1, max_waiting=1)
    with queue:
        with queue:
            assert queue.num_inside == 2
            with pytest.raises(OverloadedError) as caught, queue:
                pass
            assert caught.value.retry_after_s is not None
        with queue:
            pass
    assert queue.num_inside == 0


def test_a_place_is_given_back_when_the_request_fails() -> None:
    queue = RequestQueue(max_running=1, max_waiting=0)
    with pytest.raises(KeyError), queue:
        raise KeyError
    with queue:
        pass
