"""What must hold at the end of every schedule. Each check reads the evidence and says what is wrong with it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Final, NamedTuple

from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import AddReader, CompleteSegment, ReleaseSegment, RemoveReader
from readergroup.scaling.concurrent_worker import MIN_WINDOW_EVENTS, WINDOW_EVENTS_PER_SLOT
from readergroup.streams.config import SegmentId
from synchronizer import Update
from tests.chaos.diaries import Diary, Interval
from tests.chaos.evidence import RECOVERY_SECONDS, Assignment, Evidence, Stored, assignments, moves
from tests.readergroup.reader_processes import Delivery

#: L1: after a kill the segments have other owners within the timeout and so many seconds more.
TAKEOVER_SECONDS: Final = 2.0
#: Whoever stood still for this part of the timeout has to observe anew, by the protocol.
LONG_STALL: Final = 0.3

#: How much later than due a position may be committed.
COMMIT_SECONDS: Final = 1.0

#: A removal rests on what was seen up to so much longer ago than the timeout.
EVICTION_SECONDS: Final = 1.0

Violations = Iterator[str]


def stream(evidence: Evidence) -> Violations:
    """The stream holds each writer's events once, each key in order and without holes, and all that was acknowledged.

    What a killed writer had not been told is stored may be there or not, but nothing after a gap.
    """
    held: dict[str, list[int]] = defaultdict(list)
    for event in chain.from_iterable(evidence.stored.values()):
        held[event.key].append(event.number)
    intended: dict[str, int] = {}
    for diary in evidence.of_role("writer"):
        intended |= diary.intended
        for key, count in diary.acknowledged.items():
            if len(held[key]) < count:
                yield f"S2 {diary.name} was told that {count} events of {key} are stored, and {len(held[key])} are"
    for key, numbers in held.items():
        if numbers != list(range(len(numbers))):
            at = next(index for index, number in enumerate(numbers) if number != index)
            yield f"S3 the stream holds, of {key}, {numbers[max(0, at - 2) : at + 3]} where {at} was to come"
        if len(numbers) > intended.get(key, 0):
            yield f"S2 the stream holds {len(numbers)} events of {key}, of which {intended.get(key, 0)} were written"


def nothing_is_lost(evidence: Evidence) -> Violations:
    """Every event that the stream holds was delivered."""
    delivered = {(each.segment, each.offset) for each in _deliveries(evidence)}
    for segment, events in evidence.stored.items():
        lost = [event for event in events if (segment, event.offset) not in delivered]
        if lost:
            yield f"S2 {len(lost)} events of {segment} were never delivered, the first is {lost[0]}"


def deliveries_are_of_the_stream(evidence: Evidence) -> Violations:
    """What was delivered is what the stream holds at that place."""
    held = {(event.segment, event.offset): event for event in chain.from_iterable(evidence.stored.values())}
    for each in _deliveries(evidence):
        event = held.get((SegmentId(each.segment), each.offset))
        if event is None or (event.key, event.number) != (each.key, each.number):
            yield f"S2 {each} was delivered, but the stream holds {event} there"


def order_of_keys(evidence: Evidence) -> Violations:
    """No event was delivered before the one that was written before it under its key, to whomever."""
    first: dict[tuple[str, int], Delivery] = {}
    for each in sorted(_deliveries(evidence), key=lambda each: each.at):
        if each.number and (each.key, each.number - 1) not in first:
            yield f"S3 {each} was delivered before the event before it"
        first.setdefault((each.key, each.number), each)


def assignments_read_on(evidence: Evidence) -> Violations:
    """Each assignment is of one process, and hands out its segment from its start on: each event once, in order."""
    given = assignments(evidence.log)
    for (segment, token), by_process in _by_assignment(evidence).items():
        if len(by_process) > 1:
            yield f"S1 {segment} was read under token {token} by {' and '.join(sorted(by_process))}"
        assignment = given.get((segment, token))
        if assignment is None:
            if evidence.log_is_whole:
                yield f"S1 {segment} was read under token {token}, which nobody was given"
            continue
        for process, deliveries in by_process.items():
            yield from _reads_on(assignment, process, evidence, deliveries)


def _reads_on(assignment: Assignment, process: str, evidence: Evidence, deliveries: Sequence[Delivery]) -> Violations:
    if evidence.processes[process].id != assignment.reader:
        yield f"S1 {process} read {assignment.segment} under the token {assignment.token} of {assignment.reader}"
    if evidence.processes[process].concurrency > 1:
        yield from _reads_together(assignment, process, evidence, deliveries)
        return
    offsets = _offsets_from(evidence.stored.get(assignment.segment, ()), assignment.start)
    for expected, each in zip(offsets, deliveries, strict=False):
        if each.offset != expected:
            yield f"S3 {process} began at {assignment.start}, was to be handed the event at {expected} and got {each}"
            return


def _reads_together(
    assignment: Assignment, process: str, evidence: Evidence, deliveries: Sequence[Delivery]
) -> Violations:
    """Each event was processed once, and began when all those of its key before it were processed.

    Between it and the first event that was not, there were no more than the pool takes.
    """
    events = [each for each in evidence.stored.get(assignment.segment, ()) if each.offset >= assignment.start]
    place = {event.offset: index for index, event in enumerate(events)}
    processed = {each.offset: each.at for each in deliveries}
    if len(processed) < len(deliveries):
        yield f"S3 {process} processed an event of {assignment.segment} twice under the token {assignment.token}"
    before: dict[int, int] = {}  # the event before it, of its key
    last: dict[str, int] = {}
    for event in events:
        if event.key in last:
            before[event.offset] = last[event.key]
        last[event.key] = event.offset
    # When everything up to each event was processed.
    done = list(accumulate((processed.get(event.offset, float("inf")) for event in events), max))
    window = max(MIN_WINDOW_EVENTS, WINDOW_EVENTS_PER_SLOT * evidence.processes[process].concurrency)
    for each in evidence.diary(process).begun:
        if (each.segment, each.token) != (assignment.segment, assignment.token):
            continue
        if each.offset not in place:
            yield f"S3 {process} began {each}, which is before {assignment.start} or not in the stream"
            return
        if each.offset in before and processed.get(before[each.offset], float("inf")) > each.at:
            yield f"S3 {process} began {each} before the event before it was processed, at {before[each.offset]}"
            return
        if place[each.offset] + 1 - bisect_right(done, each.at) > window:
            yield f"S2 {process} began {each} more than {window} events behind the first unfinished one"
            return


def kills_repeat_little(evidence: Evidence) -> Violations:
    """A killed reader had committed what was processed without a gap shortly before, if nothing stood still."""
    read = _by_assignment(evidence)
    given = assignments(evidence.log)
    for happened in evidence.happened:
        name = happened.process
        if happened.action != "kill" or evidence.processes[name].concurrency == 1:
            continue
        since = happened.at - evidence.position_interval_seconds - COMMIT_SECONDS
        within = Interval(since, happened.at)
        times = running(evidence, evidence.diary(name))
        if not any(each.start <= since and happened.at <= each.end for each in times) or any(
            each.start < within.end and within.start < each.end for each in evidence.stalls_of(name)
        ):
            continue
        for key, by_process in read.items():
            assignment = given.get(key)
            if assignment is None or assignment.end is None or not assignment.was_declared_dead:
                continue
            if assignment.ended_at < happened.at:
                continue  # it stood still before, came back in another life, and was killed in that one
            processed = {each.offset for each in by_process.get(name, ()) if each.at < since}
            offsets = _offsets_from(evidence.stored.get(assignment.segment, ()), assignment.start)
            gapless = next((offset for offset in offsets if offset not in processed), assignment.end)
            if name in by_process and assignment.end < gapless:
                yield (
                    f"S2 {name} had processed {assignment.segment} up to {gapless} {happened.at - since:.1f} s before "
                    f"it was killed, and the group went on at {assignment.end}"
                )


def commits_are_of_what_was_processed(evidence: Evidence) -> Violations:
    """The group went on where the reader before had processed everything; who gave a segment up, repeats nothing."""
    read = _by_assignment(evidence)
    in_hand = {each for diary in evidence.diaries.values() for each in diary.in_hand}
    for key, assignment in assignments(evidence.log).items():
        if assignment.end is None:
            continue
        if assignment.end < assignment.start:
            yield f"S1 {key} went back from {assignment.start} to {assignment.end}: {assignment.ended_by}"
        deliveries = [
            each for each in chain.from_iterable(read.get(key, {}).values()) if each.at <= assignment.ended_at
        ]
        delivered = {each.offset for each in deliveries}
        offsets = _offsets_from(evidence.stored.get(assignment.segment, ()), assignment.start)
        skipped = [offset for offset in offsets if offset < assignment.end and offset not in delivered]
        if skipped:
            yield (
                f"S2 {assignment.reader} left {assignment.segment} at {assignment.end}, and {len(skipped)} events from "
                f"{skipped[0]} on were not handed to it: {assignment.ended_by}"
            )
        repeated = sorted({each.offset for each in deliveries if each not in in_hand and each.offset >= assignment.end})
        if assignment.given_up and repeated and not _waits_for_a_retry(assignment, evidence, delivered):
            yield (
                f"S3 {assignment.reader} gave {assignment.segment} up at {assignment.end}, and had been handed "
                f"{len(repeated)} events from {repeated[0]} on: {assignment.ended_by}"
            )


def _waits_for_a_retry(assignment: Assignment, evidence: Evidence, processed: Collection[int]) -> bool:
    """Whether a reader that was asked to leave, as it may, did not wait for the next attempt of its first event."""
    attempts = (each for diary in evidence.diaries.values() for each in diary.begun)
    begun = {each.offset for each in attempts if (each.segment, each.token) == (assignment.segment, assignment.token)}
    return isinstance(assignment.ended_by, RemoveReader) and assignment.end in begun and assignment.end not in processed


def cuts_follow_the_deliveries(evidence: Evidence) -> Violations:
    """At no time did the group stand behind an event that nobody had been handed yet, and it never went back."""
    handed: dict[SegmentId, dict[int, float]] = defaultdict(dict)
    for each in sorted(_deliveries(evidence), key=lambda each: each.at):
        handed[SegmentId(each.segment)].setdefault(each.offset, each.at)
    complete: dict[SegmentId, tuple[list[int], list[float]]] = {}
    for segment, events in evidence.stored.items():
        offsets = [event.offset for event in events]
        # When all events up to this one had been handed out.
        times = list(accumulate((handed[segment].get(offset, float("inf")) for offset in offsets), max))
        complete[segment] = offsets, times
    reached: dict[SegmentId, int] = {}
    for at, cut in evidence.cuts:
        for segment, offset in cut.items():
            if offset < reached.get(segment, 0):
                yield f"S1 the group's position in {segment} went back from {reached[segment]} to {offset}"
            reached[segment] = offset
            offsets, times = complete.get(segment, ([], []))
            before = bisect_left(offsets, offset)
            if before and times[before - 1] > at:
                yield f"S2 the group stood at {offset} in {segment} before all events up to there were handed out"
                return


def owners(evidence: Evidence) -> Violations:
    """By the group's log, an owner loses a segment only by its own update or its removal, and tokens only grow."""
    tokens: dict[SegmentId, int] = {}
    for move in moves(evidence.log):
        for segment, before, after in move.changed:
            token_before = None if before is None else before.token
            if after is not None and after.token == token_before:
                continue
            if before is not None and before.owner is not None and not _ends(move.update, before.owner, segment):
                yield f"S1 {before.owner} lost {segment} by {move.update!r}"
            if after is None or after.token is None:
                continue
            if after.token <= tokens.get(segment, -1):
                yield f"S7 the token of {segment} went from {tokens[segment]} to {after.token}"
            tokens[segment] = after.token


def _ends(update: Update[ReaderGroupState], owner: str, segment: SegmentId) -> bool:
    match update:
        case RemoveReader():
            return update.reader == owner
        case ReleaseSegment() | CompleteSegment():
            return (update.reader, update.segment) == (owner, segment)
        case _:
            return False


def who_lost_a_segment_stops(evidence: Evidence) -> Violations:
    """A reader that was declared dead hands out the event that it held, and no other; or as many as it runs at once.

    One whose id was taken over while it ran goes on until it hears of that.
    """
    given = {key: each for key, each in assignments(evidence.log).items() if each.was_declared_dead}
    late: dict[tuple[str, int], list[Delivery]] = defaultdict(list)
    for name, diary in evidence.diaries.items():
        for each in diary.begun or diary.deliveries:
            assignment = given.get((SegmentId(each.segment), each.token))
            if assignment is not None and each.at > assignment.ended_at:
                late[name, assignment.incarnation].append(each)
    for (process, _), deliveries in late.items():
        if len(deliveries) > evidence.processes[process].concurrency:
            yield f"S1 {process} handed out {len(deliveries)} events after it was out: {deliveries[:3]}"


def who_was_replaced_stays_out(evidence: Evidence) -> Violations:
    """A process joins the group once, and again only after it was declared dead, as far as the log could tell it.

    Where it came back behind a snapshot in which its id is free again, it cannot know, and may join.
    """
    may_join = Counter(process.id for process in evidence.processes.values() if process.role == "reader")
    for diary in evidence.of_role("reader"):
        may_join[evidence.processes[diary.name].id] += diary.joins_again
    replaced: set[str] = set()
    freed: dict[str, int] = {}  # the replaced ones, with the offset at which those that took over from them had left
    for move in moves(evidence.log):
        if isinstance(move.update, RemoveReader):
            reader = move.update.reader
            may_join[reader] += move.update.cause == "dead"
            if move.update.cause == "replaced":
                replaced.add(reader)
            elif reader in replaced:
                freed[reader] = move.revision.offset
        elif isinstance(move.update, AddReader):
            reader = move.update.reader
            snapshot = next((start for at, start in evidence.truncations if at >= move.at), 0)
            if freed.get(reader, snapshot) < min(snapshot, move.revision.offset):
                replaced.discard(reader)
                del freed[reader]
            else:
                may_join[reader] -= 1
    for reader, left in may_join.items():
        if left < 0:
            yield f"S1 readers of the id {reader} joined {-left} times after others had taken over from them"


class Takeover(NamedTuple):
    """How the segments of a killed reader came to others."""

    reader: str
    killed_at: float
    #: From when on another reader was there.
    from_: float
    #: When all of its segments had other owners.
    to: float
    #: The longest time in which nothing but the protocol kept others from taking over.
    quiet_seconds: float

    @property
    def seconds(self) -> float:
        return self.to - self.from_

    @property
    def was_stalled(self) -> bool:
        return self.quiet_seconds < self.seconds


def takeovers(evidence: Evidence) -> Iterator[Takeover]:
    """Of each reader that was killed with segments in its hands, while or until others were there."""
    for happened in evidence.happened:
        if happened.action == "kill" and evidence.processes[happened.process].role == "reader":
            taken = _taken_over(evidence, happened.process, happened.at)
            found = [] if taken is None else list(_witnessed(evidence, happened.process, happened.at, taken))
            if found:
                yield max(found, key=lambda takeover: takeover.quiet_seconds)


def in_time(evidence: Evidence) -> Violations:
    """L1, on a machine and a store that answer."""
    bound = evidence.reader_timeout_seconds + TAKEOVER_SECONDS
    for takeover in takeovers(evidence):
        if takeover.quiet_seconds > bound:
            yield (
                f"L1 the segments of {takeover.reader} had no other owners for {takeover.seconds:.1f} s, of which "
                f"{takeover.quiet_seconds:.1f} s at a stretch without a stall; the bound is {bound:.1f} s"
            )


def _taken_over(evidence: Evidence, process: str, killed_at: float) -> float | None:
    """When all that the reader had at its removal had owners again; None if it had nothing or was not in the group."""
    reader = evidence.processes[process].id
    before = [entry.transition.after for entry in evidence.log if entry.at <= killed_at]
    present = before[-1] if before else None
    found = present.readers.get(reader) if present is not None else None
    if present is None or found is None or found.incarnation not in evidence.diary(process).incarnations:
        return None
    left = {segment: held.token for segment, held in present.segments_of(reader).items()}
    had_any = bool(left)
    removed = False
    for move in moves([entry for entry in evidence.log if entry.at > killed_at]):
        if not removed:
            if move.after.readers.get(reader) == found:
                continue
            removed = True
            left = {segment: held.token for segment, held in move.before.segments_of(reader).items()}
            had_any |= bool(left)
        left = {segment: token for segment, token in left.items() if not _has_new_owner(move.after, segment, token)}
        if not left:
            return move.at if had_any else None
    return float("inf") if had_any else None


def _has_new_owner(state: ReaderGroupState, segment: SegmentId, token: int | None) -> bool:
    held = state.segments.get(segment)
    return held is None or (held.owner is not None and held.token != token)


def _witnessed(evidence: Evidence, killed: str, killed_at: float, taken_at: float) -> Iterator[Takeover]:
    """The wait for the takeover, as each of the other readers could have ended it."""
    reader = evidence.processes[killed].id
    for diary in evidence.of_role("reader"):
        if diary.name == killed:
            continue
        for interval in running(evidence, diary):
            start, end = max(killed_at, interval.start), min(taken_at, interval.end)
            if start < end:
                stalls = evidence.stalls_of(diary.name)
                long = LONG_STALL * evidence.reader_timeout_seconds
                yield Takeover(reader, killed_at, start, end, quiet_seconds(stalls, Interval(start, end), long))


def running(evidence: Evidence, diary: Diary) -> Iterator[Interval]:
    """The times in which a reader was in the group and neither stopped nor ended."""
    start = diary.joined_at
    for happened in evidence.happened:
        if happened.process != diary.name or diary.joined_at is None or happened.at < diary.joined_at:
            continue
        if happened.action == "continue":
            start = happened.at
        elif start is not None:
            yield Interval(start, happened.at)
            start = None
    if start is not None:
        yield Interval(start, float("inf") if diary.ended_at is None else diary.ended_at)


def quiet_seconds(stalls: Sequence[Interval], within: Interval, long: float) -> float:
    """The longest stretch of ``within`` between stalls of ``long`` seconds, without the shorter stalls in it."""
    merged: list[Interval] = []
    for stall in sorted(stalls):
        start, end = max(stall.start, within.start), min(stall.end, within.end)
        if start >= end:
            continue
        if merged and start <= merged[-1].end:
            merged[-1] = Interval(merged[-1].start, max(end, merged[-1].end))
        else:
            merged.append(Interval(start, end))
    stretches = [0.0]
    at = within.start
    for stall in [*merged, Interval(within.end, within.end)]:
        stretches[-1] += stall.start - at
        if stall.end - stall.start >= long:
            stretches.append(0.0)
        at = stall.end
    return max(stretches)


def nobody_is_evicted_without_a_cause(evidence: Evidence) -> Violations:
    """L3: who is declared dead had ended or stood still, or the store did not answer it, within the timeout before."""
    by_incarnation = {
        incarnation: name for name, diary in evidence.diaries.items() for incarnation in diary.incarnations
    }
    for move in moves(evidence.log):
        if not isinstance(move.update, RemoveReader) or move.update.cause != "dead":
            continue
        name = by_incarnation.get(move.before.readers[move.update.reader].incarnation)
        if name is None:
            continue  # it was killed before it could write down that it had joined
        before = Interval(move.at - evidence.reader_timeout_seconds - EVICTION_SECONDS, move.at)
        times = running(evidence, evidence.diary(name))
        ran = any(each.start <= before.start and before.end <= each.end for each in times)
        stalled = any(each.start < before.end and before.start < each.end for each in evidence.stalls_of(name))
        if ran and not stalled:
            yield f"L3 {name} was declared dead at {move.at:.2f}, and had been running and in contact"


def store_recovers(evidence: Evidence) -> Violations:
    """After a fault the store answers within the bound, on a machine that does not stand still."""
    bound = RECOVERY_SECONDS[evidence.kind]
    for each in evidence.befallen:
        within = Interval(each.answered - each.recovery_seconds, each.answered)
        # The machine stood still where all readers did.
        seconds = max(
            (
                quiet_seconds(diary.stalls, within, float("inf"))
                for diary in evidence.of_role("reader")
                if any(run.start <= within.start and within.end <= run.end for run in running(evidence, diary))
            ),
            default=each.recovery_seconds,
        )
        if seconds > bound:
            yield f"the store answered {seconds:.1f} s after {each.fault!r}; the bound is {bound:.1f} s"


def ended_well(evidence: Evidence) -> Violations:
    """No process failed, and all came to their ends."""
    yield from evidence.troubles


ALL: Final[Sequence[Callable[[Evidence], Violations]]] = (
    ended_well,
    stream,
    nothing_is_lost,
    deliveries_are_of_the_stream,
    order_of_keys,
    assignments_read_on,
    kills_repeat_little,
    commits_are_of_what_was_processed,
    cuts_follow_the_deliveries,
    owners,
    who_lost_a_segment_stops,
    who_was_replaced_stays_out,
    in_time,
    nobody_is_evicted_without_a_cause,
    store_recovers,
)


def violations(evidence: Evidence) -> list[str]:
    """All that is wrong, the first few of each check."""
    return [text for check in ALL for text, _ in zip(check(evidence), range(5), strict=False)]


def _deliveries(evidence: Evidence) -> Iterator[Delivery]:
    return chain.from_iterable(diary.deliveries for diary in evidence.diaries.values())


def _by_assignment(evidence: Evidence) -> Mapping[tuple[SegmentId, int], Mapping[str, list[Delivery]]]:
    """What each process was handed, in that order, by segment and token."""
    found: dict[tuple[SegmentId, int], dict[str, list[Delivery]]] = defaultdict(lambda: defaultdict(list))
    for name, diary in evidence.diaries.items():
        for each in diary.deliveries:
            found[SegmentId(each.segment), each.token][name].append(each)
    return found


def _offsets_from(events: Sequence[Stored], start: int) -> list[int]:
    return [event.offset for event in events if event.offset >= start]
