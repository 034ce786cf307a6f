"""Notifiers as applications run them: real threads, a real clock, and changes from another replica."""

from __future__ import annotations

import asyncio
import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import apscheduler.schedulers.base
import pytest
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from notifications import Change, scheduler
from notifications.scheduler import SHARED
from synchronizer import (
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    SegmentStore,
    StateSynchronizer,
    SystemClock,
)
from synchronizer.testing import FailingStore
from tests.notifications.counting import Add, Counted, Counter, CountNotifier, Heard, counter
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.stores(round_robin=True)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until(lambda: _ours(before) == [], "the notifier's threads have ended")


def _ours(before: set[threading.Thread]) -> list[str]:
    names = [t.name for t in threading.enumerate() if t not in before]
    return [n for n in names if n.startswith(("listener of", "waker of", "polls of", "APScheduler"))]


def test_the_growth_of_the_log_wakes_the_notifier_long_before_its_interval(
    notifier: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()
    notifier.register_listener(heard)
    for amount in range(1, 4):
        elsewhere.update_state_unconditionally(Add(amount=1))
        heard.wait_for(amount)
    assert heard.values == [0, 1, 2, 3]


def test_a_change_made_through_the_borrowed_synchronizer_wakes_the_notifier_too(notifier: CountNotifier) -> None:
    heard = Heard()
    notifier.register_listener(heard)
    for value in range(1, 200):
        notifier.synchronizer.update_state_unconditionally(Add())
        if value % 20 == 0:
            heard.wait_for(value)
    assert heard.wait_for(199) == list(range(200))


def test_a_change_that_is_made_while_others_are_being_told_is_told_at_once(visits: StateSynchronizer[Counter]) -> None:
    """The worst moment: it is applied here, so the log does not look longer, and the feed was drained before it."""

    class Busy(CountNotifier):
        def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
            if before is not None and after.value < 5:
                self.synchronizer.update_state_unconditionally(Add())
            return super().detect(before, after, change)

    heard = Heard()
    with Busy(visits, interval_seconds=60) as notifier:
        notifier.register_listener(heard)
        visits.update_state_unconditionally(Add())
        assert heard.wait_for(5) == [0, 1, 2, 3, 4, 5]


def test_without_help_from_the_store_a_change_is_told_after_the_interval(
    store: SegmentStore, elsewhere: StateSynchronizer[Counter]
) -> None:
    deaf = FailingStore(store)
    deaf.miss_changes(1_000_000)
    heard = Heard()
    with CountNotifier(counter(deaf), interval_seconds=0.05) as notifier:
        notifier.register_listener(heard)
        heard.wait_for(0)
        elsewhere.update_state_unconditionally(Add())
        heard.wait_for(1)


def test_changes_during_an_outage_of_the_store_are_told_one_by_one_after_it(
    store: SegmentStore, elsewhere: StateSynchronizer[Counter], caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailingStore(store)
    heard = Heard()
    with CountNotifier(counter(failing, timeout=0.05), interval_seconds=0.05) as notifier:
        notifier.register_listener(heard)
        heard.wait_for(0)
        failing.unavailable = True
        for _ in range(3):
            elsewhere.update_state_unconditionally(Add())
        until(lambda: "polls of CountNotifier of visits fail (1 in a row)" in caplog.text, "the failure is logged")
        failing.unavailable = False
        assert heard.wait_for(3) == [0, 1, 2, 3]


def test_a_slow_listener_stops_neither_the_polls_nor_the_others_and_learns_of_its_gap(
    visits: StateSynchronizer[Counter], elsewhere: StateSynchronizer[Counter]
) -> None:
    slow, quick = Heard(), Heard()
    go_on = threading.Event()

    def listener(notification: Counted) -> None:
        slow(notification)
        go_on.wait(PATIENCE_SECONDS)

    with CountNotifier(visits, interval_seconds=60, queue_size=3) as notifier:
        notifier.register_listener(listener)
        slow.wait_for(0)
        notifier.register_listener(quick)
        for value in range(1, 9):
            elsewhere.update_state_unconditionally(Add())
            quick.wait_for(value)
        go_on.set()
        slow.wait_for(8)
    assert quick.values == list(range(9))
    assert [(n.value, n.gap) for n in slow.notifications] == [(0, False), (1, False), (2, False), (8, True)]


def test_a_listener_is_in_one_call_at_a_time_and_in_its_own_thread(
    notifier: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    first, second = Heard(), Heard()
    inside = threading.Lock()
    overlaps: list[Counted] = []

    def exclusive(notification: Counted) -> None:
        if not inside.acquire(blocking=False):
            overlaps.append(notification)
            return
        time.sleep(0.002)
        inside.release()
        first(notification)

    notifier.register_listener(exclusive)
    notifier.register_listener(second)
    threads = [threading.Thread(target=notifier.poll) for _ in range(8)]
    for _ in range(20):
        elsewhere.update_state_unconditionally(Add())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.wait_for(20) == second.wait_for(20) == list(range(21))
    assert overlaps == []
    assert threading.current_thread().name not in first.threads | second.threads


def test_listeners_that_register_while_the_state_changes_miss_and_repeat_nothing(
    notifier: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    listeners: list[Heard] = []
    done = threading.Event()

    def change(replica: StateSynchronizer[Counter]) -> None:
        for _ in range(100):
            replica.update_state_unconditionally(Add())

    writers = [threading.Thread(target=change, args=(replica,)) for replica in (elsewhere, notifier.synchronizer)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers) and len(listeners) < 50:
        listeners.append(Heard())
        notifier.register_listener(listeners[-1])
        done.wait(0.002)
    for writer in writers:
        writer.join()
    for heard in listeners:
        values = heard.wait_for(200)
        assert values == list(range(values[0], 201))


def test_a_registration_during_a_poll_does_not_overtake_what_the_poll_is_telling(
    visits: StateSynchronizer[Counter],
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(CountNotifier):
        def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
            if before is not None and after.value == 1:
                inside.set()
                go_on.wait(PATIENCE_SECONDS)
            return super().detect(before, after, change)

    early, late = Heard(), Heard()
    with Slow(visits, interval_seconds=60) as notifier:
        notifier.register_listener(early)
        visits.update_state_unconditionally(Add())
        assert inside.wait(PATIENCE_SECONDS)
        visits.update_state_unconditionally(Add())
        opening = threading.Timer(0.1, go_on.set)
        opening.start()
        notifier.register_listener(late)
        opening.join()
        assert early.wait_for(2) == [0, 1, 2]
        assert late.wait_for(2) == [2]


def test_polling_starts_again_after_the_last_listener_left(
    notifier: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    before = set(threading.enumerate())
    heard = Heard()
    for value in range(1, 4):
        notifier.register_listener(heard)
        elsewhere.update_state_unconditionally(Add())
        heard.wait_for(value)
        notifier.unregister_all_listeners()
        until(lambda: _ours(before) == [], "nothing runs for nobody")
    assert heard.values == [0, 1, 1, 2, 2, 3]


def test_a_registration_that_fails_leaves_nothing_running(visits: StateSynchronizer[Counter]) -> None:
    class Broken(CountNotifier):
        def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
            raise RuntimeError("detect is broken")

    before = set(threading.enumerate())
    with Broken(visits) as notifier:
        with pytest.raises(RuntimeError):
            notifier.register_listener(Heard())
        until(lambda: _ours(before) == [], "nothing runs for nobody")


class FragileNotifier(CountNotifier):
    """Fails as often as it is told to, and remembers when it was polled."""

    failures_to_come = 0

    def __init__(self, visits: StateSynchronizer[Counter], *, interval_seconds: float) -> None:
        super().__init__(visits, interval_seconds=interval_seconds)
        self.polled_at: list[float] = []

    def before_poll(self) -> None:
        self.polled_at.append(time.monotonic())
        if self.failures_to_come > 0:
            self.failures_to_come -= 1
            raise ConnectionError("the sky is falling")


@pytest.mark.unexpected_errors
def test_failing_polls_are_logged_and_repeated_after_growing_pauses(
    visits: StateSynchronizer[Counter], elsewhere: StateSynchronizer[Counter], caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()
    caplog.set_level(logging.INFO, logger="notifications")
    with FragileNotifier(visits, interval_seconds=0.02) as notifier:
        notifier.failures_to_come = 5
        notifier.register_listener(heard)
        until(lambda: notifier.failures_to_come == 0 and len(notifier.polled_at) > 6, "the polls recover")
        elsewhere.update_state_unconditionally(Add())
        heard.wait_for(1)
        polls = len(notifier.polled_at)
        until(lambda: len(notifier.polled_at) > polls + 2, "the polls go on")
    pauses = [later - earlier for earlier, later in zip(notifier.polled_at, notifier.polled_at[1:], strict=False)]
    for number in range(5):
        assert pauses[number] >= 0.02 * 2**number
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        f"polls of FragileNotifier of visits fail ({number} in a row); the next is in {pause} s: the sky is falling"
        for number, pause in ((1, "0.02"), (2, "0.04"), (4, "0.16"))
    ]
    assert caplog.text.count("succeed again, after 5 failures") == caplog.text.count("succeed again") == 1


def test_a_poll_that_takes_longer_than_the_interval_is_not_complained_about(
    visits: StateSynchronizer[Counter], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    go_on = threading.Event()
    polls = []

    class SlowNotifier(CountNotifier):
        def before_poll(self) -> None:
            polls.append(threading.current_thread().name)
            go_on.wait(0.3)

    with SlowNotifier(visits, interval_seconds=0.02) as notifier:
        notifier.register_listener(Heard())
        until(lambda: any(name.startswith("polls of") for name in polls), "APScheduler polls")
        until(lambda: len(polls) > 3, "and again")
        go_on.set()
    assert [r for r in caplog.records if "apscheduler" in r.name] == []


def test_what_grows_and_is_not_taken_up_does_not_make_the_waker_spin(visits: StateSynchronizer[Counter]) -> None:
    polls = 0

    class Watching(CountNotifier):
        def before_poll(self) -> None:
            nonlocal polls
            polls += 1

        def watched(self) -> dict[str, int]:
            return {"something": -1}

    visits.store.create("something")
    pause = threading.Event()
    began = time.monotonic()
    with Watching(visits, interval_seconds=60) as notifier:
        notifier.register_listener(Heard())
        until(lambda: polls >= 2, "the waker was woken")
        pause.wait(0.3)
        told, seconds = polls, time.monotonic() - began
    assert told <= 8 + 2 * seconds  # each after a pause twice as long as the one before, up to half a second


def test_a_further_segment_that_is_watched_wakes_the_notifier(visits: StateSynchronizer[Counter]) -> None:
    """As a group's notifier does with the metadata of its streams: what was seen there is recorded first."""
    store = visits.store
    store.create("something")

    class Watching(CountNotifier):
        length = 0

        def before_poll(self) -> None:
            length = store.info("something").length
            if length > self.length:
                self.synchronizer.update_state_unconditionally(Add(amount=length - self.length))
                self.length = length

        def watched(self) -> dict[str, int]:
            return {"something": self.length}

    heard = Heard()
    with Watching(visits, interval_seconds=60) as notifier:
        notifier.register_listener(heard)
        heard.wait_for(0)
        store.append("something", b"12345")
        heard.wait_for(5)
        store.append("something", b"67")
        heard.wait_for(7)
    assert heard.values == [0, 5, 7]


def test_a_notifier_that_cannot_be_woken_says_so_once_and_polls_at_its_interval(
    visits: StateSynchronizer[Counter], elsewhere: StateSynchronizer[Counter], caplog: pytest.LogCaptureFixture
) -> None:
    class Watching(CountNotifier):
        def watched(self) -> dict[str, int]:
            return {"a segment that does not exist": 0}

    heard = Heard()
    with Watching(visits, interval_seconds=0.05) as notifier:
        notifier.register_listener(heard)
        for value in range(1, 4):
            elsewhere.update_state_unconditionally(Add())
            heard.wait_for(value)
        until(lambda: "cannot wait for the store now" in caplog.text, "it says so")
    assert caplog.text.count("cannot wait for the store now") == 1


def test_wait_returns_as_soon_as_there_is_something_to_tell(
    notifier: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    assert notifier.wait(timeout=PATIENCE_SECONDS).value == 0
    later = threading.Timer(0.05, lambda: elsewhere.update_state_unconditionally(Add()))
    later.start()
    assert notifier.wait(timeout=PATIENCE_SECONDS).value == 1
    later.join()
    began = time.thread_time()
    with pytest.raises(DeadlineExceededError):
        notifier.wait(timeout=0.3)
    assert time.thread_time() - began < 0.1


def test_closing_ends_a_wait_in_another_thread(notifier: CountNotifier) -> None:
    notifier.wait(timeout=PATIENCE_SECONDS)
    errors: list[BaseException] = []

    def waiting() -> None:
        try:
            notifier.wait(timeout=PATIENCE_SECONDS)
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=waiting)
    thread.start()
    notifier.close()
    thread.join(PATIENCE_SECONDS)
    assert len(errors) == 1


def test_a_listener_may_close_the_notifier(notifier: CountNotifier) -> None:
    closed = threading.Event()

    def listener(notification: Counted) -> None:
        notifier.close()
        closed.set()

    notifier.register_listener(listener)
    assert closed.wait(PATIENCE_SECONDS)


@pytest.mark.usefixtures("patient_close")
def test_closing_waits_for_the_call_that_a_listener_is_in(notifier: CountNotifier) -> None:
    began, finished = threading.Event(), threading.Event()

    def listener(notification: Counted) -> None:
        began.set()
        time.sleep(0.1)
        finished.set()

    notifier.register_listener(listener)
    assert began.wait(PATIENCE_SECONDS)
    notifier.close()
    assert finished.is_set()


@pytest.mark.usefixtures("patient_close")
@pytest.mark.parametrize("interval_seconds", [60, 0.02])
def test_closing_waits_for_the_poll_that_runs_and_is_silent_about_its_end(
    visits: StateSynchronizer[Counter], caplog: pytest.LogCaptureFixture, interval_seconds: float
) -> None:
    began, finished = threading.Event(), threading.Event()

    class Interrupted(CountNotifier):
        def before_poll(self) -> None:
            # The waker polls first; with the short interval it is APScheduler that is interrupted.
            if interval_seconds == 60 or threading.current_thread().name.startswith("polls of"):
                began.set()
                assert self._polling._stopping.wait(PATIENCE_SECONDS)
                time.sleep(0.1)
                finished.set()
                raise ConnectionError("what the poll needs is being closed")

    with Interrupted(visits, interval_seconds=interval_seconds) as notifier:
        notifier.register_listener(Heard())
        assert began.wait(PATIENCE_SECONDS)
        notifier.close()
        assert finished.is_set()
    assert caplog.text == ""


@pytest.mark.usefixtures("patient_close")
def test_a_poll_may_close_the_notifier(visits: StateSynchronizer[Counter]) -> None:
    took: list[float] = []

    class Closing(CountNotifier):
        def before_poll(self) -> None:
            started = time.monotonic()
            self.close()
            took.append(time.monotonic() - started)

    with Closing(visits, interval_seconds=60) as notifier:
        notifier.register_listener(Heard())
        until(lambda: len(took) > 0, "the poll has closed it")
    assert took[0] < PATIENCE_SECONDS / 2  # it does not wait for itself


def test_closing_does_not_wait_for_ever(notifier: CountNotifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notifications.notifier.CLOSE_TIMEOUT_SECONDS", 0.05)
    began, go_on = threading.Event(), threading.Event()

    def listener(notification: Counted) -> None:
        began.set()
        go_on.wait(PATIENCE_SECONDS)

    notifier.register_listener(listener)
    assert began.wait(PATIENCE_SECONDS)
    notifier.close()
    assert not go_on.is_set()
    go_on.set()


# ---------------------------------------------------------------------- asyncio


def test_an_async_listener_runs_on_the_loop_of_its_registration_one_call_at_a_time(
    notifier: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        all_heard = asyncio.Event()
        told: list[str] = []

        async def listener(prefix: str, notification: Counted) -> None:
            assert asyncio.get_running_loop() is loop
            told.append(f"{prefix}{notification.value} begins")
            await asyncio.sleep(0.01)
            told.append(f"{prefix}{notification.value} ends")
            if notification.value == 3:
                all_heard.set()

        notifier.register_listener(functools.partial(listener, "#"))
        for _ in range(3):
            await asyncio.to_thread(elsewhere.update_state_unconditionally, Add())
        await asyncio.wait_for(all_heard.wait(), PATIENCE_SECONDS)
        notifier.close()
        return told

    assert asyncio.run(main()) == [f"#{value} {edge}" for value in range(4) for edge in ("begins", "ends")]


def test_a_lambda_that_returns_a_coroutine_is_awaited(notifier: CountNotifier) -> None:
    async def main() -> int:
        heard: asyncio.Queue[int] = asyncio.Queue()
        notifier.register_listener(lambda n: heard.put(n.value))
        return await asyncio.wait_for(heard.get(), PATIENCE_SECONDS)

    assert asyncio.run(main()) == 0


def test_an_async_listener_without_a_running_loop_is_refused(notifier: CountNotifier) -> None:
    async def listener(notification: Counted) -> None: ...

    class Callable:
        async def __call__(self, notification: Counted) -> None: ...

    for refused in (listener, functools.partial(listener), Callable()):
        with pytest.raises(InvalidArgumentError, match="register it in a coroutine"):
            notifier.register_listener(refused)


def test_an_async_listener_that_raises_or_whose_loop_is_gone_counts_as_failing(
    notifier: CountNotifier, elsewhere: StateSynchronizer[Counter]
) -> None:
    heard = Heard()

    async def listener(notification: Counted) -> None:
        raise RuntimeError("this listener is broken")

    async def main() -> None:
        notifier.register_listener(listener)
        while notifier.listener_failures < 1:
            await asyncio.sleep(0.005)

    asyncio.run(main())
    notifier.register_listener(heard)
    elsewhere.update_state_unconditionally(Add())
    heard.wait_for(1)
    until(lambda: notifier.listener_failures == 2, "the closed loop is counted")


@pytest.mark.usefixtures("patient_close")
def test_closing_on_the_loop_does_not_wait_for_a_listener_of_that_loop(notifier: CountNotifier) -> None:
    async def main() -> None:
        began = asyncio.Event()
        never = asyncio.Event()

        async def listener(notification: Counted) -> None:
            began.set()
            await never.wait()

        notifier.register_listener(listener)
        await asyncio.wait_for(began.wait(), PATIENCE_SECONDS)
        started = time.monotonic()
        notifier.close()
        assert time.monotonic() - started < PATIENCE_SECONDS / 2

    asyncio.run(main())


# ---------------------------------------------------------------------- the scheduler


def test_all_notifiers_of_a_process_share_one_scheduler_that_ends_with_the_last(
    visits: StateSynchronizer[Counter],
) -> None:
    with CountNotifier(visits) as one, CountNotifier(visits) as two:
        one.register_listener(Heard())
        two.register_listener(Heard())
        assert [t.name for t in threading.enumerate()].count("APScheduler") == 1
        one.close()
        assert [t.name for t in threading.enumerate()].count("APScheduler") == 1
        two.close()
        assert [t.name for t in threading.enumerate()].count("APScheduler") == 0


def test_jobs_run_at_their_interval_and_not_after_they_were_removed() -> None:
    removed, stays = threading.Semaphore(0), threading.Semaphore(0)
    remove = SHARED.add(removed.release, interval_seconds=0.02, name="removed")
    remove_other = SHARED.add(stays.release, interval_seconds=0.02, name="stays")
    assert all(removed.acquire(timeout=PATIENCE_SECONDS) for _ in range(3))
    remove()
    while removed.acquire(blocking=False):
        pass
    assert all(stays.acquire(timeout=PATIENCE_SECONDS) for _ in range(10))
    assert not removed.acquire(blocking=False) or not removed.acquire(blocking=False)  # a run that had begun
    remove_other()


def test_a_scheduler_of_ones_own_gets_the_job_and_is_not_stopped(visits: StateSynchronizer[Counter]) -> None:
    scheduler = BackgroundScheduler()
    scheduler.start(paused=True)
    try:
        with CountNotifier(visits, scheduler=scheduler, interval_seconds=7) as notifier:
            notifier.register_listener(Heard())
            (job,) = scheduler.get_jobs()
            assert job.trigger.interval.total_seconds() == 7
            assert (job.coalesce, job.max_instances) == (True, 1)
        assert scheduler.get_jobs() == []
        assert scheduler.running
    finally:
        scheduler.shutdown()


@pytest.mark.parametrize("end", [BackgroundScheduler.shutdown, BackgroundScheduler.remove_all_jobs])
def test_a_scheduler_of_ones_own_may_end_or_drop_the_job_before_the_notifier_is_closed(
    visits: StateSynchronizer[Counter], end: Callable[[BackgroundScheduler], object]
) -> None:
    scheduler = BackgroundScheduler()
    scheduler.start()
    try:
        notifier = CountNotifier(visits, scheduler=scheduler)
        unregister = notifier.register_listener(Heard())
        end(scheduler)
        unregister()
        notifier.close()
    finally:
        if scheduler.running:
            scheduler.shutdown()


class PicklingStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler 3 has no types
    """As a store that keeps its jobs in a database."""

    def add_job(self, job: Any) -> None:
        pickle.dumps(job.__getstate__())
        super().add_job(job)


def test_a_scheduler_that_pickles_its_jobs_is_refused_in_words(visits: StateSynchronizer[Counter]) -> None:
    scheduler = BackgroundScheduler(jobstores={"default": PicklingStore()})
    scheduler.start()
    try:
        with CountNotifier(visits, scheduler=scheduler) as notifier:
            with pytest.raises(InvalidArgumentError, match="must keep jobs in memory"):
                notifier.register_listener(Heard())
    finally:
        scheduler.shutdown()


@pytest.mark.parametrize("is_own", [True, False])
def test_an_interval_that_no_date_can_follow_is_waited_for(visits: StateSynchronizer[Counter], is_own: bool) -> None:
    scheduler = BackgroundScheduler() if is_own else None
    if scheduler is not None:
        scheduler.start()
    heard = Heard()
    try:
        with CountNotifier(visits, scheduler=scheduler, interval_seconds=1e12) as notifier:
            notifier.register_listener(heard)
            assert heard.wait_for(0) == [0]
    finally:
        if scheduler is not None:
            scheduler.shutdown()


class LevelNotifier(CountNotifier):
    def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
        if after.value >= 5 and (before is None or before.value < 5):
            yield Counted(change=change, value=after.value)


def test_a_notifier_of_a_level_tells_each_crossing_to_every_listener(store: SegmentStore) -> None:
    early, late = Heard(), Heard()
    with LevelNotifier(counter(store), interval_seconds=60) as notifier:
        notifier.register_listener(early)
        for amount in (5, 1, -3, 4):
            notifier.synchronizer.update_state_unconditionally(Add(amount=amount))
        early.wait_for(7)
        notifier.register_listener(late)
        late.wait_for(7)
    assert (early.values, late.values) == ([5, 7], [7])


def test_polls_go_on_when_the_clock_of_the_system_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = timedelta()

    class SystemTime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + ahead

    class MovedClock(SystemClock):
        def time(self) -> float:
            return super().time() + ahead.total_seconds()

    monkeypatch.setattr(apscheduler.schedulers.base, "datetime", SystemTime)
    monkeypatch.setattr(scheduler, "_clock", MovedClock())
    polls = threading.Semaphore(0)
    remove = SHARED.add(polls.release, interval_seconds=0.02, name="polls")
    try:
        for back in (timedelta(), timedelta(hours=-1), timedelta(days=-400), timedelta(hours=1)):
            ahead = back
            for _ in range(4):  # one may have been due before
                assert polls.acquire(timeout=PATIENCE_SECONDS), back
    finally:
        remove()


def test_a_job_that_is_removed_while_the_clock_is_set_back_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    polls = threading.Semaphore(0)
    remove = SHARED.add(polls.release, interval_seconds=0.02, name="polls")
    remove_other = SHARED.add(lambda: None, interval_seconds=600.0, name="other")
    jobs_of, removed = BackgroundScheduler.get_jobs, threading.Event()

    def jobs_until_one_goes(scheduler: BackgroundScheduler) -> list[object]:
        jobs: list[object] = jobs_of(scheduler)
        if not removed.is_set():
            remove_other()
            removed.set()
        return jobs

    class Earlier(SystemClock):
        def time(self) -> float:
            return super().time() - 3600.0

    monkeypatch.setattr(scheduler, "_clock", Earlier())
    monkeypatch.setattr(BackgroundScheduler, "get_jobs", jobs_until_one_goes)
    try:
        assert removed.wait(PATIENCE_SECONDS)
        for _ in range(4):
            assert polls.acquire(timeout=PATIENCE_SECONDS)
    finally:
        remove()


def test_the_end_of_summer_time_holds_up_no_poll() -> None:
    """A scheduler of an application counts in its local time."""
    berlin = ZoneInfo("Europe/Berlin")
    of_application = BackgroundScheduler(timezone=berlin)
    scheduler.add_job(of_application, lambda: None, interval_seconds=2.0, name="polls")
    trigger = of_application.get_jobs()[0].trigger
    before = datetime.fromtimestamp(datetime(2026, 10, 25, 0, 59, 59, tzinfo=UTC).timestamp(), berlin)
    following = trigger.get_next_fire_time(before, before)
    assert following.timestamp() == before.timestamp() + 2.0
