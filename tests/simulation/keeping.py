"""What readers kept at checkpoints, against the cuts that their group recorded and was reset to (S6).

An *effect* is an event that an application has processed. When a reader passes a checkpoint, the application keeps the
effects that it has had until then. Those of a checkpoint are what its readers kept, and what readers that left before
they passed had committed: these effects, and no others, have to be those of the events before the cut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import readergroup as rg
from readergroup.group.model.checkpoint import CheckpointState
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import PassCheckpoint, RemoveReader, ResetStream
from readergroup.streams.config import SegmentId, data_segment, number_of, stream_of
from synchronizer import Revision
from synchronizer.log.replica import Transition

from .world import Process

#: A reader and its incarnation.
Life = tuple[str, int]
#: A segment and the token under which a reader had it.
Assignment = tuple[SegmentId, int]
#: Behind the last event.
END: Final = 1 << 62


class Keeping:
    """The effects of one group since it was created, or was last reset, and what was kept of them."""

    def __init__(self, broken: Callable[[str, str], None], stored: Callable[[str], Iterable[int]]) -> None:
        self._broken = broken
        #: The offsets of the events in a data segment that nobody gave up.
        self._stored = stored
        self.counts: Counter[str] = Counter()
        self._processes: dict[Life, Process] = {}
        self._state: ReaderGroupState | None = None
        self._lives: dict[Assignment, Life] = {}
        self._ends: dict[Assignment, int] = {}  # where it ended
        self._ranges: dict[SegmentId, tuple[float, float]] = {}
        self._cuts: dict[int, Mapping[SegmentId, int]] = {}  # of all checkpoints that were ever completed
        self._begin_anew({}, 0)

    def _begin_anew(self, base: Mapping[SegmentId, int], token: int) -> None:
        """The group was created, or reset. Nothing of what was processed before counts any more."""
        self._base = base
        self._since = token
        self._processed = 0  # effects
        self._effects: dict[Assignment, list[tuple[int, int]]] = defaultdict(list)  # their numbers and offsets
        self._kept: dict[tuple[Life, int], int] = {}  # by checkpoint: how many effects there were
        self._passed: set[tuple[Life, int]] = set()
        self._lost: set[Life] = set()  # with what they had in memory
        self._completed: dict[int, CheckpointState] = {}

    # ------------------------------------------------------------------ what happens

    def joined(self, life: Life, process: Process) -> None:
        self._processes[life] = process

    def processed(self, event: rg.Event[bytes]) -> None:
        if event.fencing_token > self._since:
            self._effects[event.segment, event.fencing_token].append((self._processed, event.offset))
            self._processed += 1

    def kept(self, process: Process, reader: str, name: str) -> None:
        """The application keeps its effects, because a reader of its process is about to pass the checkpoint."""
        self.counts["kept"] += 1
        lives = [life for life, other in self._processes.items() if other is process and life[0] == reader]
        outstanding = [] if self._state is None else self._state.outstanding_checkpoints
        token = next((each.token for each in outstanding if each.name == name), None)
        if token is not None:  # else it has failed meanwhile
            self._kept[max(lives, key=lambda life: life[1]), token] = self._processed

    def entry(self, transition: Transition[ReaderGroupState]) -> None:
        """The group's log has another entry."""
        before, after, updates = transition.before, transition.after, transition.updates
        self._state = after
        if after is None:
            return
        resets = [update for update in updates if isinstance(update, ResetStream)]
        if before is None:
            self._ranges.clear()
            self._cuts.clear()
            self._begin_anew(dict(after.offsets), transition.revision.token)
        elif resets:
            self.counts["resets"] += 1
            self.check()
            for update in resets:
                self._check_reset(update)
            self._begin_anew(dict(after.offsets), before_this(transition))
        else:
            for update in updates:
                if isinstance(update, PassCheckpoint):
                    self._note_pass(before, update)
                elif isinstance(update, RemoveReader) and update.reader in before.readers and update.cause != "closed":
                    found = before.readers[update.reader]
                    if found.keeps:
                        self._lost.add((update.reader, found.incarnation))
        if before is None or before.segments is not after.segments:
            self._note_assignments(before, after)
        if after.checkpoints and (before is None or before.checkpoints is not after.checkpoints):
            self._note_completed(after.checkpoints)

    def _note_pass(self, state: ReaderGroupState, update: PassCheckpoint) -> None:
        life = update.reader, state.readers[update.reader].incarnation
        self._passed.add((life, update.checkpoint))
        self._kept.setdefault((life, update.checkpoint), self._processed)  # where the application keeps nothing

    def _note_assignments(self, before: ReaderGroupState | None, after: ReaderGroupState) -> None:
        for segment, found in after.segments.items():
            self._ranges[segment] = found.low, found.high
            if found.owner is not None and found.token is not None:
                self._lives[segment, found.token] = found.owner, after.readers[found.owner].incarnation
        for segment, earlier in (before.segments if before is not None else {}).items():
            later = after.segments.get(segment)
            if earlier.token is not None and (later is None or later.token != earlier.token):
                # Of a completed one everything counts.
                self._ends[segment, earlier.token] = END if later is None or later.completed else later.offset

    def _note_completed(self, checkpoints: Iterable[CheckpointState]) -> None:
        for checkpoint in checkpoints:
            if not checkpoint.completed or checkpoint.token in self._cuts:
                continue
            if checkpoint.token <= self._since:
                self._broken("S6", f"{checkpoint.name} was under way when the group was reset, and is completed")
            self.counts["completed"] += 1
            self._completed[checkpoint.token] = checkpoint
            self._cuts[checkpoint.token] = checkpoint.offsets
            self._check(checkpoint)

    # ------------------------------------------------------------------ what has to hold

    def check(self) -> None:
        """Each completed checkpoint is still what was kept, whatever was processed since."""
        for checkpoint in self._completed.values():
            self._check(checkpoint)

    def _check(self, checkpoint: CheckpointState) -> None:
        self._check_cover(checkpoint)
        kept: set[tuple[SegmentId, int]] = set()
        cuts = {segment: self._place(segment, checkpoint.offsets) for segment in self._ranges}
        for (segment, token), effects in self._effects.items():
            life, cut = self._lives[segment, token], cuts[segment]
            kept_before = self._kept_before(life, checkpoint)
            end = self._ends.get((segment, token), END)  # what lies behind was lost with its reader
            counted = [(number < kept_before, offset < cut, offset) for number, offset in effects if offset < end]
            for is_kept, is_before, offset in counted:
                if is_kept and not is_before:
                    self._broken("S6", f"{segment}@{offset} is kept at {checkpoint.name} and lies behind its cut")
                elif is_before and not is_kept:
                    self._broken("S6", f"{segment}@{offset} is before the cut of {checkpoint.name}, handled after it")
            of_these = [offset for is_kept, is_before, offset in counted if is_kept and is_before]
            kept.update((segment, offset) for offset in of_these)
            if of_these:
                self._check_not_lost(life, checkpoint)
        missing = [event for event in self._events_before(cuts) if event not in kept]
        if missing:
            self._broken("S6", f"{missing[0]} lies before the cut of {checkpoint.name}, and nobody kept it")

    def _kept_before(self, life: Life, checkpoint: CheckpointState) -> int:
        """The number before which its effects are kept: of a reader that left without passing all that it committed."""
        if life[1] > checkpoint.token:
            return 0
        return self._kept[life, checkpoint.token] if (life, checkpoint.token) in self._passed else END

    def _check_not_lost(self, life: Life, checkpoint: CheckpointState) -> None:
        """What a reader had and never kept is named, unless it left by itself."""
        if not checkpoint.lost and life in self._lost and (life, checkpoint.token) not in self._passed:
            self._broken("S6", f"effects were lost with {life}, and {checkpoint.name} counts nobody who was")

    def _check_cover(self, checkpoint: CheckpointState) -> None:
        for stream in {stream_of(segment) for segment in checkpoint.offsets}:
            at = 0.0
            for low, high in sorted(self._ranges[each] for each in checkpoint.offsets if stream_of(each) == stream):
                at = high if low == at else 2.0
            if at != 1.0:
                self._broken("S6", f"the cut of {checkpoint.name} does not cover each key once")

    def _check_reset(self, update: ResetStream) -> None:
        """The group goes on exactly where a completed checkpoint was, whatever else it forgets."""
        start = {segment: found.offset for segment, found in update.segments.items() if not found.waiting_for}
        if not any({s: cut[s] for s in cut if stream_of(s) == update.stream} == start for cut in self._cuts.values()):
            self._broken("S6", f"{update.stream} is reset to {start}, which is no checkpoint")

    def _events_before(self, cuts: Mapping[SegmentId, int]) -> Iterator[tuple[SegmentId, int]]:
        """The events from where the group began to the cut."""
        assert self._state is not None
        for segment, cut in cuts.items():
            start = self._place(segment, self._base)
            if start < cut:
                name = data_segment(segment, self._state.streams[stream_of(segment)].incarnation)
                yield from ((segment, offset) for offset in self._stored(name) if start <= offset < cut)

    def _place(self, segment: SegmentId, cut: Mapping[SegmentId, int]) -> int:
        """Where the cut is in this segment. It may lie all before or behind it: numbers of later epochs are greater."""
        if segment in cut:
            return cut[segment]
        low, high = self._ranges[segment]
        for other in cut:
            if stream_of(other) == stream_of(segment):
                other_low, other_high = self._ranges[other]
                if other_low < high and low < other_high:
                    return 0 if number_of(segment) > number_of(other) else END
        return 0


def before_this(transition: Transition[ReaderGroupState]) -> int:
    """A token less than all that the entry made."""
    return Revision(transition.revision.offset, 0).token - 1
