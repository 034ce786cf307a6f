"""A start of a thread that fails is one of our errors, which may be repeated, and leaves nothing behind.

Each start fails once, or all of them for a while.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pytest

import readergroup as rg
from readergroup import Client
from tests.waiting import STARTS_A_THREAD, CallInThread, until

T = TypeVar("T")


class Starts:
    """Counts the starts of threads that have a name, and fails one or all. Those of tests have none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.failing: int | None = None
        self.all_fail = threading.Event()
        self._start = getattr(threading, STARTS_A_THREAD)
        monkeypatch.setattr(threading, STARTS_A_THREAD, self._start_or_fail)

    def _start_or_fail(self, bootstrap: Callable[[], None], *arguments: Any, **named: Any) -> object:
        name = bootstrap.__self__.name
        if not name.startswith("Thread-"):
            self.names.append(name)
            if self.all_fail.is_set() or len(self.names) - 1 == self.failing:
                raise RuntimeError("can't start new thread")
        return self._start(bootstrap, *arguments, **named)


def repeated(call: Callable[[], T]) -> T:
    """What the call returns in the end: an error that says so may be repeated."""
    with suppress(rg.StoreUnavailableError):
        return call()
    return call()


def repeated_until_it_works(call: Callable[[], T]) -> T:
    results: list[T] = []

    def works() -> bool:
        with suppress(rg.StoreUnavailableError):
            results.append(call())
        return bool(results)

    until(works)
    return results[0]


# ---------------------------------------------------------------------- what starts threads


def waiting(client: Client) -> None:
    segment = uuid.uuid4().hex
    client.store.create(segment)
    call = CallInThread(lambda: repeated(lambda: client.store.wait({segment: 0}, 60)))
    client.store.append(segment, b"data")
    assert call.ended() == {segment}


def writing(client: Client) -> None:
    client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(4))
    with repeated(lambda: client.writer("shop/orders")) as writer:
        for _ in range(3):
            for number in range(100):
                writer.write(b"%d" % number, str(number))
            writer.flush()


def reading(client: Client) -> None:
    writing(client)
    client.groups.create("billing", streams=["shop/orders"], reader_timeout_seconds=60.0)
    client.streams.seal("shop/orders")
    group = client.groups.get("billing")
    with repeated(lambda: group.reader("one")) as reader, repeated(lambda: group.reader("two")) as other:
        until(lambda: len(group.online_readers()) == 2)
        call = CallInThread(lambda: sum(1 for _ in other))
        assert sum(1 for _ in reader) + call.ended() == 300


def listening(client: Client) -> None:
    client.streams.create("shop/orders")
    client.groups.create("billing", streams=["shop/orders"])
    group = client.groups.get("billing")
    heard: list[str] = []
    notifier = group.reader_notifier
    repeated(lambda: notifier.register_listener(lambda change: heard.append("lasting")))
    repeated(lambda: notifier.register_listener(lambda change: heard.append("durable"), durable="name"))
    until(lambda: "lasting" in heard)
    with repeated(lambda: group.reader("one")):
        until(lambda: heard.count("lasting") >= 2 and "durable" in heard)


def following(client: Client) -> None:
    counter = client.counter("count")
    heard: list[object] = []
    repeated(lambda: counter.synchronizer.on_update(heard.append))
    counter.add(1)
    until(lambda: heard)


def locking(client: Client) -> None:
    def hold() -> None:
        with client.lock("lock", timeout=60):
            pass

    for _ in range(2):
        repeated(hold)


def joining(client: Client) -> None:
    membership = client.membership("members", "one")
    repeated(membership.join)
    until(lambda: "one" in [*membership.members()])
    membership.leave()


def electing(client: Client) -> None:
    election = client.leader_election("leader", "one")
    elected: list[int] = []
    repeated(lambda: election.on_elected(elected.append))
    repeated(election.campaign)
    until(lambda: elected)


def processing(client: Client) -> None:
    handled: list[bytes] = []
    queue = client.event_queue("queue")
    processor = repeated(lambda: client.event_processor("queue", lambda event: handled.append(event.data)))
    queue.add(b"event")
    processor.drain(timeout=60)
    assert handled == [b"event"]


def deleting(client: Client) -> None:
    for number in range(3):
        client.streams.create(f"shop/{number}")
        client.streams.delete(f"shop/{number}")


def recording(client: Client) -> None:
    client.streams.create("shop/orders")
    client.groups.create("billing", streams=["shop/orders"])
    group = client.groups.get("billing")
    with repeated(group.record_notifications):
        with repeated(lambda: group.reader("one")):
            pass


def pooling(client: Client) -> None:
    client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
    client.groups.create("billing", streams=["shop/orders"])
    with repeated(lambda: client.writer("shop/orders")) as writer:
        for number in range(10):
            writer.write(b"%d" % number, str(number))
    client.streams.seal("shop/orders")
    handled: list[bytes] = []
    repeated(lambda: client.groups.get("billing").pool(lambda event: handled.append(event.raw), readers=2).run())
    assert sorted({*handled}) == sorted(b"%d" % number for number in range(10))


def autoscaling(client: Client) -> None:
    client.streams.create("shop/orders")
    client.groups.create("billing", streams=["shop/orders"], reader_timeout_seconds=1.0)
    group = client.groups.get("billing")
    told: list[object] = []
    repeated(lambda: group.autoscale(rg.ReaderScalingPolicy(min_readers=1, max_readers=3))(told.append))
    until(lambda: told)


def copying(client: Client) -> None:
    writing(client)
    target = repeated(lambda: client.streams.copy("shop/orders", "shop/archive", by="events", threads=2))
    assert sum(1 for part in client.batch.segment_ranges(target.name) for _ in client.batch.read(part)) == 300


SCENARIOS: list[Callable[[Client], None]] = [
    waiting,
    writing,
    reading,
    listening,
    following,
    locking,
    joining,
    electing,
    processing,
    deleting,
    recording,
    pooling,
    autoscaling,
    copying,
]


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    before = {*threading.enumerate()}
    yield
    until(lambda: not {*threading.enumerate()} - before, f"threads end: {threading.enumerate()}")


@pytest.mark.stores("memory", "sqlite", "nats")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_thread_that_cannot_be_started_once(
    scenario: Callable[[Client], None], store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(monkeypatch)
    for number in itertools.count():
        starts.names.clear()
        starts.failing = number
        with nothing_left_behind(), repeated(lambda: rg.connect(store_url)) as client:
            scenario(client)
            if len(starts.names) <= number:
                return  # each has failed
            for name in [*client.groups.list()]:
                client.groups.delete(name)
            for name in [*client.streams.list()]:
                client.streams.delete(name)


#: For how long no thread can be started.
EXHAUSTED_SECONDS = 0.5


@pytest.mark.stores("sqlite", "nats")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_thread_can_be_started_for_a_while(
    scenario: Callable[[Client], None], store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "repeated", repeated_until_it_works)
    with nothing_left_behind(), rg.connect(store_url) as client:
        starts.all_fail.set()
        call = CallInThread(lambda: scenario(client) or "done")
        time.sleep(EXHAUSTED_SECONDS)
        starts.all_fail.clear()
        assert call.ended() == "done"
    assert starts.names
