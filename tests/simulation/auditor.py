"""The auditor sees everything that reaches the store and everything that is delivered, and checks what must hold.

It keeps its own fold of every log, its own record of what each segment of a stream holds, and of what applications were
handed and have processed. Nothing of it is the product's word.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import readergroup as rg
from readergroup.group.model import balance, weights
from readergroup.group.model.positions import decode_positions
from readergroup.group.model.state import ReaderGroupState, SegmentState
from readergroup.group.model.updates import (
    UPDATES,
    AddReader,
    CompleteSegment,
    ConfigureStreams,
    PassCheckpoint,
    ReassignSegment,
    RecordWeights,
    ReleaseSegment,
    RemoveReader,
    ResetStream,
)
from readergroup.streams.config import SegmentId, data_prefix, data_segment, stream_of
from readergroup.streams.data.block import parse_blocks
from readergroup.streams.state import (
    STREAM_UPDATES,
    AnnounceScale,
    PublishScale,
    SealStream,
    StreamState,
    TruncateStream,
)
from synchronizer import Appended, NotFoundError, ReaderGroupError, Revision
from synchronizer.liveness.lease import PREFIX, lease_attribute
from synchronizer.liveness.leaving import SILENCE_SECONDS
from synchronizer.liveness.timing import RENEWALS
from synchronizer.log.entries import MARK, EntryLog, Mark, decode_entries
from synchronizer.log.replica import Replica, Transition
from synchronizer.state import StateCodec

from .keeping import Keeping
from .ledger import LEDGER_UPDATES, Ledger
from .retrying import PLACES, Retries
from .together import Together
from .world import Done, Process, World

#: How much later than the timeout a dead reader may be out of its group.
TAKEOVER_SECONDS: Final = 2.0
BALANCE_SECONDS: Final = 10.0
NOTICE_SECONDS: Final = 1.0
#: How much longer than its timeout a call may take: a few answers of the store.
CALL_SLACK_SECONDS: Final = 2.5
#: How much later than due a renewal may arrive at a store that answers.
RENEWAL_SLACK_SECONDS: Final = 0.1
#: Clocks run this much faster or slower at most.
CLOCK_SLACK: Final = 1.02
#: The store's segments that hold logs of states, by the first part of their names.
_LOGS: Final = ("group", "stream", "state")


class Violation(NamedTuple):
    guarantee: str
    text: str
    at: float

    def __str__(self) -> str:
        return f"{self.guarantee} broken at {self.at:.3f} s: {self.text}"


class Fold:
    """A log as the auditor applies it: every state that it ever had."""

    def __init__(self, segment: str, codec: StateCodec[Any]) -> None:
        self.segment = segment
        self.codec = codec
        self.replica: Replica[Any] = Replica()
        self.begins_at = 0
        self.states: dict[int, tuple[int, Any]] = {0: (0, None)}  # by the length of the log: checksum, state
        self.committed_at: dict[Revision, float] = {}

    def append(self, data: bytes, offset: int, now: float) -> Iterable[Transition[Any]]:
        if offset > self.replica.next_offset and not _is_in_use(self.replica.state):
            # The log is new, perhaps after a forgotten one.
            self.begins_at, self.replica = offset, Replica(None, Revision(offset - 1, 0), offset)
            self.states[offset] = (0, None)
        for entry in decode_entries(self.segment, data, offset, self.replica.checksum):
            self.replica, transition = self.replica.follow(entry, self.codec, self.segment)
            self.states[self.replica.next_offset] = (self.replica.checksum, self.replica.state)
            self.committed_at[transition.revision] = now
            yield transition


def _is_in_use(state: object) -> bool:
    if isinstance(state, StreamState):
        return state.is_in_use
    return state is not None


class StoredEvent(NamedTuple):
    key: str
    number: int
    offset: int
    end: int


@dataclass
class DataSegment:
    """What a segment of a stream holds, and how far applications have processed it."""

    name: str
    events: list[StoredEvent] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    #: Everything before this is processed, by whomever.
    frontier: int = 0
    #: Everything before this was given up; the store may hold more.
    given_up: int = 0
    #: Where the store's data began after each truncation: who was behind that goes on there.
    starts: set[int] = field(default_factory=set)
    processed: dict[int, int] = field(default_factory=dict)  # beyond the frontier: from, to

    @property
    def end(self) -> int:
        """Where the last event ends."""
        return self.events[-1].end if self.events else 0

    def event_at(self, offset: int) -> StoredEvent | None:
        index = bisect_right(self.offsets, offset) - 1
        return self.events[index] if index >= 0 and self.offsets[index] == offset else None

    def count_as_processed(self, start: int, end: int) -> None:
        if start > self.frontier:
            self.processed[start] = max(end, self.processed.get(start, end))
            return
        self.frontier = max(self.frontier, end)
        while self.processed:
            first = min(self.processed)
            if first > self.frontier:
                return
            self.frontier = max(self.frontier, self.processed.pop(first))


class Assignment(NamedTuple):
    """A life of a segment in one owner's hands."""

    segment: str  # of the store
    token: int


class Told(NamedTuple):
    """What a listener heard."""

    revision: Revision
    value: Any
    gap: bool
    at: float


@dataclass(eq=False)
class Hearing:
    """One listener, of one process."""

    process: Process
    kind: str
    told: list[Told] = field(default_factory=list)
    #: Slow listeners hear later than the notice was ready.
    slow: bool = False
    closed: bool = False
    #: When it was told of the present life of the group for the first time, and the beginning of that.
    back_since: tuple[Revision, float] = Revision(0, 0), 0.0


class Auditor:
    """What happened in a run, and what of it must not have."""

    def __init__(self, world: World, log: str = "group/billing") -> None:
        self.world = world
        #: The log of the group whose applications say what they are handed.
        self.log = log
        self.violations: list[Violation] = []
        self.folds: dict[str, Fold] = {}
        self.data: dict[str, DataSegment] = {}
        self.stored: dict[tuple[str, int], int] = Counter()
        self.last_of_key: dict[str, int] = {}
        self.reached: dict[tuple[str, str], int] = {}  # stream and key: number of the last event delivered first
        self.order: dict[tuple[str, str], list[int]] = defaultdict(list)  # as stored
        self.marks: dict[str, list[Mark]] = defaultdict(list)  # of each log
        self.began: dict[Assignment, int] = {}
        self.owners: dict[Assignment, str] = {}
        self.delivered_to: dict[Assignment, int] = {}  # the offset after the last event handed out
        self.over: dict[Assignment, float] = {}  # ended by its owner being declared dead
        self.tokens: dict[tuple[str, str], int] = defaultdict(int)
        self.committed: dict[str, tuple[int, int]] = {}  # per data segment: token and offset as acknowledged last
        self.lives: dict[tuple[str, int], Process] = {}  # reader and incarnation
        self.joined_at: dict[tuple[str, int], float] = {}
        self.killed_at: dict[Process, float] = {}
        self.closed_at: dict[tuple[str, int], float] = {}  # when a reader began to leave its group
        self.in_hand_since: dict[Process, float] = {}
        self.handled: dict[Process, list[tuple[float, float]]] = defaultdict(list)  # what it had in hand: from, to
        self.renewed_at: dict[str, float] = {}  # by the lease's attribute
        self.deliveries = 0
        self.repeats = 0
        self.transitions: Counter[str] = Counter()
        self.hearings: list[Hearing] = []
        self.scaling: list[Process] = []  # in which the callback that scales readers runs now
        self.created = Revision(0, 0)  # the group, the last time
        #: Notifiers that could not write what they saw of a stream poll less and less often until then.
        self.deaf_until = 0.0
        self.changes: dict[str, list[tuple[Revision, Any]]] = defaultdict(list)  # per kind of notification
        self.takeovers: list[float] = []
        self.changed_at = 0.0  # the last change of members, segments or weights
        self.together = Together(self)
        self.keeping = Keeping(self.broken, self._stored_offsets)
        self.retries = Retries(self)
        self.reset_at: dict[str, int] = {}  # by stream: what has a smaller token is of before its last reset
        self.planned_at: list[float] = []  # entries that only move segments
        #: Told of what begins and ends: "hand-over", a name, and whether it begins.
        self.on_phase: Callable[[str, str, bool], None] = lambda phase, name, begins: None
        #: Told of every entry of a log, after it was checked.
        self.on_transition: Callable[[Done, Transition[Any]], None] = lambda done, transition: None
        world.on_done = self.done

    def broken(self, guarantee: str, text: str) -> None:
        self.world.say("auditor", f"{guarantee}: {text}")
        self.violations.append(Violation(guarantee, text, self.world.simulation.now))

    # ------------------------------------------------------------------ what reaches the store

    def done(self, done: Done) -> None:
        if done.segment.startswith(PLACES):
            self.retries.done(done)
            return
        kind = done.segment.partition("/")[0]
        if done.verb == "truncate" and kind in _LOGS:
            self._check_truncation(done)
        if kind == "data" and done.verb in ("truncate", "delete") and not isinstance(done.result, Exception):
            self._given_up(done)
        if done.verb != "append" or not isinstance(done.result, Appended):
            return
        if kind == "data":
            self._events(done, done.result)
        elif kind in _LOGS:
            if done.data:
                self._entries(done, kind, done.result.offset)
            if MARK in done.attributes:
                self._check_mark(done)
            if kind == "group":
                self._leases(done)

    def _events(self, done: Done, appended: Appended) -> None:
        data = self.data.setdefault(done.segment, DataSegment(done.segment))
        stream = "/".join(done.segment.split("/")[1:3])
        if not done.data:
            return
        blocks, _ = parse_blocks(done.segment, appended.offset, done.data)
        for block in blocks:
            offsets = [*block.offsets, block.end]
            for index, raw in enumerate(block.data):
                key, _, number = raw.decode().partition(":")
                event = StoredEvent(key, int(number), offsets[index], offsets[index + 1])
                data.events.append(event)
                data.offsets.append(event.offset)
                self.stored[key, event.number] += 1
                if event.number <= self.last_of_key.get(key, -1):
                    self.broken("S3", f"{done.process.name} stored {key}:{number} after {self.last_of_key[key]}")
                self.last_of_key[key] = max(event.number, self.last_of_key.get(key, -1))
                self.order[stream, key].append(event.number)

    def _given_up(self, done: Done) -> None:
        """Somebody deleted data, or truncated it: what nobody has read of that is not missed."""
        data = self.data.setdefault(done.segment, DataSegment(done.segment))
        end = self.world.memory.info(done.segment).start_offset if done.verb == "truncate" else data.end
        data.starts.add(end)
        self._give_up(data, end)

    def _give_up(self, data: DataSegment, end: int) -> None:
        before = data.given_up
        data.given_up = max(data.given_up, end)
        self._forget_given_up("/".join(data.name.split("/")[1:3]), data, before)
        data.count_as_processed(0, end)

    def _forget_given_up(self, stream: str, data: DataSegment, since: int) -> None:
        """What is given up, and nobody was handed, does not have to come before what follows it."""
        for event in data.events:
            if since <= event.offset < data.given_up:
                order = self.order[stream, event.key]
                if event.number > self.reached.get((stream, event.key), -1) and event.number in order:
                    order.remove(event.number)

    def _stored_offsets(self, name: str) -> Iterable[int]:
        """Where the events in a segment lie that nobody gave up."""
        data = self.data.get(name)
        return [] if data is None else [event.offset for event in data.events if event.offset >= data.given_up]

    def fold(self, segment: str) -> Fold:
        if segment not in self.folds:
            kind = segment.partition("/")[0]
            codec: StateCodec[Any]
            if kind == "group":
                codec = StateCodec(ReaderGroupState, UPDATES)
            elif kind == "stream":
                codec = StateCodec(StreamState, STREAM_UPDATES)
            else:
                codec = StateCodec(Ledger, LEDGER_UPDATES)
            self.folds[segment] = Fold(segment, codec)
        return self.folds[segment]

    def _entries(self, done: Done, kind: str, offset: int) -> None:
        try:
            for transition in self.fold(done.segment).append(done.data, offset, self.world.simulation.now):
                for update in transition.updates:
                    self.transitions[update.tag] += 1
                if kind == "group":
                    self._group(done, transition)
                elif kind == "stream":
                    self._stream(done, transition)
                self.on_transition(done, transition)
        except ReaderGroupError as error:
            self.broken("S4", f"{done.process.name} wrote an entry that cannot be applied: {error}")

    # ------------------------------------------------------------------ compaction

    def _check_mark(self, done: Done) -> None:
        """S5: the mark moves forward, to a snapshot that is there and is the state of its revision."""
        self.transitions["compact"] += 1
        value = done.attributes[MARK].new
        assert value is not None
        mark = Mark.decode(done.segment, value)
        marks = self.marks[done.segment]
        if marks and mark.revision <= marks[-1].revision:
            self.broken("S5", f"{done.process.name} moves the mark from {marks[-1].revision} to {mark.revision}")
        marks.append(mark)
        fold = self.fold(done.segment)
        try:
            body = EntryLog(self.world.memory, done.segment).read_snapshot(mark)
            snapshot = Replica.from_snapshot(mark, body, fold.codec)
        except ReaderGroupError as error:
            self.broken("S5", f"{done.process.name} moves the mark to a snapshot that cannot be read: {error}")
            return
        if fold.states.get(mark.next_offset) != (snapshot.checksum, snapshot.state):
            self.broken("S5", f"{done.process.name} moves the mark to another state than that of {mark.revision}")

    def _check_truncation(self, done: Done) -> None:
        """S5: a follower that is less than one compaction behind goes on without noticing."""
        fold = self.fold(done.segment)
        marks = [mark for mark in self.marks[done.segment] if mark.next_offset > fold.begins_at]
        start = self.world.memory.info(done.segment).start_offset
        needed = marks[-2].next_offset if len(marks) > 1 else fold.begins_at
        was_deleted = bool(marks) and not _is_in_use(fold.states[marks[-1].next_offset][1])
        if start > needed and not was_deleted:
            self.broken("S5", f"{done.segment} begins at {start}, and followers may need what comes after {needed}")

    # ------------------------------------------------------------------ the group

    def _group(self, done: Done, transition: Transition[ReaderGroupState]) -> None:
        before, after, updates = transition.before, transition.after, transition.updates
        if after is None:
            self.keeping.entry(transition)
            self.scaling.clear()  # whichever process had the role had it of the group that is no more
            return
        resets = [update for update in updates if isinstance(update, ResetStream)]
        starts = {
            stream: start.segments
            for update in updates
            if isinstance(update, ConfigureStreams)
            for stream, start in (update.starts or {}).items()
        }
        if before is None:
            self.created = transition.revision
        if self.world.on_line is not None:
            self.world.say(done.process.name, f"  {transition.revision}: {'; '.join(map(_short, updates))}")
        self._check_members(done, after, updates)
        self._check_owners(done, before, updates)
        self._check_plan(before, after, updates)
        by_itself = before is not None and before.config.balance == "load" and done.process.kind != "weigher"
        if by_itself and updates and isinstance(updates[0], RecordWeights):
            self._check_weights(before, updates[0], updates[1:])
        for stream, segments in {**{reset.stream: reset.segments for reset in resets}, **starts}.items():
            self._reset(after, stream, segments, transition.revision)
        removed = before.streams.keys() - after.streams.keys() if before is not None else set()
        for stream in removed:  # what its readers have in hand counts no more
            self.reset_at[stream] = transition.revision.token
        streams_reset = {reset.stream for reset in resets} | starts.keys() | removed
        for segment, found in after.segments.items():
            earlier = before.segments.get(segment) if before is not None else None
            if stream_of(segment) in streams_reset:
                earlier = None
            if earlier is not found:
                self._check_segment(after, segment, earlier, found, updates)
        if before is not None and before.segments is not after.segments:
            for segment, earlier in before.segments.items():
                if segment not in after.segments and stream_of(segment) not in streams_reset:
                    self._gone(before, segment, earlier, updates)
        self._check_cover(after)
        self._note_changes(before, after, transition.revision)
        self._phases(before, after, updates)
        self.keeping.entry(transition)

    def _reset(
        self, state: ReaderGroupState, name: str, segments: Mapping[SegmentId, SegmentState], revision: Revision
    ) -> None:
        """The group goes on elsewhere in a stream: from there on, everything is to be processed again."""
        self.reset_at[name] = revision.offset
        prefix = data_prefix(name, state.streams[name].incarnation)
        mine = [data for name, data in self.data.items() if name.startswith(prefix)]
        for data in mine:
            found = segments.get(SegmentId(f"{name}/{data.name.removeprefix(prefix)}"))
            data.frontier, data.processed = data.end if found is None else found.offset, {}
            data.count_as_processed(0, data.given_up)
        behind: dict[str, int] = {}  # the last event of a key that is not to come again
        for data in mine:
            for event in data.events:
                if event.offset < data.frontier:
                    behind[event.key] = max(event.number, behind.get(event.key, -1))
        for stream, key in self.order:
            if stream == name:
                self.reached[stream, key] = behind.get(key, -1)
        for data in mine:
            self._forget_given_up(name, data, 0)

    def _check_members(self, done: Done, after: ReaderGroupState, updates: Iterable[Any]) -> None:
        for update in updates:
            if isinstance(update, AddReader) and update.reader in after.readers:
                life = (update.reader, after.readers[update.reader].incarnation)
                self.lives[life] = done.process
                self.joined_at[life] = self.world.simulation.now
                self.keeping.joined(life, done.process)
        for segment in after.handing_over:
            found = after.segments[segment]
            target = after.readers.get(found.target or "")
            if target is None or target.incarnation != found.target_incarnation:
                self.broken("S1", f"{segment} is marked for {found.target}, which is not in the group")

    def _check_owners(self, done: Done, before: ReaderGroupState | None, updates: Iterable[Any]) -> None:
        """Segments are given up by their owner alone, and a reader leaves, and passes checkpoints, by itself: by the
        present life of its id."""
        if before is None:
            return
        for update in updates:
            of_itself = isinstance(update, PassCheckpoint) or (
                isinstance(update, RemoveReader) and update.cause == "closed"
            )
            if not of_itself and not isinstance(update, (ReleaseSegment, CompleteSegment)):
                continue
            found = before.readers.get(update.reader)
            life = None if found is None else self.lives.get((update.reader, found.incarnation))
            owner = update.reader if of_itself else before.segments[update.segment].owner
            if owner != update.reader or life is not done.process:
                self.broken("S1", f"{done.process.name} does what is {owner}'s alone: {_short(update)}")

    def _check_plan(self, before: ReaderGroupState | None, after: ReaderGroupState, updates: tuple[Any, ...]) -> None:
        if updates and all(isinstance(update, ReassignSegment) for update in updates):
            self.planned_at.append(self.world.simulation.now)
            if before is not None and not balance.plan(before):
                self.broken("L3", f"moves in a group that was balanced: {'; '.join(map(_short, updates))}")
            elif before is not None and balance.plan(before) != list(updates):
                self.broken("S4", f"moves that were planned on another state: {'; '.join(map(_short, updates))}")
        elif before is None or before.readers is not after.readers or before.segments is not after.segments:
            self.changed_at = self.world.simulation.now

    def _check_weights(self, before: ReaderGroupState, recorded: RecordWeights, moves: tuple[Any, ...]) -> None:
        """L3: what a group measures is recorded rarely, and moves a bounded number of segments."""
        self.transitions["weigh"] += 1
        steps = [abs(weight - before.segments[segment].weight) for segment, weight in recorded.weights.items()]
        if not all(steps):
            self.broken("L3", f"weights are recorded that have not changed: {_short(recorded)}")
        if before.handing_over or balance.plan(before):
            self.broken("L3", f"weights are recorded while segments move: {_short(recorded)}")
        if len(moves) > weights.most_moves(before) and steps != [1]:
            self.broken("L3", f"{len(moves)} moves after {_short(recorded)}")

    def _check_segment(
        self,
        state: ReaderGroupState,
        segment: SegmentId,
        before: SegmentState | None,
        after: SegmentState,
        updates: Iterable[Any],
    ) -> None:
        name = self._data_name(state, segment)
        if before is not None and after.offset < before.offset:
            self.broken("S1", f"{segment} goes back from {before.offset} to {after.offset}")
        data = self.data.get(name)
        if before is not None and after.offset > (data.frontier if data is not None else 0):
            done = data.frontier if data is not None else 0
            self.broken("S2", f"{segment} goes on at {after.offset}, but only what is before {done} was processed")
        if after.owner is not None and (before is None or before.token != after.token):
            self._check_new_owner(state, segment, name, after)
        if before is not None and before.token is not None and before.token != after.token:
            self._check_commits(segment, name, before, after.offset)
        if after.completed and (before is None or not before.completed):
            self._check_completion(segment, name, after)

    def _check_new_owner(self, state: ReaderGroupState, segment: SegmentId, name: str, found: SegmentState) -> None:
        assert found.owner is not None and found.token is not None
        if found.owner not in state.readers:
            self.broken("S1", f"{segment} is owned by {found.owner}, which is not in the group")
        if found.token <= self.tokens["token", segment]:
            self.broken("S7", f"token {found.token} of {segment} after {self.tokens['token', segment]}")
        self.tokens["token", segment] = found.token
        assignment = Assignment(name, found.token)
        self.began[assignment], self.owners[assignment] = found.offset, found.owner
        self._check_predecessors(state, segment)

    def _check_predecessors(self, state: ReaderGroupState, segment: SegmentId) -> None:
        """A segment is read only after everything that was in its predecessors is processed."""
        stream = stream_of(segment)
        metadata: StreamState | None = self.fold(f"stream/{stream}").replica.state
        if metadata is None or metadata.incarnation != state.streams[stream].incarnation:
            return
        if not any(metadata.segment(number) == segment for number in metadata.segments):
            return
        for predecessor in metadata.predecessors(segment):
            data = self.data.get(self._data_name(state, predecessor))
            if data is not None and data.events and data.frontier < data.events[-1].end:
                self.broken("S3", f"{segment} has an owner, but {predecessor} is processed to {data.frontier} only")

    def _check_commits(self, segment: SegmentId, name: str, before: SegmentState, offset: int) -> None:
        token, committed = self.committed.get(name, (0, 0))
        if token == before.token and offset < committed:
            self.broken("S1", f"{segment} goes on at {offset}, but {before.owner} had committed {committed}")

    def _check_completion(self, segment: SegmentId, name: str, found: SegmentState) -> None:
        try:
            info = self.world.memory.info(name)
        except NotFoundError:
            return  # the stream was deleted
        if found.end is None and (not info.sealed or found.offset != info.length):
            self.broken("S2", f"{segment} counts as completed at {found.offset}, its data: {info}")

    def _gone(self, state: ReaderGroupState, segment: SegmentId, before: SegmentState, updates: Iterable[Any]) -> None:
        """A segment is dropped when it is completed and its successors are readable."""
        if not before.completed:
            for update in updates:
                if isinstance(update, CompleteSegment) and update.segment == segment:
                    done = before.changed(completed=True, offset=update.offset)
                    name = self._data_name(state, segment)
                    data = self.data.get(name)
                    if update.offset > (data.frontier if data is not None else 0):
                        self.broken("S2", f"{segment} is completed at {update.offset}, processed less")
                    self._check_completion(segment, name, done)
                    return
            self.broken("S2", f"{segment} is no longer in the group and was not completed")

    def _check_cover(self, state: ReaderGroupState) -> None:
        ranges: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for segment, found in state.segments.items():
            if not found.waiting_for:
                ranges[stream_of(segment)].append((found.low, found.high))
        for stream, parts in ranges.items():
            at = 0.0
            for low, high in sorted(parts):
                if low != at:
                    break
                at = high
            if at != 1.0:
                self.broken("S6", f"the cut of {stream} does not cover each key once: {sorted(parts)}")

    def _note_changes(self, before: ReaderGroupState | None, after: ReaderGroupState, revision: Revision) -> None:
        if before is None or before.newest_segments != after.newest_segments:
            self.changes["segments"].append((revision, after.newest_segments))
        if before is None or before.readers != after.readers:
            self.changes["readers"].append((revision, frozenset(after.readers)))
        if before is None or before.end_of_data != after.end_of_data:
            # None means that the end is over: there is more to read. No listener hears of it.
            self.changes["end of data"].append((revision, after.end_of_data or None))

    def _phases(self, before: ReaderGroupState | None, after: ReaderGroupState, updates: Iterable[Any]) -> None:
        if before is None:
            return
        for segment in after.handing_over:
            if segment not in before.handing_over:
                self.on_phase("hand-over", segment, True)
        for segment in before.handing_over:
            if segment not in after.handing_over:
                self.on_phase("hand-over", segment, False)
        for update in updates:
            if isinstance(update, RemoveReader):
                self._removed(before, update)
            elif isinstance(update, (AddReader, CompleteSegment, ReleaseSegment)):
                if isinstance(update, ReleaseSegment):
                    self.together.released(before, update)
                name = {"add_reader": "join", "complete": "completion", "release": "release"}[update.tag]
                self.on_phase(name, "", True)
                self.on_phase(name, "", False)

    # ------------------------------------------------------------------ takeovers

    def killed(self, process: Process) -> None:
        self.killed_at[process] = self.world.simulation.now

    def closes(self, process: Process, reader: str) -> None:
        """``process`` closes its reader of this id."""
        lives = [life for life, owner in self.lives.items() if owner is process and life[0] == reader]
        if lives and process.alive:  # else it is what a killed thread leaves behind
            self.closed_at.setdefault(lives[-1], self.world.simulation.now)

    def dead_since(self, life: tuple[str, int]) -> float | None:
        """When this reader ended without leaving its group: its process was killed, or it was closed while it, or a
        reader that its process closed right before, could not reach the store.
        """
        process = self.lives.get(life)
        if process is None:
            return None
        closed_at = self.closed_at.get(life)
        in_contact_since = max(process.in_contact_since, self.world.healthy_since)
        if closed_at is not None and in_contact_since > max(process.started_at, closed_at - SILENCE_SECONDS):
            return closed_at
        return self.killed_at.get(process)

    def _removed(self, before: ReaderGroupState, update: RemoveReader) -> None:
        life = (update.reader, before.readers[update.reader].incarnation)
        process = self.lives.get(life)
        self.on_phase("takeover" if update.cause == "dead" else "leave", update.reader, False)
        if update.cause == "dead":
            for segment, found in before.segments_of(update.reader).items():
                assert found.token is not None
                self.over[Assignment(self._data_name(before, segment), found.token)] = self.world.simulation.now
        if process is None or update.cause != "dead":
            return
        dead_since = self.dead_since(life)
        if dead_since is not None:
            self.takeovers.append(self.world.simulation.now - dead_since)
            self._check_takeover(before, life, dead_since)
        elif self._takes_too_long(process, before) or self._is_about_to_renew(process, before):
            return
        elif process.runs and self._was_in_contact(process, before):
            self.broken("L1", f"{update.reader} of {process.name} was in contact and alive, and is declared dead")
        elif process.runs and self._only_the_store_was_away(process, before, update.reader):
            self.broken("L1", f"{update.reader} of {process.name} is declared dead because the store was away")

    def _was_in_contact(self, process: Process, state: ReaderGroupState) -> bool:
        """For more than the timeout, so that it must have renewed its lease."""
        since = max(process.in_contact_since, self.world.healthy_since)
        return self.world.simulation.now - since > self.timeout(state) * CLOCK_SLACK

    def _takes_too_long(self, process: Process, state: ReaderGroupState) -> bool:
        """Whether it has events in hand for longer than its group allows."""
        limit, since = state.config.max_processing_seconds, self.in_hand_since.get(process)
        return since is not None and self.world.simulation.now - since > limit / CLOCK_SLACK

    def _took_too_long_until(self, process: Process, state: ReaderGroupState) -> float:
        """When it last had done with an event that took longer than its group allows: meanwhile it renewed nothing."""
        limit = state.config.max_processing_seconds
        return next((to for since, to in reversed(self.handled[process]) if to - since > limit / CLOCK_SLACK), 0.0)

    def _is_about_to_renew(self, process: Process, state: ReaderGroupState) -> bool:
        """Whether it has just done with such an event, and its next renewal may not be due yet."""
        ended = self._took_too_long_until(process, state)
        within = self.timeout(state) / RENEWALS * CLOCK_SLACK + RENEWAL_SLACK_SECONDS
        return ended > 0 and self.world.simulation.now - ended <= within

    def _only_the_store_was_away(self, process: Process, state: ReaderGroupState, reader: str) -> bool:
        """Since the last renewal of a reader nothing else kept it from the next one."""
        lease = state.readers[reader].lease
        if lease is None:
            return False
        renewed_at = self.renewed_at[lease_attribute(lease)]
        if self._took_too_long_until(process, state) > renewed_at:
            return False  # it did not renew meanwhile
        return process.in_contact_since <= renewed_at < self.world.healthy_since

    def _check_takeover(self, state: ReaderGroupState, life: tuple[str, int], dead_since: float) -> None:
        latest = self._latest_takeover(state, life, dead_since)
        if self.world.simulation.now > latest:
            self.broken("L1", f"{life[0]} ended at {dead_since:.3f} and should have been out at {latest:.3f}")

    def _latest_takeover(self, state: ReaderGroupState, life: tuple[str, int], dead_since: float) -> float:
        """When the reader should be out of the group: counted from when another one is there and in contact."""
        contacts = []
        for reader, found in state.readers.items():
            other = (reader, found.incarnation)
            process = self.lives.get(other)
            watches = process is not None and process.runs and other not in self.closed_at
            if process is not None and watches and other != life and not self._takes_too_long(process, state):
                contacts.append(
                    max(process.in_contact_since, self.joined_at[other], self._took_too_long_until(process, state))
                )
        since = max(dead_since, self.world.healthy_since, min(contacts, default=float("inf")))
        return since + self.timeout(state) * CLOCK_SLACK + TAKEOVER_SECONDS

    def timeout(self, state: ReaderGroupState) -> float:
        return state.config.reader_timeout_seconds

    def check_dead_readers(self) -> None:
        """L1: of those that are dead nobody is in a group for longer than it may take."""
        for segment, fold in self.folds.items():
            if segment.startswith("group/") and fold.replica.state is not None:
                state = fold.replica.state
                for reader, found in state.readers.items():
                    life = (reader, found.incarnation)
                    dead_since = self.dead_since(life)
                    if dead_since is not None:
                        self._check_takeover(state, life, dead_since)

    # ------------------------------------------------------------------ leases

    def _leases(self, done: Done) -> None:
        state: ReaderGroupState | None = self.fold(done.segment).replica.state
        if state is None:
            return
        leases = {lease_attribute(found.lease) for found in state.readers.values() if found.lease is not None}
        for attribute, change in done.attributes.items():
            if attribute.startswith(PREFIX) and change.new is not None:
                self.renewed_at[attribute] = self.world.simulation.now
                if attribute not in leases:
                    self.broken("S1", f"{done.process.name} commits for a reader that is out of its group")
                for segment, held in decode_positions(change.new).items():
                    found = state.segments.get(segment)
                    if found is not None and found.token == held.token:
                        self._check_commit(state, segment, held.token, held.offset, attribute)

    def _check_commit(
        self, state: ReaderGroupState, segment: SegmentId, token: int, offset: int, attribute: str
    ) -> None:
        name = self._data_name(state, segment)
        owner = state.readers.get(state.segments[segment].owner or "")
        if owner is not None and owner.lease is not None and lease_attribute(owner.lease) != attribute:
            self.broken("S1", f"{segment} is committed under the token of {state.segments[segment].owner} by another")
            return
        data = self.data.get(name)
        if offset > max(data.frontier if data is not None else 0, state.segments[segment].offset):
            done = data.frontier if data is not None else 0
            self.broken("S2", f"{segment} is committed up to {offset}, but only what is before {done} was processed")
        earlier_token, earlier = self.committed.get(name, (0, 0))
        if token == earlier_token and offset < earlier:
            self.broken("S1", f"the position in {segment} goes back from {earlier} to {offset}")
        self.committed[name] = (token, offset)

    # ------------------------------------------------------------------ streams

    def _stream(self, done: Done, transition: Transition[StreamState]) -> None:
        before, after = transition.before, transition.after
        if after is None:
            return
        for update in transition.updates:
            if self.world.on_line is not None:
                self.world.say(done.process.name, f"  {transition.revision}: {_short(update)}")
            if isinstance(update, AnnounceScale):
                self.on_phase("scale", after.name, True)
            elif isinstance(update, PublishScale):
                self.on_phase("scale", after.name, False)
                if before is not None and before.scale is not None:
                    self._check_published(before, [*before.scale.predecessors])
            elif isinstance(update, SealStream):
                self._check_published(after, list(after.current))
            elif isinstance(update, TruncateStream):
                self.on_phase("truncation", done.process.name, True)
                for number, offset in update.head.items():  # where groups begin from now on
                    name = after.data_segment(number)
                    self._give_up(self.data.setdefault(name, DataSegment(name)), offset)
                for number, each in after.segments.items():
                    if each.retired_at is not None:
                        name = after.data_segment(number)
                        data = self.data.setdefault(name, DataSegment(name))
                        self._give_up(data, data.end)

    def _check_published(self, state: StreamState, numbers: list[int]) -> None:
        """What is replaced, or ended, takes no more events."""
        for number in numbers:
            if not self.world.memory.info(state.data_segment(number)).sealed:
                self.broken("S3", f"segment {number} of {state.name} is replaced and not sealed")

    # ------------------------------------------------------------------ what is delivered

    def _data_name(self, state: ReaderGroupState, segment: SegmentId) -> str:
        return data_segment(segment, state.streams[stream_of(segment)].incarnation)

    def assignment(self, event: rg.Event[bytes]) -> Assignment:
        return Assignment(data_segment(event.segment, event.pointer.incarnation), event.fencing_token)

    def handed(self, process: Process, event: rg.Event[bytes]) -> tuple[DataSegment, StoredEvent, Assignment] | None:
        """``process`` was handed the event, in whatever order. None if that is broken."""
        self.deliveries += 1
        if process not in self.in_hand_since:
            self.in_hand_since[process] = self.world.simulation.now
            self.on_phase("handling", process.name, True)
        assignment = self.assignment(event)
        key, _, number = event.raw.decode().partition(":")
        data = self.data.get(assignment.segment)
        stored = data.event_at(event.offset) if data is not None else None
        if data is None or stored is None or stored != (key, int(number), event.offset, event.next_offset):
            self.broken("S2", f"{process.name} was handed {event!r} {event.raw!r}, stored is {stored}")
            return None
        if assignment not in self.began:
            self.broken("S1", f"{process.name} was handed {event!r} under the token {event.fencing_token} of nobody")
            return None
        if assignment in self.over:
            # A dead reader's lease was over before, by its own clock too: it has to have stopped by itself.
            self.broken("S1", f"{process.name} was handed {event!r} after it was dead at {self.over[assignment]:.3f}")
        return data, stored, assignment

    def delivered(self, process: Process, event: rg.Event[bytes]) -> None:
        """``process`` was handed the event, after those before it."""
        found = self.handed(process, event)
        if found is None:
            return
        data, stored, assignment = found
        expected = self.delivered_to.get(assignment, self.began[assignment])
        if event.offset not in (expected, max(expected, data.given_up)) and not (
            event.offset > expected and event.offset in data.starts
        ):
            self.broken("S3", f"{process.name} was handed {event!r}, and before it what ends at {expected}")
        self.delivered_to[assignment] = event.next_offset
        self.delivered_in_order(process, event, stored)

    def delivered_in_order(self, process: Process, event: rg.Event[bytes], stored: StoredEvent) -> None:
        """An event comes to whomever for the first time after those of its key that were written before."""
        if not self._is_of_before_a_reset(event):
            self._check_key(process, stream_of(event.segment), stored.key, stored.number)

    def _check_key(self, process: Process, stream: str, key: str, number: int) -> None:
        reached = self.reached.get((stream, key), -1)
        if number <= reached:
            self.repeats += 1
            return
        order = self.order[stream, key]
        index = bisect_left(order, number)
        earlier = order[index - 1] if index > 0 else -1
        if earlier > reached:
            self.broken("S3", f"{process.name} was handed {key}:{number}, and nobody {key}:{earlier}")
        self.reached[stream, key] = number

    def processed(self, process: Process, event: rg.Event[bytes]) -> None:
        """The application has done with the event, before the product counts it."""
        since = self.in_hand_since.pop(process, None)
        if since is not None:
            self.handled[process].append((since, self.world.simulation.now))
            self.on_phase("handling", process.name, False)
        if self._is_of_before_a_reset(event):
            return
        data = self.data[data_segment(event.segment, event.pointer.incarnation)]
        data.count_as_processed(event.offset, event.next_offset)
        self.keeping.processed(event)

    def _is_of_before_a_reset(self, event: rg.Event[bytes]) -> bool:
        return event.fencing_token <= self.reset_at.get(stream_of(event.segment), 0)

    def acknowledged(self, process: Process, events: Iterable[tuple[str, int]]) -> None:
        """A flush of ``process`` said that these are stored."""
        for key, number in events:
            if self.stored[key, number] != 1:
                self.broken(
                    "S2", f"{process.name}: {key}:{number} is acknowledged, stored {self.stored[key, number]} times"
                )

    def called(self, process: Process, what: str, began: float, timeout: float) -> None:
        """A call has returned that was to take ``timeout`` seconds at most, by the clock of its process."""
        took = self.world.simulation.now - began
        undisturbed = process.in_contact_since <= began
        if undisturbed and took > timeout * CLOCK_SLACK + CALL_SLACK_SECONDS:
            self.broken("L5", f"{process.name}: {what} took {took:.3f} s, its timeout is {timeout} s")

    # ------------------------------------------------------------------ who scales

    def scaling_began(self, process: Process) -> None:
        """One process at a time is called, as long as all are in contact with the store."""
        others = [other for other in self.scaling if other.runs and other is not process]
        timeout = self.timeout(self.folds[self.log].replica.state)
        for other in others:
            since = max(other.in_contact_since, self.world.healthy_since)
            if self.world.simulation.now - since > timeout * CLOCK_SLACK:
                self.broken("S1", f"{process.name} is called to scale the readers, and so is {other.name}")
        self.scaling.append(process)

    def scaling_ended(self, process: Process) -> None:
        if process in self.scaling:
            self.scaling.remove(process)

    # ------------------------------------------------------------------ what is told

    def heard(self, hearing: Hearing, revision: Revision, value: Any, gap: bool) -> None:
        now = self.world.simulation.now
        hearing.told.append(Told(revision, value, gap, now))
        fold = self.folds[self.log]
        committed_at = fold.committed_at.get(revision, now)
        process = hearing.process
        undisturbed = max(process.in_contact_since, process.started_at, self.world.healthy_since) <= committed_at
        if revision >= self.created > hearing.back_since[0]:
            hearing.back_since = self.created, now
        # While a group is deleted its listeners poll it less and less often.
        was_back = hearing.back_since[1] <= committed_at
        if (
            len(hearing.told) > 1
            and was_back
            and undisturbed
            and committed_at > self.deaf_until
            and not hearing.slow
            and now - committed_at > NOTICE_SECONDS
        ):
            self.broken("L4", f"{process.name} hears of {hearing.kind} at {revision} {now - committed_at:.3f} s late")

    def check_hearing(self, hearing: Hearing, *, at_rest: bool) -> None:
        """S8: each change was told once, in order, or is covered by a gap."""
        changes = self.changes[hearing.kind]
        told = hearing.told
        for earlier, later in zip(told, told[1:], strict=False):
            if later.revision < earlier.revision or (later.revision == earlier.revision and not later.gap):
                self.broken("S8", f"{hearing.process.name} heard {later} after {earlier}")
                return
            between = [each for each in changes if earlier.revision < each[0] < later.revision and each[1] is not None]
            if between and not later.gap:
                self.broken("S8", f"{hearing.process.name} was not told of {hearing.kind} at {between[0][0]}")
                return
        for each in told:
            expected = next((value for revision, value in reversed(changes) if revision <= each.revision), None)
            if each.value != expected:
                self.broken("S8", f"{hearing.process.name} heard {each}, it was {expected}")
                return
        # What was stored a moment ago, as when a reader begins again, may be on its way.
        committed_at, now = self.folds[self.log].committed_at, self.world.simulation.now
        known = sum(now - committed_at.get(revision, 0.0) > NOTICE_SECONDS for revision, _ in changes)
        revision, newest = changes[known - 1] if known else (Revision(0, 0), None)
        good = [value for _, value in changes[max(0, known - 1) :]]
        is_up_to_date = bool(told) and (
            told[-1].revision >= revision or (told[-1].value in good and self._may_have_skipped(told[-1].revision))
        )
        if at_rest and hearing.process.runs and not hearing.closed and newest is not None and not is_up_to_date:
            self.broken("S8", f"{hearing.process.name} was not told of {hearing.kind} at {revision}")

    def _may_have_skipped(self, since: Revision) -> bool:
        """Whether a follower of the group may have gone on from a snapshot, or in another life of the group: changes
        after ``since`` that left all as it was are then not told at once.
        """
        return max([self.created, *(mark.revision for mark in self.marks[self.log][-1:])]) > since

    # ------------------------------------------------------------------ at rest

    def check_replica(self, process: Process, synchronizer: Any) -> None:
        """S4, S5: what a process holds is what the log says, at the length that it has applied."""
        replica = synchronizer._follower.replica
        found = self.folds[synchronizer.segment].states.get(replica.next_offset)
        if found is None:
            self.broken(
                "S4",
                f"{process.name} has applied {synchronizer.segment} up to {replica.next_offset}: no entry ends there",
            )
        elif found != (replica.checksum, replica.state):
            self.broken("S4", f"{process.name} has another state of {synchronizer.segment} at {replica.next_offset}")

    def check_all_delivered(self) -> None:
        """S2: everything that is stored was processed. S6: checkpoints are still what was kept."""
        self.keeping.check()
        for data in self.data.values():
            if data.events and data.frontier < data.events[-1].end:
                left = [event for event in data.events if event.end > data.frontier]
                self.broken("S2", f"{len(left)} events of {data.name} were never processed, the first is {left[0]}")

    def check_once(self) -> None:
        """S3 and S4: nothing is stored twice."""
        twice = [event for event, count in self.stored.items() if count > 1]
        if twice:
            self.broken("S3", f"stored more than once: {twice[:5]}")


def _short(update: Any) -> str:
    fields: Mapping[str, Any] = {name: value for name, value in update if value is not None}
    return f"{type(update).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"[:300]
