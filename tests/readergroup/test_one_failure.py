"""A call of the store that fails once is repeated: the caller of a question or an action does not notice it.

Every public name of the classes below either has an entry in `CALLS`, or is listed in `NOT_CALLED` with its reason.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from pydantic import BaseModel

import readergroup as rg
from readergroup import aio
from readergroup.group.manager import ReaderGroupManager
from readergroup.streams.manager import StreamManager
from synchronizer import open_store
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.waiting import PATIENCE_SECONDS, until

STREAM: Final = "shop/orders"
OTHER: Final = "shop/returns"
GROUP: Final = "billing"
QUEUE: Final = "shop/failed"
WRITTEN_AT: Final = datetime(2026, 1, 1, tzinfo=UTC)

CLASSES: Final = (
    rg.Client, StreamManager, ReaderGroupManager, rg.ReaderGroup, rg.Reader, rg.BatchClient, rg.DeadLetters,
    rg.EventWriter, rg.Transaction, rg.SharedMap, rg.SharedSet, rg.SharedConfig, rg.SharedCounter, rg.EventQueue,
    rg.HeldLock, rg.LeaderElection, rg.Membership, rg.Barrier, rg.NotificationRecord, rg.StateSynchronizer,
    rg.EventProcessor, rg.Outbox, rg.OutboxRelay, rg.ReaderPool,
)  # fmt: skip


class Limits(BaseModel):
    rate: int = 1


class Level(rg.State):
    value: int = 0


class Raise(rg.Update[Level], tag="raise"):
    by: int

    def apply_to(self, state: Level, revision: rg.Revision) -> Level:
        return state.replace(value=state.value + self.by)


class World:
    """A client, and what a test has prepared with it. What a call is made of is made before the failure."""

    def __init__(self, client: rg.Client) -> None:
        self.client = client
        self.streams, self.groups, self.batch = client.streams, client.groups, client.batch
        load = rg.ScalingPolicy.by_event_rate(1000)
        self.streams.create(STREAM, scaling=load, retention=rg.RetentionPolicy(max_bytes=1 << 20))
        with client.writer(STREAM) as writer:
            writer.write(b"x", event_time=WRITTEN_AT)
            writer.note_time(datetime(2026, 1, 2, tzinfo=UTC))
        self.group = self.groups.create(GROUP, streams=[STREAM], retention="MANUAL")
        self.cuts = self.group.stream_cuts()
        (self.range,) = self.batch.segment_ranges(STREAM)

    def reader(self) -> rg.Reader[bytes]:
        return self.group.reader("r1")


Call = Callable[[World], Callable[[], object]]


def _state(world: World) -> rg.StateSynchronizer[Level]:
    return world.client.synchronizer("level", initial=Level(), updates=[Raise])


def _ask(call: Callable[[World], object]) -> Call:
    return lambda world: lambda: call(world)


def _with(prepare: Callable[[World], Any], call: Callable[[Any], object]) -> Call:
    """Return a call on what is prepared before the failure."""

    def prepared(world: World) -> Callable[[], object]:
        found = prepare(world)
        return lambda: call(found)

    return prepared


def _then(call: Callable[[World], object], look: Callable[[World], object]) -> Call:
    """Return an action, and what is to be seen after it."""
    return lambda world: lambda: (call(world), look(world))


def _map(world: World) -> rg.SharedMap[int]:
    found = world.client.shared_map("prices", int)
    found.put("a", 1)
    return found


def _set(world: World) -> rg.SharedSet[int]:
    found = world.client.shared_set("seen", int)
    found.add(1)
    return found


def _config(world: World) -> rg.SharedConfig[Limits]:
    found = world.client.shared_config("limits", Limits)
    found.put("rate", 2)
    return found


def _counter(world: World) -> rg.SharedCounter:
    found = world.client.counter("orders")
    found.add(5)
    return found


def _queue(world: World) -> rg.EventQueue:
    found = world.client.event_queue("mail")
    found.add(b"x")
    return found


def _letters(world: World) -> rg.DeadLetters:
    """Return the dead letters of a stream, with one pending."""
    world.streams.create(QUEUE)
    (event,) = world.batch.read(world.range)
    with world.client.writer(QUEUE, serializer=rg.PydanticSerializer(rg.DeadLetter)) as writer:
        writer.write(rg.DeadLetter(data=event.raw, pointer=event.pointer, error="ValueError: odd", attempts=3))
    return world.client.dead_letters(QUEUE)


def _set_aside(world: World) -> None:
    def fail(event: rg.QueuedEvent) -> None:
        raise ValueError("odd")

    retries = rg.Retries(attempts=1, first_delay_seconds=0)
    with world.client.event_processor("mail", fail, retries=retries, set_aside=True) as processor:
        processor.add(b"x")
        processor.drain(timeout=PATIENCE_SECONDS)


def _queue_letters(world: World) -> rg.DeadLetters:
    """Return the dead letters of a queue, with one pending."""
    _set_aside(world)
    return world.client.dead_letters(queue="mail")


def _queue_with_letter(world: World) -> rg.EventQueue:
    _set_aside(world)
    return world.client.event_queue("mail")


def _forget(queue: rg.EventQueue) -> object:
    (letter,) = queue.dead_letters()
    queue.forget_dead_letters(letter)
    return list(queue.dead_letters())


def _texts(letters: rg.DeadLetters) -> object:
    return [(each.letter.data, each.status) for each in letters.list(status=None)]


def _show(letters: rg.DeadLetters) -> object:
    (letter,) = letters.list()
    return letters.show(letter.pointer).letter.data


def _member(world: World) -> rg.Membership:
    return world.client.membership("nodes", "n1")


def _election(world: World) -> rg.LeaderElection:
    return world.client.leader_election("chief", "n1")


def _lock(world: World) -> object:
    with world.client.lock("door") as held:
        held.check()
    with world.client.lock("door", timeout=PATIENCE_SECONDS):
        return True


def _semaphore(world: World) -> object:
    with world.client.semaphore("seats", permits=2) as held:
        return held is not None


def _barrier(world: World) -> rg.Barrier:
    return world.client.barrier("start", 1)


def _closed_writer(world: World) -> Callable[[], object]:
    writer = world.client.writer(STREAM)
    writer.write(b"y")

    def close() -> object:
        writer.close()
        return world.batch.count(world.batch.segment_ranges(STREAM)[0])

    return close


def _cuts_of(world: World) -> object:
    return {stream: dict(cut.offsets) for stream, cut in world.group.stream_cuts().items()}


def _segments(world: World) -> object:
    return world.streams.info(STREAM).number_of_segments


def _written(world: World) -> Callable[[], object]:
    writer = world.client.writer(STREAM)

    def write() -> object:
        writer.write(b"y")
        writer.flush()
        return world.batch.count(world.batch.segment_ranges(STREAM)[0])

    return write


def _committed(world: World) -> Callable[[], object]:
    transaction = world.client.writer(STREAM).transaction()
    transaction.write(b"y")

    def commit() -> object:
        transaction.commit()
        return world.batch.count(world.batch.segment_ranges(STREAM)[0])

    return commit


def _aborted(world: World) -> Callable[[], object]:
    transaction = world.client.writer(STREAM).transaction()
    transaction.write(b"y")

    def abort() -> object:
        transaction.abort()
        return world.batch.count(world.batch.segment_ranges(STREAM)[0])

    return abort


def _read(world: World) -> Callable[[], object]:
    reader = world.reader()

    def read() -> object:
        event = reader.read(timeout=PATIENCE_SECONDS)
        return None if event is None else event.data

    return read


def _commit(world: World) -> Callable[[], object]:
    reader = world.group.reader("r1", auto_commit=False)
    assert reader.read(timeout=PATIENCE_SECONDS) is not None

    def commit() -> object:
        reader.commit()
        return _cuts_of(world)

    return commit


def _outbox(world: World) -> rg.Outbox[bytes]:
    """Return an outbox with one event."""
    folder = TemporaryDirectory()

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{folder.name}/app.db")

    found = rg.Outbox(world.client, connect)
    found.create_table()
    with closing(connect()) as database:
        found.write(database, STREAM, b"y")
        database.commit()
    return found


def _waiting(outbox: rg.Outbox[bytes]) -> object:
    lag = outbox.lag()
    return lag.events, lag.relay


def _relayed(outbox: rg.Outbox[bytes]) -> object:
    with outbox.relay() as relay:
        until(lambda: relay.events_moved == 1)
    return outbox.lag().events


def _processor(world: World) -> rg.EventProcessor:
    return world.client.event_processor("mail", lambda event: None)


def _pool(world: World) -> Callable[[], object]:
    world.streams.seal(STREAM)
    handled: list[bytes] = []
    policy = rg.ReaderScalingPolicy(min_readers=1, max_readers=2)
    pool = world.group.pool(lambda event: handled.append(event.data), readers=policy, workers="thread")

    def run() -> object:
        pool.run()
        return handled

    return run


def _group_names(world: World) -> object:
    return list(world.groups.list())


def _lag(world: World) -> object:
    lag = world.group.lag()
    return lag.bytes, lag.events


#: What is called, with what is compared: an answer without times and random names in it.
CALLS: Final[Mapping[str, Call]] = {
    "StreamManager.info": _ask(lambda w: w.streams.info(STREAM).watermark),
    "StreamManager.exists": _ask(lambda w: w.streams.exists(STREAM)),
    "StreamManager.list": _ask(lambda w: list(w.streams.list())),
    "StreamManager.describe_all": _ask(lambda w: [each.name for each in w.streams.describe_all()]),
    "StreamManager.retain": _ask(lambda w: w.streams.retain(STREAM, dry_run=True).deleted_bytes),
    "StreamManager.create": _then(lambda w: w.streams.create(OTHER).name, lambda w: list(w.streams.list())),
    "StreamManager.create_many": _ask(lambda w: [each.name for each in w.streams.create_many([OTHER, QUEUE])]),
    "StreamManager.configure": _ask(lambda w: w.streams.configure(STREAM, tags={"team": "shop"}).config.tags),
    "StreamManager.copy": _ask(lambda w: len(w.streams.copy(STREAM, OTHER, threads=1).segments)),
    "StreamManager.delete": _then(lambda w: w.streams.delete(STREAM), lambda w: w.streams.exists(STREAM)),
    "StreamManager.scale": _ask(lambda w: len(w.streams.scale(STREAM, split=[0]).segments)),
    "StreamManager.scale by a merge": _with(
        lambda w: w.streams.scale(STREAM, split=[0]) and w.streams,
        lambda streams: len(streams.scale(STREAM, merge=[1, 2]).segments),
    ),
    "StreamManager.seal": _ask(lambda w: w.streams.seal(STREAM).sealed),
    "StreamManager.truncate": _then(
        lambda w: w.streams.truncate(STREAM, w.streams.tail_cut(w.streams.fetch_state(STREAM))),
        lambda w: w.batch.segment_ranges(STREAM),
    ),
    "ReaderGroupManager.create": _then(lambda w: w.groups.create("audit", streams=[STREAM]).name, _group_names),
    "ReaderGroupManager.get": _ask(lambda w: w.groups.get(GROUP).name),
    "ReaderGroupManager.list": _ask(_group_names),
    "ReaderGroupManager.states": _ask(lambda w: [name for name, _ in w.groups.states()]),
    "ReaderGroupManager.delete": _then(lambda w: w.groups.delete(GROUP), _group_names),
    "ReaderGroup.lag": _ask(_lag),
    "ReaderGroup.stream_cuts": _ask(_cuts_of),
    "ReaderGroup.generate_stream_cuts": _ask(
        lambda w: {stream: dict(cut.offsets) for stream, cut in w.group.generate_stream_cuts().items()}
    ),
    "ReaderGroup.online_readers": _ask(lambda w: w.group.online_readers()),
    "ReaderGroup.distribution": _ask(lambda w: len(w.group.distribution().unassigned)),
    "ReaderGroup.checkpoints": _ask(lambda w: list(w.group.checkpoints)),
    "ReaderGroup.checkpoint": _then(lambda w: w.group.checkpoint("noon").name, lambda w: list(w.group.checkpoints)),
    "ReaderGroup.cancel_checkpoint": _ask(lambda w: w.group.cancel_checkpoint("noon")),
    "ReaderGroup.configure": _ask(lambda w: w.group.configure(max_outstanding_checkpoints=7)),
    "ReaderGroup.reset": _then(lambda w: w.group.reset("tail"), _cuts_of),
    "ReaderGroup.reset at a time": _then(lambda w: w.group.reset(WRITTEN_AT), _cuts_of),
    "ReaderGroup.update_retention_cuts": _then(
        lambda w: w.group.update_retention_cuts(w.cuts), lambda w: list(w.group.state.retention_cuts or {})
    ),
    "ReaderGroup.remove_reader": _with(
        lambda w: (w.group, w.reader()), lambda found: (found[0].remove_reader("r1"), found[0].online_readers())
    ),
    "ReaderGroup.reader": _ask(lambda w: w.reader() and w.group.online_readers()),
    "ReaderGroup.scaling_decision": _ask(
        lambda w: w.group.scaling_decision(rg.ReaderScalingPolicy(max_readers=3)).desired_readers
    ),
    "Reader.time_window": _with(World.reader, lambda reader: reader.time_window(STREAM)),
    "Reader.read": _read,
    "Reader.commit": _commit,
    "Reader.close": _with(lambda w: (w, w.reader()), lambda found: (found[1].close(), found[0].group.online_readers())),
    "BatchClient.segment_ranges": _ask(lambda w: [each.size for each in w.batch.segment_ranges(STREAM)]),
    "BatchClient.cut_at": _ask(lambda w: dict(w.batch.cut_at(STREAM, WRITTEN_AT).offsets)),
    "BatchClient.next_cut": _ask(lambda w: dict(w.batch.next_cut(w.cuts[STREAM]).offsets)),
    "BatchClient.next_cuts": _ask(lambda w: [dict(cut.offsets) for cut in w.batch.next_cuts([w.cuts[STREAM]])]),
    "BatchClient.count": _ask(lambda w: w.batch.count(w.range)),
    "BatchClient.divide": _ask(lambda w: len(list(w.batch.divide(w.range, 1)))),
    "BatchClient.read": _ask(lambda w: [event.data for event in w.batch.read(w.range)]),
    "BatchClient.batches": _ask(lambda w: [len(batch) for batch in w.batch.batches(w.range)]),
    "BatchClient.record_batches": _ask(lambda w: [each.num_rows for each in w.batch.record_batches(w.range)]),
    "EventWriter.flush": _written,
    "EventWriter.close": _closed_writer,
    "Transaction.commit": _committed,
    "Transaction.abort": _aborted,
    "SharedMap.put": _with(_map, lambda m: (m.put("b", 2), m.copy())),
    "SharedMap.put_if_absent": _with(_map, lambda m: m.put_if_absent("b", 2)),
    "SharedMap.pop": _with(_map, lambda m: m.pop("a")),
    "SharedMap.popitem": _with(_map, lambda m: m.popitem()),
    "SharedMap.remove": _with(_map, lambda m: m.remove("a", 1)),
    "SharedMap.replace": _with(_map, lambda m: m.replace("a", 2, 1)),
    "SharedMap.setdefault": _with(_map, lambda m: m.setdefault("b", 2)),
    "SharedMap.update": _with(_map, lambda m: (m.update(b=2), m.copy())),
    "SharedMap.clear": _with(_map, lambda m: (m.clear(), m.copy())),
    "SharedMap.refresh": _with(_map, lambda m: (m.refresh(), m.copy())),
    "SharedSet.add": _with(_set, lambda s: s.add(2)),
    "SharedSet.discard": _with(_set, lambda s: s.discard(1)),
    "SharedSet.remove": _with(_set, lambda s: (s.remove(1), s.copy())),
    "SharedSet.pop": _with(_set, lambda s: s.pop()),
    "SharedSet.update": _with(_set, lambda s: (s.update([2]), s.copy())),
    "SharedSet.clear": _with(_set, lambda s: (s.clear(), s.copy())),
    "SharedSet.refresh": _with(_set, lambda s: (s.refresh(), s.copy())),
    "SharedConfig.put": _with(_config, lambda c: (c.put("rate", 3), c.value)),
    "SharedConfig.put_if_absent": _with(_config, lambda c: c.put_if_absent("rate", 3)),
    "SharedConfig.remove": _with(_config, lambda c: c.remove("rate", 2)),
    "SharedConfig.replace": _with(_config, lambda c: c.replace("rate", 3, 2)),
    "SharedConfig.update": _with(_config, lambda c: (c.update(rate=3), c.value)),
    "SharedConfig.clear": _with(_config, lambda c: (c.clear(), c.value)),
    "SharedConfig.refresh": _with(_config, lambda c: (c.refresh(), c.value)),
    "SharedCounter.add": _with(_counter, lambda c: c.add(2)),
    "SharedCounter.put": _with(_counter, lambda c: (c.put(2), c.value)),
    "SharedCounter.replace": _with(_counter, lambda c: c.replace(2, 5)),
    "SharedCounter.refresh": _with(_counter, lambda c: (c.refresh(), c.value)),
    "EventQueue.add": _with(_queue, lambda q: (q.add(b"y"), q.outstanding_bytes)),
    "EventQueue.add_many": _with(_queue, lambda q: (q.add_many([b"y", b"z"]), q.outstanding_bytes)),
    "EventQueue.clear": _with(_queue, lambda q: (q.clear(), q.outstanding_bytes)),
    "EventQueue.outstanding_bytes": _with(_queue, lambda q: q.outstanding_bytes),
    "EventQueue.handled_upto": _with(_queue, lambda q: q.handled_upto),
    "EventQueue.dead_letters": _with(_queue_with_letter, lambda q: [each.data for each in q.dead_letters()]),
    "EventQueue.forget_dead_letters": _with(_queue_with_letter, _forget),
    "DeadLetters.list": _with(_letters, _texts),
    "DeadLetters.show": _with(_letters, _show),
    "DeadLetters.replay": _with(_letters, lambda letters: (letters.replay(), _texts(letters))),
    "DeadLetters.discard": _with(_letters, lambda letters: (letters.discard(), _texts(letters))),
    "DeadLetters.list of a queue": _with(_queue_letters, _texts),
    "DeadLetters.show of a queue": _with(_queue_letters, _show),
    "DeadLetters.replay of a queue": _with(_queue_letters, lambda letters: (letters.replay(), _texts(letters))),
    "DeadLetters.discard of a queue": _with(_queue_letters, lambda letters: (letters.discard(), _texts(letters))),
    "Membership.join": _with(_member, lambda member: (member.join(), member.members())),
    "Membership.members": _with(_member, lambda member: member.members()),
    "Membership.leave": _with(
        lambda w: (found := _member(w), found.join())[0], lambda member: (member.leave(), member.members())
    ),
    "LeaderElection.campaign": _with(
        _election, lambda election: (election.campaign(timeout=PATIENCE_SECONDS), election.leader())
    ),
    "LeaderElection.leader": _with(_election, lambda election: election.leader()),
    "LeaderElection.resign": _with(
        lambda w: (found := _election(w), found.campaign(timeout=PATIENCE_SECONDS))[0],
        lambda election: (election.resign(), election.leader()),
    ),
    "Barrier.wait": _with(_barrier, lambda barrier: barrier.wait(timeout=PATIENCE_SECONDS)),
    "Barrier.n_waiting": _with(_barrier, lambda barrier: barrier.n_waiting),
    "Barrier.reset": _with(_barrier, lambda barrier: (barrier.reset(), barrier.n_waiting)),
    "StateSynchronizer.update_state": _with(_state, lambda s: s.update_state(lambda _: [Raise(by=1)]).value),
    "StateSynchronizer.update_state_returning": _with(
        _state, lambda s: s.update_state_returning(lambda state: ([Raise(by=1)], state.value))
    ),
    "StateSynchronizer.update_state_unconditionally": _with(
        _state, lambda s: s.update_state_unconditionally(Raise(by=1)).value
    ),
    "StateSynchronizer.fetch_updates": _with(_state, lambda s: s.fetch_updates().value),
    "StateSynchronizer.wait_for": _with(_state, lambda s: s.wait_for(lambda state: True).value),
    "StateSynchronizer.compact": _with(_state, lambda s: s.compact()),
    "StateSynchronizer.history": _with(
        lambda w: (found := _state(w), found.revision, found.update_state_unconditionally(Raise(by=1))),
        lambda found: len(found[0].history(found[1])),
    ),
    "StateSynchronizer.initialize": _with(_state, lambda s: s.initialize(Level(value=3))),
    "StateSynchronizer.delete": _with(_state, lambda s: s.delete()),
    "NotificationRecord.range": _ask(lambda w: w.group.notification_record.range()),
    "NotificationRecord.read": _ask(lambda w: list(w.group.notification_record.read())),
    "EventProcessor.add": _with(_processor, lambda p: (p.add(b"x"), p.join(0))),
    "EventProcessor.drain": _with(
        _processor, lambda p: (p.add(b"x"), p.drain(timeout=PATIENCE_SECONDS), p.processed_events)
    ),
    "Outbox.lag": _with(_outbox, _waiting),
    "Outbox.relay": _with(_outbox, _relayed),
    "Outbox.stuck_notifier": _with(_outbox, lambda outbox: outbox.stuck_notifier is not None),
    "ReaderPool.run": _pool,
    "Client.synchronizer": _ask(lambda w: _state(w).state.value),
    "Client.shared_map": _ask(lambda w: w.client.shared_map("prices", int).copy()),
    "Client.shared_set": _ask(lambda w: w.client.shared_set("seen", int).copy()),
    "Client.shared_config": _ask(lambda w: w.client.shared_config("limits", Limits).value),
    "Client.counter": _ask(lambda w: w.client.counter("orders").value),
    "Client.event_queue": _ask(lambda w: w.client.event_queue("mail").segment),
    "Client.lock": _ask(_lock),
    "Client.semaphore": _ask(_semaphore),
    "Client.barrier": _ask(lambda w: _barrier(w).n_waiting),
    "Client.membership": _ask(lambda w: _member(w).members()),
    "Client.leader_election": _ask(lambda w: _election(w).leader()),
    "Client.dead_letters": _ask(
        lambda w: list(w.client.dead_letters(queue="mail").list()) if w.client.event_queue("mail") else None
    ),
    "Client.writer": _ask(lambda w: w.client.writer(STREAM).failure),
}


#: Public names without an entry, and why.
NOT_CALLED: Final[Mapping[str, frozenset[str]]] = {
    "asks no store: it tells what this process knows, or makes an object of it": frozenset({
        "Barrier.arrival", "Barrier.check_open", "Barrier.closed", "BatchClient.ranges_between", "Client.batch",
        "Client.groups", "Client.streams", "Client.telemetry", "EventProcessor.active", "EventProcessor.error",
        "EventProcessor.join", "EventProcessor.latency", "EventProcessor.processed_bytes",
        "EventProcessor.processed_events", "EventWriter.begin_write", "EventWriter.failure",
        "EventWriter.has_ended", "EventWriter.has_room", "EventWriter.transaction",
        "HeldLock.check", "LeaderElection.check", "LeaderElection.check_open", "LeaderElection.fencing_token",
        "LeaderElection.is_candidate", "LeaderElection.is_leader", "LeaderElection.member_timeout_seconds",
        "LeaderElection.on_elected", "LeaderElection.on_lost", "LeaderElection.on_news", "Membership.is_member",
        "Membership.member_timeout_seconds", "Membership.on_dead", "Membership.on_joined", "Membership.on_left",
        "Outbox.create_table", "Outbox.ddl", "Outbox.write", "OutboxRelay.events_moved", "OutboxRelay.is_active",
        "Reader.assigned_segments", "Reader.position", "Reader.stop", "ReaderGroup.stop", "ReaderGroupManager.stop",
        "OutboxRelay.stop", "EventProcessor.stop", "ReaderGroup.checkpoint_notifier",
        "ReaderGroup.config", "ReaderGroup.coordinator", "ReaderGroup.counters", "ReaderGroup.end_of_data_notifier",
        "ReaderGroup.lag_notifier",
        "ReaderGroup.notification_record", "ReaderGroup.pool", "ReaderGroup.reader_notifier",
        "ReaderGroup.retention_notifier", "ReaderGroup.segment_notifier", "ReaderGroup.state",
        "ReaderPool.desired_readers", "ReaderPool.stop", "ReaderPool.workers", "SharedConfig.kind",
        "SharedConfig.value", "SharedCounter.kind", "SharedCounter.value", "SharedMap.copy", "SharedMap.get",
        "SharedMap.items", "SharedMap.keys", "SharedMap.kind", "SharedMap.values", "SharedSet.copy",
        "SharedSet.isdisjoint", "SharedSet.kind", "StateSynchronizer.applied_length",
        "StateSynchronizer.bytes_since_compaction", "StateSynchronizer.revision", "StateSynchronizer.segment",
        "StateSynchronizer.was_compacted",
        "StateSynchronizer.snapshot_of_state", "StateSynchronizer.state", "StateSynchronizer.transitions",
        "StreamManager.copies", "StreamManager.timeout",
    }),
    "its threads call the store, and repeat what fails until they are closed": frozenset({
        "Client.event_processor", "EventWriter.note_time", "EventWriter.wait_for_room", "EventWriter.write",
        "EventWriter.write_arrow", "EventWriter.write_batch", "EventWriter.write_many", "OutboxRelay.start",
        "ReaderGroup.autoscale",
        "ReaderGroup.record_notifications", "SharedConfig.register_listener", "SharedCounter.register_listener",
        "SharedMap.register_listener", "SharedSet.register_listener", "StateSynchronizer.on_update",
        "Transaction.write", "Transaction.write_arrow", "Transaction.write_batch",
    }),
    "one round of the threads, for a clock that is moved by hand: the next round repeats it": frozenset({
        "Barrier.step", "Client.step", "EventProcessor.handle_queued", "EventProcessor.step", "LeaderElection.step",
        "Membership.step", "OutboxRelay.step", "ReaderGroup.step", "ReaderGroupManager.step", "SharedConfig.step",
        "SharedCounter.step", "SharedMap.step", "SharedSet.step", "StateSynchronizer.poll_listeners",
        "StateSynchronizer.step",
    }),
    "it ends what was opened, and has no answer": frozenset({
        "Barrier.close", "Client.close", "EventProcessor.close", "EventQueue.close", "LeaderElection.close",
        "Membership.close", "OutboxRelay.close", "ReaderGroup.close", "ReaderGroupManager.close", "ReaderPool.close",
        "SharedConfig.close", "SharedCounter.close", "SharedMap.close", "SharedSet.close", "StateSynchronizer.close",
        "StreamManager.close",
    }),
    "another entry has the same calls of the store": frozenset({
        "EventProcessor.add_many", "EventProcessor.clear", "EventProcessor.dead_letters",
        "EventProcessor.forget_dead_letters", "EventProcessor.handled_upto", "EventProcessor.outstanding_bytes",
        "HeldLock.release", "LeaderElection.observe", "NotificationRecord.follow", "NotificationRecord.record_batches",
        "NotificationRecord.table", "Reader.batches", "Reader.go_on", "Reader.read_arrow", "Reader.read_batch",
        "ReaderGroup.open_reader", "ReaderGroupManager.note_skipped",
        "ReaderGroupManager.subscribers", "SharedConfig.watch", "SharedCounter.watch", "SharedMap.watch",
        "SharedSet.watch", "StateSynchronizer.update_state_with_attributes", "StateSynchronizer.watch",
        "StreamManager.fetch_state", "StreamManager.finish_pending", "StreamManager.note_deleted_group",
        "StreamManager.resolve",
        "StreamManager.segment_lengths", "StreamManager.states", "StreamManager.synchronizer", "StreamManager.tail_cut",
    }),
    "one look of a loop that repeats it": frozenset({"StateSynchronizer.wait_for_growth"}),
    "for copies into a staging stream, which a later round deletes again": frozenset({"StreamManager.delete_staged"}),
}  # fmt: skip


def test_each_public_name_has_an_entry_or_a_reason() -> None:
    public = {f"{each.__name__}.{name}" for each in CLASSES for name in dir(each) if not name.startswith("_")}
    entries = {name.partition(" ")[0] for name in CALLS}
    reasons = [name for names in NOT_CALLED.values() for name in names]
    assert len(set(reasons)) == len(reasons) and not entries & set(reasons)
    assert entries | set(reasons) == public


def _failures(call: Call, arm: Callable[[FailingStore, Operation], None]) -> Iterator[tuple[int, object]]:
    """Yield the answer without a failure, as number 0, then with a failure of each call of the store, in order."""
    this_thread = threading.get_ident()
    for number in count(0):
        store = FailingStore(open_store("memory://"))
        left, failed = number, False

        def fail(operation: Operation, store: FailingStore = store) -> None:
            nonlocal left, failed
            if threading.get_ident() == this_thread:
                left -= 1
                if left == 0:
                    failed = True
                    arm(store, operation)

        with rg.Client(store, timeout=PATIENCE_SECONDS) as client:
            act = call(World(client))
            store.before = fail
            try:
                answer = act()
            except rg.ReaderGroupError as error:
                if not number:
                    raise
                answer = f"{type(error).__name__} at {store.operations[-1]}: {error}"
            finally:
                store.before = store.after = None
        yield number, answer
        if number and not failed:
            assert number > 1, "the store was not asked"
            return


def _fail(store: FailingStore, operation: Operation) -> None:
    """Make this call fail, with nothing done."""
    raise rg.StoreUnavailableError("away")


def _lose_answer(store: FailingStore, operation: Operation) -> None:
    """Let this call take effect, and fail all the same: with the answer that appends have for it, or an error."""
    if operation.verb in ("append", "append_together", "concat"):
        store.lose_answers()
        return

    def lose(operation: Operation) -> None:
        store.after = None
        raise rg.StoreUnavailableError("the answer was lost")

    store.after = lose


@pytest.mark.parametrize("arm", [_fail, _lose_answer])
@pytest.mark.parametrize("name", CALLS)
def test_the_answer_is_the_same_if_any_call_of_the_store_fails_once(
    name: str, arm: Callable[[FailingStore, Operation], None]
) -> None:
    answers = _failures(CALLS[name], arm)
    _, expected = next(answers)
    wrong = {number: answer for number, answer in answers if answer != expected}
    assert not wrong, expected


async def _names(client: aio.Client) -> object:
    return [name async for name in client.groups.list()]


async def _lag_of(client: aio.Client) -> object:
    return (await (await client.groups.get(GROUP)).lag()).events


async def _offsets_of(client: aio.Client) -> object:
    return sorted(await (await client.groups.get(GROUP)).stream_cuts())


async def _deleted(client: aio.Client) -> object:
    await client.groups.delete(GROUP)
    return await _names(client)


@pytest.mark.parametrize("ask", [_names, _lag_of, _offsets_of, _deleted])
def test_a_call_under_asyncio_is_repeated_as_well(ask: Callable[[aio.Client], Awaitable[object]]) -> None:
    answers = []
    for number in count(0):
        store = FailingStore(open_store("memory://"))
        with rg.Client(store) as client:
            World(client)
        left = number

        def fail(operation: Operation) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise rg.StoreUnavailableError("away")

        async def run(store: FailingStore = store, fail: Callable[[Operation], None] = fail) -> object:
            async with aio.Client(store, timeout=PATIENCE_SECONDS) as client:
                store.before = fail
                try:
                    return await ask(client)
                finally:
                    store.before = None

        answers.append(asyncio.run(run()))
        if number and left > 0:
            break
    assert number > 1 and all(answer == answers[0] for answer in answers)


OUTAGE_SECONDS: Final = 2.0


@pytest.mark.stores
@pytest.mark.parametrize(
    "name",
    [
        "ReaderGroup.stream_cuts",
        "ReaderGroupManager.list",
        "ReaderGroupManager.delete",
        "BatchClient.read",
        "DeadLetters.replay",
    ],
)
def test_the_answer_is_the_same_if_the_store_is_away_for_two_seconds(store_url: str, name: str) -> None:
    with rg.connect("memory://") as client:
        expected = CALLS[name](World(client))()
    with open_store(store_url) as opened, rg.Client(store := FailingStore(opened), timeout=PATIENCE_SECONDS) as client:
        act = CALLS[name](World(client))
        back = threading.Timer(OUTAGE_SECONDS, lambda: setattr(store, "unavailable", False))
        store.unavailable = True
        back.start()
        try:
            answer = act()
        finally:
            back.join()
    assert answer == expected


def test_a_store_that_stays_away_is_reported_at_the_timeout_and_another_error_at_once() -> None:
    store, clock = FailingStore(open_store("memory://")), InstantClock(datetime(2026, 1, 3, tzinfo=UTC).timestamp())
    with rg.Client(store, timeout=5.0, clock=clock) as client:
        world = World(client)
        for ask in (_group_names, _lag, _cuts_of):
            since = clock.monotonic()
            store.unavailable = True
            with pytest.raises((rg.StoreUnavailableError, rg.DeadlineExceededError)) as caught:
                ask(world)
            store.unavailable = False
            assert 5.0 <= clock.monotonic() - since <= 5.5
            if ask is _group_names:
                assert caught.value.facts["verb"] == "list"
                assert caught.value.facts["failing_for_seconds"] == 5.0

        def damage(operation: Operation) -> None:
            raise rg.CorruptStoreError("damaged")

        for ask in (_group_names, _cuts_of):
            calls, store.before = len(store.operations), damage
            with pytest.raises(rg.CorruptStoreError):
                ask(world)
            store.before = None
            assert len(store.operations) == calls + 1


def test_opening_a_lock_takes_no_longer_than_the_timeout_of_the_call() -> None:
    store, clock = FailingStore(open_store("memory://")), InstantClock()
    with rg.Client(store, timeout=30.0, clock=clock) as client:
        store.unavailable = True
        for hold in (client.lock("door", timeout=2.0), client.semaphore("seats", permits=2, timeout=2.0)):
            since = clock.monotonic()
            with pytest.raises(rg.DeadlineExceededError), hold:
                pass
            assert clock.monotonic() - since <= 2.5
        store.unavailable = False
        with client.lock("door", timeout=2.0) as held:
            held.check()


def test_who_waits_for_the_store_to_open_a_lock_holds_up_no_other() -> None:
    store = FailingStore(open_store("memory://"))
    answers, asked = threading.Event(), threading.Semaphore(0)

    def wait(operation: Operation) -> None:
        if operation.segment == "lock/slow":
            asked.release()
            assert answers.wait(PATIENCE_SECONDS)

    def open_it() -> rg.Lock:
        return client._lock(rg.Lock, "slow", timeout=PATIENCE_SECONDS, member_timeout_seconds=10.0)

    store.before = wait
    with rg.Client(store, timeout=PATIENCE_SECONDS) as client, ThreadPoolExecutor(2) as threads:
        opening = [threads.submit(open_it) for _ in range(2)]
        for _ in opening:
            assert asked.acquire(timeout=PATIENCE_SECONDS)
        with client.lock("fast", timeout=5.0):
            pass
        answers.set()
        one, other = (each.result(PATIENCE_SECONDS) for each in opening)
        assert one is other  # it knows which of the client's threads hold the lock
