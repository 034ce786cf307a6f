"""What processes do that die, without any cleaning up, at a chosen operation of their store.

Each has a clock of its own that stands still unless it moves it. So nothing runs in the background but the writer's
thread, and a life comes by the same operations every time. What it knows to be done it tells its parent at once.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import readergroup as rg
from synchronizer import ManualClock, Revision, StateSynchronizer, open_store
from synchronizer.testing import FailingStore, Operation

STREAM = "shop/orders"
GROUP = "billing"
KEYS = [f"k{number}" for number in range(16)]
READER_TIMEOUT_SECONDS = 3.0


class Death(NamedTuple):
    """At the operation of that number, the first being 1: before it is carried out, or before its answer is used."""

    operation: int
    when: Literal["before", "after"]


class Told(NamedTuple):
    """What a process says: that something is done, or that it ``waits`` until its parent has had a turn."""

    what: str
    facts: tuple[Any, ...] = ()
    waits: bool = False


class Delivery(NamedTuple):
    reader: str
    event: str
    segment: str
    offset: int
    token: int


class Tally(rg.State):
    value: int = 0


class Add(rg.Update[Tally], tag="add"):
    def apply_to(self, state: Tally, revision: Revision) -> Tally:
        return state.replace(value=state.value + 1)


def tally(client: rg.Client) -> StateSynchronizer[Tally]:
    return client.synchronizer("tally", initial=Tally(), updates=[Add])


class Life:
    """A process with a client whose store it dies at."""

    def __init__(self, connection: Connection, url: str, death: Death) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._death = death
        self._numbers = itertools.count(1)
        self._mine = threading.local()  # the number of the operation that this thread is at
        self.store = FailingStore(open_store(url))
        self.store.before, self.store.after = self._before, self._after
        self.clock = ManualClock()
        self.client = rg.Client(self.store, clock=self.clock)

    def tell(self, what: str, *facts: Any) -> None:
        with self._lock:
            self._connection.send(Told(what, facts))

    def give_turn(self, what: str) -> None:
        """Tell it, and go on when the parent has done what it wants to do then."""
        with self._lock:
            self._connection.send(Told(what, waits=True))
        self._connection.recv()

    def read(self, reader: rg.Reader[bytes], count: int) -> None:
        """Read events that are there."""
        for _ in range(count):
            assert self.read_one(reader), "there is nothing to read"

    def read_one(self, reader: rg.Reader[bytes]) -> bool:
        """Whether there was an event to be read. The one before is processed when this begins, and not sooner."""
        self.tell("asks for the next")
        event = reader.read(timeout=0)
        if event is not None:
            self.tell("delivered", delivery(reader, event))
        return event is not None

    def commit(self, reader: rg.Reader[bytes]) -> None:
        self.tell("commits")
        reader.commit()
        self.tell("committed")

    def _before(self, operation: Operation) -> None:
        self._mine.number = next(self._numbers)
        self._die_if_due(operation, "before")

    def _after(self, operation: Operation) -> None:
        self._die_if_due(operation, "after")

    def _die_if_due(self, operation: Operation, when: str) -> None:
        if self._death == (self._mine.number, when):
            with self._lock:
                self._connection.send(Told("dies", tuple(operation)))
                os.kill(os.getpid(), signal.SIGKILL)


def delivery(reader: rg.Reader[bytes], event: rg.Event[bytes]) -> Delivery:
    return Delivery(reader.reader_id, event.raw.decode(), event.segment, event.offset, event.fencing_token)


def live(connection: Connection, url: str, do: Callable[[Life], None], death: Death) -> None:
    life = Life(connection, url, death)
    do(life)
    life.tell("completed", len(life.store.operations))


# What there is to do


def write(life: Life) -> None:
    """Events of all keys, two at a time, numbered per key. Tells how many of each are stored."""
    with life.client.writer(STREAM) as writer:
        for count in (2, 4, 6):
            for number in (count - 2, count - 1):
                for key in KEYS:
                    writer.write(f"{key}:{number}".encode(), routing_key=key)
            writer.flush()
            life.tell("stored", count)


def transact(life: Life) -> None:
    """Two transactions of all keys, the second staged before a split. Tells how many are committed."""
    with life.client.writer(STREAM) as writer:
        for number in range(2):
            transaction = writer.transaction()
            for key in KEYS:
                transaction.write(f"{key}:{number}".encode(), routing_key=key)
            if number == 1:
                life.client.streams.scale(STREAM, split=[0])
            transaction.commit()
            life.tell("stored", number + 1)
    life.tell("closed")


def split_and_merge(life: Life) -> None:
    streams = life.client.streams
    streams.scale(STREAM, split=[0])
    life.tell("split")
    streams.scale(STREAM, merge=[3, 1])
    life.tell("merged")


def seal(life: Life) -> None:
    life.client.streams.seal(STREAM)
    life.tell("sealed")


def compact(life: Life) -> None:
    """Compact the logs of a state, of a group and of a stream's metadata, each after an update."""
    state = tally(life.client)
    for _ in range(2):
        state.update_state_unconditionally(Add())
        life.tell("added")
        assert state.compact()
        life.tell("compacted")
    group = life.client.groups.get(GROUP)
    for seconds in (1.5, 2.5):
        group.configure(position_interval_seconds=seconds)
        assert group.synchronizer.compact()
    streams = life.client.streams
    streams.scale(STREAM, split=[0])
    assert streams.synchronizer(STREAM).compact()


def create_and_delete(life: Life) -> None:
    """Delete a group that has a reader and its stream that has events, and create and delete them again."""
    for _ in range(2):
        life.client.groups.delete(GROUP)
        life.tell("group is deleted")
        life.client.streams.delete(STREAM)
        life.tell("stream is deleted")
        life.client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        life.tell("stream is there")
        create_group(life.client)
        life.tell("group is there")


def create_group(client: rg.Client) -> rg.ReaderGroup:
    return client.groups.create(GROUP, streams=[STREAM], reader_timeout_seconds=READER_TIMEOUT_SECONDS)


def join_commit_and_close(life: Life) -> None:
    """A reader joins, reads, commits by hand and by renewing, and leaves."""
    group = life.client.groups.get(GROUP)
    reader = group.reader("mortal")
    life.tell("joined")
    life.read(reader, 10)
    life.commit(reader)
    life.read(reader, 10)
    life.clock.advance(1.0)
    group.coordinator.step()  # renews the lease, and commits the events that are processed
    life.read(reader, 5)
    reader.close()
    life.tell("closed")


def hand_over(life: Life) -> None:
    """A reader joins another, gets some of its segments, and gives one up to a third."""
    group = life.client.groups.get(GROUP)
    reader = group.reader("mortal")
    life.give_turn("joined")
    life.read(reader, 10)
    life.commit(reader)
    life.read(reader, 5)
    life.clock.advance(1.0)
    group.coordinator.step()
    life.give_turn("may lose a segment")
    group.coordinator.step()
    life.read(reader, 5)
    life.give_turn("lost a segment")
    life.read(reader, 2)
    reader.close()
    life.tell("closed")


def take_over(life: Life) -> None:
    """A reader joins one that is dead, declares it dead, takes over its segments and leaves."""
    group = life.client.groups.get(GROUP)
    reader = group.reader("mortal")
    for _ in range(int(READER_TIMEOUT_SECONDS / 0.5) + 2):
        life.clock.advance(0.5)
        group.coordinator.step()
    assert list(group.state.readers) == ["mortal"]
    life.tell("declared dead")
    life.read(reader, 60)
    life.commit(reader)
    reader.close()
    life.tell("closed")


def read_across_a_scale(life: Life) -> None:
    """A reader comes to the end of segments that somebody began to merge and died; it finishes that, and reads on."""
    group = life.client.groups.get(GROUP)
    reader = group.reader("mortal")
    for _ in range(100):
        while life.read_one(reader):
            pass
        if group.state.streams[STREAM].epoch == 1:
            break
        life.clock.advance(0.5)
        group.coordinator.step()
    assert group.state.streams[STREAM].epoch == 1
    reader.close()
    life.tell("closed")


def record(life: Life) -> None:
    """Record what becomes of a group, and its lag."""
    group = life.client.groups.get(GROUP)
    recording = group.record_notifications(lag_interval_seconds=10.0)
    recording.poll()
    life.give_turn("begun")
    for number in range(2):
        group.synchronizer.update_state_unconditionally(rg.AddReader(reader=f"r{number}"))
        life.client.streams.scale(STREAM, split=[number])
        recording.poll()
        life.clock.advance(11.0)
        life.give_turn("recorded")
        group.synchronizer.update_state_unconditionally(rg.RemoveReader(reader=f"r{number}", cause="dead"))
    recording.close()
