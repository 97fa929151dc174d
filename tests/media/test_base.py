"""MediaRef and MediaIO: one decode, no accidental one, and who lets go of what."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest

from lazydecode.errors import CorruptMediaError
from lazydecode.media.base import (
    EMPTY_SPEC,
    DecodeSpec,
    ImageHeader,
    MediaIO,
    MediaRef,
    PayloadDigest,
    decode_base64,
    derive_media_key,
)


class Decoder:
    """Counts its runs; each gives a new list."""

    def __init__(self, *, fail: int = 0) -> None:
        self.runs = 0
        self.fail = fail

    def __call__(self) -> list[int]:
        self.runs += 1
        if self.runs <= self.fail:
            raise OSError("damaged")
        return [self.runs]


def ref_over(decoder: Callable[[], Any], **options: Any) -> MediaRef[Any]:
    return MediaRef(decoder, b"payload", **options)


# -- decode


def test_decode_is_memoized() -> None:
    decoder = Decoder()
    ref = ref_over(decoder)
    assert not ref.is_decoded
    assert ref.decode() is ref.decode()
    assert ref.is_decoded
    assert decoder.runs == 1


def test_a_decoder_may_give_none() -> None:
    runs: list[int] = []
    ref = ref_over(lambda: runs.append(1))
    assert ref.decode() is None
    assert ref.decode() is None
    assert ref.is_decoded
    assert runs == [1]


def test_threads_run_the_decoder_once() -> None:
    barrier = threading.Barrier(16)
    inside, leave = threading.Event(), threading.Event()
    runs: list[int] = []

    def decode() -> object:
        runs.append(1)
        inside.set()
        assert leave.wait(120)
        return object()

    ref = ref_over(decode)

    def work() -> object:
        barrier.wait(120)
        return ref.decode()

    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(work) for _ in range(16)]
        assert inside.wait(120)
        leave.set()
        results = {id(future.result(120)) for future in futures}
    assert len(results) == 1
    assert runs == [1]


def test_a_failed_decode_is_unchanged_and_runs_again() -> None:
    decoder = Decoder(fail=2)
    ref = ref_over(decoder)
    for _ in range(2):
        with pytest.raises(OSError, match=r"^damaged$"):
            ref.decode()
        assert not ref.is_decoded
    assert ref.decode() == [3]
    assert decoder.runs == 3


# -- identity


def test_key_is_derived_from_data_and_spec() -> None:
    spec = DecodeSpec({"mode": "RGB"})
    ref = ref_over(Decoder(), spec=spec)
    assert ref.key == derive_media_key(b"payload", spec)
    assert ref.spec == spec
    assert ref_over(Decoder()).spec == EMPTY_SPEC
    assert ref_over(Decoder(), key=b"given").key == b"given"


@pytest.mark.parametrize("name", ["key", "spec", "data", "is_decoded", "header", "extra"])
def test_attributes_cannot_be_set(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(ref_over(Decoder()), name, b"")


# -- no decode by accident


def test_nothing_but_decode_decodes(caplog: pytest.LogCaptureFixture) -> None:
    decoder = Decoder()
    ref = ref_over(decoder)
    repr(ref), str(ref), f"{ref}", bool(ref), hash(ref)
    with caplog.at_level(logging.INFO):
        logging.getLogger(__name__).info("%s %r", ref, [ref])
    assert ref == ref and ref != ref_over(decoder)
    assert ref in [ref] and {ref: 1}[ref] == 1
    assert np.asarray(ref).dtype == object and np.array([ref, ref]).shape == (2,)
    for probe in ("__array__", "__iter__", "__len__", "__getitem__", "shape", "size", "mode"):
        assert not hasattr(ref, probe)
    with pytest.raises(TypeError):
        iter(ref)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        len(ref)  # type: ignore[arg-type]
    dir(ref), copy.copy(ref), copy.deepcopy({"image": [ref]})
    ref.key, ref.spec, ref.data, ref.header, ref.is_decoded, ref.fork(), ref.map(len), ref.renew()
    assert decoder.runs == 0


def test_repr_shows_state_and_size_only() -> None:
    ref = ref_over(Decoder())
    assert repr(ref) == "<MediaRef undecoded, 7 bytes>"
    ref.decode()
    assert repr(ref) == "<MediaRef decoded, 7 bytes>"
    ref.release()
    assert repr(ref) == "<MediaRef decoded, 0 bytes>"


# -- release


def test_released_undecoded_cannot_decode() -> None:
    decoder = Decoder()
    ref = ref_over(decoder)
    ref.release()
    ref.release()
    assert ref.data == b""
    with pytest.raises(RuntimeError, match="released"):
        ref.decode()
    assert decoder.runs == 0


def test_released_decoded_stays_readable() -> None:
    ref = ref_over(Decoder())
    media = ref.decode()
    ref.release()
    assert ref.decode() is media
    assert ref.key == derive_media_key(b"payload", EMPTY_SPEC)


def test_release_lets_go_of_decoder_and_header_probe() -> None:
    class Payload:
        pass

    payload = Payload()
    gone = weakref.ref(payload)
    ref = ref_over(lambda held=payload: None, header_probe=lambda held=payload: None)
    del payload
    ref.release()
    gc.collect()
    assert gone() is None


def test_release_inside_the_decoder_does_not_deadlock_and_the_decode_finishes() -> None:
    def decode() -> str:
        ref.release()
        return "media"

    ref = ref_over(decode)
    assert ref.decode() == "media"
    assert ref.decode() == "media"
    assert ref.data == b""


def test_release_during_a_decode_in_another_thread_does_not_wait() -> None:
    inside, leave = threading.Event(), threading.Event()

    def decode() -> str:
        inside.set()
        assert leave.wait(120)
        return "media"

    ref = ref_over(decode)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ref.decode)
        assert inside.wait(120)
        ref.release()  # returns although the decoder still runs
        leave.set()
        assert future.result(120) == "media"
    assert ref.decode() == "media"


# -- fork


def test_a_fork_decodes_through_its_parent() -> None:
    decoder = Decoder()
    parent = ref_over(decoder, spec=DecodeSpec({"a": 1}), key=b"k", key_covers_spec=False)
    fork = parent.fork()
    assert (fork.key, fork.spec, fork.key_covers_spec) == (b"k", parent.spec, False)
    assert fork.data is parent.data
    assert not fork.is_decoded
    assert fork.decode() is parent.decode()
    assert decoder.runs == 1


def test_a_fork_of_a_decoded_parent_is_decoded() -> None:
    parent = ref_over(Decoder())
    media = parent.decode()
    fork = parent.fork()
    assert fork.is_decoded
    fork.release()
    assert fork.decode() is media


def test_releasing_a_fork_leaves_the_parent() -> None:
    parent = ref_over(Decoder())
    parent.fork().release()
    assert parent.data == b"payload"
    assert parent.decode() == [1]


def test_releasing_an_undecoded_parent_fails_its_forks() -> None:
    parent = ref_over(Decoder())
    fork = parent.fork()
    parent.release()
    with pytest.raises(RuntimeError, match="released"):
        fork.decode()


def test_copies_are_forks() -> None:
    decoder = Decoder()
    parent = ref_over(decoder)
    shallow, deep = copy.copy(parent), copy.deepcopy([parent, parent])
    assert deep[0] is deep[1]
    assert shallow.data is deep[0].data is parent.data
    shallow.release()
    assert deep[0].decode() is parent.decode()
    assert decoder.runs == 1


# -- map


def test_map_without_settings_keeps_the_identity() -> None:
    parent = ref_over(Decoder(), spec=DecodeSpec({"a": 1}), key=b"k", key_covers_spec=False)
    mapped = parent.map(len)
    assert (mapped.key, mapped.spec, mapped.key_covers_spec) == (b"k", parent.spec, False)
    assert mapped.data is parent.data
    assert mapped.decode() == 1
    assert parent.is_decoded


def test_map_with_settings_derives_the_key_from_the_parents() -> None:
    parent = ref_over(Decoder(), spec=DecodeSpec({"a": 1}))
    mapped = parent.map(len, target_sr=16000)
    assert mapped.spec.settings == {"a": 1, "target_sr": 16000}
    assert mapped.key == derive_media_key(parent.key, mapped.spec)
    assert mapped.key != parent.map(len, target_sr=8000).key
    assert parent.map(len, a=1).key != parent.key


def test_a_mapped_trusted_key_covers_its_spec() -> None:
    parent = ref_over(Decoder(), key=b"uuid", key_covers_spec=False)
    assert parent.map(len, target_sr=16000).key_covers_spec


def test_map_transforms_once_and_keeps_the_parents_media() -> None:
    decoder = Decoder()
    parent = ref_over(decoder)
    calls: list[list[int]] = []
    mapped = parent.map(lambda media: calls.append(media) or "mapped")
    assert [mapped.decode() for _ in range(3)] == ["mapped"] * 3
    assert calls == [parent.decode()]
    assert decoder.runs == 1


def test_releasing_a_mapped_ref_leaves_the_parent() -> None:
    parent = ref_over(Decoder())
    mapped = parent.map(len)
    mapped.release()
    assert parent.decode() == [1]
    with pytest.raises(RuntimeError, match="released"):
        mapped.decode()


# -- renew


@pytest.mark.parametrize("derive", [lambda ref: ref, MediaRef.fork, lambda ref: ref.map(list)])
def test_a_renewed_ref_leaves_no_media_behind(derive: Callable[[Any], MediaRef[Any]]) -> None:
    decoder = Decoder()
    parent = ref_over(decoder)
    kept = derive(parent)
    renewed = kept.renew()
    assert (renewed.key, renewed.spec) == (kept.key, kept.spec)
    assert renewed.data is kept.data
    assert renewed.decode() == [1]
    assert not kept.is_decoded and not parent.is_decoded
    assert kept.renew().decode() == [2]


def test_a_released_ref_cannot_be_renewed() -> None:
    parent = ref_over(Decoder())
    fork = parent.fork()
    parent.release()
    for ref in (parent, fork):
        with pytest.raises(RuntimeError, match="released"):
            ref.renew()


# -- pickle


def test_pickle_decodes_and_carries_no_payload() -> None:
    spec = DecodeSpec({"a": 1})
    header = ImageHeader(4, 3, "RGB", "PNG")
    ref = ref_over(Decoder(), spec=spec, header_probe=lambda: header, key_covers_spec=False)
    restored = pickle.loads(pickle.dumps(ref))
    assert ref.is_decoded and restored.is_decoded
    assert restored.decode() == [1]
    assert restored.data == b""
    assert (restored.key, restored.spec) == (ref.key, spec)
    assert restored.header == header
    assert not restored.key_covers_spec
    assert pickle.loads(pickle.dumps(restored)).decode() == [1]


# -- header


def test_header_is_read_once_and_on_first_use() -> None:
    header = ImageHeader(4, 3, "RGB", "PNG")
    probes: list[int] = []

    def probe() -> ImageHeader:
        probes.append(1)
        return header

    ref = ref_over(Decoder(), header_probe=probe)
    assert probes == []
    fork, mapped = ref.fork(), ref.map(len, x=1)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda one: one.header, [ref, fork, mapped] * 8))
    assert read == [header] * 24
    assert probes == [1]
    ref.release()
    assert ref.header == header


def test_header_is_read_while_a_decode_runs() -> None:
    inside, leave = threading.Event(), threading.Event()

    def decode() -> None:
        inside.set()
        assert leave.wait(120)

    ref = ref_over(decode, header_probe=lambda: None)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ref.decode)
        assert inside.wait(120)
        assert ref.header is None
        leave.set()
        future.result(120)


def test_header_after_release_is_absent_if_it_was_not_read() -> None:
    ref = ref_over(Decoder(), header_probe=lambda: ImageHeader(1, 1, "L", "PNG"))
    ref.release()
    assert ref.header is None


# -- MediaIO


class TextIO(MediaIO[str]):
    def get_decode_spec(self) -> DecodeSpec:
        return DecodeSpec({"encoding": "ascii"})

    def load_bytes(self, data: bytes) -> str:
        return data.decode("ascii")

    def load_base64(self, media_type: str, data: str) -> str:
        return self.load_bytes(decode_base64(data))

    def load_file(self, filepath: Path) -> str:
        return self.load_bytes(filepath.read_bytes())


def test_ref_builders_agree(tmp_path: Path) -> None:
    io = TextIO()
    path = tmp_path / "text"
    path.write_bytes(b"hello")
    text = pybase64.b64encode(b"hello").decode()
    refs = [
        io.load_bytes_ref(b"hello"),
        io.load_bytes_ref(b"hello", digest=PayloadDigest(b"hello")),
        io.load_base64_ref("text/plain", text),
        io.load_base64_ref("text/plain", memoryview(text.encode())),
        io.load_file_ref(path),
    ]
    path.unlink()
    assert {ref.key for ref in refs} == {derive_media_key(b"hello", io.get_decode_spec())}
    assert [ref.decode() for ref in refs] == ["hello"] * 5
    assert all(ref.spec == io.get_decode_spec() for ref in refs)


def test_defaults_of_a_media_io() -> None:
    assert TextIO().get_max_bytes() is None
    assert MediaIO.get_decode_spec(TextIO()) is None
    assert TextIO().probe_header(b"") is None
    assert TextIO.merge_kwargs({"a": 1, "b": {"x": 1}}, {"b": {"y": 2}}) == {"a": 1, "b": {"y": 2}}
    assert TextIO.merge_kwargs(None, None) == {}


@pytest.mark.parametrize(
    "text", ["aGk", "aGk=\n", " aGk=", "aG!=", "aGk=aGk=", "a", "äGk=", "-_=="]
)
def test_base64_is_strict(text: str) -> None:
    with pytest.raises(CorruptMediaError, match="base64"):
        decode_base64(text)


def test_base64_of_nothing_is_nothing() -> None:
    assert decode_base64("") == b""
