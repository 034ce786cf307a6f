"""A simulated group of many readers, and what each of its changes costs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import readergroup as rg
from readergroup.group.model import balance
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import UPDATES, AddReader, ReassignSegment, ReleaseSegment, RemoveReader
from synchronizer import Appended, AppendResult, Conflict
from synchronizer.log.entries import decode_entries
from synchronizer.log.replica import Replica
from synchronizer.state import StateCodec

from .sharing import shared
from .threads import SimThread, Simulation
from .world import Done, Process, SimStore, World, simulated

GROUP: Final = "billing"
STREAM: Final = "shop/orders"
LOG: Final = f"group/{GROUP}"
#: Readers that start together do so within this time.
RUSH_SECONDS: Final = 1.0
#: So long after it is balanced a group is looked at, and after that so long at rest.
CALM_SECONDS: Final = 2.0
REST_SECONDS: Final = 10.0
PATIENCE_SECONDS: Final = 120.0
#: Of the processes: a group of 10,000 segments is larger than the default allows.
STATE_LIMIT_BYTES: Final = 4 * 1024 * 1024


@dataclass
class Change:
    """What came of one change of a group, until it was balanced again."""

    what: str
    #: Virtual time from the change until the group was balanced, and from the entry of the last reader that joined.
    seconds: float = 0.0
    since_last_join: float = 0.0
    #: Entries of the group's log, by what they are for.
    entries: Counter[str] = field(default_factory=Counter)
    #: Updates in these.
    updates: Counter[str] = field(default_factory=Counter)
    log_bytes: int = 0
    conflicts: int = 0
    #: Calls of the store, all readers.
    calls: int = 0

    @property
    def conflicts_per_success(self) -> float:
        return self.conflicts / max(1, self.entries.total())


@dataclass
class Rest:
    """What a group costs while nothing changes."""

    readers: int
    #: Of the group's log, from all of them.
    entries: int
    #: Calls of the store a second, of the average reader, by verb.
    calls: Mapping[str, float]
    #: Bytes of their answers a minute: of the reader that reads least, and of the one that reads most, a watcher.
    bytes_a_minute: float
    bytes_a_minute_of_a_watcher: float


@contextmanager
def group_of(segments: int, seed: int = 0) -> Iterator[Scaled]:
    """A simulated group without readers, of one stream."""
    simulation = Simulation(seed, max_switches=10**10)
    logging.disable(logging.CRITICAL)
    try:
        with simulated(simulation), shared():
            yield Scaled(simulation, segments)
            simulation.end()
    finally:
        logging.disable(logging.NOTSET)


class Scaled:
    """A group whose readers start, leave, die and rest; all find their streams empty."""

    def __init__(self, simulation: Simulation, segments: int) -> None:
        self.simulation = simulation
        self.world = World(simulation, seed=0)
        self.world.waiters = _Waiters()  # type: ignore[assignment]
        self.world.on_done = self._done
        self.world.on_call = self._call
        self.readers: dict[str, Process] = {}
        self.replica: Replica[ReaderGroupState] = Replica()
        self._codec = StateCodec(ReaderGroupState, UPDATES)
        self._open: dict[str, rg.Reader[bytes]] = {}
        self._change = Change("")
        self._balanced_at: float | None = None
        self._joined_at = 0.0
        self.calls: Counter[str] = Counter()
        self.bytes_read: Counter[str] = Counter()
        self._lives = 0
        self.admin = self._process("admin")
        self._in_admin(lambda client: self._found(client, segments))

    @property
    def state(self) -> ReaderGroupState:
        assert self.replica.state is not None
        return self.replica.state

    @property
    def state_bytes(self) -> int:
        return self._codec.size(self.state)

    @property
    def snapshot_bytes(self) -> int:
        return len(self._codec.encode_snapshot(self.state, self.replica.checksum))

    # ------------------------------------------------------------------ what happens to the group

    def start(self, readers: Collection[str], *, within: float = RUSH_SECONDS) -> Change:
        """Start these readers, each in a process of its own, at random moments."""
        with self._changing(f"{len(readers)} start"):
            self._start_all(readers, within)
            return self._until_balanced({*self.readers})

    def join(self, reader: str) -> Change:
        with self._changing("one joins"):
            self._start(reader)
            return self._until_balanced({*self.readers})

    def leave(self, reader: str) -> Change:
        with self._changing("one leaves"):
            self._close(reader)
            return self._until_balanced({*self.readers})

    def kill(self, reader: str) -> Change:
        with self._changing("one is killed"):
            self.world.kill(self.readers.pop(reader))
            return self._until_balanced({*self.readers})

    def split(self, number: int) -> Change:
        return self._scale("a segment is split", split=[number])

    def merge(self, *numbers: int) -> Change:
        return self._scale("segments are merged", merge=numbers)

    def _scale(self, what: str, **how: Sequence[int]) -> Change:
        """The time counts from the moment when writers know of it."""
        epoch = self.state.streams[STREAM].epoch
        with self._changing(what):
            self._in_admin(lambda client: client.streams.scale(STREAM, **how))
            return self._until_balanced({*self.readers}, lambda: self.state.streams[STREAM].epoch > epoch)

    def restart_closed(self, *, within: float = RUSH_SECONDS) -> Change:
        """All leave, and as many start under other ids as soon as each has left."""
        before = list(self.readers)
        with self._changing(f"all {len(before)} leave and start again"):
            for reader in before:
                self._close(reader)
            self._run_until(lambda: not self.state.readers)
            self._start_all([_renamed(reader) for reader in before], within)
            return self._until_balanced({*self.readers})

    def restart_killed(self, *, same_ids: bool, within: float = RUSH_SECONDS) -> Change:
        """All are killed, and as many start, under the same ids or under other ones."""
        before = list(self.readers)
        with self._changing(f"all {len(before)} are killed and start again{'' if same_ids else ' under other ids'}"):
            for reader in before:
                self.world.kill(self.readers.pop(reader))
            self._start_all(before if same_ids else [_renamed(reader) for reader in before], within)
            return self._until_balanced({*self.readers})

    def rest(self, seconds: float = REST_SECONDS) -> Rest:
        """Look at the group while nothing happens."""
        self.run_for(CALM_SECONDS)
        self.calls.clear()
        self.bytes_read.clear()
        with self._changing("rest") as change:
            self.run_for(seconds)
        count = len(self.readers)
        read = sorted(self.bytes_read[process.name] / seconds * 60 for process in self.readers.values())
        return Rest(
            readers=count,
            entries=change.entries.total(),
            calls={verb: calls / seconds / count for verb, calls in sorted(self.calls.items())},
            bytes_a_minute=read[0],
            bytes_a_minute_of_a_watcher=read[-1],
        )

    def run_for(self, seconds: float) -> None:
        end = self.simulation.now + seconds
        self._run_until(lambda: self.simulation.now >= end)

    # ------------------------------------------------------------------ processes

    def _process(self, reader: str) -> Process:
        # Another name for each life: what a process draws by chance goes by its name.
        self._lives += 1
        process = self.world.process(f"{reader}/{self._lives}", "reader")
        process.store = _MeasuredStore(process, self.bytes_read)
        return process

    def _in_admin(self, call: Callable[[rg.Client], object]) -> None:
        thread = self.admin.spawn(lambda: call(_client(self.admin)))
        self._run_until(lambda: thread.done)
        if thread.error is not None:
            raise thread.error

    def _found(self, client: rg.Client, segments: int) -> None:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
        client.groups.create(GROUP, streams=[STREAM])
        client.close()

    def _start_all(self, readers: Collection[str], within: float) -> None:
        for reader in readers:
            self.readers[reader] = self._process(reader)  # expected from now on
            at = self.simulation.now + self.simulation.rng.random() * within
            self.simulation.call_at(at, lambda reader=reader: self._start(reader, self.readers[reader]))  # type: ignore[misc]

    def _start(self, reader: str, process: Process | None = None) -> None:
        process = self.readers[reader] = process or self._process(reader)

        def main() -> None:
            group = _client(process).groups.get(GROUP)
            with group.reader(reader) as opened:
                self._open[reader] = opened
                for _ in opened:
                    pass

        process.spawn(main)

    def _close(self, reader: str) -> None:
        self._open.pop(reader).stop()
        self.readers.pop(reader)

    # ------------------------------------------------------------------ what is seen

    @contextmanager
    def _changing(self, what: str) -> Iterator[Change]:
        self._change = Change(what)
        self._balanced_at = None
        yield self._change
        self._change = Change("")

    def _call(self, process: Process, verb: str, segment: str) -> None:
        self._change.calls += 1
        if process is not self.admin:
            self.calls[verb] += 1

    def _done(self, done: Done) -> None:
        if done.verb != "append" or done.segment != LOG or not done.data:
            return
        if isinstance(done.result, Conflict):
            self._change.conflicts += 1
        elif isinstance(done.result, Appended):
            self._change.log_bytes += len(done.data)
            if not self.replica.next_offset:  # the log is new
                self.replica = Replica(next_offset=done.result.offset)
            for entry in decode_entries(LOG, done.data, done.result.offset, self.replica.checksum):
                self.replica, transition = self.replica.follow(entry, self._codec, LOG)
                self._change.entries[_kind_of(transition.updates)] += 1
                self._change.updates.update(update.tag for update in transition.updates)
                if any(isinstance(update, AddReader) for update in transition.updates):
                    self._joined_at = self.simulation.now
            self._balanced_at = None

    def _is_balanced(self) -> bool:
        state = self.state
        return not state.handing_over and not state.unassigned and not balance.plan(state)

    def _until_balanced(self, readers: set[str], also: Callable[[], bool] = lambda: True) -> Change:
        began, change = self.simulation.now, self._change

        def balanced() -> bool:
            if self._balanced_at is None and also() and self.state.readers.keys() == readers and self._is_balanced():
                self._balanced_at = self.simulation.now
            return self._balanced_at is not None and self.simulation.now >= self._balanced_at + CALM_SECONDS

        self._run_until(balanced)
        assert self._balanced_at is not None
        change.seconds = self._balanced_at - began
        change.since_last_join = self._balanced_at - self._joined_at
        return change

    def _run_until(self, condition: Callable[[], bool]) -> None:
        end = self.simulation.now + PATIENCE_SECONDS
        self.simulation.run(lambda: condition() or self.simulation.now > end or bool(self.simulation.errors))
        for thread, error in self.simulation.errors:
            raise AssertionError(f"{thread.owner.name} failed") from error
        assert condition(), f"{self._change} did not come to an end in {PATIENCE_SECONDS} s"


class _Waiters(dict[str, dict[SimThread, None]]):
    """Who waits for which segment: sets, since there are thousands."""

    def __missing__(self, segment: str) -> dict[SimThread, None]:
        return self.setdefault(segment, {})


class _MeasuredStore(SimStore):
    """A way to the store that counts the bytes of the answers."""

    def __init__(self, process: Process, bytes_read: Counter[str]) -> None:
        super().__init__(process)
        self._bytes_read = bytes_read

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        data = super().read(segment, offset, max_bytes)
        self._bytes_read[self._process.name] += len(data)
        return data

    def attributes(self, segment: str, prefix: str = "", **options: Any) -> Mapping[str, bytes]:
        found = super().attributes(segment, prefix, **options)
        self._bytes_read[self._process.name] += sum(len(name) + len(value) for name, value in found.items())
        return found

    def append(self, segment: str, data: bytes, **options: Any) -> AppendResult:
        answer = super().append(segment, data, **options)
        if isinstance(answer, Conflict):
            self._bytes_read[self._process.name] += len(answer.delta)
        return answer

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        self._begin("wait", "")
        changed = self._changed(known)
        if changed or timeout <= 0:
            return changed
        thread, waiters = self._simulation._running(), self._world.waiters
        for name in known:
            waiters[name][thread] = None  # type: ignore[call-overload]
        self._simulation.block(timeout)
        for name in known:
            waiters[name].pop(thread, None)  # type: ignore[call-overload]
        return self._changed(known)


def _client(process: Process) -> rg.Client:
    return rg.Client(process.store, timeout=100.0, state_limit_bytes=STATE_LIMIT_BYTES, clock=process.clock)


def _renamed(reader: str) -> str:
    """The id that comes in place of this one."""
    name, _, life = reader.partition(".")
    return f"{name}.{int(life or 0) + 1}"


def _kind_of(updates: Collection[object]) -> str:
    for kind, name in ((AddReader, "join"), (RemoveReader, "leave"), (ReleaseSegment, "release")):
        if any(isinstance(update, kind) for update in updates):
            return name
    return "plan" if updates and all(isinstance(update, ReassignSegment) for update in updates) else "other"
