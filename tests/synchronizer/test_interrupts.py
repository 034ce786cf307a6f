"""Ctrl-C anywhere in an update: other threads and processes go on, and each update is stored and told of once.

The frames of the call that was interrupted are kept, as a notebook keeps them.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from synchronizer import EventQueue, SegmentStore, open_store
from synchronizer.log.contention import MAX_CONTENTION
from synchronizer.recipes.queue.frames import read_frames
from synchronizer.testing import FailingStore, Operation
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.synchronizer.accounts import Account, Add, Put, Replica, opened
from tests.waiting import CallInThread

pytestmark = pytest.mark.stores("memory", "sqlite", "postgresql", "nats")

DEADLINE = 30.0


@pytest.fixture
def stores(store_url: str) -> Iterator[list[SegmentStore]]:
    """One that is interrupted, and one as of another process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        url = f"sqlite:///{folder}/store.db" if store_url.startswith("sqlite") else store_url
        with open_store(url) as one, open_store(url) as other:
            yield [one, other]


@pytest.fixture
def replicas(stores: list[SegmentStore]) -> list[Replica]:
    return [opened(store) for store in stores]


@FEW_OR_MORE
@pytest.mark.parametrize("is_polite", [False, True])
def test_an_interrupted_update_holds_up_nobody(replicas: list[Replica], is_polite: bool, sparsely: int) -> None:
    one, other = replicas
    feed = one.transitions()
    heard = [each.revision for each in feed.drain()]
    numbers = itertools.count()

    def update() -> None:
        if is_polite:
            one._writer._queue._contention = MAX_CONTENTION
        one.update_state_unconditionally(Put(key=str(next(numbers)), value=1), timeout=DEADLINE)

    added = 0
    one_in = 4 if one.store.url.startswith("sqlite") else 1
    for run in interrupts(update, one_in=sparsely * one_in):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        for replica in (other, one):
            adding = CallInThread(lambda replica=replica: replica.update_state_unconditionally(Add(), timeout=DEADLINE))
            added += 1
            assert adding.ended().value == added, run.place
        assert is_free(other.store, one.segment), run.place
        one.update_state_unconditionally(Add(), timeout=DEADLINE)
        added += 1
        heard += [each.revision for each in feed.drain()]
        assert heard == sorted(set(heard)), run.place
    heard += [each.revision for each in feed.drain()]
    assert heard[1:] == [each.revision for each in other.history(heard[0])]
    assert one.fetch_updates() == other.fetch_updates()


def is_free(store: SegmentStore, segment: str) -> bool:
    with store.fair_lock(segment, 5.0) as is_held:
        return is_held


class FrozenStore(FailingStore):
    """While it ``is_frozen``, it answers neither an append nor the release of a lock: an interrupt ends the wait."""

    is_frozen = False

    def __init__(self, inner: SegmentStore) -> None:
        super().__init__(inner)
        self.before = self._freeze

    def _freeze(self, operation: Operation) -> None:
        if self.is_frozen and operation.verb == "append":
            raise KeyboardInterrupt

    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        return FrozenLock(self, super().fair_lock(segment, timeout, patience))


class FrozenLock(AbstractContextManager[bool]):
    def __init__(self, store: FrozenStore, lock: AbstractContextManager[bool]) -> None:
        self._store = store
        self._lock = lock

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        if self._store.is_frozen:
            raise KeyboardInterrupt
        self._lock.__exit__(None, None, None)


@pytest.mark.stores("memory")
def test_an_interrupted_update_whose_release_of_the_lock_is_interrupted_too_holds_up_nobody(
    stores: list[SegmentStore],
) -> None:
    store = FrozenStore(stores[0])
    replica = opened(store)
    replica._writer._queue._contention = MAX_CONTENTION
    store.is_frozen = True
    with pytest.raises(KeyboardInterrupt):
        replica.update_state_unconditionally(Add(), timeout=DEADLINE)
    store.is_frozen = False
    adding = CallInThread(lambda: replica.update_state_unconditionally(Add(), timeout=DEADLINE)).ended()
    assert isinstance(adding, Account), adding
    assert replica.update_state_unconditionally(Add(), timeout=DEADLINE).value == 2
    assert is_free(stores[1], replica.segment)


def test_those_who_update_together_with_an_interrupted_thread_go_on(replicas: list[Replica]) -> None:
    one, other = replicas
    stopping = threading.Event()

    def add_again_and_again() -> int:
        number = 0
        while not stopping.is_set():
            one.update_state_unconditionally(Add(), timeout=DEADLINE)
            number += 1
        return number

    adding = [CallInThread(add_again_and_again) for _ in range(2)]
    numbers = itertools.count()
    try:
        for run in itertools.islice(
            interrupts(
                lambda: one.update_state_unconditionally(Put(key=str(next(numbers)), value=1), timeout=DEADLINE)
            ),
            1000,
        ):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
    finally:
        stopping.set()
        counts = [each.ended() for each in adding]
    assert other.fetch_updates().value == sum(counts), counts


def test_an_interrupted_thread_that_adds_to_a_queue_holds_up_nobody(stores: list[SegmentStore]) -> None:
    queue, other = (EventQueue(store, "jobs", timeout=DEADLINE) for store in stores)
    numbers = itertools.count()
    added = []
    for run in interrupts(lambda: queue.add(b"interrupted %d" % next(numbers))):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        for each in (other, queue):
            added.append(b"%d" % len(added))
            adding = CallInThread(lambda each=each, data=added[-1]: (each.add(data),))
            assert adding.ended() == (None,), run.place
    stored = [frame.data for frame in read_frames(stores[1], "queue/jobs", 0)]
    assert len(stored) == len(set(stored))
    assert [data for data in stored if not data.startswith(b"interrupted")] == added
