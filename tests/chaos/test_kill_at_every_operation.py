"""A process dies at its n-th store operation, for every n. The next process completes what it began.

`make test` takes every eleventh n.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, Final

import pytest

import readergroup as rg
from readergroup.record.entries import LagSample
from readergroup.streams.config import data_prefix
from synchronizer import ManualClock, open_store
from synchronizer.testing import FailingStore, Operation
from tests.chaos import dying
from tests.chaos.dying import GROUP, KEYS, READER_TIMEOUT_SECONDS, STREAM, Death, Delivery, Life, Told, delivery, tally
from tests.chaos.zygote import ENDED, Child, Zygote

#: What happens in between two operations of a process nobody else can see. So dying after one that only looks is dying
#: before the next one.
WRITES: Final = frozenset(
    {"create", "create_together", "delete", "forget", "append", "append_together", "concat", "truncate", "seal"}
)
#: Events per key that are written before the life begins.
WRITTEN: Final = 5
SHARED_MEMORY: Final = "/dev/shm"
L1_SECONDS: Final = READER_TIMEOUT_SECONDS + 2.0
L2_SECONDS: Final = 10.0


class World:
    """The process that was there before the death, or comes after it. Its clock is moved by hand."""

    def __init__(self, url: str, number: int) -> None:
        self.store = open_store(url)
        self.clock = ManualClock()
        self.client = rg.Client(self.store, clock=self.clock)
        self.number = number  # of the operation that is died at: chooses who comes first
        self.told: list[Told] = []
        self.readers: list[rg.Reader[bytes]] = []
        self.deliveries: list[Delivery] = []  # in their order, those of the dead too
        self.own: list[Delivery] = []
        self.committed: set[str] = set()  # by the dead
        self.in_hand: str | None = None  # what the dead had got and not processed
        self.written = dict.fromkeys(KEYS, WRITTEN)

    @property
    def group(self) -> rg.ReaderGroup:
        return self.client.groups.get(GROUP)

    def hear(self, told: Told) -> None:
        self.told.append(told)
        if told.what == "delivered":
            (delivered,) = told.facts
            self.deliveries.append(delivered)
            self.in_hand = delivered.event
        if told.what in ("asks for the next", "commits"):
            self.in_hand = None
        by_it = [each.event for each in self.deliveries if each.reader == "mortal" and each not in self.own]
        if told.what == "committed":
            self.committed.update(by_it)
        if told.what == "closed":  # the event in hand does not count as processed
            self.committed.update(by_it[:-1])

    def heard(self, what: str) -> int:
        """How often this was told."""
        return Counter(told.what for told in self.told)[what]

    # Writing

    def write(self, count: int) -> None:
        """So many more events of each key."""
        with self.client.writer(STREAM) as writer:
            for _ in range(count):
                for key in KEYS:
                    writer.write(f"{key}:{self.written[key]}".encode(), routing_key=key)
                    self.written[key] += 1

    # Reading

    def join(self, reader_id: str) -> rg.Reader[bytes]:
        reader = self.group.reader(reader_id)
        self.readers.append(reader)
        return reader

    def take(self, reader: rg.Reader[bytes], count: int | None = None) -> int:
        """Read so many events, or all that are there; how many there were."""
        for taken in itertools.count():
            event = reader.read(timeout=0) if taken != count else None
            if event is None:
                return taken
            self.own.append(delivery(reader, event))
            self.deliveries.append(self.own[-1])
        raise AssertionError

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.group.coordinator.step()

    def bury(self, reader_id: str) -> None:
        """Until the dead reader is out of the group, which must not take longer than its lease and two seconds."""
        start = self.clock.monotonic()
        while reader_id in self.group.state.readers:
            assert self.clock.monotonic() - start < L1_SECONDS, f"{reader_id} is still in the group"
            self.pass_time(0.25)

    def read_everything(self) -> None:
        """Until each event that was written is delivered, and a while longer for those that come twice."""
        start = self.clock.monotonic()
        while missing := self.events - {each.event for each in self.deliveries}:
            assert self.clock.monotonic() - start < L2_SECONDS, f"not delivered: {sorted(missing)}"
            self._read_round()
        for _ in range(2):
            self._read_round()

    def _read_round(self) -> None:
        for reader in self.readers:
            self.take(reader)
        self.pass_time(0.5)

    @property
    def events(self) -> set[str]:
        return {f"{key}:{number}" for key, count in self.written.items() for number in range(count)}

    # What has to hold

    def check_deliveries(self) -> None:
        """Nothing skipped; nothing twice but what the dead had not committed; in order; by growing tokens."""
        own = [each.event for each in self.own]
        assert len(own) == len(set(own))
        assert not self.committed & set(own)
        assert self.in_hand is None or self.in_hand in own
        assert {each.event for each in self.deliveries} == self.events
        self._check_keys()
        by_segment: dict[str, list[Delivery]] = {}
        for each in self.deliveries:
            by_segment.setdefault(each.segment, []).append(each)
        for delivered in by_segment.values():
            for before, after in pairwise(delivered):
                assert before.token <= after.token, "an older owner has delivered after a newer one"
                assert before.token < after.token or before.offset < after.offset

    def _check_keys(self) -> None:
        for key in KEYS:
            seen = -1
            for each in self.deliveries:
                if each.event.startswith(f"{key}:"):
                    number = int(each.event.removeprefix(f"{key}:"))
                    assert number <= seen + 1, "an event was skipped, or came too early"
                    seen = max(seen, number)
            mine = [int(each.event.split(":")[1]) for each in self.own if each.event.startswith(f"{key}:")]
            assert mine == sorted(mine)

    def check_goes_on(self) -> None:
        """Events that are written now are delivered, and the group holds nothing of the dead."""
        self.write(1)
        self.read_everything()
        self.check_deliveries()
        state = self.group.synchronizer.fetch_updates()
        assert set(state.readers) == {reader.reader_id for reader in self.readers}
        assert {segment.owner for segment in state.segments.values() if segment.readable} <= set(state.readers)
        assert len(self.group._updater.leases()) == len(self.readers)

    @contextmanager
    def closing(self) -> Iterator[World]:
        with ExitStack() as closing:
            closing.callback(self.store.close)
            closing.callback(self.client.close)
            yield self


class Scenario:
    """What is there before, what a process does that dies, and what whoever comes next has to find and to be able to.

    Here a stream of four segments with events, and a group that reads it.
    """

    do: ClassVar[Callable[[Life], None]]
    segments = 4

    def prepare(self, store: FailingStore, client: rg.Client) -> None:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(self.segments))
        dying.create_group(client)
        with client.writer(STREAM) as writer:
            for number in range(WRITTEN):
                for key in KEYS:
                    writer.write(f"{key}:{number}".encode(), routing_key=key)

    def come_before(self, world: World) -> None:
        """Before the life begins."""

    def take_turn(self, world: World, what: str) -> None:
        """When it waits, having done ``what``."""

    def come_after(self, world: World) -> None:
        raise NotImplementedError


class Write(Scenario):
    do = dying.write

    def prepare(self, store: FailingStore, client: rg.Client) -> None:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(self.segments))
        dying.create_group(client)

    def come_after(self, world: World) -> None:
        stored = max((told.facts[0] for told in world.told if told.what == "stored"), default=0)
        reader = world.join("next")
        world.take(reader)
        counts = Counter(each.event.split(":")[0] for each in world.own)
        assert all(stored <= counts[key] <= min(stored + 2, 6) for key in KEYS)
        world.written = {key: counts[key] for key in KEYS}
        world.check_deliveries()
        world.check_goes_on()


class Transact(Write):
    do = dying.transact
    segments = 2

    def come_after(self, world: World) -> None:
        stored = max((told.facts[0] for told in world.told if told.what == "stored"), default=0)
        turn = world.number % 3
        if turn == 0:
            world.client.streams.finish_pending(STREAM)
        if turn == 1:
            world.client.streams.scale(STREAM, split=[1])
        with world.client.writer(STREAM):
            state = world.client.streams.fetch_state(STREAM)
        committed = state.transactions.sequence
        assert stored <= committed <= min(stored + 1, 2)
        assert state.transactions.open is None
        world.written = dict.fromkeys(KEYS, committed)
        world.join("next")
        world.read_everything()
        assert Counter(each.event for each in world.deliveries) == Counter(world.events)
        world.check_deliveries()
        world.check_goes_on()


class SplitAndMerge(Scenario):
    do = dying.split_and_merge
    segments = 2

    def come_after(self, world: World) -> None:
        def somebody_writes() -> None:
            world.write(3)

        def somebody_reads() -> None:
            world.take(world.join("next"))

        def somebody_scales() -> None:
            if world.client.streams.finish_pending(STREAM).epoch == 0:
                world.client.streams.scale(STREAM, split=[0])
            if world.client.streams.info(STREAM).epoch == 1:
                world.client.streams.scale(STREAM, merge=[3, 1])

        epoch = world.client.streams.info(STREAM).epoch
        assert world.heard("split") + world.heard("merged") <= epoch <= 2
        coming = [somebody_writes, somebody_reads, somebody_scales]
        turn = world.number % 3
        for act in coming[turn:] + coming[:turn]:
            act()
        world.read_everything()
        world.check_goes_on()
        assert Counter(each.event for each in world.deliveries) == Counter(world.events)
        self._check_segments(world)

    def _check_segments(self, world: World) -> None:
        state = world.client.streams.fetch_state(STREAM)
        assert state.epoch == 2 and not state.is_pending
        ranges = sorted((each.low, each.high) for each in world.client.streams.info(STREAM).segments.values())
        assert ranges[0][0] == 0.0 and ranges[-1][1] == 1.0
        assert all(left[1] == right[0] for left, right in pairwise(ranges))
        stored = set(world.store.list(data_prefix(STREAM, state.incarnation)))
        assert stored == {state.data_segment(number) for number in state.segments}


class Seal(Scenario):
    do = dying.seal

    def come_after(self, world: World) -> None:
        reader = world.join("next")
        if world.number % 2:
            world.take(reader, WRITTEN * len(KEYS))
        if not world.client.streams.fetch_state(STREAM).sealing:
            assert not world.heard("sealed")
            world.write(1)
        info = world.client.streams.seal(STREAM)
        assert info.sealed
        with pytest.raises(rg.SealedError):
            world.client.writer(STREAM)
        self._read_to_the_end(world, reader)
        world.check_deliveries()
        assert Counter(each.event for each in world.deliveries) == Counter(world.events)

    def _read_to_the_end(self, world: World, reader: rg.Reader[bytes]) -> None:
        start = world.clock.monotonic()
        while world.clock.monotonic() - start < L2_SECONDS:
            try:
                world.take(reader)
            except rg.EndOfDataError:
                return
            world.pass_time(0.5)
        raise AssertionError("the end of the data is not seen")


class Compact(Scenario):
    do = dying.compact
    before = 5

    def prepare(self, store: FailingStore, client: rg.Client) -> None:
        super().prepare(store, client)
        state = tally(client)
        for _ in range(self.before):
            state.update_state_unconditionally(dying.Add())
            state.compact()

    def come_before(self, world: World) -> None:
        self.follower = tally(world.client)
        world.group.synchronizer.fetch_updates()  # further behind than one compaction, in the end
        world.client.streams.info(STREAM)

    def come_after(self, world: World) -> None:
        added = self.before + world.heard("added")
        value = self.follower.fetch_updates().value
        assert added <= value <= min(added + 1, self.before + 2)
        with World(world.store.url, world.number).closing() as later:
            replica = tally(later.client)
            assert replica.state.value == value and replica.revision == self.follower.revision
            assert replica.update_state_unconditionally(dying.Add()).value == value + 1
            assert replica.compact()
            assert later.group.state == world.group.synchronizer.fetch_updates()
            later.group.configure(position_interval_seconds=9.0)
            assert later.group.synchronizer.compact()
            streams = later.client.streams
            number = max(streams.fetch_state(STREAM).current)
            streams.scale(STREAM, split=[number])
            assert streams.synchronizer(STREAM).compact()
        assert self.follower.fetch_updates().value == value + 1
        # What was left half done is cleared away: one snapshot per log.
        logs = [name.removeprefix("snapshot/").split("@")[0] for name in world.store.list("snapshot/")]
        assert sorted(logs) == sorted({f"group/{GROUP}", "state/tally", f"stream/{STREAM}"})
        world.join("next")
        world.read_everything()
        world.check_goes_on()


class CreateAndDelete(Scenario):
    do = dying.create_and_delete
    segments = 2

    def prepare(self, store: FailingStore, client: rg.Client) -> None:
        super().prepare(store, client)
        client.groups.get(GROUP).reader("dead")  # its lease is there to be removed with the group

    def come_before(self, world: World) -> None:
        self.token = max(segment.token or 0 for segment in world.group.state.segments.values())
        self.incarnation = world.client.streams.fetch_state(STREAM).incarnation

    def come_after(self, world: World) -> None:
        turn = world.number % 3
        if turn == 0:
            self._delete_all(world)
        if turn == 1 and world.client.streams.exists(STREAM):
            assert len(world.client.streams.info(STREAM).segments) == self.segments
        self._create_all(world)
        is_new = world.client.streams.fetch_state(STREAM).incarnation != self.incarnation
        assert is_new or (turn != 0 and not world.heard("stream is deleted"))
        world.written = dict.fromkeys(KEYS, 0 if is_new else WRITTEN)
        reader = world.join("next")
        world.bury("dead")
        world.write(2)
        world.read_everything()
        world.check_deliveries()
        assert min(each.token for each in world.own) > self.token
        reader.close()
        self._delete_all(world)
        self._check_nothing_is_left(world)
        self._create_all(world)

    def _delete_all(self, world: World) -> None:
        if GROUP in list(world.client.groups.list()):
            world.client.groups.delete(GROUP)
        if world.client.streams.exists(STREAM):
            world.client.streams.delete(STREAM)

    def _create_all(self, world: World) -> None:
        world.client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(self.segments))
        dying.create_group(world.client)

    def _check_nothing_is_left(self, world: World) -> None:
        assert list(world.client.streams.list()) == list(world.client.groups.list()) == []
        assert list(world.store.list("data/")) == []
        assert world.store.attributes(f"group/{GROUP}", "lease/") == {}


class JoinCommitAndClose(Scenario):
    do = dying.join_commit_and_close

    def come_after(self, world: World) -> None:
        if world.number % 2:
            world.join("mortal")  # restarted under the same id, it need not wait for its own lease
            assert len(world.group.online_readers()) == 1
        else:
            world.join("next")
            world.bury("mortal")
        world.read_everything()
        world.check_deliveries()
        world.check_goes_on()


class HandOver(Scenario):
    do = dying.hand_over

    def come_before(self, world: World) -> None:
        world.take(world.join("first"), 4)

    def take_turn(self, world: World, what: str) -> None:
        if what == "may lose a segment":
            world.join("third")
            world.join("fourth")
        world.pass_time(0.25)
        for reader in world.readers:
            world.take(reader, 3)

    def come_after(self, world: World) -> None:
        world.bury("mortal")
        world.read_everything()
        world.check_deliveries()
        world.check_goes_on()
        owners = Counter(segment.owner for segment in world.group.state.segments.values())
        assert max(owners.values()) - min(owners.values()) <= 1 and len(owners) == len(world.readers)


class TakeOver(Scenario):
    do = dying.take_over

    def prepare(self, store: FailingStore, client: rg.Client) -> None:
        super().prepare(store, client)
        reader = client.groups.get(GROUP).reader("dead")
        self.delivered = []
        for number in range(30):
            if number == 20:
                reader.commit()
            event = reader.read(timeout=0)
            assert event is not None
            self.delivered.append(delivery(reader, event))

    def come_before(self, world: World) -> None:
        world.deliveries += self.delivered
        world.committed |= {each.event for each in self.delivered[:20]}

    def come_after(self, world: World) -> None:
        if world.heard("declared dead"):
            assert "dead" not in world.group.state.readers
        world.join("next")
        world.bury("dead")
        world.bury("mortal")
        world.read_everything()
        world.check_deliveries()
        world.check_goes_on()


class ReadAcrossAScale(Scenario):
    do = dying.read_across_a_scale
    segments = 2

    def prepare(self, store: FailingStore, client: rg.Client) -> None:
        super().prepare(store, client)

        def die_before_publishing(operation: Operation) -> None:
            if operation.verb == "append" and store.count("seal") == 2:
                raise SystemExit

        store.before = die_before_publishing
        with pytest.raises(SystemExit):
            client.streams.scale(STREAM, merge=[0, 1])
        store.before = None

    def come_after(self, world: World) -> None:
        world.join("next")
        world.bury("mortal")
        world.read_everything()
        world.check_deliveries()
        world.check_goes_on()
        assert world.client.streams.info(STREAM).epoch == 1


class Record(Scenario):
    """Others record as well, or come when the first one is dead; the truth is what a listener hears."""

    do = dying.record
    segments = 2

    def come_before(self, world: World) -> None:
        group = world.group
        self.heard: list[rg.Notification] = []
        self.notifiers = (group.segment_notifier, group.reader_notifier, group.end_of_data_notifier)
        for notifier in self.notifiers:
            notifier.register_listener(self.heard.append)
        self.recording = group.record_notifications(lag_interval_seconds=10.0)
        self.take_turn(world, "before")

    def take_turn(self, world: World, what: str) -> None:
        if world.number % 3 == 0:  # else what comes first is left to the one that dies
            self.recording.poll()

    def come_after(self, world: World) -> None:
        for _ in range(2):
            world.client.streams.scale(STREAM, split=[max(world.client.streams.fetch_state(STREAM).current)])
            world.clock.advance(16.0)
            self.recording.poll()
        for notifier in self.notifiers:
            notifier.poll()
        found = list(world.group.notification_record.read())
        begun = found[0].revision
        assert [each.cause for each in found[:2]] == ["present value"] * 2
        told = {self._key(each) for each in self.heard if each.revision > begun}
        recorded = [self._key(each) for each in found[2:] if not isinstance(each, LagSample)]
        assert len(recorded) == len(set(recorded)) and set(recorded) == told
        assert [each.revision for each in found] == sorted(each.revision for each in found)
        assert any(isinstance(each, LagSample) for each in found)
        assert len(list(world.store.list("record/"))) == 1

    def _key(self, notification: rg.Notification) -> tuple[str, str]:
        own = notification.model_dump_json(exclude={"change": {"seen_at"}})
        return type(notification).__name__, own


SCENARIOS: Final = [
    Write,
    Transact,
    SplitAndMerge,
    HandOver,
    Compact,
    Seal,
    CreateAndDelete,
    JoinCommitAndClose,
    TakeOver,
    ReadAcrossAScale,
    Record,
]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote([dying.__name__, "synchronizer.stores.sqlite.store"]) as zygote:
        yield zygote


def test_a_child_that_raises_fails_the_test(zygote: Zygote, tmp_path: Path) -> None:
    child = zygote.start(dying.live, f"sqlite:///{tmp_path}/store.db", dying.seal, Death(0, "before"))
    with pytest.raises(AssertionError, match="NotFoundError: there is no stream of this name"):
        child.receive()
    assert child.receive() is ENDED
    assert not child.was_killed


def test_a_child_is_killed_when_it_waits(zygote: Zygote) -> None:
    child = zygote.start(_wait_for_ever)
    assert child.receive() == "waiting"
    child.kill()
    assert child.was_killed


def _wait_for_ever(connection: Connection) -> None:
    connection.send("waiting")
    connection.recv()


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that is possible: what a process gave to the system outlives it there as on a disk."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None) as folder:
        yield Path(folder)


#: Each eleventh operation: what comes next depends on its number by 2 and by 3, and 11 meets all of these.
@pytest.mark.parametrize("each", [11, pytest.param(1, marks=pytest.mark.broad)], ids=["each eleventh", "each"])
@pytest.mark.parametrize("kind", SCENARIOS)
def test_whoever_comes_next_completes_what_a_dead_process_began(
    kind: type[Scenario], each: int, zygote: Zygote, folder: Path
) -> None:
    scenario = kind()
    template = folder / "template.db"
    store = FailingStore(open_store(f"sqlite:///{template}"))
    with store:
        # Not closed: a reader that is there stays.
        scenario.prepare(store, rg.Client(store, clock=ManualClock()))
    deaths: Counter[str] = Counter()
    for number in itertools.count(each, each):
        died_at = _live_and_complete(scenario, zygote, template, Death(number, "before"))
        if died_at is None:
            break
        deaths["before"] += 1
        if died_at.verb in WRITES and _live_and_complete(scenario, zygote, template, Death(number, "after")):
            deaths["after"] += 1
    assert number > 5 and (each > 1 or deaths["after"] > 2)
    print(f"{kind.__name__}: {deaths.total()} deaths, {deaths['after']} after an operation")


def _live_and_complete(scenario: Scenario, zygote: Zygote, template: Path, death: Death) -> Operation | None:
    """Let a process live on a copy of the store, and go on after it; the operation that it died at, if it did."""
    path = template.with_name(f"{death.when}-{death.operation}.db")
    shutil.copy(template, path)
    died_at: Operation | None = None
    try:
        with World(f"sqlite:///{path}", death.operation).closing() as world:
            scenario.come_before(world)
            died_at = _accompany(scenario, world, zygote.start(dying.live, world.store.url, type(scenario).do, death))
            scenario.come_after(world)
    except BaseException as error:
        error.add_note(f"{type(scenario).__name__}: {death}, at {died_at}")
        raise
    for left in template.parent.glob(f"{path.name}*"):
        left.unlink()
    return died_at


def _accompany(scenario: Scenario, world: World, child: Child) -> Operation | None:
    """Hear what the process tells until it has ended, and take turns with it."""
    while (told := child.receive()) is not ENDED:
        world.hear(told)
        if told.waits:
            scenario.take_turn(world, told.what)
            child.send("go on")
    died = world.heard("dies") == 1
    assert child.was_killed == died and world.heard("completed") == 1 - died
    return Operation(*world.told[-1].facts) if died else None
