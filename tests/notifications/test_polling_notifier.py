"""What a listener hears, on a clock that stands still: every step is made by `poll` in the test's own thread."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from notifications import PRESENT_VALUE, SEVERAL_CHANGES, Change, Notification, PollingNotifier
from synchronizer import (
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    ManualClock,
    SegmentStore,
    StateSynchronizer,
)
from tests.notifications.counting import Add, Counted, Counter, CountNotifier, Heard, counter

pytestmark = pytest.mark.stores(round_robin=True)


def test_a_new_listener_hears_the_present_value_once(manual: CountNotifier) -> None:
    heard = Heard()
    manual.register_listener(heard)
    assert heard.values == [0]
    assert heard.notifications[0].cause == PRESENT_VALUE
    manual.poll()
    manual.poll()
    assert heard.values == [0]


def test_every_change_between_two_polls_is_told_once_in_order(
    manual: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()
    manual.register_listener(heard)
    for amount in (5, -5, 3):  # the second takes back the first
        elsewhere.update_state_unconditionally(Add(amount=amount))
    manual.poll()
    assert heard.values == [0, 5, 0, 3]
    revisions = [n.revision for n in heard.notifications]
    assert revisions == sorted(set(revisions))


def test_what_cannot_be_called_is_no_listener(manual: CountNotifier) -> None:
    listener: Any = None
    with pytest.raises(InvalidArgumentError, match="must be a function"):
        manual.register_listener(listener)


def test_a_change_made_through_the_borrowed_synchronizer_is_told_as_well(manual: CountNotifier) -> None:
    heard = Heard()
    manual.register_listener(heard)
    manual.synchronizer.update_state_unconditionally(Add())
    manual.poll()
    assert heard.values == [0, 1]


def test_a_notification_carries_source_revision_cause_and_time(
    manual: CountNotifier, manual_clock: ManualClock
) -> None:
    heard = Heard()
    manual.register_listener(heard)
    manual.synchronizer.update_state_unconditionally(Add(), Add())
    manual.poll()
    told = heard.notifications[-1]
    assert told.source == "visits"
    assert told.revision == manual.synchronizer.revision
    assert told.cause == "add, add"
    assert told.seen_at.timestamp() == pytest.approx(manual_clock.time())
    assert told.seen_at.utcoffset() is not None
    assert not told.gap


def test_a_late_listener_hears_the_present_value_and_then_what_the_others_hear(
    manual: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    early, late = Heard(), Heard()
    manual.register_listener(early)
    elsewhere.update_state_unconditionally(Add())
    manual.poll()
    elsewhere.update_state_unconditionally(Add())
    manual.register_listener(late)
    assert late.values == [1]
    elsewhere.update_state_unconditionally(Add())
    manual.poll()
    assert late.values == [1, 2, 3]
    assert early.values == [0, 1, 2, 3]


def test_what_was_applied_but_not_polled_yet_is_not_repeated_to_a_late_listener(manual: CountNotifier) -> None:
    early, late = Heard(), Heard()
    manual.register_listener(early)
    manual.synchronizer.update_state_unconditionally(Add())  # applied here, told nobody yet
    manual.register_listener(late)
    assert late.values == [1]
    manual.poll()
    assert late.values == [1]
    assert early.values == [0, 1]


def test_changes_that_compaction_removed_are_one_notification_with_a_gap(
    manual: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()
    manual.register_listener(heard)
    for _ in range(2):  # the log is truncated to the compaction before the last
        for _ in range(3):
            elsewhere.update_state_unconditionally(Add())
        elsewhere.compact()
    elsewhere.update_state_unconditionally(Add())
    manual.poll()
    assert heard.values == [0, 6, 7]
    assert [n.gap for n in heard.notifications] == [False, True, False]
    assert heard.notifications[1].cause == SEVERAL_CHANGES


def test_registering_again_changes_nothing(manual: CountNotifier) -> None:
    heard = Heard()
    manual.register_listener(heard)
    unregister = manual.register_listener(heard)
    manual.synchronizer.update_state_unconditionally(Add())
    manual.poll()
    assert heard.values == [0, 1]
    unregister()
    manual.synchronizer.update_state_unconditionally(Add())
    manual.poll()
    assert heard.values == [0, 1]


def test_an_unregistered_listener_hears_nothing_more_and_unregistering_twice_is_no_error(manual: CountNotifier) -> None:
    gone, stays = Heard(), Heard()
    unregister = manual.register_listener(gone)
    manual.register_listener(stays)
    unregister()
    unregister()
    manual.unregister_listener(gone)
    manual.synchronizer.update_state_unconditionally(Add())
    manual.poll()
    assert gone.values == [0]
    assert stays.values == [0, 1]


def test_what_cannot_be_a_listener_is_not_unregistered_without_a_word(manual: CountNotifier) -> None:
    heard = Heard()
    unregister = manual.register_listener(heard)
    with pytest.raises(InvalidArgumentError, match="call it if register_listener returned it"):
        manual.unregister_listener(unregister)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="must be a function"):
        manual.unregister_listener("heard")  # type: ignore[arg-type]
    manual.synchronizer.update_state_unconditionally(Add())
    manual.poll()
    assert heard.values == [0, 1]
    manual.unregister_listener(print)  # it was never registered


@pytest.mark.parametrize("durable", [None, "sizer"])
def test_a_listener_that_takes_no_notification_is_refused(manual: CountNotifier, durable: str | None) -> None:
    for listener in (lambda: None, lambda notification, gap: None):
        with pytest.raises(InvalidArgumentError, match=r"called as listener\(notification\)"):
            manual.register_listener(listener, durable=durable)  # type: ignore[arg-type]
    for listener in (lambda *heard: None, lambda notification, gap=False: None, [].append, type):
        manual.register_listener(listener, durable=durable)()


def test_a_listener_that_comes_back_after_the_last_one_left_hears_the_present_value(
    manual: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()
    manual.register_listener(heard)()
    elsewhere.update_state_unconditionally(Add())
    manual.poll()
    assert heard.values == [0]
    manual.register_listener(heard)
    elsewhere.update_state_unconditionally(Add())
    manual.poll()
    assert heard.values == [0, 1, 2]


def test_a_listener_may_unregister_itself_and_register_another(manual: CountNotifier) -> None:
    heard = Heard()

    def once(notification: Counted) -> None:
        manual.unregister_listener(once)
        manual.register_listener(heard)

    manual.register_listener(once)
    manual.synchronizer.update_state_unconditionally(Add())
    manual.poll()
    assert heard.values == [0, 1]


def test_a_listener_that_polls_hears_everything_once_and_in_order(
    manual: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()

    def listener(notification: Counted) -> None:
        if notification.value < 3:
            elsewhere.update_state_unconditionally(Add())
            manual.poll()
        heard(notification)

    manual.register_listener(listener)
    assert heard.values == [0, 1, 2, 3]


def test_a_failing_listener_is_counted_and_stops_neither_the_others_nor_itself(
    manual: CountNotifier, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, tried = Heard(), Heard(), Heard()

    def failing(notification: Counted) -> None:
        tried(notification)
        raise RuntimeError("this listener is broken")

    for listener in (before, failing, after):
        manual.register_listener(listener)
    manual.synchronizer.update_state_unconditionally(Add())
    manual.poll()
    assert before.values == after.values == tried.values == [0, 1]
    assert manual.listener_failures == 2
    assert "this listener is broken" in caplog.text


def test_a_lambda_a_bound_method_and_a_decorated_function_are_held_strongly(manual: CountNotifier) -> None:
    heard: list[int] = []

    class Owner:
        def listener(self, notification: Counted) -> None:
            heard.append(notification.value)

    manual.register_listener(lambda n: heard.append(n.value))
    manual.register_listener(Owner().listener)

    @manual.listen
    def decorated(notification: Counted) -> None:
        heard.append(notification.value)

    alive = weakref.ref(decorated)
    del decorated
    gc.collect()
    heard.clear()
    manual.synchronizer.update_state_unconditionally(Add())
    manual.poll()
    assert heard == [1, 1, 1]
    assert alive() is not None


def test_a_bound_method_is_recognised_when_it_is_unregistered(manual: CountNotifier) -> None:
    heard: list[int] = []

    class Owner:
        def listener(self, notification: Counted) -> None:
            heard.append(notification.value)

    owner = Owner()
    manual.register_listener(owner.listener)
    manual.unregister_listener(owner.listener)
    manual.synchronizer.update_state_unconditionally(Add())
    manual.poll()
    assert heard == [0]


def test_wait_returns_the_present_value_first_and_then_every_change(
    manual: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    assert manual.wait(timeout=0).value == 0
    for _ in range(2):
        elsewhere.update_state_unconditionally(Add())
    assert [manual.wait(timeout=0).value, manual.wait(timeout=0).value] == [1, 2]
    with pytest.raises(DeadlineExceededError):
        manual.wait(timeout=0)
    elsewhere.update_state_unconditionally(Add())
    assert manual.wait(timeout=0).value == 3


def test_wait_and_a_listener_do_not_take_notifications_from_each_other(manual: CountNotifier) -> None:
    heard = Heard()
    manual.wait(timeout=0)
    manual.register_listener(heard)
    manual.synchronizer.update_state_unconditionally(Add())
    assert manual.wait(timeout=0).value == 1
    assert heard.values == [0, 1]


class ThresholdNotifier(CountNotifier):
    """Tells nothing at first, and fails as long as it is told to."""

    broken = False

    def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
        if after.value >= 2:
            yield Counted(change=change, value=after.value)
        if self.broken:
            raise RuntimeError("detect is broken")


@pytest.fixture
def threshold(store: SegmentStore, manual_clock: ManualClock) -> Iterable[ThresholdNotifier]:
    with ThresholdNotifier(counter(store, clock=manual_clock)) as notifier:
        yield notifier


def test_a_notifier_with_nothing_to_tell_of_the_present_value_tells_nothing(threshold: ThresholdNotifier) -> None:
    heard = Heard()
    threshold.register_listener(heard)
    threshold.synchronizer.update_state_unconditionally(Add())
    threshold.poll()
    assert heard.values == []
    threshold.synchronizer.update_state_unconditionally(Add())
    threshold.poll()
    assert heard.values == [2]


def test_a_change_on_which_detect_failed_is_told_later_and_not_twice(threshold: ThresholdNotifier) -> None:
    heard = Heard()
    threshold.register_listener(heard)
    threshold.broken = True
    threshold.synchronizer.update_state_unconditionally(Add(amount=2))
    with pytest.raises(RuntimeError, match="detect is broken"):
        threshold.poll()
    assert heard.values == []
    threshold.broken = False
    threshold.poll()
    threshold.poll()
    assert [(n.value, n.gap, n.cause) for n in heard.notifications] == [(2, False, "add")]


def test_changes_on_which_detect_failed_are_covered_by_a_gap_once_others_follow(threshold: ThresholdNotifier) -> None:
    heard = Heard()
    threshold.register_listener(heard)
    threshold.broken = True
    threshold.synchronizer.update_state_unconditionally(Add(amount=2))
    with pytest.raises(RuntimeError):
        threshold.poll()
    threshold.broken = False
    threshold.synchronizer.update_state_unconditionally(Add())
    threshold.synchronizer.update_state_unconditionally(Add())
    threshold.poll()
    assert [(n.value, n.gap) for n in heard.notifications] == [(3, True), (4, False)]


def test_a_listener_for_whom_the_present_value_cannot_be_found_is_not_registered(threshold: ThresholdNotifier) -> None:
    heard = Heard()
    threshold.broken = True
    with pytest.raises(RuntimeError, match="detect is broken"):
        threshold.register_listener(heard)
    threshold.broken = False
    threshold.synchronizer.update_state_unconditionally(Add(amount=2))
    threshold.poll()
    assert heard.values == []


class RecordingNotifier(CountNotifier):
    """Adds 10 to the state before the first poll, and 100 more if it fails after that."""

    failing = False

    def before_poll(self) -> None:
        if self.synchronizer.state.value < 10:
            self.synchronizer.update_state_unconditionally(Add(amount=10))
        if self.failing:
            raise RuntimeError("before_poll is broken")


def test_what_before_poll_records_is_told_by_that_poll_even_if_it_fails_then(
    store: SegmentStore, manual_clock: ManualClock
) -> None:
    heard = Heard()
    with RecordingNotifier(counter(store, clock=manual_clock)) as notifier:
        notifier.register_listener(heard)
        notifier.failing = True
        with pytest.raises(RuntimeError, match="before_poll is broken"):
            notifier.poll()
    assert heard.values == [0, 10]


def test_a_state_that_was_deleted_and_begun_again_is_told_when_it_begins(
    manual: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()
    manual.register_listener(heard)
    elsewhere.delete()
    manual.poll()  # there is nothing to tell, which is no failure
    elsewhere.initialize(Counter(value=7))
    manual.poll()
    manual.poll()
    assert [(n.value, n.cause) for n in heard.notifications] == [(0, PRESENT_VALUE), (7, PRESENT_VALUE)]


@pytest.mark.parametrize("polls_while_deleted", [True, False])
def test_changes_that_went_with_a_deleted_state_are_covered_by_a_gap(
    manual: CountNotifier, elsewhere: StateSynchronizer[Counter], polls_while_deleted: bool
) -> None:
    heard = Heard()
    manual.register_listener(heard)
    elsewhere.update_state_unconditionally(Add())
    elsewhere.delete()
    if polls_while_deleted:
        manual.poll()
    elsewhere.initialize(Counter(value=7))
    elsewhere.update_state_unconditionally(Add())
    elsewhere.compact()
    elsewhere.update_state_unconditionally(Add())
    elsewhere.compact()
    manual.poll()
    assert [(n.value, n.gap) for n in heard.notifications] == [(0, False), (9, True)]


def test_changes_that_went_with_a_deletion_are_covered_by_the_first_value_after_it(
    manual: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()
    manual.register_listener(heard)
    elsewhere.update_state_unconditionally(Add())
    elsewhere.delete()
    manual.poll()
    elsewhere.initialize(Counter(value=7))
    elsewhere.update_state_unconditionally(Add())
    manual.poll()
    assert [(n.value, n.gap) for n in heard.notifications] == [(0, False), (7, True), (8, False)]


def test_with_a_manual_clock_nothing_runs_in_the_background(manual: CountNotifier) -> None:
    threads = set(threading.enumerate())
    heard = Heard()
    manual.register_listener(heard)
    assert heard.threads == {threading.current_thread().name}
    assert set(threading.enumerate()) == threads


def test_a_closed_notifier_refuses_listeners_and_polls_and_leaves_the_synchronizer_open(manual: CountNotifier) -> None:
    manual.register_listener(Heard())
    manual.close()
    manual.close()
    with pytest.raises(ClosedError):
        manual.register_listener(Heard())
    with pytest.raises(ClosedError):
        manual.poll()
    with pytest.raises(ClosedError):
        manual.wait(timeout=0)
    assert manual.synchronizer.update_state_unconditionally(Add()).value == 1


@pytest.mark.parametrize("wrong", [{"interval_seconds": 0}, {"interval_seconds": -1}, {"queue_size": 0}])
def test_what_cannot_be_polled_or_queued_is_refused(visits: StateSynchronizer[Counter], wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        CountNotifier(visits, **wrong)  # type: ignore[arg-type]


class Milestone(Notification):
    value: int


class MilestoneNotifier(PollingNotifier[Counter, Milestone]):
    def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Milestone]:
        if after.value >= 100:
            yield Milestone(change=change, value=after.value)


def test_a_notifier_of_ones_own_is_one_method(store: SegmentStore, manual_clock: ManualClock) -> None:
    heard: list[Milestone] = []
    with MilestoneNotifier(counter(store, clock=manual_clock)) as notifier:
        notifier.register_listener(heard.append)
        for amount in (99, 1, 5):
            notifier.synchronizer.update_state_unconditionally(Add(amount=amount))
        notifier.poll()
    assert [milestone.value for milestone in heard] == [100, 105]


class ChangeNotifier(CountNotifier):
    """Tells a value when it is another one than before."""

    def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
        if before is None or before.value != after.value:
            yield Counted(change=change, value=after.value)


def test_a_gap_in_which_nothing_is_told_is_told_of_by_the_next_notification(
    store: SegmentStore, manual_clock: ManualClock, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()
    with ChangeNotifier(counter(store, clock=manual_clock)) as notifier:
        notifier.register_listener(heard)
        for _ in range(2):  # there and back, and compacted past what this process has seen
            elsewhere.update_state_unconditionally(Add(amount=1))
            elsewhere.update_state_unconditionally(Add(amount=-1))
            elsewhere.compact()
        notifier.poll()
        for amount in (5, 1):
            elsewhere.update_state_unconditionally(Add(amount=amount))
            notifier.poll()
    told = [(n.value, n.gap, n.cause) for n in heard.notifications]
    assert told == [(0, False, PRESENT_VALUE), (5, True, "add"), (6, False, "add")]
