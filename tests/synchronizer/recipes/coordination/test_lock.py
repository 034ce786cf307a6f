"""Who holds the lock, who waits for how long, and what is left of those who died."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from synchronizer import (
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    LeaseLostError,
    ManualClock,
    OutcomeUnknownError,
    SegmentStore,
    open_store,
)
from synchronizer.log.batches import EntryBatch
from synchronizer.log.replica import Replica
from synchronizer.recipes.coordination.lock import HeldLock, Lock, Semaphore
from synchronizer.recipes.coordination.members import Members
from synchronizer.recipes.coordination.participant import ASK_SECONDS, Participant
from synchronizer.testing import FailingStore, InstantClock
from tests.clocks import StandingClock
from tests.waiting import CallInThread, until

pytestmark = pytest.mark.stores(round_robin=True)
LONG = 60.0


@pytest.fixture
def store(store_url: str) -> Iterator[SegmentStore]:
    with open_store(store_url) as store:
        yield store


def a_lock(store: SegmentStore, owner: str = "a", timeout_seconds: float = 10.0) -> Lock:
    return Lock(store, "door", owner=owner, member_timeout_seconds=timeout_seconds)


def dead_holder(store: SegmentStore, timeout_seconds: float) -> None:
    """A lock that is held by somebody who does nothing any more."""
    lock = Lock(store, "door", owner="dead", member_timeout_seconds=timeout_seconds, threads=False)
    assert lock.acquire(timeout=LONG).fencing_token


def held_in_an_outage(store: SegmentStore) -> tuple[ManualClock, FailingStore, Lock, HeldLock]:
    """A lock whose last renewal failed, because the store is away."""
    clock, failing = ManualClock(), FailingStore(store)
    lock = Lock(failing, "door", member_timeout_seconds=10.0, clock=clock, threads=False)
    held = lock.acquire(timeout=LONG)
    failing.unavailable = True
    clock.advance(5)
    held._participant.step()
    return clock, failing, lock, held


class Waiting(CallInThread[HeldLock]):
    """A thread that waits for the lock."""

    def __init__(self, lock: Lock, timeout: float = LONG) -> None:
        super().__init__(partial(lock.acquire, timeout=timeout))

    def held(self) -> HeldLock:
        found = self.ended()
        assert isinstance(found, HeldLock), found
        return found


def members(lock: Lock) -> list[str]:
    return [each.member for each in lock.synchronizer.fetch_updates().members]


def wait_for_members(lock: Lock, *owners: str) -> None:
    lock.synchronizer.wait_for(lambda state: [each.member for each in state.members] == [*owners], timeout=LONG)


def test_a_lock_is_held_within_its_block_and_its_tokens_grow(store: SegmentStore) -> None:
    locks = [a_lock(store, "a"), a_lock(store, "b")]
    tokens = []
    for lock in (*locks, *locks):
        with lock.acquire(timeout=LONG) as held:
            held.check()
            assert lock.holders() == [lock.owner]
            tokens.append(held.fencing_token)
        with pytest.raises(LeaseLostError, match=f"fencing_token={held.fencing_token}"):
            held.check()
    assert tokens == sorted(set(tokens))
    assert locks[0].holders() == []


def test_a_lock_is_released_when_its_block_raises(store: SegmentStore) -> None:
    lock = a_lock(store)
    with pytest.raises(ZeroDivisionError), lock.acquire(timeout=LONG):
        raise ZeroDivisionError
    assert lock.holders() == []


def test_those_who_wait_get_the_lock_in_the_order_of_their_coming(store: SegmentStore) -> None:
    first = a_lock(store, "first")
    held = first.acquire(timeout=LONG)
    waiting = []
    for number in range(4):
        waiting.append(Waiting(a_lock(store, f"w{number}")))
        wait_for_members(first, "first", *(f"w{each}" for each in range(number + 1)))
    held.release()
    for each in waiting:
        next_held = each.held()
        assert next_held.fencing_token > held.fencing_token
        held = next_held
        held.release()


def test_threads_of_a_process_exclude_each_other(store: SegmentStore) -> None:
    lock = a_lock(store)
    inside, most = 0, 0
    for _ in range(3):

        def work() -> None:
            nonlocal inside, most
            for _ in range(4):
                with lock.acquire(timeout=LONG):
                    inside += 1
                    most = max(most, inside)
                    inside -= 1

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    assert (inside, most) == (0, 1)


def test_who_waits_too_long_is_told_who_holds_the_lock_and_is_not_in_line_any_more(store: SegmentStore) -> None:
    lock, other = a_lock(store, "a", timeout_seconds=600.0), a_lock(store, "b", timeout_seconds=600.0)
    with lock.acquire(timeout=LONG) as held:
        for timeout in (0.0, 0.1):
            with pytest.raises(DeadlineExceededError, match=r"holders=\['a'\]") as caught:
                other.acquire(timeout=timeout)
            assert isinstance(caught.value, TimeoutError)
        assert other._lingering is not None
        other._lingering = other._lingering._replace(until=0.0)  # as if the holder's timeout had passed
        wait_for_members(lock, "a")
        held.check()


def test_a_thread_that_holds_the_lock_is_refused_and_may_come_back_later(store: SegmentStore) -> None:
    lock = a_lock(store)
    with lock.acquire(timeout=LONG):
        with pytest.raises(InvalidArgumentError, match="this thread already holds the lock"):
            lock.acquire(timeout=LONG)
    with lock.acquire(timeout=LONG) as held:
        held.check()


def test_a_new_thread_with_the_id_of_one_that_has_ended_does_not_hold_its_lock(store: SegmentStore) -> None:
    lock = a_lock(store)
    first = CallInThread(lambda: (threading.get_ident(), lock.acquire(timeout=LONG))).ended()
    assert isinstance(first, tuple)
    ident, held = first

    def acquire() -> int:
        with pytest.raises(DeadlineExceededError):
            lock.acquire(timeout=0.0)
        return threading.get_ident()

    with held:
        for _ in range(100):
            if (found := CallInThread(acquire).ended()) == ident:
                return
            assert isinstance(found, int), found
    pytest.skip("the system uses no id again")


def test_who_releases_twice_does_not_release_what_he_has_acquired_since(store: SegmentStore) -> None:
    lock = a_lock(store)
    first = lock.acquire(timeout=LONG)
    first.release()
    with lock.acquire(timeout=LONG) as held:
        first.release()
        held.check()
        with pytest.raises(InvalidArgumentError, match="this thread already holds the lock"):
            lock.acquire(timeout=0.0)


def test_who_waits_for_a_lock_whose_store_is_closed_hears_of_it(store_url: str, store: SegmentStore) -> None:
    held = a_lock(store, "a").acquire(timeout=LONG)
    other = open_store(store_url)
    waiting = Waiting(a_lock(other, "b"))
    wait_for_members(held._lock, "a", "b")
    other.close()
    error = waiting.ended()
    if isinstance(error, OutcomeUnknownError):  # the store was closed while it stored the request
        assert isinstance(error.__cause__, ClosedError)
    else:
        assert isinstance(error, ClosedError)
    held.release()


def test_the_lock_of_a_dead_holder_is_given_on_after_its_timeout(store: SegmentStore) -> None:
    dead_holder(store, 0.5)
    held = a_lock(store).acquire(timeout=LONG)
    # The timeout of the dead one is that of this one too, and a busy machine may pause for as long.
    until(lambda: is_held(held), "the lock")
    held.release()


def test_the_lock_of_a_dead_holder_is_given_on_also_where_everybody_waits_for_less(store: SegmentStore) -> None:
    dead_holder(store, 0.5)
    lock = a_lock(store)
    with pytest.raises(DeadlineExceededError):
        lock.acquire(timeout=0.0)
    wait_for_members(lock)
    with lock.acquire(timeout=0.0) as held:
        held.check()


def test_who_gets_the_lock_in_the_moment_when_he_gives_up_does_not_keep_it(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, other = a_lock(store, "a"), a_lock(store, "b")
    held = lock.acquire(timeout=LONG)
    linger = other._linger

    def linger_a_moment_later(participant: Participant) -> None:
        held.release()
        other.synchronizer.fetch_updates()
        linger(participant)

    monkeypatch.setattr(other, "_linger", linger_a_moment_later)
    with pytest.raises(DeadlineExceededError):
        other.acquire(timeout=0.1)
    assert lock.holders() == []


def test_closing_releases_the_lock_and_ends_the_waiting(store: SegmentStore) -> None:
    lock, other = a_lock(store, "a"), a_lock(store, "b")
    held = lock.acquire(timeout=LONG)
    waiting = Waiting(other)
    wait_for_members(lock, "a", "b")
    other.close()
    assert isinstance(waiting.ended(), ClosedError)
    wait_for_members(lock, "a")
    lock.close()
    with pytest.raises(LeaseLostError):
        held.check()
    with pytest.raises(ClosedError):
        lock.acquire(timeout=LONG)
    with a_lock(store, "c").acquire(timeout=LONG):
        pass


def test_a_lock_that_could_not_be_released_in_an_outage_is_released_by_the_next_holder(store: SegmentStore) -> None:
    clock, failing = InstantClock(), FailingStore(store)
    lock = Lock(failing, "door", member_timeout_seconds=10.0, clock=clock, threads=False)
    held = lock.acquire(timeout=LONG)
    failing.unavailable = True
    began = clock.monotonic()
    held.release()
    assert ASK_SECONDS <= clock.monotonic() - began < ASK_SECONDS + 1
    with pytest.raises(LeaseLostError):
        held.check()
    failing.unavailable = False
    with lock.acquire(timeout=0.0) as held:  # what could not be released stands in nobody's way
        held.check()
        assert len(members(lock)) == 1


def test_who_goes_asks_the_store_although_one_renewal_has_just_failed(store: SegmentStore) -> None:
    """As when a connection has ended: the next call has another one."""
    clock, failing, lock, held = held_in_an_outage(store)
    failing.unavailable = False
    clock.advance(0.5)
    held.release()
    assert members(lock) == []


def test_a_lease_that_may_be_over_is_told_before_anybody_else_can_hold_the_lock(store: SegmentStore) -> None:
    clock = ManualClock()
    failing = FailingStore(store)
    lock = Lock(failing, "door", member_timeout_seconds=10.0, clock=clock, threads=False)
    held = lock.acquire(timeout=LONG)
    clock.advance(7.9)
    held.check()
    clock.advance(0.2)
    with pytest.raises(LeaseLostError):
        held.check()
    held._participant.step()
    held.check()
    failing.unavailable = True
    clock.advance(8.1)
    held._participant.step()
    with pytest.raises(LeaseLostError):
        held.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_holds_no_lock(store: SegmentStore) -> None:
    with Lock(store, "door", threads=False).acquire(timeout=LONG) as held:
        child = os.fork()
        if not child:
            try:
                held.check()
            except LeaseLostError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        held.check()


# ---------------------------------------------------------------------- semaphores


def a_semaphore(store: SegmentStore, owner: str, permits: int = 2, timeout_seconds: float = 10.0) -> Semaphore:
    return Semaphore(store, "berth", permits, owner=owner, member_timeout_seconds=timeout_seconds)


def test_so_many_hold_a_semaphore_at_a_time_and_the_next_follows_whoever_releases_it(store: SegmentStore) -> None:
    a, b, c = (a_semaphore(store, name) for name in "abc")
    first, second = a.acquire(timeout=LONG), b.acquire(timeout=LONG)
    waiting = Waiting(c)
    wait_for_members(a, "a", "b", "c")
    assert c.holders() == ["a", "b"]
    second.release()
    third = waiting.held()
    assert a.holders() == ["a", "c"]
    first.check()
    third.check()
    with pytest.raises(LeaseLostError, match="the semaphore was released"):
        second.check()


def test_the_permit_of_a_dead_holder_is_given_on(store: SegmentStore) -> None:
    dead = Semaphore(store, "berth", 2, owner="dead", member_timeout_seconds=0.5, threads=False)
    dead.acquire(timeout=LONG)
    a, b = a_semaphore(store, "a"), a_semaphore(store, "b")
    with a.acquire(timeout=LONG) as first, b.acquire(timeout=LONG) as second:
        # The timeout of the dead one is short, and a busy machine may pause for as long.
        until(lambda: is_held(first) and is_held(second), "two permits")
        assert a.holders() == ["a", "b"]


def is_held(permit: HeldLock) -> bool:
    try:
        permit.check()
    except LeaseLostError:
        return False
    return True


def test_a_semaphore_has_the_permits_that_it_was_begun_with(store: SegmentStore) -> None:
    a_semaphore(store, "a")
    with pytest.raises(InvalidArgumentError, match="permits=2 given=3"):
        a_semaphore(store, "b", permits=3)
    with pytest.raises(InvalidArgumentError, match="permits must be an integer >= 1"):
        a_semaphore(store, "b", permits=0)


# ---------------------------------------------------------------------- threads


def threads_of_the_lock() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("lock/door-")}


def test_a_lock_that_is_released_soon_costs_no_thread(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self.name), start(self)))
    monkeypatch.setattr("synchronizer.threads.delayed_calls._clock", StandingClock())
    lock = a_lock(store)
    for _ in range(20):
        lock.acquire().release()
    assert [name for name in started if name.startswith("lock/")] == []
    lock.close()


@pytest.mark.parametrize("opened", [a_lock, lambda store: a_semaphore(store, "a")], ids=["lock", "semaphore"])
def test_acquiring_and_releasing_is_two_appends_of_which_the_first_is_flushed(
    store: SegmentStore, opened: Callable[[SegmentStore], Lock], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine one call may take longer than the moment after which a thread keeps what is held.
    monkeypatch.setattr("synchronizer.threads.delayed_calls._clock", StandingClock())
    failing = FailingStore(store)
    lock = opened(failing)
    flushed, unflushed = [], []
    for calls, verb in ((flushed, "append"), (unflushed, "append_unflushed")):
        call = getattr(failing, verb)
        monkeypatch.setattr(
            failing, verb, lambda *args, calls=calls, call=call, **kw: calls.append(args) or call(*args, **kw)
        )
    del failing.operations[:]
    for number in range(1, 6):
        with lock.acquire():
            assert len(flushed) == number
        assert len(unflushed) == number
    assert {each.verb for each in failing.operations} <= {"append", "fair_lock"}
    assert failing.count("append") == 10
    lock.close()


def test_a_lock_that_is_released_soon_leaves_nothing_for_the_garbage_collector(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = a_lock(store)
    batches: list[weakref.ref[EntryBatch[Members]]] = []
    create = EntryBatch.__init__

    def created(batch: EntryBatch[Members], base: Replica[Members]) -> None:
        create(batch, base)
        batches.append(weakref.ref(batch))

    monkeypatch.setattr(EntryBatch, "__init__", created)
    monkeypatch.setattr("synchronizer.threads.delayed_calls._clock", StandingClock())
    gc.disable()
    try:
        with lock.acquire() as held:
            participant = weakref.ref(held._participant)
        del held
        assert participant() is None
        assert len(batches) == 2 and all(batch() is None for batch in batches)
    finally:
        gc.enable()
    lock.close()


def test_one_that_is_held_for_longer_is_renewed(store: SegmentStore) -> None:
    lock = a_lock(store, timeout_seconds=3.0)
    held = lock.acquire()
    values = store.attributes("lock/door")
    until(lambda: store.attributes("lock/door") != values, "a renewal")
    until(lambda: threads_of_the_lock() == {"lock/door-lease", "lock/door-members"}, "the threads")
    until(lambda: is_held(held), "the lock")  # a busy machine may pause for as long as the lease lasts
    held.release()
    until(lambda: threads_of_the_lock() == set(), "the end of the threads")
    lock.close()


def test_where_there_is_no_thread_to_keep_the_lock_it_is_kept_when_there_is_one(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = a_lock(store, timeout_seconds=30.0)
    start, refused = threading.Thread.start, threading.Event()

    def start_others(self: threading.Thread) -> None:
        if self.name == "lock/door-members":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_others)
        held = lock.acquire()
        assert refused.wait(LONG)
    until(lambda: threads_of_the_lock() == {"lock/door-lease", "lock/door-members"}, "the threads")
    held.check()
    lock.close()
