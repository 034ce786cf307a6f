"""A listener under a durable name: it goes on where it stopped, whatever became of the process that it was in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import pytest

from notifications import Change, NotificationKey
from notifications.unheard import ALL, HeardUpTo
from synchronizer import (
    ANY,
    AttributeChange,
    InvalidArgumentError,
    ManualClock,
    NotFoundError,
    SegmentStore,
    StateSynchronizer,
    StoreUnavailableError,
    UnknownUpdateError,
)
from synchronizer.liveness.exclusive_role import RoleValue
from synchronizer.log import replica
from synchronizer.testing import FailingStore, Operation
from tests.golden import golden
from tests.notifications.counting import Add, Counted, Counter, CountNotifier, Heard, counter
from tests.waiting import PATIENCE_SECONDS, until

ATTRIBUTE = "listener/CountNotifier/sizer"
TIMEOUT_SECONDS = 9.0


class Killed(BaseException):
    """The process ends here."""


class TwiceNotifier(CountNotifier):
    """Tells two things of each value."""

    def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
        yield Counted(change=change, value=after.value)
        yield Counted(change=change, value=-after.value)


class TenthsNotifier(CountNotifier):
    """Tells of every tenth value."""

    def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
        if after.value // 10 > (0 if before is None else before.value // 10):
            yield Counted(change=change, value=after.value)


class Process:
    """A notifier on a replica of its own, with a listener that can fail and die."""

    def __init__(self, store: SegmentStore, clock: ManualClock, kind: type[CountNotifier] = CountNotifier) -> None:
        self.store = FailingStore(store)
        self.synchronizer = counter(self.store, clock=clock)
        self.notifier = kind(self.synchronizer, role_timeout_seconds=TIMEOUT_SECONDS)
        self.told: list[Counted] = []
        self.die_at: int | None = None
        self.during: Callable[[], None] = lambda: None
        self.unregister: Callable[[], None] = lambda: None

    def listen(self) -> None:
        self.unregister = self.notifier.register_listener(self.hear, durable="sizer")

    def hear(self, notification: Counted) -> None:
        self.told.append(notification)
        if len(self.told) == self.die_at:
            self.kill()
            raise Killed
        self.during()

    @property
    def values(self) -> list[int]:
        return [notification.value for notification in self.told]

    def kill(self) -> None:
        """It does nothing more and gives nothing up."""
        self.store.unavailable = True


Start = Callable[..., Process]


@pytest.fixture
def start(store: SegmentStore, manual_clock: ManualClock) -> Iterator[Start]:
    with ExitStack() as processes:

        def start(kind: type[CountNotifier] = CountNotifier, *, die_at: int | None = None) -> Process:
            process = Process(store, manual_clock, kind)
            processes.callback(process.notifier.close)
            process.die_at = die_at
            process.listen()
            return process

        yield start


def take_over(process: Process, clock: ManualClock) -> None:
    """Let this one see for as long as it takes that the one before is gone."""
    for _ in range(int(TIMEOUT_SECONDS)):
        process.notifier.poll()
        clock.advance(1)
    process.notifier.poll()


# ---------------------------------------------------------------------- what it hears


@pytest.mark.stores(round_robin=True)
def test_a_name_hears_the_present_value_once_and_after_a_restart_what_came_since(
    start: Start, elsewhere: StateSynchronizer[Counter]
) -> None:
    elsewhere.update_state_unconditionally(Add(amount=5))
    first = start()
    elsewhere.update_state_unconditionally(Add())
    first.notifier.poll()
    assert first.values == [5, 6]
    first.notifier.close()
    elsewhere.update_state_unconditionally(Add())
    elsewhere.update_state_unconditionally(Add())
    second = start()
    second.notifier.poll()
    assert second.values == [7, 8]
    assert [told.cause for told in first.told + second.told] == ["present value", "add", "add", "add"]
    keys = [told.key for told in first.told + second.told]
    assert keys == sorted(set(keys))
    assert keys[-1] == NotificationKey(elsewhere.revision, 0, "Counted")


@pytest.mark.stores(round_robin=True)
def test_f19_what_was_told_when_the_process_died_is_told_again(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    first = start(die_at=2)
    elsewhere.update_state_unconditionally(Add())
    elsewhere.update_state_unconditionally(Add())
    with pytest.raises(Killed):
        first.notifier.poll()
    assert first.values == [0, 1]
    second = start()
    take_over(second, manual_clock)
    assert second.values == [1, 2]
    assert second.told[0].key == first.told[1].key


def test_one_that_is_polled_rarely_hears_at_the_third_poll_what_one_that_died_did_not(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    first, second = start(), start()
    elsewhere.update_state_unconditionally(Add())
    for _ in range(3):
        manual_clock.advance(TIMEOUT_SECONDS)
        first.notifier.poll()
        second.notifier.poll()
    assert (first.values, second.values) == ([0, 1], [])
    first.kill()
    elsewhere.update_state_unconditionally(Add())
    for _ in range(2):
        assert second.values == []
        manual_clock.advance(TIMEOUT_SECONDS)
        second.notifier.poll()
    assert second.values == [2]


@pytest.mark.stores(round_robin=True)
def test_f19_of_two_one_hears_and_the_other_goes_on_at_once_where_it_was_closed(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    first, second = start(), start()
    for value in range(1, 20):
        elsewhere.update_state_unconditionally(Add())
        second.notifier.poll()
        first.notifier.poll()
        assert (first.values[-1], second.values) == (value, [])
        manual_clock.advance(1)
    first.notifier.close()
    elsewhere.update_state_unconditionally(Add())
    second.notifier.poll()
    assert second.values == [20]


def test_a_process_that_was_stopped_too_long_hears_nothing_more(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    first, second = start(), start()
    take_over(second, manual_clock)
    elsewhere.update_state_unconditionally(Add())
    first.notifier.poll()
    second.notifier.poll()
    assert (first.values, second.values) == ([0], [1])


def test_a_process_that_was_stopped_hears_nothing_again_of_what_another_heard_meanwhile(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    first = start()
    manual_clock.advance(TIMEOUT_SECONDS / 3)
    second = start()
    take_over(second, manual_clock)
    elsewhere.update_state_unconditionally(Add())
    second.notifier.poll()
    assert second.values[-1] == 1
    second.unregister()
    first.notifier.poll()
    elsewhere.update_state_unconditionally(Add())
    first.notifier.poll()
    assert first.values == [0, 2]


def test_what_is_heard_in_a_role_that_was_lost_meanwhile_does_not_count(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    first, second = start(), start()

    def slow() -> None:
        """As a process is that was stopped in the call, and its thread of the role with it."""
        take_over(second, manual_clock)
        first.during = lambda: None

    first.during = slow
    elsewhere.update_state_unconditionally(Add())
    elsewhere.update_state_unconditionally(Add())
    first.notifier.poll()
    assert first.values == [0, 1]
    assert second.values == [1, 2]
    second.notifier.close()
    elsewhere.update_state_unconditionally(Add())
    first.notifier.poll()
    assert first.values == [0, 1, 3]


@pytest.mark.stores(round_robin=True)
def test_one_that_raises_is_told_the_same_again_after_growing_pauses(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    process = start()
    elsewhere.update_state_unconditionally(Add())
    elsewhere.update_state_unconditionally(Add())

    def fail() -> None:
        if len(process.told) <= 4:
            raise ValueError("it fails")

    process.during = fail
    began = manual_clock.monotonic()
    heard_at: list[float] = []
    for _ in range(20):
        process.notifier.poll()
        heard_at += [manual_clock.monotonic() - began] * (len(process.told) - 1 - len(heard_at))
        manual_clock.advance(0.25)
    assert process.values == [0, 1, 1, 1, 1, 2]
    assert heard_at == [0, 0.5, 1.5, 3.5, 3.5]
    assert process.notifier.listener_failures == 3


def test_what_cannot_be_told_is_tried_again_and_nothing_after_it_is_told_before(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start()
    elsewhere.update_state_unconditionally(Add())
    elsewhere.update_state_unconditionally(Add())
    with monkeypatch.context() as patch:
        patch.setattr(process.notifier, "detect", lambda before, after, change: 1 / 0)
        process.notifier.poll()
        process.notifier.poll()
    assert process.notifier.listener_failures == 1
    manual_clock.advance(1)
    process.notifier.poll()
    assert process.values == [0, 1, 2]


@pytest.mark.parametrize("heard", range(1, 5))
def test_one_that_died_in_the_middle_of_a_revision_goes_on_in_it(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock, heard: int
) -> None:
    elsewhere.update_state_unconditionally(Add(amount=5))
    values = [5, -5, 6, -6]
    first = Process(elsewhere.store, manual_clock, TwiceNotifier)
    elsewhere.update_state_unconditionally(Add())
    first.die_at = heard
    with pytest.raises(Killed):
        first.listen()
        first.notifier.poll()
    second = start(TwiceNotifier)
    take_over(second, manual_clock)
    assert first.values == values[:heard]
    assert second.values == values[heard - 1 :]
    assert second.told[0].key == first.told[-1].key
    indexes = [told.change.index for told in second.told]
    assert indexes == [0, 1, 0, 1][heard - 1 :]
    assert [told.cause for told in second.told] == ["present value", "present value", "add", "add"][heard - 1 :]


def test_one_that_fails_for_long_hears_each_change_nevertheless(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "MAX_TRANSITIONS", 3)
    process = start()

    def fail() -> None:
        raise ValueError("it fails")

    process.during = fail
    for _ in range(20):
        elsewhere.update_state_unconditionally(Add())
        process.notifier.poll()
    process.during = lambda: None
    manual_clock.advance(1)
    process.notifier.poll()
    assert process.values == [0, 1, *range(1, 21)]
    assert not any(told.gap for told in process.told)


# ---------------------------------------------------------------------- compaction


@pytest.mark.stores(round_robin=True)
def test_what_was_compacted_is_covered_by_one_notification_with_a_gap(
    start: Start, elsewhere: StateSynchronizer[Counter]
) -> None:
    start().notifier.close()
    for _ in range(5):
        elsewhere.update_state_unconditionally(Add())
    elsewhere.compact()
    elsewhere.update_state_unconditionally(Add())
    second = start()
    assert [(told.value, told.gap, told.cause) for told in second.told] == [
        (5, True, "present value"),
        (6, False, "add"),
    ]


def test_a_gap_in_which_there_was_nothing_to_tell_is_told_with_what_comes_next(
    start: Start, elsewhere: StateSynchronizer[Counter]
) -> None:
    start(TenthsNotifier).notifier.close()
    elsewhere.update_state_unconditionally(Add(amount=20))
    elsewhere.update_state_unconditionally(Add(amount=-15))
    elsewhere.compact()
    second = start(TenthsNotifier)
    second.notifier.close()
    assert second.told == []
    third = start(TenthsNotifier)
    for _ in range(3):
        elsewhere.update_state_unconditionally(Add(amount=5))
        third.notifier.poll()
    assert [(told.value, told.gap) for told in third.told] == [(10, True), (20, False)]


def test_what_there_was_nothing_to_tell_of_is_no_gap(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    first = start(TenthsNotifier)
    for _ in range(5):
        elsewhere.update_state_unconditionally(Add())
        first.notifier.poll()
        manual_clock.advance(TIMEOUT_SECONDS / 3)
    first.notifier.poll()
    elsewhere.compact()
    first.kill()
    second = start(TenthsNotifier)
    take_over(second, manual_clock)
    elsewhere.update_state_unconditionally(Add(amount=5))
    second.notifier.poll()
    assert [(told.value, told.gap) for told in second.told] == [(10, False)]


def test_one_that_was_told_in_part_of_what_was_compacted_is_told_the_present_value(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    first = start(TwiceNotifier, die_at=4)
    elsewhere.update_state_unconditionally(Add())
    with pytest.raises(Killed):
        first.notifier.poll()
    assert first.values == [0, 0, 1, -1]
    elsewhere.compact()
    second = start(TwiceNotifier)
    take_over(second, manual_clock)
    assert [(told.value, told.gap) for told in second.told] == [(1, True), (-1, True)]


def test_the_present_value_that_was_not_heard_is_told_again_as_it_was(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    """Though the state went on, so that nothing after it is missed."""
    elsewhere.update_state_unconditionally(Add(amount=3))
    first = Process(elsewhere.store, manual_clock)
    first.die_at = 1
    with pytest.raises(Killed):
        first.listen()
    elsewhere.update_state_unconditionally(Add())
    second = start()
    take_over(second, manual_clock)
    assert [(told.value, told.cause, told.gap) for told in second.told] == [
        (3, "present value", False),
        (4, "add", False),
    ]


def test_a_state_that_was_deleted_has_nothing_to_tell_and_its_next_life_begins_with_a_gap(
    start: Start, elsewhere: StateSynchronizer[Counter]
) -> None:
    process = start()
    elsewhere.update_state_unconditionally(Add())
    elsewhere.delete()
    process.notifier.poll()
    assert process.values == [0]
    with pytest.raises(NotFoundError):
        process.synchronizer.fetch_updates()
    elsewhere.initialize(Counter(value=7))
    process.notifier.poll()
    assert [(told.value, told.gap) for told in process.told[1:]] == [(7, True)]


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 101, "ä"])
def test_a_name_that_is_none_is_refused(manual: CountNotifier, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"1 to 100 letters, digits and \. _ -"):
        manual.register_listener(Heard(), durable=name)
    with pytest.raises(InvalidArgumentError):
        manual.forget_listener(name)


def test_a_name_is_that_of_one_listener(manual: CountNotifier) -> None:
    heard = Heard()
    unregister = manual.register_listener(heard, durable="sizer")
    manual.register_listener(heard, durable="sizer")
    with pytest.raises(InvalidArgumentError, match="another listener has this name"):
        manual.register_listener(Heard(), durable="sizer")
    with pytest.raises(InvalidArgumentError, match="unregister it first"):
        manual.forget_listener("sizer")
    assert heard.values == [0]
    unregister()
    unregister()
    manual.register_listener(Heard(), durable="sizer")


def test_the_names_of_two_notifiers_of_one_state_are_two(start: Start, manual: CountNotifier) -> None:
    start(TenthsNotifier)
    heard = Heard()
    manual.register_listener(heard, durable="sizer")
    assert heard.values == [0]


@pytest.mark.stores(round_robin=True)
def test_a_name_that_was_forgotten_begins_anew(start: Start, elsewhere: StateSynchronizer[Counter]) -> None:
    first = start()
    first.notifier.close()
    store, segment = elsewhere.store, elsewhere.segment
    assert list(store.attributes(segment)) == [ATTRIBUTE]
    with CountNotifier(elsewhere) as notifier:
        notifier.forget_listener("sizer")
        notifier.forget_listener("sizer")
    assert not store.attributes(segment)
    assert start().values == [0]


def test_one_whose_name_was_forgotten_under_it_begins_anew(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    process = start()
    with CountNotifier(elsewhere) as notifier:
        notifier.forget_listener("sizer")
    for _ in range(3):
        elsewhere.update_state_unconditionally(Add())
        process.notifier.poll()
        manual_clock.advance(1)
    process.notifier.poll()
    assert process.told[-1].value == 3
    assert [told.cause for told in process.told].count("present value") == 2


def test_one_that_begins_anew_and_dies_is_told_all_since_then(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    first = start(die_at=3)
    with CountNotifier(elsewhere) as notifier:
        notifier.forget_listener("sizer")
    elsewhere.update_state_unconditionally(Add())
    first.notifier.poll()
    with pytest.raises(Killed):
        first.notifier.poll()
    assert first.values == [0, 1, 1]
    elsewhere.update_state_unconditionally(Add())
    second = start()
    take_over(second, manual_clock)
    assert [(told.value, told.cause) for told in second.told] == [(1, "present value"), (2, "add")]


def test_a_lost_answer_to_forgetting_is_said(start: Start) -> None:
    process = start()
    process.unregister()
    process.store.lose_answers()
    with pytest.raises(StoreUnavailableError, match="repeat the call"):
        process.notifier.forget_listener("sizer")


def test_one_that_unregisters_itself_has_heard_what_it_was_told(
    start: Start, elsewhere: StateSynchronizer[Counter]
) -> None:
    first = start()
    first.during = lambda: first.unregister()
    elsewhere.update_state_unconditionally(Add())
    elsewhere.update_state_unconditionally(Add())
    first.notifier.poll()
    assert first.values == [0, 1]
    assert start().values == [2]


@pytest.mark.parametrize("how", ["listener", "all"])
def test_one_that_was_unregistered_hears_nothing_more_and_gives_the_role_up(
    start: Start, elsewhere: StateSynchronizer[Counter], how: str
) -> None:
    first = start()
    elsewhere.update_state_unconditionally(Add())
    if how == "listener":
        first.notifier.unregister_listener(first.hear)
    else:
        first.notifier.unregister_all_listeners()
    first.notifier.poll()
    assert first.values == [0]
    assert start().values == [1]


# ---------------------------------------------------------------------- the store fails


@pytest.mark.parametrize("arrived", [True, False], ids=["the answer", "the request"])
def test_what_was_heard_is_recorded_when_the_store_is_there_again(
    start: Start, elsewhere: StateSynchronizer[Counter], arrived: bool
) -> None:
    process = start()
    elsewhere.update_state_unconditionally(Add())
    (process.store.lose_answers if arrived else process.store.lose_requests)()
    with pytest.raises(StoreUnavailableError):
        process.notifier.poll()
    elsewhere.update_state_unconditionally(Add())
    process.notifier.poll()
    assert process.values == [0, 1, 2]
    process.notifier.close()
    assert start().values == []


def test_a_log_that_cannot_be_read_now_is_read_later(start: Start, elsewhere: StateSynchronizer[Counter]) -> None:
    start().notifier.close()
    elsewhere.update_state_unconditionally(Add())
    process = Process(elsewhere.store, ManualClock())

    def fail(operation: Operation) -> None:
        if operation.verb in ("read", "attributes") and process.store.count("append"):
            raise StoreUnavailableError("away")

    process.synchronizer.timeout = 0.0
    process.store.before = fail
    process.listen()
    assert process.values == []
    process.store.before = None
    process.notifier.poll()
    assert process.values == [1]


def test_no_call_begins_when_the_role_may_be_over(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    start().notifier.close()
    elsewhere.update_state_unconditionally(Add())
    process = Process(elsewhere.store, manual_clock)

    def read_slowly(operation: Operation) -> None:
        if operation.verb == "read":
            manual_clock.advance(0.8 * TIMEOUT_SECONDS)

    process.store.before = read_slowly
    process.listen()
    assert process.values == []
    process.store.before = None
    process.notifier.poll()
    assert process.values == [1]


def test_what_a_newer_release_remembers_stops_this_one_and_no_other(start: Start, manual_clock: ManualClock) -> None:
    process = start()
    heard = process.synchronizer.store.attributes(process.synchronizer.segment)[ATTRIBUTE]
    process.notifier.close()
    newer = RoleValue(payload=(*RoleValue.decode(heard).payload, "something new")).encode()
    changes = {ATTRIBUTE: AttributeChange(ANY, newer)}
    process.store.append(process.synchronizer.segment, b"", attributes=changes)
    other = start()
    with pytest.raises(UnknownUpdateError, match="deploy that release here"):
        other.notifier.poll()
    role = RoleValue.decode(process.store.attributes(process.synchronizer.segment)[ATTRIBUTE])
    assert (role.holder_id, role.payload[-1]) == (b"", "something new")


@pytest.mark.usefixtures("patient_close")
def test_ending_waits_for_no_store(store: SegmentStore) -> None:
    failing = FailingStore(store)
    here, heard = counter(failing), Heard()
    notifier = CountNotifier(here, interval_seconds=60)
    notifier.register_listener(heard, durable="sizer")
    heard.wait_for(0)
    failing.unavailable = True
    began = here.clock.monotonic()
    notifier.close()
    assert here.clock.monotonic() - began < PATIENCE_SECONDS / 2  # a call that does not return is waited for
    here.close()


def test_a_new_name_hears_every_change_since_it_was_registered(
    start: Start, elsewhere: StateSynchronizer[Counter], manual_clock: ManualClock
) -> None:
    """Also where it gets the role only later."""
    process = Process(elsewhere.store, manual_clock)
    process.store.fail_appends()
    process.listen()
    for _ in range(2):
        elsewhere.update_state_unconditionally(Add())
    process.synchronizer.fetch_updates()
    assert process.values == []
    process.notifier.poll()
    assert process.values == [0, 1, 2]
    process.notifier.close()


def test_the_progress_of_a_listener_is_written_and_read_as_in_the_first_release() -> None:
    heard = HeardUpTo(120, 1, ALL, missed=True)
    value = RoleValue(b"\x00holder\xff", 3, heard)
    stored = golden("durable-listener-v1.msgpack", value.encode())
    assert stored == value.encode()
    assert HeardUpTo(*RoleValue.decode(stored).payload) == heard


# ---------------------------------------------------------------------- in the background


@pytest.mark.stores(round_robin=True)
def test_in_the_background_it_hears_all_in_order(
    notifier: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()
    notifier.register_listener(heard, durable="sizer")
    for value in range(1, 20):
        elsewhere.update_state_unconditionally(Add())
        if value % 5 == 0:
            heard.wait_for(value)
    assert heard.wait_for(19) == list(range(20))
    assert heard.threads == {"listener of CountNotifier/sizer of visits"}


def test_a_call_that_takes_long_keeps_its_role(
    visits: StateSynchronizer[Counter], elsewhere: StateSynchronizer[Counter]
) -> None:
    """Longer than a process that has died would keep it."""
    entered, let_go = threading.Event(), threading.Event()
    second = Heard()

    def slow(notification: Counted) -> None:
        entered.set()
        let_go.wait(PATIENCE_SECONDS)

    def counter() -> int:
        return RoleValue.decode(visits.store.attributes(visits.segment)[ATTRIBUTE]).counter

    with (
        # It renews more often than the other one needs: a busy machine may pause it for some seconds.
        CountNotifier(visits, role_timeout_seconds=1.0) as one,
        CountNotifier(elsewhere, role_timeout_seconds=6.0) as other,
    ):
        unregister = one.register_listener(slow, durable="sizer")
        assert entered.wait(PATIENCE_SECONDS)
        other.register_listener(second, durable="sizer")
        clock = visits.clock
        began = clock.monotonic()
        until(lambda: clock.monotonic() - began > 9.0, "that is longer")
        unregister()  # it waits until the call has returned
        seen = counter()
        until(lambda: counter() > seen + 1, "it is renewed meanwhile")
        assert second.values == []
        let_go.set()
        elsewhere.update_state_unconditionally(Add())
        assert second.wait_for(1) == [1]


def test_what_was_heard_while_another_one_took_the_role_is_forgotten(
    store: SegmentStore, elsewhere: StateSynchronizer[Counter]
) -> None:
    entered, let_go = threading.Event(), threading.Event()
    first, second = Heard(), Heard()
    failing = FailingStore(store)

    def slow(notification: Counted) -> None:
        first(notification)
        if notification.value == 1:
            entered.set()
            let_go.wait(PATIENCE_SECONDS)

    here = counter(failing)
    with (
        CountNotifier(here, role_timeout_seconds=600.0) as one,  # it does not take for dead the one that renews late
        CountNotifier(elsewhere, role_timeout_seconds=0.5) as other,
    ):
        one.register_listener(slow, durable="sizer")
        elsewhere.update_state_unconditionally(Add())
        assert entered.wait(PATIENCE_SECONDS)
        failing.unavailable = True
        other.register_listener(second, durable="sizer")
        elsewhere.update_state_unconditionally(Add())
        assert second.wait_for(2) == [1, 2]
        failing.unavailable = False
        listening = one._durables[ATTRIBUTE]
        listening._timeout_seconds = 601.0  # after a change its next look renews the role
        listening.look()
        until(lambda: listening._heard is None, "the first one knows that it has lost its role")
        other.unregister_all_listeners()

        def has_it_again() -> bool:
            listening.look()
            return listening._role.valid_until > 0

        until(has_it_again, "the first one has it again")
        let_go.set()
        elsewhere.update_state_unconditionally(Add())
        assert first.wait_for(3) == [0, 1, 3]
    here.close()


def test_a_coroutine_has_heard_when_it_has_returned(visits: StateSynchronizer[Counter]) -> None:
    told: list[int] = []

    async def hear(notification: Counted) -> None:
        await asyncio.sleep(0)
        told.append(notification.value)
        if told == [0]:
            raise ValueError("it fails")

    async def main() -> None:
        with CountNotifier(visits, interval_seconds=60) as notifier:
            notifier.register_listener(hear, durable="sizer")
            visits.update_state_unconditionally(Add())
            async with asyncio.timeout(PATIENCE_SECONDS):
                while told != [0, 0, 1]:
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(notifier.close)  # here it could not wait for the call, which may be about to return

    asyncio.run(main())
    heard = Heard()
    with CountNotifier(visits, interval_seconds=60) as notifier:
        notifier.register_listener(heard, durable="sizer")
        visits.update_state_unconditionally(Add())
        assert heard.wait_for(2) == [2]


def test_a_coroutine_that_closes_its_notifier_has_heard_and_the_next_one_goes_on_at_once(
    visits: StateSynchronizer[Counter],
) -> None:
    returned = asyncio.Event()

    async def main() -> None:
        notifier = CountNotifier(visits, interval_seconds=60, role_timeout_seconds=600)

        async def hear(notification: Counted) -> None:
            notifier.close()
            await asyncio.sleep(0)
            returned.set()

        notifier.register_listener(hear, durable="sizer")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await returned.wait()
            while [thread.name for thread in threading.enumerate() if "sizer" in thread.name]:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    heard = Heard()
    with CountNotifier(visits, interval_seconds=60, role_timeout_seconds=600) as notifier:
        notifier.register_listener(heard, durable="sizer")
        visits.update_state_unconditionally(Add())
        assert heard.wait_for(1) == [1]


def test_its_threads_end_with_it(notifier: CountNotifier) -> None:
    heard = Heard()
    unregister = notifier.register_listener(heard, durable="sizer")
    heard.wait_for(0)
    unregister()

    def ended() -> bool:
        return not [thread.name for thread in threading.enumerate() if "sizer" in thread.name]

    until(ended, "the threads have ended")
    notifier.register_listener(heard, durable="sizer")
    notifier.close()
    assert ended()
