"""A little of everything that uses a store, all the time, and what must be true of it whatever the store does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final, Self

import readergroup as rg
from synchronizer.threads.background import BackgroundThread
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

STREAM: Final = "shop/orders"
#: Longer than any fault lasts: nobody is evicted, and no lock is lost.
LEASE_SECONDS: Final = 30.0
CALL_SECONDS: Final = 10.0


class Activity:
    """A thread of a user, which does one thing again and again and deals with our errors only."""

    def __init__(self, name: str, step: Callable[[], object]) -> None:
        self.name = name
        self.steps = 0
        self.refused = 0  # steps that raised one of our errors
        self.raw: BaseException | None = None  # anything else that came out
        self._step = step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"activity {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), f"{self.name} does not end"

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            try:
                self._step()
                self.steps += 1
            except rg.ReaderGroupError:
                self.refused += 1
            except BaseException as error:
                self.raw = error
                return


class Workload:
    """All activities on one client, in a block."""

    def __init__(self, client: rg.Client) -> None:
        self.client = client
        self._open = ExitStack()
        self.written: set[int] = set()  # events whose flush returned
        self.read: set[int] = set()
        self.added = 0  # to the counter
        self.maybe_added = 0
        self.queued: set[int] = set()
        self.handled: set[int] = set()
        self.handled_by_pool: set[int] = set()
        self.heard: set[int] = set()
        self._number = 0
        self._in_transactions = 1_000_000
        self._queued = 0
        self._writer: rg.EventWriter[bytes] | None = None
        self._threads: set[str] = set()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            client = opening.enter_context(self.client)
            client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
            self.group = client.groups.create("shop", streams=[STREAM], reader_timeout_seconds=LEASE_SECONDS)
            self.group.segment_notifier.register_listener(lambda notification: None)
            self.group.segment_notifier.register_listener(lambda notification: None, durable="hears")
            self.reader = self.group.reader("r1")
            self.counter = client.counter("total")
            self.watching = client.counter("total")
            self.watching.register_listener(lambda change: self.heard.add(change.after or 0))
            self.queue = client.event_queue("jobs")
            self.processor = client.event_processor("jobs", lambda event: self.handled.add(int(event.data)))
            self.membership = client.membership("all", "m1", member_timeout_seconds=LEASE_SECONDS)
            self.membership.join()
            self.election = client.leader_election("one", "c1", member_timeout_seconds=LEASE_SECONDS)
            self.election.on_elected(lambda token: None)
            self.election.campaign()
            self.held = opening.enter_context(client.lock("held", member_timeout_seconds=LEASE_SECONDS))
            opening.enter_context(self.group.record_notifications(lag_interval_seconds=1.0))
            pooled = client.groups.create("pooled", streams=[STREAM], reader_timeout_seconds=LEASE_SECONDS)
            self.pool = pooled.pool(lambda event: self.handled_by_pool.add(int(event.data)), readers=1)
            self._pool_run = CallInThread(self._run_pool)
            opening.callback(self._end_pool)  # its workers pause after errors, so that it is looked at in the end
            self.activities = [
                Activity("writes", self._write),
                Activity("reads", self._read),
                Activity("commits", self._transact),
                Activity("counts", self._count),
                Activity("adds to a queue", self._add),
                Activity("takes a lock repeatedly", self._lock),
                Activity("holds its leases", self._check),
                Activity("creates and deletes", self._create_and_delete),
            ]
            for activity in self.activities:
                activity.start()
                opening.callback(activity.stop)
            opening.callback(self._close_writer)
            self._open = opening.pop_all()
        until(lambda: all(activity.steps > 2 for activity in self.activities), "a first step of all")
        self._threads = self.background_threads()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    @staticmethod
    def background_threads() -> set[str]:
        """The names of those that are to live as long as what they work for."""
        threads = (thread for thread in threading.enumerate() if isinstance(thread, BackgroundThread))
        # A thread that takes a lock repeatedly has a participant for as long, a writer is closed when it failed, and a
        # pool replaces a worker that failed.
        calls = "delayed-calls", "time-slices", "reading-ahead"
        passing = "lock/repeated", "writers", "deletions of", "worker ", "group/pooled", *calls
        return {thread.name for thread in threads if not thread.name.startswith(passing)}

    # ------------------------------------------------------------------ what it does

    def _write(self) -> None:
        if self._writer is None:
            self._writer = self.client.writer(STREAM)
        self._number += 1
        number = self._number
        try:
            self._writer.write(b"%d" % number, routing_key=str(number % 7))
            self._writer.flush()
        except rg.ReaderGroupError:
            self._close_writer()
            raise
        self.written.add(number)

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(rg.ReaderGroupError):
                writer.close()

    def _transact(self) -> None:
        with self.client.writer(STREAM) as writer, writer.transaction() as transaction:
            self._in_transactions += 2
            numbers = self._in_transactions, self._in_transactions + 1
            for number in numbers:
                transaction.write(b"%d" % number, routing_key=str(number))
        self.written.update(numbers)

    def _read(self) -> None:
        event = self.reader.read(timeout=0.1)
        if event is not None:
            self.read.add(int(event.data))
            if len(self.read) % 10 == 0:
                self.reader.commit()

    def _count(self) -> None:
        try:
            self.counter.add(1)
        except rg.OutcomeUnknownError:
            self.maybe_added += 1
            raise
        self.added += 1

    def _add(self) -> None:
        self._queued += 1
        number = self._queued
        self.queue.add(b"%d" % number)
        self.queued.add(number)

    def _lock(self) -> None:
        with self.client.lock("repeated", timeout=CALL_SECONDS, member_timeout_seconds=LEASE_SECONDS) as held:
            held.check()

    def _check(self) -> None:
        """Nobody was taken for dead, since nobody was."""
        try:
            self.held.check()
            assert self.election.is_leader
            assert self.membership.is_member
        except rg.ReaderGroupError as error:
            raise AssertionError("a lease was lost") from error

    def _create_and_delete(self) -> None:
        self.client.streams.create("shop/other")
        self.client.streams.delete("shop/other")

    def _run_pool(self) -> str:
        self.pool.run()
        return "ran"

    def _end_pool(self) -> None:
        self.pool.stop()
        if isinstance(ended := self._pool_run.ended(), Exception):
            raise ended

    # ------------------------------------------------------------------ what must be true

    def until_all_went_on(self) -> None:
        """Every activity took two more steps, of which the second began after this call."""
        steps = {activity.name: activity.steps for activity in self.activities}
        until(
            lambda: self.raw_errors() or all(each.steps >= steps[each.name] + 2 for each in self.activities),
            "two steps more of all",
        )

    def raw_errors(self) -> Mapping[str, BaseException]:
        found = {each.name: each.raw for each in self.activities if each.raw is not None}
        ended = self._pool_run.result
        is_raw = isinstance(ended, Exception) and not isinstance(ended, rg.ReaderGroupError)
        return {**found, "runs the pool": ended} if is_raw else found

    def check(self, fault: object = None) -> None:
        """No error came out raw, and no thread has ended."""
        for name, error in self.raw_errors().items():
            raise AssertionError(f"the activity that {name} got {error!r} at {fault}") from error
        until(
            lambda: self._threads <= self.background_threads(),
            f"{self._threads - self.background_threads()} live after {fault}",
        )
        assert self.processor.error is None, fault

    def end(self) -> None:
        """Stop, and check that nothing acknowledged is missing."""
        for activity in self.activities:
            if activity.name != "reads":
                activity.stop()
        until(lambda: self.raw_errors() or self.written <= self.read, "all events read")
        until(lambda: self.written <= self.handled_by_pool, "all events handled by the pool")
        until(lambda: self.queued <= self.handled, "all jobs handled")
        self._check_record()
        self.check()
        value = self.client.counter("total").value
        assert self.added <= value <= self.added + self.maybe_added
        until(lambda: value in self.heard, "the last change was told")

    def _check_record(self) -> None:
        """Each change of the readers is recorded once, up to the last."""
        with self.group.reader("last"):
            pass

        def readers() -> Sequence[rg.ReaderNotification]:
            return [each for each in self.group.notification_record.read() if isinstance(each, rg.ReaderNotification)]

        until(lambda: len(readers()) > 2 and {*readers()[-1].readers} == {"r1"}, "the last change is recorded")
        revisions = [each.revision for each in readers()]
        assert revisions == sorted({*revisions})
