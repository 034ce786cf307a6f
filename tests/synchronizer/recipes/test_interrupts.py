"""Ctrl-C anywhere in what takes a lock, an election or a membership: the others go on, and wait for no lease.

The frames of the call that was interrupted are kept, as a notebook keeps them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from synchronizer import SegmentStore, open_store
from synchronizer.recipes.coordination.election import LeaderElection
from synchronizer.recipes.coordination.lock import HeldLock, Lock, Semaphore
from synchronizer.recipes.coordination.membership import Membership
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.waiting import until

pytestmark = [pytest.mark.stores("memory", "sqlite", "postgresql", "nats"), FEW_OR_MORE]

#: A lease is longer than the test waits for anything.
LEASE_SECONDS: Final = 600.0
DEADLINE: Final = 10.0
#: A call has hundreds of places, more in some stores: so many are left out, as long as it takes seconds.
ONE_IN: Final = {"memory": 4, "sqlite": 15, "postgresql": 60, "nats": 60}

LOCKS: Final[dict[str, Callable[[SegmentStore], Lock]]] = {
    "lock": lambda store: Lock(store, "name", member_timeout_seconds=LEASE_SECONDS),
    "semaphore": lambda store: Semaphore(store, "name", 2, member_timeout_seconds=LEASE_SECONDS),
}


@pytest.fixture
def stores(store_url: str) -> Iterator[list[SegmentStore]]:
    """One that is interrupted, and one as of another process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        url = f"sqlite:///{folder}/store.db" if store_url.startswith("sqlite") else store_url
        with open_store(url) as one, open_store(url) as other:
            yield [one, other]


def one_in(store: SegmentStore, sparsely: int) -> int:
    return sparsely * ONE_IN[store.url.partition(":")[0]]


def take_and_release(lock: Lock) -> None:
    held: list[HeldLock] = []
    try:
        held.append(lock.acquire(timeout=DEADLINE))
        held[0].release()
    except BaseException:
        if held:
            held[0].release()
        raise


@pytest.mark.parametrize("kind", LOCKS)
def test_an_interrupted_lock_is_held_by_nobody(kind: str, stores: list[SegmentStore], sparsely: int) -> None:
    lock, other = (LOCKS[kind](store) for store in stores)
    for run in interrupts(lambda: take_and_release(lock), one_in=one_in(stores[0], sparsely), seed=kind):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        if stores[0].url.startswith("postgresql"):
            # The server may complete a join whose connection was cut. The next one of this process removes it.
            lock.acquire(timeout=DEADLINE).release()
        until(lambda: not other.holders(), f"nobody holds it, interrupted at {run.place}", seconds=DEADLINE)
        for each in (other, lock):
            each.acquire(timeout=DEADLINE).release()
    lock.close()
    other.close()


@pytest.mark.stores("memory", "sqlite")
@pytest.mark.parametrize("kind", LOCKS)
def test_an_interrupted_close_of_a_lock_that_is_held_can_be_repeated(
    kind: str, stores: list[SegmentStore], sparsely: int
) -> None:
    other = LOCKS[kind](stores[1])
    opened: list[tuple[Lock, HeldLock]] = []

    def take() -> None:
        lock = LOCKS[kind](stores[0])
        opened[:] = [(lock, lock.acquire(timeout=DEADLINE))]

    for run in interrupts(lambda: opened[0][0].close(), one_in=one_in(stores[0], sparsely), seed=kind, before=take):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        opened[0][0].close()
        until(lambda: not other.holders(), f"nobody holds it, interrupted at {run.place}", seconds=DEADLINE)
    other.close()


def test_an_interrupted_campaign_leaves_no_candidate(stores: list[SegmentStore], sparsely: int) -> None:
    one, other = (
        LeaderElection(store, "name", name, member_timeout_seconds=LEASE_SECONDS)
        for store, name in zip(stores, ("one", "other"), strict=True)
    )

    def campaign_and_resign() -> None:
        assert one.campaign(timeout=DEADLINE)
        try:
            one.resign()
        except BaseException:
            one.resign()
            raise

    try:
        for run in interrupts(campaign_and_resign, one_in=one_in(stores[0], sparsely)):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            until(lambda: other.leader() is None, f"nobody leads, interrupted at {run.place}", seconds=DEADLINE)
            assert other.campaign(timeout=DEADLINE)
            other.resign()
            assert one.campaign(timeout=DEADLINE)
            one.resign()
    finally:
        one.close()
        other.close()


def test_an_interrupted_join_leaves_no_member(stores: list[SegmentStore], sparsely: int) -> None:
    one, other = (
        Membership(store, "name", name, member_timeout_seconds=LEASE_SECONDS)
        for store, name in zip(stores, ("one", "other"), strict=True)
    )

    def join_and_leave() -> None:
        one.join()
        try:
            one.leave()
        except BaseException:
            one.leave()
            raise

    try:
        for run in interrupts(join_and_leave, one_in=one_in(stores[0], sparsely)):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            until(lambda: not other.members(), f"nobody is there, interrupted at {run.place}", seconds=DEADLINE)
            one.join()
            assert other.members() == ["one"]
            one.leave()
    finally:
        one.close()
        other.close()
