"""Which of the schedules that break simpler protocols occurred in a run, whoever arranged it: a scenario, or chance.

``PYTHONHASHSEED=0 python -m tests.simulation.sightings 0 1000`` says in how many of the runs of these seeds.

Each schedule has a pattern: a few facts about one run, in an order. A `Watcher` looks at what the auditor looks at, and
judges nothing. That a schedule was seen, and the auditor found nothing, is what a test asks for.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import readergroup as rg
from readergroup.group.model.positions import Positions, decode_positions
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import (
    AddReader,
    CompleteSegment,
    PassCheckpoint,
    ReassignSegment,
    ReleaseSegment,
    RemoveReader,
)
from readergroup.record.recorder import RECORDED, Recorded
from readergroup.streams.config import SegmentId, stream_of
from readergroup.streams.state import (
    AnnounceScale,
    CommitTransaction,
    FinishTransaction,
    PublishScale,
    StreamState,
)
from readergroup.streams.transactions.merging import PROGRESS
from synchronizer import (
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    NotFoundError,
    ReaderGroupError,
    Revision,
    SealedError,
    UnknownOutcome,
)
from synchronizer.limits import DEFAULT_STATE_LIMIT_BYTES
from synchronizer.liveness.lease import PREFIX, lease_attribute
from synchronizer.log.entries import MARK, Mark, decode_entries
from synchronizer.log.replica import Transition

from .auditor import Assignment, Fold, Hearing
from .listening import Hearing as DurableHearing
from .run import Run, run
from .scenario import generate
from .world import Done, Process, is_staged

#: What is looked for, by the number of the schedule and its variant.
SCHEDULES: Final[Mapping[str, str]] = {
    "F1": "An entry is stored and its answer lost; the next attempt is refused, by that entry among others.",
    "F2.1": "An update is decided on a state that is not the newest any more, and could not be applied to that.",
    "F2.2": "A request that was given up arrives after its writer has gone on, and is refused.",
    "F3.1": "A group is deleted and created again while others have it open.",
    "F3.2": "A segment of a group that was created again gets an owner, and its data had owners before.",
    "F3.3": "A scale, or its completion, reaches the data of a stream that was deleted meanwhile.",
    "F4.1": "A removal of a silent reader is refused, because the reader has renewed its lease since it was looked at.",
    "F4.2": "A renewal arrives after the removal of its reader, and is refused.",
    "F4.3": "A commit names an assignment that is over, and has no effect.",
    "F4.4": "A late renewal, given up by its sender, arrives after the removal of its reader.",
    "F4.5": "A removal is refused, because the reader has committed a later position since that was read.",
    "F5.1": "A segment goes from a reader that has passed a checkpoint to one that has not.",
    "F5.2": "A segment goes from a reader that has not passed a checkpoint to one that has.",
    "F5.3": "Of two segments that are to be merged one is completed while a checkpoint waits for the other's reader.",
    "F5.4": "A reader that a checkpoint waits for is declared dead.",
    "F5.5": "A reader has passed the first of two checkpoints that are under way.",
    "F5.6": "A position is committed that was reached before the group was reset.",
    "F6.1": "A reader is lost with the last event of a sealed segment in hand.",
    "F6.2": "A scaler dies between announcing and publishing, and another process publishes.",
    "F6.3": "Data is truncated away before its reader has come to it.",
    "F7": "An append arrives at a segment that was sealed since the writer looked.",
    "F8.1": "The answer to an append is lost, and the segment is sealed before the writer asks again.",
    "F8.2": "The answer to an append is lost, and the segment is deleted before the writer asks again.",
    "F8.3": "A writer has appends in doubt on two segments when they are merged.",
    "F8.4": "A segment takes events while its successor is announced and another predecessor of that is sealed.",
    "F9": "The store was away for so long that every lease looks dead, and is back for one reader first.",
    "F10.1": "The target of a hand-over is removed before the owner has released the segment.",
    "F10.2": "The target of a hand-over comes back under its id, before the owner has released the segment.",
    "F10.3": "The owner of a segment that is marked for hand-over is removed when the target is dead as well.",
    "F11": "Two processes plan at the same moment; one of the plans is refused.",
    "F12": "A newer release writes what an older one, that has the log open, does not know.",
    "F13.1": "A compaction is late: the mark has moved on since it made its snapshot.",
    "F13.2": "Entries are written between the snapshot of a compaction and its mark.",
    "F13.3": "A process dies between the snapshot of a compaction and its mark.",
    "F14": "Others write while a call finds that it has nothing to do.",
    "F15.1": "A hand-over waits for a slow handler, for longer than the timeout.",
    "F15.2": "A reader that takes longer than its group allows is removed, although it is alive and in contact.",
    "F16.1": "The answer to a renewal comes when half of the timeout has passed, or more.",
    "F16.2": "A process that was paused hands out an event whose segment has another owner by now.",
    "F17": "A reader joins under the id of another one that is alive.",
    "F18": "Several calls of one process go out together, and are refused.",
    "F19": "A listener is told of a gap: the log was compacted past what its process had applied.",
    "F19.1": "A listener under a durable name is told what it was told before, by a process that has died over it.",
    "F19.2": "Of two processes that listen under one name, one is told and the other is not.",
    "F19.3": "Who records dies, the log is compacted past what is recorded, and another process goes on.",
    "F20": "A reader is taken out of a state that is too large for anything to be added.",
    "F21.1": "Who commits a transaction dies when it is merged in part, and another process completes it.",
    "F21.2": "The segments that events were staged for are scaled before the commit.",
    "F21.3": "A merge is stored and its answer lost, and the transaction is completed.",
    "F21.4": "The request of a merge that was given up arrives when that is done, and is refused.",
    "F22": "An update is stored while a process that is stopped holds the fair lock.",
    "F23.1": "The store has gone back behind what a process has applied, and that asks again.",
    "F23.2": "The store has gone back, and on with other entries, past what a process has applied; that asks again.",
    "F23.3": "The store has gone back, and on to the length that a process has applied, which writes.",
}


def sightings(seeds: Iterable[int]) -> Counter[str]:
    """In how many of the runs of these seeds each schedule occurred."""
    runs: list[Counter[str]] = []
    for seed in seeds:
        run(generate(seed), watch=lambda running: runs.append(watch_for_sightings(running)))
    return Counter(name for seen in runs for name in seen)


def watch_for_sightings(run: Run) -> Counter[str]:
    """How often each schedule has occurred in the run so far; it grows while the run goes on."""
    seen: Counter[str] = Counter()
    watchers = [
        kind(run, seen) for kind in (_Log, _Leases, _Members, _Checkpoints, _Streams, _Transactions, _Record, _Calls)
    ]
    world, auditor = run.world, run.auditor
    on_done, on_fault = world.on_done, world.on_fault
    on_transition, on_phase = auditor.on_transition, auditor.on_phase
    process, delivered, heard = world.process, auditor.delivered, auditor.heard

    def after_done(done: Done) -> None:
        on_done(done)
        for watcher in watchers:
            watcher.done(done)

    def after_fault(process: Process, fault: str, verb: str) -> None:
        on_fault(process, fault, verb)
        for watcher in watchers:
            watcher.fault(process, fault)

    def after_transition(done: Done, transition: Transition[Any]) -> None:
        on_transition(done, transition)
        for watcher in watchers:
            watcher.transition(done, transition)

    def after_phase(phase: str, name: str, begins: bool) -> None:
        on_phase(phase, name, begins)
        for watcher in watchers:
            watcher.phase(phase, name, begins)

    def before_delivery(process: Process, event: rg.Event[bytes]) -> None:
        for watcher in watchers:
            watcher.delivery(process, event)
        delivered(process, event)

    def before_hearing(hearing: Hearing, revision: Revision, value: Any, gap: bool) -> None:
        if gap and hearing.told:
            seen["F19"] += 1
        heard(hearing, revision, value, gap)

    def started(name: str, kind: str, **options: Any) -> Process:
        begun = process(name, kind, **options)
        _tell_of_appends(begun, watchers)
        return begun

    durable, on_call = run.durable, run.durable.on_call

    def before_call(call: DurableHearing) -> None:
        if any(each.key == call.key and not each.process.alive for each in durable.calls[call.kind]):
            seen["F19.1"] += 1
        if any(process.runs and process is not call.process for process in durable.listening):
            seen["F19.2"] += 1
        on_call(call)

    def met(schedule: str) -> None:
        seen[schedule] += 1

    durable.on_call, run.archive.on_meeting = before_call, met
    world.on_done, world.on_fault = after_done, after_fault
    auditor.on_transition, auditor.on_phase = after_transition, after_phase
    auditor.delivered, auditor.heard = before_delivery, before_hearing  # type: ignore[method-assign]
    world.process = started  # type: ignore[method-assign]
    return seen


class _Append(NamedTuple):
    """An append as its sender sees it: what was asked, and what came of it."""

    process: Process
    segment: str
    data: bytes
    expected_offset: int | None
    attributes: Mapping[str, AttributeChange]
    sent_at: float
    answer: AppendResult | ReaderGroupError

    @property
    def kind(self) -> str:
        return self.segment.partition("/")[0]


def _tell_of_appends(process: Process, watchers: Iterable[_Watcher]) -> None:
    """Let the watchers know what the process is answered, and when it had asked."""
    append, simulation = process.store.append, process.world.simulation

    def told(
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        sent_at = simulation.now
        answer: AppendResult | ReaderGroupError
        try:
            answer = append(segment, data, expected_offset=expected_offset, attributes=attributes)
        except ReaderGroupError as error:
            answer = error
        asked = _Append(process, segment, data, expected_offset, attributes or {}, sent_at, answer)
        for watcher in () if is_staged(segment) else watchers:
            watcher.answered(asked)
        if isinstance(answer, ReaderGroupError):
            raise answer
        return answer

    process.store.append = told  # type: ignore[method-assign]


class _Watcher:
    """Looks out for some schedules in one run."""

    def __init__(self, run: Run, seen: Counter[str]) -> None:
        self.run = run
        self.world = run.world
        self.auditor = run.auditor
        self.seen = seen

    def saw(self, schedule: str) -> None:
        self.seen[schedule] += 1

    @property
    def now(self) -> float:
        return self.world.simulation.now

    def done(self, done: Done) -> None:
        """A call has been carried out."""

    def answered(self, append: _Append) -> None:
        """A process has got its answer."""

    def fault(self, process: Process, fault: str) -> None: ...

    def transition(self, done: Done, transition: Transition[Any]) -> None: ...

    def phase(self, phase: str, name: str, begins: bool) -> None: ...

    def delivery(self, process: Process, event: rg.Event[bytes]) -> None: ...

    # ------------------------------------------------------------------ what the logs say

    def group(self, log: str) -> ReaderGroupState | None:
        fold = self.auditor.folds.get(log)
        return None if fold is None else fold.replica.state

    def stream(self, stream: str) -> StreamState | None:
        fold = self.auditor.folds.get(f"stream/{stream}")
        return None if fold is None else fold.replica.state

    def process_of(self, state: ReaderGroupState, reader: str) -> Process | None:
        found = state.readers.get(reader)
        return None if found is None else self.auditor.lives.get((reader, found.incarnation))


def _is_log(segment: str) -> bool:
    return segment.startswith(("group/", "stream/", "state/"))


class _Log(_Watcher):
    """Races and lost answers in a log of entries, and its compaction."""

    def __init__(self, run: Run, seen: Counter[str]) -> None:
        super().__init__(run, seen)
        self._unanswered: dict[tuple[Process, str], bytes] = {}  # stored
        self._compacting: dict[tuple[Process, str], int] = {}  # the length of the log at the snapshot

    def done(self, done: Done) -> None:
        if done.verb == "create" and done.segment.startswith("snapshot/"):
            self._begin_compaction(done.process, done.segment[len("snapshot/") :].partition("@")[0])
        elif done.verb == "append" and _is_log(done.segment):
            self._appended(done)

    def _begin_compaction(self, process: Process, log: str) -> None:
        if log in self.auditor.folds:
            self._compacting[process, log] = self.auditor.folds[log].replica.next_offset

    def _appended(self, done: Done) -> None:
        place = done.process, done.segment
        if done.data and isinstance(done.result, Appended):
            if not done.answered:
                self._unanswered[place] = done.data
            queue = self.world.queues.get(done.segment)
            if queue and queue[0].process is not done.process and queue[0].process.stopped:
                self.saw("F22")
        elif done.data and isinstance(done.result, Conflict):
            if not done.answered:
                self.saw("F2.2")
            elif self._unanswered.pop(place, None) == done.data:
                self.saw("F1")
            elif done.segment.startswith("state/"):
                self.saw("F2.1")
        if MARK in done.attributes and place in self._compacting:
            length = self._compacting.pop(place)
            if isinstance(done.result, Conflict):
                self.saw("F13.1")
            elif self.auditor.folds[done.segment].replica.next_offset > length:
                self.saw("F13.2")

    def fault(self, process: Process, fault: str) -> None:
        if fault == "kill" and any(each is process for each, _ in self._compacting):
            self.saw("F13.3")

    def answered(self, append: _Append) -> None:
        if not append.data or not isinstance(append.answer, Conflict) or not _is_log(append.segment):
            return
        updates = self._updates(append)
        if len(updates) > 1:
            self.saw("F18")
        if append.kind == "group" and updates and all(type(each) is ReassignSegment for each in updates[0]):
            self.saw("F11")

    def _updates(self, append: _Append) -> list[list[Any]]:
        """What was refused: the updates of each entry."""
        fold: Fold = self.auditor.fold(append.segment)
        if append.expected_offset not in fold.states:
            return []
        checksum, _ = fold.states[append.expected_offset]
        entries = decode_entries(append.segment, append.data, append.expected_offset, checksum)
        bodies = [fold.codec.decode_body(entry.body) for entry in entries]
        return [body if isinstance(body, list) else [body] for body in bodies]


class _Leases(_Watcher):
    """Renewals, removals, and what is between the two."""

    def __init__(self, run: Run, seen: Counter[str]) -> None:
        super().__init__(run, seen)
        self._renewed_at: dict[str, float] = {}  # by attribute

    def done(self, done: Done) -> None:
        if done.verb != "append" or done.data or not done.segment.startswith("group/"):
            return
        for attribute, change in done.attributes.items():
            if attribute.startswith(PREFIX) and change.new is not None:
                if isinstance(done.result, Appended):
                    self._renewed(self.group(done.segment), attribute, decode_positions(change.new))
                elif isinstance(done.result, Conflict) and done.result.attributes[attribute] is None:
                    self.saw("F4.2" if done.answered else "F4.4")

    def _renewed(self, state: ReaderGroupState | None, attribute: str, positions: Positions) -> None:
        if state is None:
            return
        for segment, held in positions.items():
            found = state.segments.get(segment)
            if found is None or found.token != held.token:
                self.saw("F4.3")
        self._renewed_at[attribute] = self.now
        if self._is_first_after_outage(state, attribute):
            self.saw("F9")

    def _is_first_after_outage(self, state: ReaderGroupState, attribute: str) -> bool:
        """Whether the others, who are alive, look dead only because the store was away from everybody."""
        back_at, timeout = self.world.healthy_since, self.auditor.timeout(state)
        if not back_at or self.now - back_at > timeout:
            return False
        for reader, found in state.readers.items():
            other = "" if found.lease is None else lease_attribute(found.lease)
            renewed_at = self._renewed_at.get(other, 0.0)
            process = self.process_of(state, reader)
            is_alive = other != attribute and process is not None and process.runs
            if is_alive and 0 < renewed_at < min(back_at, self.now - timeout):
                return True
        return False

    def answered(self, append: _Append) -> None:
        if append.kind != "group":
            return
        for attribute, change in append.attributes.items():
            if not attribute.startswith(PREFIX):
                continue
            if change.new is None and isinstance(append.answer, Conflict):
                self._removal_refused(append.answer.attributes.get(attribute), change.expected)
            elif not append.data and isinstance(append.answer, Appended) and self._is_late(append):
                self.saw("F16.1")

    def _is_late(self, append: _Append) -> bool:
        return self.now - append.sent_at > self.run.scenario.timeout / 2

    def _removal_refused(self, value: bytes | None, expected: object) -> None:
        if value is None or not isinstance(expected, bytes) or value == expected:
            return
        self.saw("F4.1")
        if decode_positions(value) != decode_positions(expected):
            self.saw("F4.5")


class _Members(_Watcher):
    """Readers that come and go, and segments that change hands meanwhile."""

    def __init__(self, run: Run, seen: Counter[str]) -> None:
        super().__init__(run, seen)
        self._hand_over_since: dict[SegmentId, float] = {}
        self._had_owners: set[str] = set()  # data segments that were read in an earlier life of the group

    def transition(self, done: Done, transition: Transition[Any]) -> None:
        before, after = transition.before, transition.after
        if not done.segment.startswith("group/"):
            return
        if before is not None and after is None:
            self._deleted(before, done.process)
        elif after is not None:
            for update in transition.updates:
                if before is not None:
                    self._update(before, after, update, done.process, transition.updates)
            self._note_hand_overs(after)
            self._look_for_former_owners(after)

    def _deleted(self, state: ReaderGroupState, by: Process) -> None:
        if any(process is not by and process.alive for process in self.run.groups):
            self.saw("F3.1")
        self._had_owners = {assignment.segment for assignment in self.auditor.began}
        self._hand_over_since.clear()

    def _look_for_former_owners(self, state: ReaderGroupState) -> None:
        if self._had_owners:
            for segment, found in state.segments.items():
                name = self.auditor._data_name(state, segment)
                if found.owner is not None and name in self._had_owners:
                    self._had_owners.discard(name)
                    self.saw("F3.2")

    def _note_hand_overs(self, after: ReaderGroupState) -> None:
        for segment in after.handing_over:
            self._hand_over_since.setdefault(segment, self.now)
        for segment in [each for each in self._hand_over_since if each not in after.handing_over]:
            del self._hand_over_since[segment]

    def _update(
        self, before: ReaderGroupState, after: ReaderGroupState, update: Any, by: Process, others: tuple[Any, ...]
    ) -> None:
        if isinstance(update, RemoveReader) and update.reader in before.readers:
            comes_back = any(isinstance(each, AddReader) and each.reader == update.reader for each in others)
            self._removed(before, update, by, comes_back)
        elif isinstance(update, ReleaseSegment):
            since = self._hand_over_since.get(update.segment, self.now)
            if self.now - since > self.auditor.timeout(after):
                self.saw("F15.1")

    def _removed(self, before: ReaderGroupState, update: RemoveReader, by: Process, comes_back: bool) -> None:
        process = self.process_of(before, update.reader)
        if any(before.segments[segment].target == update.reader for segment in before.handing_over):
            self.saw("F10.2" if comes_back else "F10.1")
        for segment in before.owned.get(update.reader, ()):
            self._lost(before, segment)
        if update.cause == "replaced" and process is not None and process.alive and process is not by:
            self.saw("F17")
        if update.cause == "dead" and process is not None and process.runs:
            limit = before.config.max_processing_seconds
            if limit < float("inf") and self.auditor._was_in_contact(process, before):
                self.saw("F15.2")
        if self._is_too_large(by, before):
            self.saw("F20")

    def _lost(self, before: ReaderGroupState, segment: SegmentId) -> None:
        """An owner of the segment is out."""
        found = before.segments[segment]
        target = None if found.target is None else self.process_of(before, found.target)
        if target is not None and not target.alive:
            self.saw("F10.3")
        name = self.auditor._data_name(before, segment)
        data, length = self.auditor.data.get(name), self._sealed_length(name)
        assert found.token is not None
        delivered_to = self.auditor.delivered_to.get(Assignment(name, found.token))
        if data is not None and length is not None and data.frontier < length == delivered_to:
            self.saw("F6.1")

    def _sealed_length(self, name: str) -> int | None:
        try:
            info = self.world.memory.info(name)
        except NotFoundError:
            return None
        return info.length if info.sealed else None

    def _is_too_large(self, by: Process, state: ReaderGroupState) -> bool:
        group = self.run.groups.get(by)
        if group is None:
            return False
        limit = group.synchronizer._writer._decider._state_limit_bytes
        return limit < DEFAULT_STATE_LIMIT_BYTES and group.synchronizer._codec.size(state) > limit

    def delivery(self, process: Process, event: rg.Event[bytes]) -> None:
        state = self.group("group/billing")
        if state is None or event.segment not in state.segments:
            return
        found = state.segments[event.segment]
        if found.token is not None and found.token > event.fencing_token:
            self.saw("F16.2")


class _Checkpoints(_Watcher):
    """Checkpoints that are under way, and resets."""

    def transition(self, done: Done, transition: Transition[Any]) -> None:
        before, after = transition.before, transition.after
        if not done.segment.startswith("group/") or before is None or after is None:
            return
        if before.outstanding_checkpoints:
            for segment, found in before.segments.items():
                later = after.segments.get(segment)
                if found.owner is not None and later is not None and later.owner not in (None, found.owner):
                    self._moved(before, found.owner, str(later.owner))
            for update in transition.updates:
                self._update(before, after, update)

    def _moved(self, state: ReaderGroupState, source: str, target: str) -> None:
        ahead_of_source, ahead_of_target = map(state.checkpoints_ahead_of, (source, target))
        for checkpoint in state.outstanding_checkpoints:
            if (checkpoint in ahead_of_source) != (checkpoint in ahead_of_target):
                self.saw("F5.2" if checkpoint in ahead_of_source else "F5.1")

    def _update(self, before: ReaderGroupState, after: ReaderGroupState, update: Any) -> None:
        if isinstance(update, CompleteSegment):
            for successor in before.segments[update.segment].successors:
                for other in before.segments[successor].predecessors:
                    owner = before.segments[other].owner
                    if other != update.segment and owner is not None and before.checkpoints_ahead_of(owner):
                        self.saw("F5.3")
        elif isinstance(update, RemoveReader):
            if update.cause == "dead" and before.checkpoints_ahead_of(update.reader):
                self.saw("F5.4")
        elif isinstance(update, PassCheckpoint):
            first_is_under_way = any(each.token == update.checkpoint for each in after.outstanding_checkpoints)
            if first_is_under_way and after.checkpoints_ahead_of(update.reader):
                self.saw("F5.5")

    def done(self, done: Done) -> None:
        if done.verb != "append" or done.data or not isinstance(done.result, Appended):
            return
        for attribute, change in done.attributes.items():
            if attribute.startswith(PREFIX) and change.new is not None:
                for segment, held in decode_positions(change.new).items():
                    if held.token <= self.auditor.reset_at.get(stream_of(segment), 0):
                        self.saw("F5.6")


class _Streams(_Watcher):
    """Scales, truncations, and writers that meet them."""

    def __init__(self, run: Run, seen: Counter[str]) -> None:
        super().__init__(run, seen)
        self._announced_by: dict[str, Process] = {}
        self._in_doubt: dict[tuple[Process, str], bytes] = {}
        self._sealed_in_doubt: dict[Process, set[str]] = defaultdict(set)

    def transition(self, done: Done, transition: Transition[Any]) -> None:
        if not done.segment.startswith("stream/"):
            return
        for update in transition.updates:
            if isinstance(update, AnnounceScale):
                self._announced_by[done.segment] = done.process
            elif isinstance(update, PublishScale):
                announced_by = self._announced_by.pop(done.segment, done.process)
                if announced_by is not done.process and not announced_by.alive:
                    self.saw("F6.2")

    def done(self, done: Done) -> None:
        if not done.segment.startswith("data/"):
            return
        if done.verb in ("seal", "create"):
            self._look_for_former_life(done.segment)
        elif done.verb == "truncate" and done.result is None:
            self._truncated(done.segment)
        elif done.verb == "append" and done.data and isinstance(done.result, Appended):
            self._look_for_announced(done.segment)

    def _look_for_former_life(self, name: str) -> None:
        stream, incarnation, _ = _parts(name)
        state = self.stream(stream)
        if state is not None and (not state.exists or state.incarnation != incarnation):
            self.saw("F3.3")

    def _truncated(self, name: str) -> None:
        start = self.world.memory.info(name).start_offset
        delivered = [to for assignment, to in self.auditor.delivered_to.items() if assignment.segment == name]
        if start > max(delivered, default=0):
            self.saw("F6.3")

    def _look_for_announced(self, name: str) -> None:
        stream, incarnation, number = _parts(name)
        state = self.stream(stream)
        if state is None or state.incarnation != incarnation or state.scale is None:
            return
        predecessors = state.scale.predecessors
        others = [state.data_segment(each) for each in predecessors if each != number]
        if number in predecessors and any(self.world.memory.info(other).sealed for other in others):
            self.saw("F8.4")

    def answered(self, append: _Append) -> None:
        if append.kind != "data" or not append.data:
            return
        place = append.process, append.segment
        if isinstance(append.answer, UnknownOutcome):
            self._in_doubt[place] = append.data
            return
        is_again = self._in_doubt.get(place) == append.data
        if isinstance(append.answer, SealedError):
            self.saw("F8.1" if is_again else "F7")
            if is_again:
                self._sealed_while_in_doubt(append.process, append.segment)
        elif isinstance(append.answer, NotFoundError) and is_again:
            self.saw("F8.2")
        if isinstance(append.answer, (Appended, Conflict, SealedError, NotFoundError)):
            self._in_doubt.pop(place, None)

    def _sealed_while_in_doubt(self, process: Process, name: str) -> None:
        stream, incarnation, number = _parts(name)
        state = self.stream(stream)
        for other in self._sealed_in_doubt[process]:
            is_neighbour = other.startswith(f"data/{stream}/{incarnation}/")
            if state is not None and is_neighbour and _are_merged(state, number, _parts(other)[2]):
                self.saw("F8.3")
        self._sealed_in_doubt[process].add(name)


class _Transactions(_Watcher):
    """Commits, and the merges after them."""

    def __init__(self, run: Run, seen: Counter[str]) -> None:
        super().__init__(run, seen)
        self._committed_by: dict[str, Process] = {}  # by the log of the stream, while it is merged
        self._begun: set[Process] = set()  # those of them who have merged something
        self._unanswered: set[str] = set()  # logs of streams, where a merge is stored and nobody knows

    def transition(self, done: Done, transition: Transition[Any]) -> None:
        if not done.segment.startswith("stream/") or transition.after is None:
            return
        for update in transition.updates:
            if isinstance(update, CommitTransaction):
                self._committed_by[done.segment] = done.process
                self._begun.discard(done.process)
                staged_for = {number for part in update.parts for number in part.segments}
                if not staged_for.issubset(transition.after.current):
                    self.saw("F21.2")
            elif isinstance(update, FinishTransaction):
                committed_by = self._committed_by.pop(done.segment, done.process)
                if committed_by in self._begun and not committed_by.alive:
                    self.saw("F21.1")
                if done.segment in self._unanswered:
                    self._unanswered.discard(done.segment)
                    self.saw("F21.3")

    def done(self, done: Done) -> None:
        if PROGRESS not in done.attributes:
            return
        if isinstance(done.result, Appended):
            self._begun.add(done.process)
            if not done.answered:
                self._unanswered.add(f"stream/{_parts(done.segment)[0]}")
        elif isinstance(done.result, Conflict) and not done.answered:
            self.saw("F21.4")


class _Record(_Watcher):
    """The record of notifications, and those who write it."""

    def __init__(self, run: Run, seen: Counter[str]) -> None:
        super().__init__(run, seen)
        self._recorded: Revision | None = None  # so far
        self._died = self._is_past = False  # since then: somebody who records; and the mark is past a change

    def fault(self, process: Process, fault: str) -> None:
        self._died |= fault == "kill" and process in self.run.recordings.recorders

    def done(self, done: Done) -> None:
        if done.verb != "append" or not isinstance(done.result, Appended):
            return
        if done.segment.startswith("record/"):
            if self._is_past and done.process.alive:
                self.saw("F19.3")
            self._recorded = Recorded.decode(done.attributes[RECORDED].new).revision
            self._died = self._is_past = False
        elif self._died and MARK in done.attributes and done.segment.startswith("group/"):
            value = done.attributes[MARK].new
            assert value is not None
            self._is_past |= self._is_past_a_change(Mark.decode(done.segment, value).revision)

    def _is_past_a_change(self, mark: Revision) -> bool:
        recorded = self._recorded
        return recorded is not None and any(
            recorded < revision <= mark for changes in self.auditor.changes.values() for revision, _ in changes
        )


class _Calls(_Watcher):
    """Calls of a state, as the actors tell of them."""

    def __init__(self, run: Run, seen: Counter[str]) -> None:
        super().__init__(run, seen)
        self._began_at: dict[str, int] = {}  # by process: the length of the ledger

    def phase(self, phase: str, name: str, begins: bool) -> None:
        if phase == "mixed releases" and begins:
            self.saw("F12")
        if phase == "nothing to do":
            length = self.auditor.fold("state/ledger").replica.next_offset
            if begins:
                self._began_at[name] = length
            elif self._began_at.pop(name, length) < length:
                self.saw("F14")


def _parts(name: str) -> tuple[str, str, int]:
    """The stream, its incarnation and the number of a data segment, from its name in the store."""
    _, scope, stream, incarnation, number = name.split("/")
    return f"{scope}/{stream}", incarnation, int(number)


def _are_merged(state: StreamState, one: int, other: int) -> bool:
    if state.scale is not None and {one, other} <= set(state.scale.predecessors):
        return len(state.scale.successors) == 1
    if one not in state.segments or other not in state.segments:
        return False
    return bool(set(state.segments[one].successors) & set(state.segments[other].successors))


if __name__ == "__main__":
    print(json.dumps(sightings(range(int(sys.argv[1]), int(sys.argv[2])))))
