"""Messages and tensors over a socket: what goes in comes out, and a lost peer is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lazydecode import errors
from lazydecode.engine.channel import Channel, ChannelClosedError
from lazydecode.engine.messages import (
    Abort,
    ErrorForm,
    Submit,
    error_of_form,
    form_of_error,
    form_of_request,
    request_of_form,
)
from lazydecode.engine.protocol import EngineRequest, SamplingParams
from lazydecode.inputs import (
    BatchedField,
    FlatField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PaddedField,
    PlaceholderRange,
    SharedField,
)

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = map(Channel, socket.socketpair())
    yield left, right
    left.close()
    right.close()


def full_request() -> EngineRequest:
    item = MultiModalKwargsItem(
        {
            "pixels": MultiModalFieldElem(torch.rand(7, 5).to(torch.bfloat16), FlatField(dim=0)),
            "grid": MultiModalFieldElem(torch.tensor([1, 2, 3]), BatchedField(keep_on_cpu=True)),
            "strided": MultiModalFieldElem(torch.arange(12).reshape(3, 4).T, FlatField(dim=-1)),
            "parts": MultiModalFieldElem([torch.zeros(2), torch.ones(3, 1)], PaddedField(1)),
            "empty": MultiModalFieldElem(torch.empty(0, 4), FlatField()),
            "number": MultiModalFieldElem(5, SharedField(3)),
            "nothing": MultiModalFieldElem(None, BatchedField()),
        }
    )
    mask = np.array([True, False, True])
    mask.flags.writeable = False
    return EngineRequest(
        "id",
        [1, 2, 3, 4],
        {"image": [item, None], "audio": [None]},
        {"image": ["a", "b"], "audio": ["c"]},
        {"image": [PlaceholderRange(0, 3, mask), PlaceholderRange(3, 1)], "audio": []},
        SamplingParams(temperature=0.25, logit_bias={7: 1.0}),
        2,
        False,
    )


def assert_same(left: object, right: object) -> None:
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        assert left.dtype == right.dtype
        assert left.equal(right)
    elif isinstance(left, list):
        assert isinstance(right, list)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def test_a_request_crosses_whole(pair: Pair) -> None:
    sent = full_request()
    thread = threading.Thread(target=pair[0].send, args=(form_of_request(sent),))
    thread.start()
    form = pair[1].receive()
    thread.join()
    assert isinstance(form, Submit)
    got = request_of_form(form)
    for name in ("request_id", "prompt_token_ids", "mm_hashes", "sampling", "mm_placeholders"):
        assert getattr(got, name) == getattr(sent, name)
    assert (got.num_resumed_tokens, got.cache_items) == (2, False)
    assert list(got.mm_kwargs) == ["image", "audio"]
    assert got.mm_kwargs["image"][1] is None
    sent_item, got_item = sent.mm_kwargs["image"][0], got.mm_kwargs["image"][0]
    assert sent_item is not None
    assert got_item is not None
    assert list(got_item) == list(sent_item)
    for name, elem in sent_item.items():
        assert got_item[name].field == elem.field
        assert_same(got_item[name].data, elem.data)
    assert got_item.nbytes == sent_item.nbytes


def test_frames_larger_than_the_socket_and_many_buffers_arrive_in_order(pair: Pair) -> None:
    big = torch.arange(3_000_000, dtype=torch.int32)
    many: list[object] = [torch.tensor([n]) for n in range(1500)]
    item = MultiModalKwargsItem(
        {
            "big": MultiModalFieldElem(big, FlatField()),
            "many": MultiModalFieldElem(many, BatchedField()),  # type: ignore[arg-type]
        }
    )
    request = EngineRequest("id", [1], {"image": [item]})
    thread = threading.Thread(
        target=lambda: (pair[0].send(form_of_request(request)), pair[0].send(Abort("next")))
    )
    thread.start()
    form = pair[1].receive()
    assert isinstance(form, Submit)
    got = request_of_form(form).mm_kwargs["image"][0]
    assert got is not None
    assert_same(got["big"].data, big)
    assert_same(got["many"].data, many)
    assert pair[1].receive() == Abort("next")
    thread.join()


def test_frames_of_several_threads_do_not_mix(pair: Pair) -> None:
    def send(name: str) -> None:
        for number in range(200):
            pair[0].send(Abort(f"{name}-{number}"))

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    got = [pair[1].receive().request_id for _ in range(600)]  # type: ignore[union-attr]
    for thread in threads:
        thread.join()
    for name in "abc":
        assert [g for g in got if g.startswith(name)] == [f"{name}-{n}" for n in range(200)]


def test_a_closed_peer_is_noticed_on_both_ways(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(ChannelClosedError):
        pair[1].receive()
    with pytest.raises(ChannelClosedError):
        for _ in range(100):
            pair[1].send(Abort("x"))


def test_a_peer_lost_within_a_frame_is_noticed() -> None:
    left, right = socket.socketpair()
    channel = Channel(right)
    left.sendall(b"\x10\0\0\0\0\0\0\0half")
    left.close()
    with pytest.raises(ChannelClosedError):
        channel.receive()
    channel.close()


def test_close_wakes_a_reader_in_another_thread(pair: Pair) -> None:
    raised = threading.Event()

    def read() -> None:
        try:
            pair[0].receive()
        except ChannelClosedError:
            raised.set()

    thread = threading.Thread(target=read)
    thread.start()
    pair[0].close()
    thread.join(120)
    assert raised.is_set()


def test_what_is_no_tensor_is_not_sent(pair: Pair) -> None:
    item = MultiModalKwargsItem({"x": MultiModalFieldElem(object(), FlatField())})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot send a object"):
        pair[0].send(form_of_request(EngineRequest("id", [1], {"image": [item]})))


@pytest.mark.parametrize(
    "kind",
    [
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, errors.LazyDecodeError)
        and value is not errors.CacheMissError
    ],
)
def test_our_errors_cross_as_they_are(kind: type[errors.LazyDecodeError]) -> None:
    error = kind("what went wrong", modality="image", index=3, parameter="p", value=1.5)
    got = error_of_form(form_of_error(error))
    assert type(got) is kind
    assert str(got) == "what went wrong"
    assert (got.modality, got.index, got.parameter, got.value) == ("image", 3, "p", 1.5)


def test_misses_keep_their_hashes_and_foreign_errors_lose_their_text() -> None:
    miss = error_of_form(form_of_error(errors.CacheMissError(["a", "b"])))
    assert isinstance(miss, errors.CacheMissError)
    assert miss.hashes == ["a", "b"]
    foreign = error_of_form(form_of_error(KeyError("/home/secret at 0x7f00")))
    assert type(foreign) is errors.EngineError
    assert str(foreign) == "the engine failed on this request: KeyError"
    odd = error_of_form(form_of_error(errors.ValidationError("m", value=[1, 2])))
    assert odd.value == "[1, 2]"
    assert type(error_of_form(ErrorForm("Unheard", "m"))) is errors.EngineError
