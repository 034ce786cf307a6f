"""An event that failed is retried once after each delay, while later ones are handled; then it is a dead letter."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest
from typer.testing import CliRunner

import readergroup as rg
from readergroup import aio
from readergroup.retries.attempts import FailedAttempts
from readergroup.retries.returning import Returning
from readergroup.retries.waiting import DelayLog, Diverting, WaitingEvent, clear_waiting, summary
from readergroup.sinks import SqlSink
from readergroup.streams.config import stream_of
from synchronizer import SegmentStore, open_store
from synchronizer.recipes.queue.frames import decode_frames
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.command import app
from tests.dying import Died, dying_after
from tests.golden import golden
from tests.waiting import PATIENCE_SECONDS, until

ORDERS: Final = "shop/orders"
RETRIES: Final = "shop/orders-retry"
DEAD: Final = "shop/orders-dead"
GROUP: Final = "billing"


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with rg.connect(store_url) as client:
        yield client


def set_up(client: rg.Client, events: int = 6) -> rg.ReaderGroup:
    for stream in (ORDERS, RETRIES, DEAD):
        client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
    with client.writer(ORDERS, timeout=PATIENCE_SECONDS) as writer:  # that of the client may be short
        for number in range(events):
            writer.write(b"%d" % number, "ann" if number % 2 else None, headers={"trace": b"%d" % number})
    return client.groups.create(GROUP, streams=[ORDERS, RETRIES])


def policy(*delays: float, **fields: Any) -> rg.DelayedRetry:
    return rg.DelayedRetry(delays=delays, retry_stream=RETRIES, dead_letters=DEAD, **fields)


def stored(client: rg.Client, stream: str) -> list[rg.Event[bytes]]:
    return [event for part in client.batch.segment_ranges(stream) for event in client.batch.read(part)]


def hold_back_until(is_time: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no pool return an event that waits before it is time, however long that takes."""
    step = Returning.step
    monkeypatch.setattr(Returning, "step", lambda returning: step(returning) if is_time() else 0.02)


class Running:
    """A pool that runs in a thread of its own."""

    def __init__(self, pool: rg.ReaderPool[Any]) -> None:
        self.pool = pool
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.pool.run()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.pool.stop()
        self.thread.join(120)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


def origin_of(event: rg.Event[bytes]) -> str:
    found = event.headers.get(rg.RETRY_OF)
    return str(event.pointer) if found is None else found.decode()


# ---------------------------------------------------------------------- the way of an event


HANDLERS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "at once": {"concurrency": 8},
    "batches": {"batches": True},
    "async": {"is_async": True},
    "async at once": {"is_async": True, "concurrency": 8},
}


@pytest.mark.stores
def test_an_event_that_fails_once_is_retried_and_later_ones_overtake_it(client: rg.Client) -> None:
    _retried(client)


@pytest.mark.parametrize("how", list(HANDLERS))
def test_every_kind_of_handler_can_be_retried(client: rg.Client, how: str) -> None:
    _retried(client, **HANDLERS[how])


def _retried(client: rg.Client, *, batches: bool = False, is_async: bool = False, **options: Any) -> None:
    group = set_up(client)
    handled: list[rg.Event[bytes]] = []

    def look(event: rg.Event[bytes]) -> None:
        if event.data in (b"1", b"2") and rg.RETRY_OF not in event.headers:
            raise ValueError("not yet")
        handled.append(event)

    handler: Callable[..., Any] = look
    if batches:

        def handler(batch: rg.EventBatch[bytes]) -> None:
            for event in batch:
                if event.data in (b"1", b"2") and rg.RETRY_OF not in event.headers:
                    raise ValueError("not yet")
            handled.extend(batch)

    elif is_async:

        async def handler(event: rg.Event[bytes]) -> None:
            look(event)

    first = {event.data: event for event in stored(client, ORDERS)}
    with Running(group.pool(**{"handle_batch" if batches else "handle": handler}, retry=policy(0.2), **options)):
        until(lambda: len(handled) >= 6, "all events are handled")
    assert Counter(event.data for event in handled) == Counter(b"%d" % number for number in range(6))
    assert {event.data for event in handled[:4]} == {b"0", b"3", b"4", b"5"}
    for event in handled[4:]:
        assert stream_of(event.segment) == RETRIES and event.routing_key == first[event.data].routing_key
        assert event.headers["trace"] == event.data and origin_of(event) == str(first[event.data].pointer)
    assert not list(client.dead_letters(DEAD).list())
    assert summary(client.store, GROUP).events == 0
    assert client.telemetry().groups[GROUP].retries == 2


@pytest.mark.broad
def test_worker_processes_retry_too(shared_store_url: str) -> None:
    with rg.connect(shared_store_url) as client:
        group = set_up(client)
        pool = group.pool(always_fails, retry=policy(0.1, 0.1), workers="process")
        with Running(pool):
            until(lambda: len(list(client.dead_letters(DEAD).list())) == 6, "all are dead letters")
        assert {each.letter.attempts for each in client.dead_letters(DEAD).list()} == {3}


def always_fails(event: rg.Event[bytes]) -> None:
    raise ValueError(f"number {event.data.decode()}")


def test_after_the_last_delay_an_event_is_a_dead_letter_with_its_history_and_can_be_replayed(client: rg.Client) -> None:
    group = set_up(client, 2)
    first = {event.data: event for event in stored(client, ORDERS)}
    letters = client.dead_letters(DEAD)
    with Running(group.pool(always_fails, retry=policy(0.05, 0.1, attempts=2, first_delay_seconds=0))):
        until(lambda: len(list(letters.list())) == 2, "two dead letters")
    for each in letters.list():
        assert each.letter.pointer == first[each.letter.data].pointer and each.stream == ORDERS
        assert each.letter.attempts == 6 and each.letter.error == f"ValueError: number {each.letter.data.decode()}"
        assert each.letter.earlier_errors == (each.letter.error,) * 2
        assert each.headers == {"trace": each.letter.data}
    assert letters.replay() == 2
    handled: list[rg.Event[bytes]] = []
    with Running(group.pool(handled.append, retry=policy(0.05))):
        until(lambda: len(handled) == 2, "both are handled")
    assert all(stream_of(event.segment) == ORDERS and rg.RETRY_OF not in event.headers for event in handled)


def test_an_event_that_is_too_large_for_both_stops_the_pool(client: rg.Client) -> None:
    group = set_up(client, 0)
    with client.writer(ORDERS) as writer:
        writer.write(bytes(8 * 1024 * 1024 - 200))
    with (
        pytest.raises(rg.HandlerError) as raised,
        Running(group.pool(always_fails_short, retry=policy(0.05))) as running,
    ):
        running.thread.join(60)
    assert "retried later" in "".join(raised.value.__cause__.__notes__)  # type: ignore[union-attr]
    assert summary(client.store, GROUP).events == 0


def always_fails_short(event: rg.Event[bytes]) -> None:
    raise ValueError("x" * 300)


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(os.fsdecode(b"no file \xff")), "FileNotFoundError: no file \\udcff"),
        (NoTextError(), "NoTextError"),
        (ValueError("x" * 10_000_000), "ValueError: xxx"),
    ],
    ids=["no UTF-8", "no text", "long"],
)
@pytest.mark.parametrize("retry", [policy(0.05), rg.RetryPolicy(attempts=1, dead_letters=DEAD)], ids=["delayed", ""])
def test_an_error_whose_text_cannot_be_stored_as_it_is_stops_no_pool(
    client: rg.Client,
    retry: rg.RetryPolicy,
    error: Exception,
    text: str,
    concurrency: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # xdist cannot send such a text
    group = set_up(client, 1)

    def handle(event: rg.Event[bytes]) -> None:
        raise error

    letters = client.dead_letters(DEAD)
    with Running(group.pool(handle, retry=retry, concurrency=concurrency)) as running:
        until(lambda: any(letters.list()) or not running.thread.is_alive(), "the event is a dead letter")
    (letter,) = letters.list()
    assert letter.letter.error.startswith(text) and len(letter.letter.error) <= 100_000


# ---------------------------------------------------------------------- once, wherever a process dies


def waiting(number: int, due: float = 0.0, segment: str = f"{ORDERS}/0") -> WaitingEvent:
    return WaitingEvent(due, rg.EventPointer(rg.SegmentId(segment), "a1", number), "ann", b"%d" % number, {"a": b"b"})


@pytest.mark.parametrize("fails", ["before", "after"])
def test_each_event_waits_once_wherever_the_process_dies_that_stores_it(fails: str) -> None:
    step = 0
    while _store_and_die(step, fails):
        step += 1
    assert step > 5, "it never died"


def _store_and_die(step: int, fails: str) -> bool:
    """Let the owner of a segment die at this call of the store, and the next owner handle the events again."""
    store = open_store(f"memory://{random.random()}")
    clock = InstantClock()
    failing = FailingStore(store)
    setattr(failing, fails, dying_after(step))
    has_died = False
    first = Diverting(failing, GROUP, clock, 30)
    try:
        for number in (3, 1, 2):
            assert first.put(waiting(number), 10, token=5)
    except Died:
        has_died = True
    failing.before = failing.after = None  # it was only stopped, and goes on later
    second = Diverting(store, GROUP, clock, 30)
    for number in (1, 2, 3, 4):
        assert second.put(waiting(number), 10, token=6)
    for number in (9, 10):
        assert not first.put(waiting(number), 10, token=5), "a former owner stores nothing"
    log = DelayLog(store, GROUP, 10)
    assert sorted(each.event.data for each in log.all()) == [b"1", b"2", b"3", b"4"]
    return has_died


def test_a_lost_answer_stores_an_event_once() -> None:
    store = open_store(f"memory://{random.random()}")
    failing = FailingStore(store)
    lost = 0

    def lose(operation: Operation) -> None:
        nonlocal lost
        lost += 1
        if lost % 2:
            raise rg.StoreUnavailableError("the answer is lost")

    failing.after = lose
    diverting = Diverting(failing, GROUP, InstantClock(), 30)
    for number in range(5):
        assert diverting.put(waiting(number), 10, token=5)
    assert [each.event.data for each in DelayLog(store, GROUP, 10).all()] == [b"0", b"1", b"2", b"3", b"4"]


def test_after_an_error_an_owner_looks_what_it_has_stored() -> None:
    store = open_store(f"memory://{random.random()}")
    failing = FailingStore(store)
    diverting = Diverting(failing, GROUP, InstantClock(), 30)
    assert diverting.put(waiting(1), 10, token=5)

    def interrupt(operation: Operation) -> None:
        raise Died

    failing.after = interrupt
    with pytest.raises(Died):
        diverting.put(waiting(2), 10, token=5)
    failing.after = None
    assert diverting.put(waiting(3), 10, token=5) and diverting.put(waiting(2), 10, token=5)
    assert [each.event.data for each in DelayLog(store, GROUP, 10).all()] == [b"1", b"2", b"3"]
    assert diverting.put(waiting(2), 10, token=5), "read again after a reset"
    assert [each.event.data for each in DelayLog(store, GROUP, 10).all()] == [b"1", b"2", b"3", b"2"]


def test_an_event_that_was_returned_before_its_owner_heard_that_it_is_stored_is_not_stored_again() -> None:
    store = open_store(f"memory://{random.random()}")
    failing = FailingStore(store)
    diverting = Diverting(failing, GROUP, InstantClock(), 30)
    log = DelayLog(store, GROUP, 10)
    assert diverting.put(waiting(1), 10, token=5)

    def go_away(operation: Operation) -> None:
        failing.unavailable = True

    failing.lose_answers()
    failing.after = go_away
    with pytest.raises(rg.StoreUnavailableError):
        diverting.put(waiting(2), 10, token=5)
    assert [each.event.data for each in log.all()] == [b"1", b"2"]
    store.truncate(log.segment, store.info(log.segment).length)
    failing.unavailable, failing.after = False, None
    assert diverting.put(waiting(2), 10, token=5)
    assert list(log.all()) == []
    assert diverting.put(waiting(3), 10, token=5)
    assert [each.event.data for each in log.all()] == [b"3"]


def test_a_segment_that_is_forgotten_while_its_owner_stores_loses_nothing() -> None:
    store = open_store(f"memory://{random.random()}")
    diverting = Diverting(store, GROUP, InstantClock(), 30)
    log = DelayLog(store, GROUP, 10)
    for number in range(4):
        assert diverting.put(waiting(number), 10, token=5)
        log.forget_sources(frozenset())
    assert len(list(log.all())) == 4


@pytest.mark.parametrize("fails", ["before", "after"])
def test_each_event_is_returned_once_wherever_the_process_dies_that_returns_it(fails: str) -> None:
    step = 0
    while _return_and_die(step, fails):
        step += 1
    assert step > 8, "it never died"


def _return_and_die(step: int, fails: str) -> bool:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    clock = InstantClock()
    whole = rg.Client(store, clock=clock)
    clock.run_when_due(whole.step)
    group = set_up(whole, 0)
    diverting = Diverting(store, GROUP, clock, 30)
    for number in range(4):
        diverting.put(waiting(number, clock.time() - 1), 10 + number % 2, token=5)
    diverting.put(waiting(9, clock.time() + 10_000), 10_000, token=5)
    failing = FailingStore(store)
    dying = rg.Client(failing, clock=clock)
    returning = Returning(dying, dying.groups.get(GROUP), policy(10, 11))
    setattr(failing, fails, dying_after(step))
    has_died = False
    try:
        returning.step()
    except Died:
        has_died = True
    failing.before = failing.after = None
    if step % 2:
        whole.streams.scale(RETRIES, split=[0])
    again = Returning(whole, group, policy(10, 11))
    for _ in range(60):
        clock.wait(threading.Event(), again.step())
        if summary(store, GROUP).events <= 1:
            break
    assert Counter(event.data for event in stored(whole, RETRIES)) == Counter([b"0", b"1", b"2", b"3"])
    assert summary(store, GROUP).events == 1
    return has_died


KILLED = """
import os, signal, sys
import readergroup as rg
from readergroup.retries import {module} as module

real = module.{kind}.{method}
calls = 0
def die(*args, **kwargs):
    global calls
    calls += 1
    if calls > 2 and {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    found = real(*args, **kwargs)
    if calls > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
module.{kind}.{method} = die

def fail(event):
    raise ValueError("always")

with rg.connect(sys.argv[1]) as client:
    retry = rg.DelayedRetry(delays=[1.0], retry_stream={retries!r}, dead_letters={dead!r})
    client.groups.get({group!r}).pool(fail, retry=retry).run()
"""


@pytest.mark.parametrize("before", [pytest.param(True, marks=pytest.mark.broad), False])
@pytest.mark.parametrize(
    ("module", "kind", "method"), [("waiting", "Diverting", "put"), ("returning", "Publisher", "publish")]
)
def test_after_a_kill_another_process_goes_on(
    shared_store_url: str, module: str, kind: str, method: str, before: bool
) -> None:
    with rg.connect(shared_store_url) as client:
        group = set_up(client, 5)
        group.configure(reader_timeout_seconds=2.0)
        calls = "calls > 0" if kind == "Publisher" else "calls > 2"
        source = KILLED.replace("calls > 2", calls).format(
            module=module, kind=kind, method=method, before=before, retries=RETRIES, dead=DEAD, group=GROUP
        )
        killed = subprocess.run([sys.executable, "-c", source, shared_store_url], timeout=120, check=False)
        assert killed.returncode == -signal.SIGKILL
        with Running(group.pool(always_fails, retry=policy(1.0))):
            until(lambda: len(distinct(client)) == 5, "all are dead letters")
        assert {each.letter.attempts for each in client.dead_letters(DEAD).list()} == {2}


def distinct(client: rg.Client) -> Counter[str]:
    return Counter(str(each.letter.pointer) for each in client.dead_letters(DEAD).list())


# ---------------------------------------------------------------------- what is stored


def test_what_waits_is_written_and_read_as_in_its_first_release() -> None:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    diverting = Diverting(store, GROUP, InstantClock(), 30)
    first = FailedAttempts(rg.EventPointer(rg.SegmentId(f"{ORDERS}/0"), "a1", 7), {"a": b"b"})
    failed = first.with_failure("ValueError: \u00e4", 2)
    event = WaitingEvent(1_700_000_010.5, failed.pointer, "ann \ud800", b"data", failed.all_headers)
    diverting.put(event, 10, token=5)
    log = DelayLog(store, GROUP, 10)
    assert log.segment == "retries/billing/10000"
    today = [store.read(log.segment, 0, 10_000), dict(store.attributes(log.segment))]
    stored_before = msgpack.unpackb(golden("waiting-event-v1.msgpack", msgpack.packb(today)))
    assert stored_before == today
    assert [each.event for each in log.all()] == [event]
    assert event.headers[rg.RETRY_OF] == b"shop/orders/0:a1:7"
    with pytest.raises(rg.UnsupportedError, match="newer release"):
        WaitingEvent.decode(msgpack.packb([3]))


def test_what_waits_with_an_event_time_is_written_and_read_as_in_the_release_that_added_it() -> None:
    event = waiting(7)._replace(event_time=-5)
    stored_before = golden("waiting-event-v2.bin", event.encode())
    assert stored_before == event.encode()
    (frame,) = decode_frames("retries", stored_before, 0)
    assert WaitingEvent.decode(frame.data) == event


# ---------------------------------------------------------------------- time


def test_an_idle_pool_looks_as_often_as_its_shortest_delay_and_a_waiting_one_when_it_is_due() -> None:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    clock = InstantClock()
    failing = FailingStore(store)
    client = rg.Client(failing, clock=clock)
    clock.run_when_due(client.step)
    group = set_up(client, 0)
    returning = Returning(client, group, policy(10, 600))
    assert returning.step() == 10
    assert Returning(client, group, policy(86_400 * 365.0)).step() == 60
    diverting = Diverting(store, GROUP, clock, 30)
    diverting.put(waiting(1, clock.time() + 7), 10, token=5)
    assert returning.step() == pytest.approx(7, abs=0.1)
    operations: list[Operation] = []
    failing.before = operations.append
    returning.step()
    assert [each.verb for each in operations if each.verb not in ("list", "info")] == [], "it reads nothing again"


def test_a_clock_that_is_set_back_delays_a_retry_by_its_delay_at_most() -> None:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    clock = InstantClock()
    client = rg.Client(store, clock=clock)
    clock.run_when_due(client.step)
    group = set_up(client, 0)
    diverting = Diverting(store, GROUP, clock, 30)
    for number in range(3):  # stored before the clock was set back by a day
        diverting.put(waiting(number, clock.time() + 86_410), 10, token=5)
    returning = Returning(client, group, policy(10))
    waited = 0.0
    while len(stored(client, RETRIES)) < 3:
        pause = returning.step()
        waited += pause
        clock.wait(threading.Event(), pause)
        assert waited < 25


def test_an_event_that_is_stored_during_a_long_look_waits_for_its_whole_delay() -> None:
    store = FailingStore(open_store(f"memory://{random.random()}"))
    clock = InstantClock()
    client = rg.Client(store, clock=clock)
    clock.run_when_due(client.step)
    group = set_up(client, 0)
    diverting = Diverting(store.inner, GROUP, clock, 30)
    diverting.put(waiting(0, clock.time() + 10), 10, token=5)
    looks = itertools.count()

    def take_long(operation: Operation) -> None:
        if operation.verb == "info" and operation.segment.startswith("retries/") and next(looks) == 1:
            clock.wait(threading.Event(), 6.0)
            diverting.put(waiting(1, clock.time() + 10), 10, token=5)

    returning = Returning(client, group, policy(10))
    store.before = take_long
    returning.step()
    for moved, returned in ((4.0, [b"0"]), (5.9, [b"0"]), (0.1, [b"0", b"1"])):
        clock.wait(threading.Event(), moved)
        returning.step()
        assert [event.data for event in stored(client, RETRIES)] == returned


# ---------------------------------------------------------------------- streams and groups that change


def test_events_of_a_deleted_group_are_dropped_and_a_new_one_of_its_name_begins_anew(client: rg.Client) -> None:
    group = set_up(client, 3)
    with Running(group.pool(always_fails, retry=policy(3600))):
        until(lambda: summary(client.store, GROUP).events == 3, "all wait")
    client.groups.delete(GROUP)
    assert summary(client.store, GROUP).events == 0
    again = client.groups.create(GROUP, streams=[ORDERS, RETRIES])
    with Running(again.pool(always_fails, retry=policy(3600))):
        until(lambda: summary(client.store, GROUP).events == 3, "all wait again")


@pytest.mark.parametrize("fails", ["before", "after"])
def test_events_of_a_group_whose_deletion_fails_wait_on_and_those_of_a_deleted_one_are_dropped_later(
    fails: str,
) -> None:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    failing = FailingStore(store)
    with rg.Client(failing, timeout=0.2) as client:
        set_up(client, 0)
        assert Diverting(store, GROUP, InstantClock(), 30).put(waiting(1), 10, token=5)

        def away(operation: Operation) -> None:
            if operation.verb == "append" and operation.segment == f"group/{GROUP}":
                raise rg.StoreUnavailableError("away")

        setattr(failing, fails, away)
        with pytest.raises(rg.ReaderGroupError):
            client.groups.delete(GROUP)
        failing.before = failing.after = None
        assert summary(store, GROUP).events == 1
        if fails == "before":
            client.groups.get(GROUP)
        else:
            client.groups.create(GROUP, streams=[ORDERS, RETRIES])
            assert summary(store, GROUP).events == 0


def test_what_a_new_group_stores_while_a_former_one_is_cleared_away_stays() -> None:
    store = open_store(f"memory://{random.random()}")
    assert Diverting(store, GROUP, InstantClock(), 30).put(waiting(1), 10, token=5)
    clear_waiting(store, GROUP, lambda: None)
    assert summary(store, GROUP).events == 1, "the group exists"

    def fetch() -> None:
        assert Diverting(store, GROUP, InstantClock(), 30).put(waiting(2), 10, token=6)
        raise rg.NotFoundError("it was deleted, and is made again")

    clear_waiting(store, GROUP, fetch)
    assert [each.event.data for each in DelayLog(store, GROUP, 10).all()] == [b"2"]
    assert not store.attributes(DelayLog(store, GROUP, 10).segment)


def test_a_handler_that_fails_after_its_group_was_deleted_leaves_nothing(client: rg.Client) -> None:
    group = set_up(client, 1)
    begun, deleted = threading.Event(), threading.Event()

    def handle(event: rg.Event[bytes]) -> None:
        begun.set()
        assert deleted.wait(60)
        raise ValueError

    with pytest.raises(rg.NotFoundError), Running(group.pool(handle, retry=policy(3600))) as running:
        assert begun.wait(60)
        client.groups.delete(GROUP)
        deleted.set()
        running.thread.join(60)
    assert summary(client.store, GROUP).events == 0


def test_events_wait_on_while_the_group_does_not_read_the_stream_of_retries(
    client: rg.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = set_up(client, 3)
    are_all_waiting = threading.Event()
    hold_back_until(are_all_waiting.is_set, monkeypatch)
    with Running(group.pool(always_fails, retry=policy(0.3))):
        until(lambda: summary(client.store, GROUP).events == 3, "all wait")
        group.configure(streams=[ORDERS])
    are_all_waiting.set()
    returning = Returning(client, group, policy(0.3))

    def refused() -> bool:
        try:
            returning.step()
        except rg.NotFoundError as error:
            assert "add it to its streams" in str(error)
            return True
        return False

    until(refused, "the events are due")
    left = summary(client.store, GROUP).events
    group.configure(streams=[ORDERS, RETRIES])
    handled: list[rg.Event[bytes]] = []
    with Running(group.pool(handled.append, retry=policy(0.3))):
        until(lambda: len(handled) >= left, "the others are handled")
    assert summary(client.store, GROUP).events == 0


def test_a_stream_that_is_no_longer_read_has_its_events_retried(
    client: rg.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = set_up(client, 3)
    handled: list[rg.Event[bytes]] = []
    are_all_waiting = threading.Event()
    hold_back_until(are_all_waiting.is_set, monkeypatch)

    def handle(event: rg.Event[bytes]) -> None:
        if rg.RETRY_OF not in event.headers:
            raise ValueError("not yet")
        handled.append(event)

    with Running(group.pool(handle, retry=policy(0.3))):
        until(lambda: summary(client.store, GROUP).events == 3, "all wait")
        group.configure(streams=[RETRIES])
        are_all_waiting.set()
        until(lambda: len(handled) == 3, "all are retried")


@pytest.mark.parametrize("concurrency", [1, pytest.param(4, marks=pytest.mark.broad)])
def test_an_outage_while_an_event_is_stored_loses_and_repeats_nothing(concurrency: int) -> None:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    failing = FailingStore(store)
    with rg.Client(failing, timeout=0.5) as client:
        group = set_up(client, 6)
        refused = 0

        def away(operation: Operation) -> None:
            nonlocal refused
            if operation.segment.startswith("retries/") and refused < 40:
                refused += 1
                raise rg.StoreUnavailableError("away")

        def fail(event: rg.Event[bytes]) -> None:
            handled.append(event.raw)
            always_fails(event)

        handled: list[bytes] = []
        failing.before = away
        letters = client.dead_letters(DEAD)
        with Running(group.pool(fail, retry=policy(0.1), concurrency=concurrency)):
            until(lambda: len(list(letters.list())) >= 6, "all are dead letters")
        assert refused == 40
        assert len(handled) == 2 * 6  # each is handled once, and retried once
        assert set(distinct(client).values()) == {1} and len(distinct(client)) == 6


def test_two_clients_in_a_process_retry_each_event_once(shared_store_url: str) -> None:
    with rg.connect(shared_store_url) as client, rg.connect(shared_store_url) as other:
        group = set_up(client, 20)
        with (
            Running(group.pool(always_fails, retry=policy(0.1, 0.2))),
            Running(other.groups.get(GROUP).pool(always_fails, retry=policy(0.1, 0.2))),
        ):
            until(lambda: len(distinct(client)) == 20, "all are dead letters")
        assert {each.letter.attempts for each in client.dead_letters(DEAD).list()} == {3}


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "delays",
    [[], [0], [-1], [math.nan], [math.inf], ["1"], [True], "10", b"10", {1: 2}, {1}, None, 5, [1e12], [1.0] * 101],
)
def test_delays_that_cannot_be_right_are_refused(delays: Any) -> None:
    with pytest.raises(rg.InvalidArgumentError, match="^(?!.*after validation).*delays"):
        rg.DelayedRetry(delays=delays, retry_stream=RETRIES, dead_letters=DEAD)


def test_streams_that_cannot_be_right_are_refused(client: rg.Client) -> None:
    for fields in ({"dead_letters": None}, {"dead_letters": RETRIES}, {"retry_stream": "no stream"}):
        with pytest.raises(rg.InvalidArgumentError, match=r"dead_letters|scope/name"):
            rg.DelayedRetry(**{"delays": [1], "retry_stream": RETRIES, "dead_letters": DEAD, **fields})  # type: ignore[arg-type]
    set_up(client)
    other = client.groups.create("other", streams=[ORDERS])
    with pytest.raises(rg.InvalidArgumentError, match="read the stream of retries"):
        other.pool(always_fails, retry=policy(1))


def test_a_plain_function_that_returns_an_awaitable_stops_the_pool_and_nothing_waits(client: rg.Client) -> None:
    group = set_up(client)

    async def handle(event: rg.Event[bytes]) -> None:
        raise ValueError

    with pytest.raises(rg.InvalidArgumentError, match="await"):
        group.pool(lambda event: handle(event), retry=policy(0.1)).run()
    assert summary(client.store, GROUP).events == 0


def test_a_sink_is_refused(client: rg.Client) -> None:
    group = set_up(client)
    with pytest.raises(rg.InvalidArgumentError, match="sink"):
        group.pool(always_fails, retry=policy(1), sink=SqlSink(lambda: sqlite3.connect(":memory:")))


def test_headers_that_only_look_like_those_of_a_retry_are_kept(client: rg.Client) -> None:
    group = set_up(client, 0)
    headers = {rg.RETRY_OF: b"x", "readergroup-retry": b"no JSON"}
    for stream in (ORDERS, RETRIES):
        with client.writer(stream) as writer:
            writer.write(b"foreign", headers=headers)
    with Running(group.pool(always_fails_short, retry=policy(0.05))):
        until(lambda: len(distinct(client)) == 2, "both are dead letters")
    assert {each.letter.attempts for each in client.dead_letters(DEAD).list()} == {2}


def test_what_waits_is_shown(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with rg.connect(url) as client:
        group = set_up(client, 3)
        run = CliRunner(env={"COLUMNS": "100"}).invoke
        assert "retry" not in run(app, ["--url", url, "group", "describe", GROUP]).stdout.replace(RETRIES, "")
        with Running(group.pool(always_fails, retry=policy(3600))):
            until(lambda: summary(client.store, GROUP).events == 3, "all wait")
        shown = run(app, ["--url", url, "group", "describe", GROUP]).stdout
        assert re.search(r"3 events wait for a retry, the next in 3,\d\d\d s", shown)
        found = json.loads(run(app, ["--url", url, "group", "describe", GROUP, "--json"]).stdout)
        assert found["waiting_for_retry"] == 3


def test_a_pool_of_the_asyncio_client_retries_later() -> None:
    async def run() -> None:
        async with aio.connect("memory://") as client:
            for stream in (ORDERS, RETRIES, DEAD):
                await client.streams.create(stream)
            async with client.writer(ORDERS) as writer:
                await writer.write(b"1")
            group = await client.groups.create(GROUP, streams=[ORDERS, RETRIES])
            retried = asyncio.Event()

            async def handle(event: rg.Event[bytes]) -> None:
                if rg.RETRY_OF not in event.headers:
                    raise ValueError("not yet")
                retried.set()

            pool = await group.pool(handle, retry=policy(0.05))
            running = asyncio.create_task(pool.run())
            await asyncio.wait_for(retried.wait(), 60)
            pool.stop()
            await running

    asyncio.run(run())
