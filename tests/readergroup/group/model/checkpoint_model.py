"""A small model of a group that takes checkpoints: readers with what they keep, and what has to come of it.

The state and its updates are the product's. A reader of the model is what `Reader` is: it hands out events as the state
said it when it last looked, and does one thing that the state asks for after the other when it looks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from readergroup.group.model.checkpoint import CheckpointState
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import (
    AddReader,
    CompleteSegment,
    CreateCheckpoint,
    PassCheckpoint,
    ReassignSegment,
    ReleaseSegment,
    RemoveReader,
)
from readergroup.streams.config import SegmentId, number_of
from synchronizer import Revision, Update
from tests.readergroup.group.histories import History, group_state, seg


class Handled(NamedTuple):
    """An event that a life of a reader has handled."""

    segment: SegmentId
    offset: int
    token: int
    life: int


class OwnedSegment(NamedTuple):
    """A segment in a reader's hands: under which token, and the next event."""

    token: int
    offset: int
    committed: int


@dataclass(frozen=True)
class ModelReader:
    """What a reader knows and holds."""

    life: int
    sources: Mapping[SegmentId, OwnedSegment] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """One moment of a group. Each step makes another one."""

    state: ReaderGroupState
    events: int  # in each segment
    offset: int = 0
    readers: Mapping[str, ModelReader] = field(default_factory=dict)
    handled: tuple[Handled, ...] = ()
    #: By life and checkpoint: how many events, of all readers together, were handled when it was passed.
    kept: Mapping[tuple[int, int], int] = field(default_factory=dict)
    #: The checkpoints that were completed, also those that the state does not keep any more.
    completed: Mapping[int, CheckpointState] = field(default_factory=dict)
    lengths: Mapping[SegmentId, int] = field(default_factory=dict)  # of sealed segments
    ranges: Mapping[SegmentId, tuple[float, float]] = field(default_factory=dict)  # also of those that are gone

    # ------------------------------------------------------------------ steps

    def apply(self, *updates: Update[ReaderGroupState]) -> Model:
        state = self.state
        for index, update in enumerate(updates):
            state = update.apply_to(state, Revision(self.offset, index))
        done = {each.token: each for each in state.checkpoints if each.completed}
        return replace(self, state=state, offset=self.offset + 10, completed={**done, **self.completed})

    @classmethod
    def of(cls, segments: int, *, readers: int, events: int) -> Model:
        """A group of so many readers, each of which has looked; the first segments are theirs in turn."""
        model = cls(group_state(segments), events)
        model = replace(model, ranges={s: (each.low, each.high) for s, each in model.state.segments.items()})
        names = [f"r{number}" for number in range(readers)]
        for name in names:
            model = model.join(name)
        for number in range(segments):
            model = model.apply(ReassignSegment(segment=seg(number), reader=names[number % readers]))
        for name in names:
            model = model.look(name)
        return model

    def scale(self, *numbers: int) -> Model:
        """One is split, two are merged. They are sealed with all their events."""
        history = History(self.state)
        history.offset = self.offset
        history._next_number = 1 + max(map(number_of, self.ranges))
        if len(numbers) == 1:
            history.split(*numbers)
        else:
            history.merge(*numbers)
        ranges = {segment: (each.low, each.high) for segment, each in history.state.segments.items()}
        return replace(
            self,
            state=history.state,
            offset=history.offset,
            ranges={**self.ranges, **ranges},
            lengths={**self.lengths, **dict.fromkeys(map(seg, numbers), self.events)},
        )

    def join(self, reader: str) -> Model:
        joined = self.apply(AddReader(reader=reader))
        life = joined.state.readers[reader].incarnation
        return replace(joined, readers={**self.readers, reader: ModelReader(life)})

    def die(self, reader: str) -> Model:
        """The reader is taken out where it has committed; what it handled since then is lost with it."""
        sources = {s: held for s, held in self.readers[reader].sources.items() if self.is_owner(reader, s)}
        position = {segment: held.committed for segment, held in sources.items()}
        left = self.apply(RemoveReader(reader=reader, position=position, cause="dead"))
        lost = {(held.token, offset) for held in sources.values() for offset in range(held.committed, held.offset)}
        # Marked, not removed: how many were handled before which checkpoint stays countable.
        handled = tuple(each._replace(life=-1) if (each.token, each.offset) in lost else each for each in self.handled)
        others = {name: each for name, each in self.readers.items() if name != reader}
        return replace(left, readers=others, handled=handled)

    def handle(self, reader: str, segment: SegmentId) -> Model:
        found = self.readers[reader]
        held = found.sources[segment]
        event = Handled(segment, held.offset, held.token, found.life)
        moved = {**found.sources, segment: held._replace(offset=held.offset + 1)}
        return replace(self._with(reader, moved), handled=(*self.handled, event))

    def commit(self, reader: str) -> Model:
        sources = self.readers[reader].sources
        return self._with(reader, {each: held._replace(committed=held.offset) for each, held in sources.items()})

    def look(self, reader: str) -> Model:
        """The reader looks at the state and does the first thing that is to be done."""
        found, owned = self.readers[reader], self.state.segments_of(reader)
        sources = self._still_held(reader)
        due = self.state.checkpoints_ahead_of(reader)
        if due:
            position = {segment: held.offset for segment, held in sources.items()}
            passed = self.apply(PassCheckpoint(reader=reader, checkpoint=due[0].token, position=position))
            kept = {**self.kept, (found.life, due[0].token): len(self.handled)}
            return replace(passed, kept=kept)._with(reader, sources).commit(reader)
        for segment, each in owned.items():
            if each.target is not None:
                offset = sources.pop(segment).offset if segment in sources else each.offset
                return self._with(reader, sources).apply(ReleaseSegment(reader=reader, segment=segment, offset=offset))
        for segment, held in sources.items():
            if held.offset == self.lengths.get(segment):
                others = {each: held for each, held in sources.items() if each != segment}
                done = CompleteSegment(reader=reader, segment=segment, offset=held.offset)
                return self._with(reader, others).apply(done)
        return self._taken_over(reader)

    def _still_held(self, reader: str) -> dict[SegmentId, OwnedSegment]:
        owned = self.state.segments_of(reader)
        held_now = self.readers[reader].sources.items()
        return {s: held for s, held in held_now if s in owned and owned[s].token == held.token}

    def _taken_over(self, reader: str) -> Model:
        owned = self.state.segments_of(reader)
        new = {
            s: OwnedSegment(token, each.offset, each.offset)
            for s, each in owned.items()
            if (token := each.token) is not None
        }
        return self._with(reader, {**new, **self._still_held(reader)})

    def look_too_late(self, reader: str) -> Model:
        """A simpler reader, which takes segments over before it passes."""
        taken_over = self._taken_over(reader)
        return taken_over if taken_over.readers != self.readers else LOOK(self, reader)

    def _with(self, reader: str, sources: Mapping[SegmentId, OwnedSegment]) -> Model:
        return replace(self, readers={**self.readers, reader: replace(self.readers[reader], sources=sources)})

    # ------------------------------------------------------------------ what may happen

    def is_owner(self, reader: str, segment: SegmentId) -> bool:
        found, held = self.state.segments.get(segment), self.readers[reader].sources[segment]
        return found is not None and found.owner == reader and found.token == held.token

    def next_steps(self, *, checkpoints: int, moves: bool = True) -> Iterator[Model]:
        """Everything that a process may do next but join, die and scale."""
        if len(self.begun) < checkpoints:
            yield self.apply(CreateCheckpoint(name=f"c{len(self.begun)}"))
        for reader, found in self.readers.items():
            after = self.look(reader)
            if after.state is not self.state or after.readers[reader] != found:
                yield after
            yield self.commit(reader)
            for segment, held in found.sources.items():
                # One that has lost its segment goes on until it looks; it is fenced, so nothing of that counts.
                if held.offset < self.lengths.get(segment, self.events) and self.is_owner(reader, segment):
                    yield self.handle(reader, segment)
        if moves:
            yield from self.moves()

    def moves(self) -> Iterator[Model]:
        for segment, found in self.state.segments.items():
            if found.readable:
                for reader in self.readers:
                    if found.planned_owner != reader and found.target is None:
                        yield self.apply(ReassignSegment(segment=segment, reader=reader))

    @property
    def begun(self) -> frozenset[int]:
        """The tokens of all checkpoints that were begun."""
        return frozenset(self.completed) | {each.token for each in self.state.checkpoints}

    # ------------------------------------------------------------------ what has to hold

    def check(self) -> None:
        for checkpoint in self.completed.values():
            self._check_cover(checkpoint)
            self._check_cut(checkpoint)

    def _check_cover(self, checkpoint: CheckpointState) -> None:
        at = 0.0
        for low, high in sorted(self.ranges[segment] for segment in checkpoint.offsets):
            assert low == at, checkpoint
            at = high
        assert at == 1.0, checkpoint

    def _check_cut(self, checkpoint: CheckpointState) -> None:
        """Each event before the cut is in one reader's keeping, or was committed by one that left; none after it."""
        before = [
            each for at, each in enumerate(self.handled) if each.life >= 0 and self._is_kept(at, each, checkpoint)
        ]
        after = [
            each for at, each in enumerate(self.handled) if each.life >= 0 and not self._is_kept(at, each, checkpoint)
        ]
        for each in before:
            assert self._is_before(each, checkpoint), f"{each} was kept and lies behind {checkpoint}"
        for each in after:
            assert not self._is_before(each, checkpoint), f"{each} is before {checkpoint} and was not kept"
        for segment, offset in checkpoint.offsets.items():
            kept = {each.offset for each in before if each.segment == segment}
            assert kept == set(range(offset)), f"{segment}: kept {kept} at {checkpoint}"

    def _is_kept(self, at: int, each: Handled, checkpoint: CheckpointState) -> bool:
        """Whether its reader handled the event before it passed the checkpoint, or left without passing."""
        passed_at = self.kept.get((each.life, checkpoint.token))
        return each.life < checkpoint.token if passed_at is None else at < passed_at

    def _is_before(self, each: Handled, checkpoint: CheckpointState) -> bool:
        if each.segment in checkpoint.offsets:
            return each.offset < checkpoint.offsets[each.segment]
        low, high = self.ranges[each.segment]
        others = [s for s in checkpoint.offsets if self.ranges[s][0] < high and low < self.ranges[s][1]]
        return all(number_of(each.segment) < number_of(other) for other in others)

    # ------------------------------------------------------------------ which moments are the same

    @property
    def key(self) -> object:
        """Equal for two moments that differ in nothing but the numbers of their revisions."""
        tokens = {found.token for found in self.state.segments.values() if found.token is not None}
        tokens |= {found.incarnation for found in self.state.readers.values()} | self.begun
        tokens |= {each.token for each in self.handled} | {each.life for each in self.handled}
        tokens |= {held.token for found in self.readers.values() for held in found.sources.values()}
        rank = {token: number for number, token in enumerate(sorted(tokens))}
        rank[-1] = -1
        checkpoints = {each.token: each for each in (*self.completed.values(), *self.state.checkpoints)}
        return (
            frozenset(
                (s, each.owner, rank.get(each.token or -1), each.offset, each.target, each.completed, each.waiting_for)
                for s, each in self.state.segments.items()
            ),
            frozenset((rank[t], each.waiting, frozenset(each.offsets.items())) for t, each in checkpoints.items()),
            frozenset(
                (
                    name,
                    rank.get(r.life),
                    frozenset((s, rank[h.token], h.offset, h.committed) for s, h in r.sources.items()),
                )
                for name, r in self.readers.items()
            ),
            frozenset(
                (
                    e.segment,
                    e.offset,
                    rank[e.life],
                    frozenset(t for t in checkpoints if self._is_kept(at, e, checkpoints[t])),
                )
                for at, e in enumerate(self.handled)
            ),
            frozenset(self.lengths.items()),
        )


LOOK: Final = Model.look
