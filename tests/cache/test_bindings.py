"""What uuids stand for: alike in one process and over several, whoever of them dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from lazydecode.cache import CONTESTED, Bindings, UuidBindings, shared_bindings
from lazydecode.cache.shared_bindings import SharedUuidBindings


@contextmanager
def shared(capacity: int = 1024) -> Iterator[SharedUuidBindings]:
    bindings = SharedUuidBindings(capacity)
    try:
        yield bindings
    finally:
        bindings.close()


def in_a_child(work: Callable[[], object]) -> int:
    """Run `work` in a fork of this process; returns how that ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


steps = st.lists(
    st.tuples(
        st.sampled_from(["bind", "contest", "clear"]),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["1" * 64, "2" * 64, "3" * 128]),
    ),
    max_size=30,
)


@given(steps)
def test_both_tables_say_the_same(sequence: list[tuple[str, str, str]]) -> None:
    with shared() as other:
        tables: list[Bindings] = [UuidBindings(), other]
        for step, name, mm_hash in sequence:
            if step == "clear":
                for table in tables:
                    table.clear()
            else:
                own, theirs = (
                    table.bind(name, mm_hash, contest=step == "contest") for table in tables
                )
                assert own == theirs
            assert [tables[0].peek(n) for n in "abc"] == [tables[1].peek(n) for n in "abc"]
            assert len(tables[0]) == len(tables[1])


def test_what_one_process_binds_the_others_know() -> None:
    with shared() as bindings:
        assert in_a_child(lambda: bindings.bind("a", "1", contest=False)) == 0
        assert bindings.peek("a") == "1" and len(bindings) == 1
        assert not bindings.bind("a", "2", contest=True)
        assert in_a_child(lambda: bindings.peek("a") == CONTESTED) == 0
        assert in_a_child(lambda: bindings.clear() is None) == 0
        assert bindings.peek("a") is None and len(bindings) == 0


def test_of_many_processes_that_bind_one_name_one_wins() -> None:
    with shared() as bindings:
        ready, go = os.pipe()
        children = []
        for number in range(6):
            child = os.fork()
            if child == 0:
                os.read(ready, 1)  # all at once, when the other end is closed
                won = [bindings.bind(f"n{n}", str(number), contest=False) for n in range(50)]
                os._exit(sum(won))
            children.append(child)
        os.write(go, b"x" * 6)
        won = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.close(ready)
        os.close(go)
        assert sum(won) == 50 == len(bindings)
        assert all(bindings.peek(f"n{n}") in set("012345") for n in range(50))


def test_a_process_that_is_killed_while_it_binds_leaves_no_lock_and_no_half_entry() -> None:
    with shared() as bindings:
        assert bindings.bind("a", "1", contest=False) and bindings.bind("b", "2", contest=False)

        def die(*args: object) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        def bind_and_die() -> bool:
            shared_bindings._checksum = die  # between the entry's end and its beginning
            return bindings.bind("a", "3", contest=True)

        assert in_a_child(bind_and_die) == -signal.SIGKILL
        assert (bindings.peek("a"), bindings.peek("b")) == (None, "2")
        assert bindings.bind("a", "4", contest=False)
        assert bindings.peek("a") == "4"


def test_the_name_that_was_bound_longest_ago_makes_room() -> None:
    with shared(8) as bindings:
        for number in range(8):
            assert bindings.bind(str(number), "1", contest=False)
        assert bindings.bind("0", "1", contest=False)
        assert bindings.bind("8", "1", contest=False)
        assert len(bindings) == 8
        assert bindings.peek("1") is None
        assert all(bindings.peek(str(number)) == "1" for number in (0, *range(2, 9)))
