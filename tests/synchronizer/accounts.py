"""What the tests of this folder share: a small state, its updates, and ways to act at a chosen point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from synchronizer import (
    AppendResult,
    AttributeChange,
    ManualClock,
    Map,
    Revision,
    SegmentStore,
    State,
    StateSynchronizer,
    UnknownOutcome,
    Update,
    open_store,
)
from synchronizer.testing import FailingStore, Operation
from tests.waiting import PATIENCE_SECONDS, until

LONG = PATIENCE_SECONDS


class Account(State):
    value: int = 0
    entries: Map[str, int] = Map()
    note: str | None = None


class Add(Update[Account], tag="add"):
    amount: int = 1

    def apply_to(self, state: Account, revision: Revision) -> Account:
        return state.replace(value=state.value + self.amount)


class Take(Update[Account], tag="take"):
    amount: int

    def apply_to(self, state: Account, revision: Revision) -> Account:
        if state.value < self.amount:
            raise ValueError(f"only {state.value} are there")
        return state.replace(value=state.value - self.amount)


class Put(Update[Account], tag="put"):
    key: str
    value: int

    def apply_to(self, state: Account, revision: Revision) -> Account:
        return state.replace(entries=state.entries.set(self.key, self.value))


class Drop(Update[Account], tag="drop"):
    key: str

    def apply_to(self, state: Account, revision: Revision) -> Account:
        return state.replace(entries=state.entries.delete(self.key))


class Note(Update[Account], tag="note"):
    text: str | None = None

    def apply_to(self, state: Account, revision: Revision) -> Account:
        return state.replace(note=self.text)


UPDATES: list[type[Update[Account]]] = [Add, Take, Put, Drop, Note]
Replica = StateSynchronizer[Account]


def opened(store: SegmentStore, *, name: str = "account", **options: Any) -> Replica:
    """A replica of its own, as another process would have it. It compacts only when told."""
    options.setdefault("compaction_bytes", None)
    return StateSynchronizer(store, name, initial=Account(), updates=UPDATES, **options)


def stepwise(store: FailingStore) -> FailingStore:
    """Let the store create one segment at a time, as the backends of others may."""
    store.guarantees = replace(store.guarantees, atomic_multi_create=False)
    return store


def failing() -> FailingStore:
    return FailingStore(open_store("memory://"))


def just_before(store: FailingStore, verb: str, action: Callable[[], object], *, nth: int = 1) -> None:
    """Let ``action`` run before the ``nth`` call of ``verb`` from now on, once."""
    remaining = nth

    def before(operation: Operation) -> None:
        nonlocal remaining
        remaining -= operation.verb == verb
        if remaining == 0:
            store.before = None
            action()

    store.before = before


def just_after(store: FailingStore, verb: str, action: Callable[[], object]) -> None:
    """Do something when the next operation of this kind is carried out, before its answer is used."""

    def after(operation: Operation) -> None:
        if operation.verb == verb:
            store.after = None
            action()

    store.after = after


class LateStore(FailingStore):
    """Remembers the appends that were lost, so that a test can let them arrive after all."""

    def __init__(self, inner: SegmentStore) -> None:
        super().__init__(inner)
        self.lost: list[tuple[str, bytes, int | None, Mapping[str, AttributeChange] | None]] = []

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        answer = super().append(segment, data, expected_offset=expected_offset, attributes=attributes)
        if isinstance(answer, UnknownOutcome):
            self.lost.append((segment, data, expected_offset, attributes))
        return answer

    def let_arrive(self, number: int) -> AppendResult:
        segment, data, expected_offset, attributes = self.lost[number]
        return self.inner.append(segment, data, expected_offset=expected_offset, attributes=attributes)


class Barrier:
    """Holds a thread at a chosen operation until it is let go: before it is carried out, or before its answer."""

    def __init__(self, store: FailingStore, verb: str, *, nth: int = 1, after: bool = False) -> None:
        self._reached = threading.Event()
        self._released = threading.Event()
        if after:
            just_after(store, verb, self._hold)
        else:
            just_before(store, verb, self._hold, nth=nth)

    def _hold(self) -> None:
        self._reached.set()
        assert self._released.wait(LONG)

    def await_reached(self) -> None:
        assert self._reached.wait(LONG), "nobody came to the barrier"

    def release(self) -> None:
        self._released.set()


@contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(number)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # a thread may wait for what the test did not come to
        raise
    pool.shutdown()


def is_waited_on(clock: ManualClock) -> bool:
    """Whether a thread waits for the clock to move."""
    return bool(clock._moved._waiters)  # type: ignore[attr-defined]


def joined(replica: Replica, number: int) -> None:
    """Wait until ``number`` calls are in the batch that goes next."""

    def are_there() -> bool:
        batch = replica._writer._batcher.open
        return batch is not None and len(batch.entries) == number

    until(are_there, f"{number} calls in the open batch")


def answer(future: Future[Any]) -> Any:
    return future.result(LONG)
