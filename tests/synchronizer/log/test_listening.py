"""`on_update` and `history` one by one: for an audit, each update of the log once, in order, whoever wrote it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from synchronizer import AppliedUpdate, ClosedError, Revision, StateSynchronizer, UnknownUpdateError, Update, open_store
from synchronizer.log.replica import MAX_TRANSITIONS
from synchronizer.testing import FailingStore
from tests.synchronizer.accounts import Account, Add, Put, just_before, opened
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)


@pytest.fixture
def store(store_url: str) -> Iterator[FailingStore]:
    with FailingStore(open_store(store_url)) as store:
        yield store


class Audit:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[AppliedUpdate[Account]] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, applied: AppliedUpdate[Account]) -> None:
        self.threads.add(threading.current_thread())
        self.heard.append(applied)

    @property
    def values(self) -> list[int | None]:
        return [applied.state.value if applied.state else None for applied in self.heard]

    def await_calls(self, number: int) -> None:
        until(lambda: len(self.heard) >= number, f"{number} calls of the listener")

    def await_value(self, value: int) -> None:
        until(lambda: self.values[-1:] == [value], f"the value {value}")


def test_every_update_is_told_once_with_its_own_revision_and_the_state_that_it_made(store: FailingStore) -> None:
    mine, other = opened(store), opened(store.inner)
    audit = Audit()
    mine.on_update(audit)
    other.update_state_unconditionally(Add(amount=1), Add(amount=2), Put(key="a", value=7))
    mine.update_state_unconditionally(Add(amount=3))
    audit.await_value(6)
    assert [applied.update for applied in audit.heard] == [
        Add(amount=1),
        Add(amount=2),
        Put(key="a", value=7),
        Add(amount=3),
    ]
    assert audit.values == [1, 3, 3, 6]
    first, last = other.revision, mine.revision
    assert [applied.revision for applied in audit.heard] == [*(Revision(first.offset, n) for n in range(3)), last]
    assert audit.heard[-1].state is mine.state


def test_an_audit_goes_on_after_the_revision_where_it_stopped_in_the_middle_of_an_entry_too(
    store: FailingStore,
) -> None:
    replica = opened(store)
    replica.update_state_unconditionally(Add(amount=1), Add(amount=2), Add(amount=3))
    replica.update_state_unconditionally(Add(amount=4))
    audit = Audit()
    opened(store.inner).on_update(audit, after=Revision(replica.history(Revision(0, 0))[0].revision.offset, 1))
    replica.update_state_unconditionally(Add(amount=5))
    audit.await_value(15)
    assert audit.values == [6, 10, 15]
    assert not any(applied.gap for applied in audit.heard)


def test_what_a_compaction_removed_is_one_call_that_says_so(store: FailingStore) -> None:
    replica = opened(store)
    replica.update_state_unconditionally(Add(amount=1), Add(amount=2))
    before = replica.revision
    replica.update_state_unconditionally(Add(amount=3))
    replica.compact()
    replica.update_state_unconditionally(Add(amount=4))
    audit = Audit()
    replica.on_update(audit, after=Revision(0, 0))
    audit.await_calls(2)
    gap, following = audit.heard
    assert (gap.update, gap.gap, gap.state) == (None, True, Account(value=6))
    assert gap.revision > before
    assert (following.update, following.gap, following.state) == (Add(amount=4), False, Account(value=10))


def test_a_follower_whose_log_was_truncated_hears_of_the_gap_and_then_of_every_update(store: FailingStore) -> None:
    far_away = FailingStore(store.inner)
    follower, other = opened(far_away), opened(store.inner)
    audit = Audit()
    far_away.unavailable = True
    follower.on_update(audit)
    for _ in range(3):
        other.update_state_unconditionally(Add())
        other.compact()
    far_away.unavailable = False
    other.update_state_unconditionally(Add())
    audit.await_value(4)
    assert [applied.gap for applied in audit.heard] == [True, False]
    assert audit.values == [3, 4]


def test_a_listener_that_fell_behind_its_queue_hears_each_update_as_soon_as_the_store_answers(
    store: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    replica = opened(store, timeout=0.1)
    audit, held, released = Audit(), threading.Event(), threading.Event()

    def hear(applied: AppliedUpdate[Account]) -> None:
        held.set()
        assert released.wait(20)
        audit(applied)

    replica.on_update(hear)
    replica.update_state_unconditionally(Add())
    assert held.wait(20)
    feed = replica._follower._held_feeds()[0]()
    assert feed is not None
    replica.update_state_unconditionally(Add())
    for transition in feed.drain():  # as if so many had come that the queue forgot them
        feed._queue.extend([transition] * MAX_TRANSITIONS)
    replica.update_state_unconditionally(Add())
    assert [transition.gap for transition in feed._queue] == [True]
    store.unavailable = True
    released.set()
    until(
        lambda: any("updates for a listener are delayed" in record.getMessage() for record in caplog.records),
        "a warning",
    )
    store.unavailable = False
    audit.await_value(3)
    assert audit.values == [1, 2, 3]


def test_a_listener_that_raises_is_logged_and_hears_the_next_update(
    store: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    replica = opened(store)
    audit, other = Audit(), Audit()

    def hear(applied: AppliedUpdate[Account]) -> None:
        audit(applied)
        if len(audit.heard) == 1:
            raise RuntimeError("the disk of the audit is full")

    replica.on_update(hear)
    replica.on_update(other)
    with caplog.at_level(logging.ERROR, "synchronizer"):
        replica.update_state_unconditionally(Add())
        replica.update_state_unconditionally(Add())
        audit.await_calls(2)
        other.await_calls(2)
    assert audit.values == other.values == [1, 2]
    (record,) = caplog.records
    assert str(audit.heard[0].revision) in record.getMessage()
    assert record.exc_info and "the disk of the audit" in str(record.exc_info[1])


def test_a_listener_may_call_the_synchronizer(store: FailingStore) -> None:
    replica = opened(store)
    audit = Audit()

    def answer(applied: AppliedUpdate[Account]) -> None:
        audit(applied)
        if applied.update == Add(amount=1):
            replica.update_state_unconditionally(Add(amount=10))

    replica.on_update(answer)
    replica.update_state_unconditionally(Add(amount=1))
    audit.await_value(11)
    assert audit.values == [1, 11]


def test_the_end_and_the_new_beginning_of_a_state_are_told_without_an_update(store: FailingStore) -> None:
    replica = opened(store)
    audit = Audit()
    replica.on_update(audit)
    replica.delete()
    audit.await_calls(1)
    replica.initialize(Account(value=5))
    audit.await_value(5)
    assert [(applied.update, applied.state) for applied in audit.heard] == [(None, None), (None, Account(value=5))]


def test_its_thread_has_a_name_and_ends_when_it_is_told_to_or_with_the_synchronizer(store: FailingStore) -> None:
    replica = opened(store)
    first, second = Audit(), Audit()
    end = replica.on_update(first)
    replica.on_update(second)
    replica.update_state_unconditionally(Add())
    first.await_calls(1)
    second.await_calls(1)
    assert [thread.name for thread in (*first.threads, *second.threads)] == ["updates of account"] * 2
    end()
    end()
    until(lambda: not any(thread.is_alive() for thread in first.threads), "the end of the thread")
    replica.update_state_unconditionally(Add())
    second.await_calls(2)
    assert first.values == [1]
    replica.close()
    until(lambda: not any(thread.is_alive() for thread in second.threads), "the end of the thread")
    with pytest.raises(ClosedError):
        replica.on_update(first)


def test_it_goes_on_after_an_outage_longer_than_the_timeout(
    store: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    replica = opened(store, timeout=0.05)
    audit = Audit()
    replica.on_update(audit)
    with caplog.at_level(logging.WARNING, "synchronizer"):
        store.unavailable = True
        until(
            lambda: any("updates for a listener are delayed" in record.getMessage() for record in caplog.records),
            "a warning",
        )
        opened(store.inner).update_state_unconditionally(Add())
        store.unavailable = False
        audit.await_value(1)


def test_an_update_that_this_release_does_not_know_ends_it_with_an_error_in_the_log(
    store: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Later(Update[Account], tag="later"):
        def apply_to(self, state: Account, revision: Revision) -> Account:
            return state

    old = opened(store)
    audit = Audit()
    old.on_update(audit)
    old.update_state_unconditionally(Add())
    audit.await_calls(1)
    new = StateSynchronizer(store.inner, "account", state_type=Account, updates=[Add, Later])
    with caplog.at_level(logging.ERROR, "synchronizer"):
        new.update_state_unconditionally(Later())
        until(lambda: not any(thread.is_alive() for thread in audit.threads), "the end of the thread")
    (record,) = caplog.records
    assert record.exc_info and isinstance(record.exc_info[1], UnknownUpdateError)


def test_a_history_that_is_compacted_while_it_is_heard_has_a_gap(store: FailingStore) -> None:
    replica, other = opened(store), opened(store.inner)
    replica.update_state_unconditionally(Add())

    def compact() -> None:
        for _ in range(2):
            other.update_state_unconditionally(Add())
            other.compact()

    just_before(store, "read", compact)
    audit = Audit()
    replica.on_update(audit, after=Revision(0, 0))
    audit.await_value(3)
    assert audit.heard[0].gap and audit.values == [3]
