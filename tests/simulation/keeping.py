"""What readers kept at checkpoints, against the cuts that their group recorded and was reset to (S6).

An *effect* is an event that an application has processed. When a reader passes a checkpoint, the application keeps the
effects that it has had until then. Those of a checkpoint are what its readers kept, and what readers that left before
they passed had committed: these effects, and no others, have to be those of the events before the cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

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
#: Behind the last event.
END: Final = 1 << 62


class Effect(NamedTuple):
    segment: SegmentId
    offset: int
    token: int


class Keeping:
    """The effects of one group since it was created, or was last reset, and what was kept of them."""

    def __init__(self, broken: Callable[[str, str], None], stored: Callable[[str], Iterable[int]]) -> None:
        self._broken = broken
        #: The offsets of the events in a data segment that nobody gave up.
        self._stored = stored
        self.counts: Counter[str] = Counter()
        self._processes: dict[Life, Process] = {}
        self._state: ReaderGroupState | None = None
        self._lives: dict[tuple[SegmentId, int], Life] = {}  # who had a segment under a token
        self._ends: dict[tuple[SegmentId, int], int] = {}  # where an assignment ended
        self._ranges: dict[SegmentId, tuple[float, float]] = {}
        self._cuts: dict[int, Mapping[SegmentId, int]] = {}  # of all checkpoints that were ever completed
        self._begin_anew({}, 0)

    def _begin_anew(self, base: Mapping[SegmentId, int], token: int) -> None:
        """The group was created, or reset. Nothing of what was processed before counts any more."""
        self._base = base
        self._since = token
        self._effects: list[Effect] = []
        self._kept: dict[tuple[Life, int], int] = {}  # by checkpoint: how many effects there were
        self._passed: set[tuple[Life, int]] = set()
        self._lost: set[Life] = set()  # with what they had in memory
        self._completed: dict[int, CheckpointState] = {}

    # ------------------------------------------------------------------ what happens

    def joined(self, life: Life, process: Process) -> None:
        self._processes[life] = process

    def processed(self, event: rg.Event[bytes]) -> None:
        if event.fencing_token > self._since:
            self._effects.append(Effect(event.segment, event.offset, event.fencing_token))

    def kept(self, process: Process, reader: str, name: str) -> None:
        """The application keeps its effects, because a reader of its process is about to pass the checkpoint."""
        self.counts["kept"] += 1
        lives = [life for life, other in self._processes.items() if other is process and life[0] == reader]
        outstanding = [] if self._state is None else self._state.outstanding_checkpoints
        token = next((each.token for each in outstanding if each.name == name), None)
        if token is not None:  # else it has failed meanwhile
            self._kept[max(lives, key=lambda life: life[1]), token] = len(self._effects)

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
        self._kept.setdefault((life, update.checkpoint), len(self._effects))  # where the application keeps nothing

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
        for at, effect in self._counted():
            is_kept = self._is_kept(at, effect, checkpoint)
            is_before = not self._is_behind(effect.segment, effect.offset, checkpoint.offsets)
            if is_kept and not is_before:
                self._broken("S6", f"{effect} is kept at {checkpoint.name} and lies behind its cut")
            elif is_before and not is_kept:
                self._broken("S6", f"{effect} lies before the cut of {checkpoint.name} and was handled after it")
            elif is_kept:
                kept.add((effect.segment, effect.offset))
                self._check_not_lost(effect, checkpoint)
        missing = [event for event in self._events_before(checkpoint) if event not in kept]
        if missing:
            self._broken("S6", f"{missing[0]} lies before the cut of {checkpoint.name}, and nobody kept it")

    def _check_not_lost(self, effect: Effect, checkpoint: CheckpointState) -> None:
        """What a reader had and never kept is named, unless it left by itself."""
        life = self._lives[effect.segment, effect.token]
        if not checkpoint.lost and life in self._lost and (life, checkpoint.token) not in self._passed:
            self._broken("S6", f"{effect} was lost with {life}, and {checkpoint.name} counts nobody who was")

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

    def _counted(self) -> Iterator[tuple[int, Effect]]:
        """The effects that were not lost with their reader: of one that is gone, those that it committed."""
        for at, effect in enumerate(self._effects):
            if effect.offset < self._ends.get((effect.segment, effect.token), END):
                yield at, effect

    def _is_kept(self, at: int, effect: Effect, checkpoint: CheckpointState) -> bool:
        """Whether the reader kept the effect, or committed it and left without passing."""
        life = self._lives[effect.segment, effect.token]
        if life[1] > checkpoint.token:
            return False
        return (life, checkpoint.token) not in self._passed or at < self._kept[life, checkpoint.token]

    def _events_before(self, checkpoint: CheckpointState) -> Iterator[tuple[SegmentId, int]]:
        """The events from where the group began to the cut."""
        assert self._state is not None
        for segment in self._ranges:
            name = data_segment(segment, self._state.streams[stream_of(segment)].incarnation)
            for offset in self._stored(name):
                if self._is_behind(segment, offset, self._base) and not self._is_behind(
                    segment, offset, checkpoint.offsets
                ):
                    yield segment, offset

    def _is_behind(self, segment: SegmentId, offset: int, cut: Mapping[SegmentId, int]) -> bool:
        """Whether this place is not before the cut. Segments of later epochs have greater numbers."""
        if segment in cut:
            return offset >= cut[segment]
        low, high = self._ranges[segment]
        for other in cut:
            if stream_of(other) == stream_of(segment):
                other_low, other_high = self._ranges[other]
                if other_low < high and low < other_high:
                    return number_of(segment) > number_of(other)
        return True


def before_this(transition: Transition[ReaderGroupState]) -> int:
    """A token less than all that the entry made."""
    return Revision(transition.revision.offset, 0).token - 1
