"""Ctrl-C anywhere in any public call: other processes go on at once, and so does the client, which can be closed.

The frames of the call that was interrupted are kept, as a notebook keeps them.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import pytest

import readergroup as rg
from readergroup.sinks import SqlSink
from synchronizer.liveness.keeper import Keeper
from tests.interrupts import interrupts
from tests.readergroup.test_one_failure import CALLS, GROUP, STREAM, Call, World
from tests.seeds import seeds
from tests.waiting import CallInThread, busyness, until

DEADLINE: Final = 60.0
#: It is less than what is left of any lease, which is renewed after a third of its ten seconds.
AT_ONCE_SECONDS: Final = 6.0
#: One of this many places is interrupted. The seed chooses the first. The narrow form has a fifth of these places.
ONE_IN: Final = 400
#: Errors of a call that has waited.
WAITED: Final = (rg.DeadlineExceededError, rg.OutcomeUnknownError, rg.StoreUnavailableError)
POLICY: Final = rg.ReaderScalingPolicy(max_readers=3)


def ignore(event: object) -> None: ...


def open_everything(world: World) -> list[object]:
    """Open one of each kind of object that holds something for other processes, or works in the background."""
    client, group = world.client, world.group
    writer, member = client.writer(STREAM), client.membership("nodes", "n1")
    election, lock = client.leader_election("chief", "n1"), client.lock("door")
    writer.write(b"y")
    member.join()
    election.campaign(timeout=DEADLINE)
    lock.__enter__()
    group.segment_notifier.register_listener(ignore)
    background = client.event_processor("mail", ignore), group.record_notifications(), group.autoscale(POLICY)(ignore)
    return [world.reader(), writer, member, election, lock, background, client.shared_map("prices", int)]


def with_everything(call: Callable[[World], object]) -> Call:
    def prepared(world: World) -> Callable[[], object]:
        opened = open_everything(world)
        return lambda: (call(world), opened)

    return prepared


def listen(world: World) -> None:
    prices = world.client.shared_map("prices", int)
    unregister = prices.register_listener(ignore)
    prices.put("b", 2)
    unregister()


def written(world: World) -> Callable[[], object]:
    writer = world.client.writer(STREAM)
    return lambda: (writer.write_many([b"y", b"z"]), writer.write_batch([b"y", b"z"]))


def with_sink(call: Callable[[World, SqlSink, rg.Event[bytes]], object]) -> Call:
    """Return a call after whose interrupt another connection can write to the sink's database."""

    def prepared(world: World) -> Callable[[], object]:
        path = Path(world.client.store.url.removeprefix("sqlite:///")).with_name("application.db")
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE effects (data)")
        sink, reader = SqlSink(lambda: sqlite3.connect(path)), world.reader()
        event = reader.read(timeout=DEADLINE)
        assert event is not None

        def act() -> object:
            try:
                return call(world, sink, event), reader
            except KeyboardInterrupt:
                with closing(sqlite3.connect(path, timeout=0)) as other:
                    other.execute("INSERT INTO effects VALUES (1)")
                raise

        return act

    return prepared


def store_event(world: World, sink: SqlSink, event: rg.Event[bytes]) -> None:
    with suppress(rg.EventStoredError), sink.transaction(event) as connection:
        connection.execute("INSERT INTO effects VALUES (?)", (event.data,))


#: Calls that are of no interest where the store fails.
MORE: Final[Mapping[str, Call]] = {
    "connect": lambda w: lambda: rg.connect(w.client.store.url).close(),
    "Client.close": with_everything(lambda w: w.client.close()),
    "ReaderGroup.close": with_everything(lambda w: w.group.close()),
    "Client.event_processor": lambda w: lambda: w.client.event_processor("mail", ignore).close(),
    "EventProcessor.close": lambda w: w.client.event_processor("mail", ignore).close,
    "Barrier.close": lambda w: w.client.barrier("start", 2).close,
    "EventQueue.close": lambda w: w.client.event_queue("mail").close,
    "SharedMap.register_listener": lambda w: lambda: listen(w),
    "ReaderGroup.autoscale": lambda w: lambda: w.group.autoscale(POLICY)(ignore).close(),
    "ReaderGroup.record_notifications": lambda w: lambda: w.group.record_notifications().close(),
    "EventWriter.write_many": written,
    "SqlSink.transaction": with_sink(store_event),
    "SqlSink.reset": with_sink(lambda w, sink, event: sink.reset(w.group, w.cuts)),
}
#: These forget a reader that they have opened, and its lease expires.
FORGET_READERS: Final = {"ReaderGroup.reader"}
#: This waits for an event that is moved only once.
ONCE: Final = {"Outbox.relay"}


class Process:
    """A client on a file of its own, and its call."""

    def __init__(self, call: Call) -> None:
        in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._folder = tempfile.TemporaryDirectory(dir=in_memory, ignore_cleanup_errors=True)
        self.url = f"sqlite:///{self._folder.name}/store.db"
        self.client = rg.connect(self.url, timeout=DEADLINE)
        self.act = call(World(self.client))

    def end(self) -> None:
        self.client.close()
        self._folder.cleanup()


def at_once(call: Callable[[], object], what: str) -> Exception | None:
    begin = time.monotonic()
    result = CallInThread(lambda: (call(),)).ended()
    seconds = time.monotonic() - begin
    assert seconds < AT_ONCE_SECONDS * max(1.0, busyness() / 4), f"it took {seconds:.1f} s: {what}"
    return result if isinstance(result, Exception) else None


def write_and_join(other: rg.Client) -> None:
    """Write to the same stream, update the same state, and join the same group."""
    with suppress(rg.NotFoundError, rg.SealedError), other.writer(STREAM) as writer:
        writer.write(b"z")
    other.shared_map("prices", int).put("z", 1)
    other.counter("orders").add(1)
    with suppress(rg.NotFoundError), other.groups.get(GROUP).reader("r2"):
        pass


def take_over(other: rg.Client, forgotten: set[str]) -> None:
    """Find that nothing belongs to the process that has closed its client."""
    with suppress(rg.NotFoundError):
        assert {*other.groups.get(GROUP).online_readers()} <= forgotten
    with other.lock("door"), other.semaphore("seats", permits=2):
        pass
    assert other.membership("nodes", "n2").members() == []
    assert other.leader_election("chief", "n2").leader() is None
    with other.event_processor("mail", ignore) as processor:
        processor.add(b"z")
        processor.drain()


def living() -> set[threading.Thread]:
    # Python lists a thread for ever that an interrupt within its `Thread.start` kept from beginning: it is not alive.
    return {each for each in threading.enumerate() if each.is_alive()}


@seeds(1, 6)
@pytest.mark.parametrize("name", [*CALLS, *MORE])
def test_an_interrupted_call_holds_up_nobody(name: str, seed: int) -> None:
    call = {**CALLS, **MORE}[name]
    running: list[Process] = []

    def renew() -> None:
        while running:
            running.pop().end()
        running.append(Process(call))

    renew()
    running[-1].act()  # an interrupt while a module is loaded would leave its lock locked
    running.pop().end()
    before = living()
    for run in interrupts(
        lambda: running[-1].act(), one_in=ONE_IN if seed else 5 * ONE_IN, seed=(name, seed), before=renew
    ):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        with rg.connect(running[-1].url, timeout=DEADLINE) as other:
            check(name, running[-1], other, run.place)
        until(lambda: not living() - before, f"threads end, interrupted at {run.place}", seconds=DEADLINE)
    while running:
        running.pop().end()


def check(name: str, process: Process, other: rg.Client, place: str) -> None:
    """Let the other process go on, then the one that was interrupted, and close its client."""
    assert at_once(lambda: write_and_join(other), f"the other process, interrupted at {place}") is None, place
    if name not in ONCE:
        again = at_once(process.act, f"the same call, interrupted at {place}")
        assert not isinstance(again, WAITED), f"{again!r}, interrupted at {place}"
    assert at_once(process.client.close, f"closing, interrupted at {place}") is None, place
    forgotten = {"r1"} if name in FORGET_READERS else set()
    error = at_once(lambda: take_over(other, forgotten), f"taking over, interrupted at {place}")
    assert error is None, f"{error!r}, interrupted at {place}"


def test_a_processor_whose_start_is_interrupted_has_given_its_role_back(
    monkeypatch: pytest.MonkeyPatch, sqlite_url: str
) -> None:
    handling, handled = threading.Event(), threading.Event()

    def handle(event: rg.QueuedEvent) -> None:
        handling.set()
        handled.wait(DEADLINE)

    def start(keeper: Keeper) -> None:
        assert handling.wait(DEADLINE)
        threading.Timer(0.2, handled.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(Keeper, "start", start)
    with rg.connect(sqlite_url) as client:
        client.event_queue("mail").add(b"x")
        with pytest.raises(KeyboardInterrupt):
            client.event_processor("mail", handle)
        assert handled.is_set()
    monkeypatch.undo()
    with rg.connect(sqlite_url) as client, client.event_processor("mail", ignore) as processor:
        assert at_once(lambda: processor.drain(timeout=DEADLINE), "taking over") is None


def test_an_autoscaling_whose_start_is_interrupted_ends(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    start, before = Keeper.start, living()

    def start_and_interrupt(keeper: Keeper) -> None:
        start(keeper)
        raise KeyboardInterrupt

    with rg.connect(sqlite_url) as client:
        client.streams.create(STREAM)
        group = client.groups.create(GROUP, streams=[STREAM])
        monkeypatch.setattr(Keeper, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            group.autoscale(POLICY)(ignore)
        assert not [each.name for each in living() - before if each.name.startswith("autoscaling")]
