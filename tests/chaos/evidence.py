"""What is known of a schedule when it is over: all that the checks look at, and nothing of the product that ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from readergroup.group.model.state import ReaderGroupState, SegmentState
from readergroup.group.model.updates import CompleteSegment, ReleaseSegment, RemoveReader
from readergroup.streams.config import SegmentId
from synchronizer import Revision, Transition, Update
from tests.chaos.diaries import Diary, Interval
from tests.chaos.hosts import NETWORK_FAULTS, Fault, StoreKind
from tests.chaos.plan import READER_TIMEOUT_SECONDS, Action, Role


class Stored(NamedTuple):
    """One event as the stream holds it, by a reading that knows of no group."""

    key: str
    number: int
    segment: SegmentId
    offset: int


class Happened(NamedTuple):
    """A signal that was sent, or a process that was started."""

    at: float
    action: Action
    process: str


class Process(NamedTuple):
    name: str
    role: Role
    id: str
    is_proxied: bool = False
    concurrency: int = 1


class Entry(NamedTuple):
    """An entry of the group's log, and when the observer had it: a little after it was written."""

    at: float
    transition: Transition[ReaderGroupState]


class Cut(NamedTuple):
    """Where the group stood by what its readers had committed, as the observer saw it."""

    at: float
    offsets: Mapping[SegmentId, int]


class Truncation(NamedTuple):
    """Where the log goes on after its newest snapshot, as the observer saw it. What is before may be truncated."""

    at: float
    start: int


class Befallen(NamedTuple):
    """A fault that the store, or the way to it, had."""

    fault: Fault
    begun: float
    #: From when on the servers ran again, or the network was as ever.
    healed: float
    #: When the observer's last append that met it, by the way that it befell, was answered.
    answered: float

    @property
    def recovery_seconds(self) -> float:
        """From the end of the fault to an answer; where others take over from a node, from its beginning on."""
        return max(0.0, self.answered - (self.begun if self.fault in TAKEN_OVER else self.healed))

    def befalls(self, process: Process) -> bool:
        return process.is_proxied or self.fault not in NETWORK_FAULTS


#: Faults of one node, whose work others take over while it lasts.
TAKEN_OVER: Final[Sequence[Fault]] = ("leader killed", "leader frozen", "rolling restart")
#: Within so many seconds after a fault, in the sense of `Befallen.recovery_seconds`, the store answers everybody.
RECOVERY_SECONDS: Final[Mapping[StoreKind, float]] = {
    "sqlite": 0.0,
    "url": 0.0,
    "postgresql": 6.0,
    "nats": 6.0,
    "nats-cluster": 15.0,
}


@dataclass
class Evidence:
    processes: Mapping[str, Process] = field(default_factory=dict)
    diaries: Mapping[str, Diary] = field(default_factory=dict)
    happened: Sequence[Happened] = ()
    #: Each segment's events, the segments in order of their epochs.
    stored: Mapping[SegmentId, Sequence[Stored]] = field(default_factory=dict)
    log: Sequence[Entry] = ()
    cuts: Sequence[Cut] = ()
    truncations: Sequence[Truncation] = ()
    #: When the store took no append, or the process that sent the signals stood still.
    stalls: Sequence[Interval] = ()
    kind: StoreKind = "sqlite"
    befallen: Sequence[Befallen] = ()
    #: What went wrong outside of the checks: a process that failed, or did not end.
    troubles: Sequence[str] = ()
    reader_timeout_seconds: float = READER_TIMEOUT_SECONDS
    position_interval_seconds: float = 1.0

    def diary(self, process: str) -> Diary:
        return self.diaries.get(process) or Diary(process)

    def stalls_of(self, process: str) -> list[Interval]:
        """When this process, the machine or the store stood still, or the store was still allowed to recover."""
        recovery = RECOVERY_SECONDS[self.kind]
        away = [
            Interval(each.begun, (each.begun if each.fault in TAKEN_OVER else each.healed) + recovery)
            for each in self.befallen
            if each.befalls(self.processes[process])
        ]
        return [*self.stalls, *self.diary(process).stalls, *away]

    def of_role(self, role: Role) -> list[Diary]:
        return [self.diary(name) for name, process in self.processes.items() if process.role == role]

    @property
    def log_is_whole(self) -> bool:
        """Whether the observer saw every entry: it may have been so slow that two compactions overtook it."""
        return not any(entry.transition.gap for entry in self.log)


class Move(NamedTuple):
    """One update of the log, with the state before and after it."""

    at: float
    revision: Revision
    before: ReaderGroupState
    update: Update[ReaderGroupState]
    after: ReaderGroupState

    @property
    def changed(self) -> Iterator[tuple[SegmentId, SegmentState | None, SegmentState | None]]:
        """The segments that are not as before."""
        if self.before.segments is self.after.segments:
            return
        for segment in sorted({*self.before.segments, *self.after.segments}):
            before, after = self.before.segments.get(segment), self.after.segments.get(segment)
            if before != after:
                yield segment, before, after


def moves(log: Sequence[Entry]) -> Iterator[Move]:
    """The log, update by update."""
    for at, transition in log:
        state = transition.before
        for index, update in enumerate(transition.updates):
            assert state is not None
            revision = Revision(transition.revision.offset, index)
            after = update.apply_to(state, revision)
            yield Move(at, revision, state, update, after)
            state = after


@dataclass
class Assignment:
    """A segment in the hands of one reader, by the group's log."""

    segment: SegmentId
    token: int
    reader: str
    incarnation: int
    start: int
    #: Where the group went on, when that was seen, and the update that ended it; None while it lasts.
    end: int | None = None
    ended_at: float = float("inf")
    ended_by: Update[ReaderGroupState] | None = None

    @property
    def given_up(self) -> bool:
        """Whether the reader itself said where it stood at the end."""
        if isinstance(self.ended_by, RemoveReader):
            return self.ended_by.cause == "closed"
        return isinstance(self.ended_by, ReleaseSegment | CompleteSegment)

    @property
    def was_declared_dead(self) -> bool:
        return isinstance(self.ended_by, RemoveReader) and self.ended_by.cause == "dead"


def assignments(log: Sequence[Entry]) -> dict[tuple[SegmentId, int], Assignment]:
    """All assignments, by segment and token."""
    found: dict[tuple[SegmentId, int], Assignment] = {}
    for move in moves(log):
        for segment, before, after in move.changed:
            token_before = None if before is None else before.token
            token_after = None if after is None else after.token
            if token_before == token_after:
                continue
            if token_before is not None and (segment, token_before) in found:
                ended = found[segment, token_before]
                ended.ended_at, ended.ended_by = move.at, move.update
                # A segment is forgotten with the update that completes it, which then says where.
                ended.end = after.offset if after is not None else getattr(move.update, "offset", None)
            if after is not None and after.owner is not None and token_after is not None:
                incarnation = move.after.readers[after.owner].incarnation
                found[segment, token_after] = Assignment(segment, token_after, after.owner, incarnation, after.offset)
    return found
