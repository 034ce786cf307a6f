"""Ctrl-C anywhere in a call of a store, one place after the other: what every thread and process does next goes on.

The frames of the call that was interrupted are kept, as a notebook keeps them.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator

import pytest

from synchronizer import ClosedError, SegmentStore, open_store
from synchronizer.store import ANY, Append, Appended, AttributeChange, SegmentCopy
from tests.interrupts import interrupts
from tests.waiting import CallInThread

pytestmark = pytest.mark.stores("memory", "sqlite")

Call = Callable[[SegmentStore, str], object]


def _fair_lock(store: SegmentStore, fresh: str) -> None:
    lock = store.fair_lock("s", 5.0)
    try:
        assert lock.__enter__()
    finally:
        try:
            lock.__exit__(None, None, None)
        except BaseException:
            lock.__exit__(None, None, None)
            raise


CALLS: dict[str, Call] = {
    "create": lambda store, fresh: store.create(fresh),
    "append": lambda store, fresh: store.append("s", b"data", attributes={"a": AttributeChange(ANY, b"value")}),
    "append_unread": lambda store, fresh: store.append_unread("s", b"data"),
    "append_together": lambda store, fresh: store.append_together([Append("s", b"one"), Append("t", b"two")]),
    "concat": lambda store, fresh: store.concat("t", "sealed"),
    "copy_segments": lambda store, fresh: store.copy_segments([SegmentCopy("sealed", fresh, 0, 5)]),
    "truncate": lambda store, fresh: store.truncate("s", store.info("s").length),
    "delete": lambda store, fresh: (store.create(fresh), store.delete(fresh)),
    "forget": lambda store, fresh: (store.create(fresh), store.forget(fresh)),
    "seal": lambda store, fresh: (store.create(fresh), store.seal(fresh)),
    "info": lambda store, fresh: store.info("s"),
    "read": lambda store, fresh: store.read("sealed", 0, 100),
    "list": lambda store, fresh: list(store.list()),
    "attributes": lambda store, fresh: store.attributes("s"),
    "wait": lambda store, fresh: store.wait({"t": store.info("t").length}, 0.001),
    "fair_lock": _fair_lock,
}


@pytest.fixture
def url(store_url: str) -> Iterator[str]:
    """In memory, where the system has files in memory: there are many runs, and what they store need not last."""
    if not (store_url.startswith("sqlite") and os.path.isdir("/dev/shm")):
        yield store_url
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield f"sqlite:///{folder}/store.db"


@pytest.fixture
def stores(url: str) -> Iterator[list[SegmentStore]]:
    """One that is interrupted, and one as of another process."""
    with open_store(url) as one, open_store(url) as other:
        for name in ("s", "t", "sealed"):
            one.create(name)
        for number in range(5):
            one.append("sealed", b"x" * 1000, attributes={str(number): AttributeChange(ANY, b"value")})
        one.seal("sealed")
        yield [one, other]


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_holds_up_nobody(name: str, stores: list[SegmentStore]) -> None:
    one, other = stores
    numbers = itertools.count()
    count = 0
    for run in interrupts(lambda: CALLS[name](one, f"fresh-{next(numbers)}")):
        count += 1
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        for store in (other, one):
            assert all_go_on(store), f"{'this' if store is one else 'the other'} store, interrupted at {run.place}"
        assert isinstance(one.append("s", b"again"), Appended)
    assert count > 5


def all_go_on(store: SegmentStore) -> bool:
    """Whether another thread can write, wait, and have the lock, and no snapshot is held."""

    def use() -> bool:
        with store.fair_lock("s", 5.0) as is_held:
            assert is_held
        assert isinstance(store.append_unread("s", b"unread"), Appended)
        answer = store.append("s", b"by another")
        assert isinstance(answer, Appended)
        assert store.wait({"s": answer.offset}, 5.0) == {"s"}
        return True

    return CallInThread(use).ended() is True


@pytest.mark.stores("memory", "sqlite")
def test_together_is_together_also_when_it_is_interrupted(stores: list[SegmentStore]) -> None:
    one, other = stores

    def call() -> object:
        change = AttributeChange(ANY, one.info("s").length.to_bytes(8))
        return one.append_together([Append("s", b"x", None, {"n": change}), Append("t", b"x", None, {"n": change})])

    for run in interrupts(call):
        assert other.info("s").length == other.info("t").length, run.place
        assert other.attributes("s", "n") == other.attributes("t", "n"), run.place


def test_a_close_that_was_interrupted_can_be_repeated(url: str) -> None:
    with open_store(url) as keeper:
        keeper.create("s")

        opened: list[SegmentStore] = []

        def close() -> None:
            opened[-1].close()

        def again() -> None:
            opened.append(open_store(url))
            opened[-1].append("s", b"x")
            opened[-1].wait({"s": 0}, 1.0)

        again()
        for run in interrupts(close):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            assert all_go_on(keeper), run.place
            opened[-1].close()
            with pytest.raises(ClosedError):
                opened[-1].append("s", b"x")
            again()
        opened[-1].close()


@pytest.mark.stores("sqlite")
def test_an_opening_that_was_interrupted_holds_up_nobody(url: str) -> None:
    numbers = itertools.count()
    made: list[str] = []

    def make() -> None:
        made.append(f"{url}-{next(numbers)}")
        open_store(made[-1]).close()

    for run in interrupts(make):
        with open_store(made[-1] if made else url) as store:
            store.create("s")
            assert all_go_on(store), run.place
