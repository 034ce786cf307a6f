from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

import pytest

from synchronizer import (
    ANY,
    AttributeChange,
    ManualClock,
    SegmentStore,
    StoreUnavailableError,
    open_store,
)
from synchronizer.liveness.exclusive_role import ExclusiveRole, RoleValue
from synchronizer.liveness.timing import observe_interval
from synchronizer.testing import FailingStore, Operation
from tests.golden import golden
from tests.interrupts import interrupts

TIMEOUT_SECONDS = 9.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(store_url: str) -> Iterator[FailingStore]:
    with open_store(store_url) as store:
        store.create("log")
        yield FailingStore(store)


def role(store: SegmentStore, clock: ManualClock) -> ExclusiveRole:
    return ExclusiveRole(store, "log", "turn", clock)


def stored(store: SegmentStore) -> RoleValue:
    return RoleValue.decode(store.attributes("log")["turn"])


def take_over(store: SegmentStore, clock: ManualClock) -> ExclusiveRole:
    """Another one that holds the role, whoever had it."""
    other = role(store, clock)
    for _ in range(int(TIMEOUT_SECONDS)):
        assert not other.take(TIMEOUT_SECONDS)
        clock.advance(1)
    assert other.take(TIMEOUT_SECONDS)
    return other


@pytest.mark.stores(round_robin=True)
def test_a_role_is_taken_over_when_it_has_stood_still_for_the_timeout(store: SegmentStore, clock: ManualClock) -> None:
    first = role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    assert first.record(5, "five")
    second = take_over(store, clock)
    assert second.value.payload == (5, "five")
    # The first one stopped before the second could have it, and cannot have it back.
    assert first.valid_until < clock.monotonic()
    assert not first.record(6)
    assert not first.take(TIMEOUT_SECONDS)
    first.give_up()
    assert second.record(7)
    assert stored(store) == RoleValue(second.own_id, second.value.counter, (7,))


@pytest.mark.parametrize("phase", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("timeout_seconds", [3.0, TIMEOUT_SECONDS, 60.0])
def test_a_watched_role_passes_on_within_the_timeout_and_a_second(
    store: SegmentStore, clock: ManualClock, timeout_seconds: float, phase: float
) -> None:
    """As the table in docs/operations.md says, also if the holder dies right after a renewal between two looks."""
    interval = observe_interval(timeout_seconds)
    first, second = role(store, clock), role(store, clock)
    assert first.take(timeout_seconds)
    assert not second.take(timeout_seconds)
    clock.advance(phase * interval)
    assert first.record("renewed")
    died_at = clock.monotonic()
    clock.advance((1 - phase) * interval)
    while not second.take(timeout_seconds):
        clock.advance(interval)
    assert timeout_seconds <= clock.monotonic() - died_at <= timeout_seconds + 1


def test_a_role_that_is_renewed_is_kept(store: SegmentStore, clock: ManualClock) -> None:
    first, second = role(store, clock), role(store, clock)
    for _ in range(30):
        assert first.take(TIMEOUT_SECONDS)
        assert first.valid_until > clock.monotonic() + 3
        assert not second.take(TIMEOUT_SECONDS)
        clock.advance(1)
    assert first.value.counter == 10  # it is not written more often than it takes


def test_recording_renews_it(store: SegmentStore, clock: ManualClock) -> None:
    first, second = role(store, clock), role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    for number in range(20):
        assert first.record(number)
        assert not second.take(TIMEOUT_SECONDS)
        clock.advance(1)
    assert first.valid_until > clock.monotonic()


def test_a_timeout_that_is_made_shorter_costs_the_holder_nothing(store: SegmentStore, clock: ManualClock) -> None:
    first, second = role(store, clock), role(store, clock)
    for _ in range(8):
        assert first.take(30)
        assert not second.take(30)
        clock.advance(1)
    # Both hear of the new timeout, the holder a little later.
    assert not second.take(TIMEOUT_SECONDS / 3)
    clock.advance(0.9)
    assert not second.take(TIMEOUT_SECONDS / 3)
    assert first.take(TIMEOUT_SECONDS / 3)
    assert first.valid_until < clock.monotonic() + TIMEOUT_SECONDS / 3
    for _ in range(20):
        clock.advance(0.5)
        assert first.take(TIMEOUT_SECONDS / 3)
        assert not second.take(TIMEOUT_SECONDS / 3)


def test_an_observer_that_did_not_look_begins_anew(store: SegmentStore, clock: ManualClock) -> None:
    first, second = role(store, clock), role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    assert not second.take(TIMEOUT_SECONDS)
    clock.advance(100)
    assert not second.take(TIMEOUT_SECONDS)


def test_an_observer_that_looks_rarely_judges_by_two_gaps(store: SegmentStore, clock: ManualClock) -> None:
    first, second = role(store, clock), role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    for _ in range(5):
        assert first.take(TIMEOUT_SECONDS)
        assert not second.take(TIMEOUT_SECONDS)
        clock.advance(5)
    assert not second.take(TIMEOUT_SECONDS)  # the first one is gone, after 5 seconds in which it may have been
    clock.advance(1)
    assert not second.take(TIMEOUT_SECONDS)
    for _ in range(2):
        clock.advance(5)
        is_taken = second.take(TIMEOUT_SECONDS)
    assert is_taken and not first.record(1)


def test_a_role_that_was_given_up_is_free_at_once_and_what_it_remembers_is_kept(
    store: SegmentStore, clock: ManualClock
) -> None:
    first, second = role(store, clock), role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    assert first.record(5)
    first.give_up()
    assert first.valid_until < clock.monotonic()
    assert not first.record(6)
    assert second.take(TIMEOUT_SECONDS)
    assert second.value.payload == (5,)
    first.give_up()
    assert second.record(7)


def test_one_that_ran_out_and_that_nobody_took_goes_on(store: SegmentStore, clock: ManualClock) -> None:
    first = role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    clock.advance(100)
    assert first.valid_until < clock.monotonic()
    assert first.record(1)  # nobody else can have acted meanwhile
    assert first.valid_until > clock.monotonic()


@pytest.mark.parametrize("arrived", [True, False], ids=["the answer", "the request"])
@pytest.mark.stores(round_robin=True)
def test_what_was_lost_is_found_out_by_the_next_call(store: FailingStore, clock: ManualClock, arrived: bool) -> None:
    lose = store.lose_answers if arrived else store.lose_requests
    first = role(store, clock)
    for act in (lambda: first.take(TIMEOUT_SECONDS), lambda: first.record(1), lambda: first.record(1, 2)):
        lose()
        with pytest.raises(StoreUnavailableError, match="the store's answer was lost"):
            act()
        assert first.take(TIMEOUT_SECONDS)
        assert first.value == stored(store)
    assert first.value.payload == ((1, 2) if arrived else ())
    lose()
    with pytest.raises(StoreUnavailableError):
        first.give_up()
    assert first.valid_until < clock.monotonic()
    assert (stored(store).holder_id == b"") is arrived


def test_f9_while_the_store_takes_nothing_nobody_is_given_up(store: FailingStore, clock: ManualClock) -> None:
    def take_nothing(operation: Operation) -> None:
        if operation.verb == "append":
            raise StoreUnavailableError("it takes nothing now")

    first, second = role(store, clock), role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    store.before = take_nothing
    for _ in range(2 * int(TIMEOUT_SECONDS)):
        with suppress(StoreUnavailableError):
            assert not second.take(TIMEOUT_SECONDS)
        clock.advance(1)
    store.before = None
    assert not second.take(TIMEOUT_SECONDS)
    assert first.take(TIMEOUT_SECONDS)
    assert first.times_taken == 1


def test_one_that_was_given_up_with_a_lost_answer_is_not_held(store: FailingStore, clock: ManualClock) -> None:
    first = role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    assert first.record(5)
    store.lose_answers()
    with pytest.raises(StoreUnavailableError):
        first.give_up()
    assert not first.record(6)
    assert stored(store).payload == (5,)
    # Whoever wants it back takes it anew.
    assert first.take(TIMEOUT_SECONDS)
    assert stored(store).holder_id == first.own_id
    assert first.times_taken == 2


def test_a_lost_request_that_arrives_late_is_known_as_ones_own(store: FailingStore, clock: ManualClock) -> None:
    first = role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    before = store.inner.attributes("log")["turn"]
    store.lose_requests()
    with pytest.raises(StoreUnavailableError):
        first.record(1)
    late = RoleValue(first.own_id, first.value.counter + 1, (1,)).encode()
    store.inner.append("log", b"", attributes={"turn": AttributeChange(before, late)})
    assert first.record(2)
    assert stored(store) == first.value == RoleValue(first.own_id, 3, (2,))


def test_the_holder_of_what_was_taken_away_records_nothing_and_keeps_its_role(
    store: SegmentStore, clock: ManualClock
) -> None:
    first = role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    assert first.record(1)
    forgotten = first.value._replace(counter=first.value.counter + 1, payload=())
    store.append("log", b"", attributes={"turn": AttributeChange(ANY, forgotten.encode())})
    assert not first.record(2)
    assert first.value.payload == ()
    assert first.take(TIMEOUT_SECONDS)
    assert first.record(3)
    store.append("log", b"", attributes={"turn": AttributeChange(ANY, forgotten.encode())})
    first.give_up()
    assert not stored(store).holder_id


def test_a_role_is_written_and_read_as_in_the_first_release() -> None:
    value = RoleValue(b"\x00holder\xff", 3, (5, None, "five"))
    stored = golden("role-v1.msgpack", value.encode())
    assert stored == value.encode()
    assert RoleValue.decode(stored) == value
    assert RoleValue.decode(None) == RoleValue()


def test_it_is_told_whether_another_had_the_role_in_between(store: FailingStore, clock: ManualClock) -> None:
    first, second = role(store, clock), role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    clock.advance(TIMEOUT_SECONDS / 2)
    store.lose_answers()
    with pytest.raises(StoreUnavailableError):
        first.take(TIMEOUT_SECONDS)
    assert first.take(TIMEOUT_SECONDS)
    assert first.times_taken == 1
    assert not second.take(TIMEOUT_SECONDS)
    first.give_up()
    assert second.take(TIMEOUT_SECONDS)
    second.give_up()
    assert first.take(TIMEOUT_SECONDS)
    assert (first.times_taken, second.times_taken) == (2, 1)


@pytest.mark.parametrize("read_seconds", [0.5, 2.4, 4.0, 8.0])
def test_a_slow_read_shortens_the_role_of_nobody(store: FailingStore, clock: ManualClock, read_seconds: float) -> None:
    """What a read returns may have been written at its end, so a silence counts from there."""
    first, second = role(store.inner, clock), role(store, clock)
    assert first.take(TIMEOUT_SECONDS)

    def read_slowly(operation: Operation) -> None:
        if operation.verb == "attributes":
            store.before = None
            clock.advance(read_seconds)
            assert first.record("renewed while the read was on its way")

    store.before = read_slowly
    read_at = clock.monotonic() + read_seconds
    while not second.take(TIMEOUT_SECONDS):
        clock.advance(0.5)
    assert clock.monotonic() > first.valid_until
    assert read_at + TIMEOUT_SECONDS <= clock.monotonic() <= read_at + 2 * TIMEOUT_SECONDS


def test_a_read_that_ends_late_says_nothing_of_the_time_since_it_began(store: FailingStore, clock: ManualClock) -> None:
    first, second = role(store.inner, clock), role(store, clock)
    assert first.take(TIMEOUT_SECONDS)
    for _ in range(17):
        assert not second.take(TIMEOUT_SECONDS)
        clock.advance(0.5)
    store.after = lambda operation: clock.advance(2.0)  # what was read is as old then
    assert not second.take(TIMEOUT_SECONDS)
    assert second.take(TIMEOUT_SECONDS)


def test_what_an_interrupted_call_recorded_is_not_taken_back_by_the_next_renewal(clock: ManualClock) -> None:
    with open_store("memory://") as store:
        store.create("log")
        holder = role(store, clock)
        assert holder.take(10.0)
        numbers = itertools.count(1)
        for run in interrupts(lambda: holder.record(next(numbers))):
            recorded = stored(store).payload
            clock.advance(5.0)
            assert holder.take(10.0), f"interrupted at {run.place}"
            assert stored(store).payload == recorded, f"interrupted at {run.place}"


def test_an_interrupt_takes_the_role_from_nobody(clock: ManualClock) -> None:
    with open_store("memory://") as store:
        store.create("log")
        holder = role(store, clock)
        assert holder.take(TIMEOUT_SECONDS)
        for number, run in enumerate(interrupts(lambda: holder.record("interrupted"))):
            assert isinstance(run.error, KeyboardInterrupt), run.place
            assert holder.record(number), f"interrupted at {run.place}"
            assert stored(store).payload == (number,)


def test_what_another_has_written_is_not_taken_for_a_renewal_though_it_is_the_same(
    store: SegmentStore, clock: ManualClock
) -> None:
    holder = role(store, clock)
    assert holder.take(TIMEOUT_SECONDS)
    same = holder.value._replace(counter=holder.value.counter + 1).encode()
    store.append("log", b"", attributes={"turn": AttributeChange(ANY, same)})
    clock.advance(TIMEOUT_SECONDS / 2)
    assert holder.take(TIMEOUT_SECONDS)
    assert holder.times_taken == 2
