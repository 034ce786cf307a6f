"""Random histories of a group's state: what must hold after every entry."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from readergroup.errors import ReaderNotInGroupError
from readergroup.group.model import balance
from readergroup.group.model.config import ReaderGroupConfig
from readergroup.group.model.state import ReaderGroupState, SegmentState
from readergroup.group.model.updates import (
    UPDATES,
    CompleteSegment,
    ConfigureStreams,
    CreateCheckpoint,
    FailCheckpoint,
    NoteSkipped,
    PassCheckpoint,
    RecordWeights,
    ReleaseSegment,
    SetRetentionCuts,
    StreamStart,
)
from readergroup.streams.config import SegmentId, StreamCut, segment_id, stream_of
from synchronizer import InvalidArgumentError, Map, NotFoundError
from synchronizer.state import StateCodec
from tests.readergroup.group.histories import STREAM, History, group_state, seg
from tests.readergroup.group.model import reference_planner

OTHER = "shop/other"
READERS = st.sampled_from([f"r{number}" for number in range(5)])
INDEX = st.integers(0, 30)
STEP = st.integers(0, 1_000)


class RandomHistory(RuleBasedStateMachine):
    """Anything may be tried at any time; what the state refuses has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.history = History(group_state(3))
        self.predecessors: dict[SegmentId, set[SegmentId]] = {}
        self.completed: set[SegmentId] = set()
        self.newest = {0, 1, 2}
        self.covered: dict[int, frozenset[SegmentId]] = {}  # by checkpoint
        self.recorded: dict[tuple[int, SegmentId], int] = {}  # positions, by checkpoint
        self.assignments: dict[SegmentId, tuple[int, int, str]] = {}  # the last token, with its offset and owner

    @property
    def state(self) -> ReaderGroupState:
        return self.history.state

    def some_segment(self, index: int) -> SegmentId:
        return sorted(self.state.segments)[index % len(self.state.segments)]

    def attempt(self, change: Callable[[], object]) -> bool:
        before = self.state
        try:
            change()
        except (InvalidArgumentError, ReaderNotInGroupError, NotFoundError):
            assert self.state is before
            return False
        return True

    # ------------------------------------------------------------------ what happens

    @rule(reader=READERS)
    def add(self, reader: str) -> None:
        is_there = reader in self.state.readers
        assert self.attempt(lambda: self.history.add(reader)) is not is_there

    @rule(reader=READERS, index=INDEX, step=STEP)
    def remove(self, reader: str, index: int, step: int) -> None:
        segment = self.some_segment(index)
        position = {segment: self.state.segments[segment].offset + step}
        self.attempt(lambda: self.history.remove(reader, position))

    @rule(reader=READERS, index=INDEX)
    def reassign(self, reader: str, index: int) -> None:
        number = int(self.some_segment(index).rpartition("/")[2])
        self.attempt(lambda: self.history.reassign(number, reader))

    @rule(index=INDEX, step=STEP)
    def release(self, index: int, step: int) -> None:
        segment = self.some_segment(index)
        found = self.state.segments[segment]
        if found.owner is not None:
            self.history.apply(
                ReleaseSegment(reader=found.owner, segment=segment, offset=found.offset + step),
            )

    @rule(reader=READERS, index=INDEX, offset=STEP)
    def release_anything(self, reader: str, index: int, offset: int) -> None:
        update = ReleaseSegment(reader=reader, segment=self.some_segment(index), offset=offset)
        self.attempt(lambda: self.history.apply(update))

    @rule(index=INDEX, step=STEP)
    def complete(self, index: int, step: int) -> None:
        segment = self.some_segment(index)
        found = self.state.segments[segment]
        if found.owner is not None:
            update = CompleteSegment(reader=found.owner, segment=segment, offset=found.offset + step)
            if self.attempt(lambda: self.history.apply(update)):
                self.completed.add(segment)

    @rule(index=INDEX)
    @precondition(lambda self: not self.state.streams[STREAM].ended and len(self.newest) < 12)
    def split(self, index: int) -> None:
        number = sorted(self.newest)[index % len(self.newest)]
        self.scaled({number}, self.history.split(number))

    @rule(index=INDEX)
    @precondition(lambda self: not self.state.streams[STREAM].ended and len(self.newest) > 1)
    def merge(self, index: int) -> None:
        in_order = sorted(self.newest, key=lambda number: self.state.segments[seg(number)].low)
        left, right = list(pairwise(in_order))[index % (len(in_order) - 1)]
        self.scaled({left, right}, [self.history.merge(left, right)])

    def scaled(self, replaced: set[int], new: list[int]) -> None:
        self.newest = self.newest - replaced | set(new)
        for number in new:
            self.predecessors[seg(number)] = set(map(seg, replaced))

    @rule()
    def end(self) -> None:
        self.history.end()

    @rule(index=INDEX, weight=st.integers(0, 3))
    def record_weight(self, index: int, weight: int) -> None:
        self.history.apply(RecordWeights(weights={self.some_segment(index): weight}))

    @rule(name=st.sampled_from([None, "a", "b"]))
    def begin_checkpoint(self, name: str | None) -> None:
        known = {each.token for each in self.state.checkpoints}
        if self.attempt(lambda: self.history.apply(CreateCheckpoint(name=name))):
            for each in self.state.checkpoints:
                if each.token not in known:
                    self.covered[each.token] = frozenset(self.state.cuts[STREAM].offsets)

    @rule(reader=READERS, step=STEP)
    def pass_checkpoint(self, reader: str, step: int) -> None:
        for checkpoint in self.state.checkpoints_ahead_of(reader)[:1]:
            position = {segment: found.offset + step for segment, found in self.state.segments_of(reader).items()}
            self.history.apply(PassCheckpoint(reader=reader, checkpoint=checkpoint.token, position=position))
            assert checkpoint.token not in {each.token for each in self.state.checkpoints_ahead_of(reader)}

    @rule()
    def fail_checkpoint(self) -> None:
        for checkpoint in self.state.outstanding_checkpoints[:1]:
            self.history.apply(FailCheckpoint(checkpoint=checkpoint.token))

    @rule(offset=st.integers(0, 10_000), skips=st.booleans())
    def retain(self, offset: int, skips: bool) -> None:
        cut = StreamCut(stream=STREAM, offsets=dict.fromkeys(self.state.cuts[STREAM].offsets, offset), incarnation="i")
        self.history.apply(NoteSkipped(head=cut) if skips else SetRetentionCuts(cuts=Map({STREAM: cut})))

    @rule(offset=STEP)
    def add_or_remove_a_stream(self, offset: int) -> None:
        """The other stream comes and goes."""
        if OTHER in self.state.streams:
            self.history.apply(ConfigureStreams(config=ReaderGroupConfig(streams=(STREAM,))))
            assert all(stream_of(each) == STREAM for each in self.state.segments)
            return
        segments = {segment_id(OTHER, 7): SegmentState(low=0.0, high=1.0, offset=offset)}
        start = StreamStart(incarnation="j", epoch=3, ended=True, segments=segments)
        self.history.apply(ConfigureStreams(config=ReaderGroupConfig(streams=(STREAM, OTHER)), starts={OTHER: start}))
        assert all(each.offsets[segment_id(OTHER, 7)] == offset for each in self.state.checkpoints)

    @rule()
    def rebalance(self) -> None:
        moves = balance.plan(self.state)
        if moves:
            self.history.apply(*moves)
        assert balance.plan(self.state) == []

    # ------------------------------------------------------------------ what holds

    @invariant()
    def what_is_derived_is_what_a_snapshot_derives(self) -> None:
        codec = StateCodec(ReaderGroupState, UPDATES)
        read, _ = codec.decode_snapshot(codec.encode_snapshot(self.state, 0))
        assert read is not None
        assert read == self.state
        assert read.segment_index == self.state.segment_index

    @invariant()
    def what_is_derived_is_what_its_words_say(self) -> None:
        segments = self.state.segments
        readable = {s: found for s, found in segments.items() if not found.completed and not found.waiting_for}
        for reader in self.state.readers:
            owned = {s for s, found in segments.items() if found.owner == reader}
            assert set(self.state.owned.get(reader, ())) == owned
        assert set(self.state.handing_over) == {s for s, found in segments.items() if found.target is not None}
        assert set(self.state.unassigned) == {s for s, found in readable.items() if found.owner is None}
        newest = {s for s, found in segments.items() if not found.completed and not found.successors}
        assert self.state.newest_segments == newest and self.state.number_of_segments == len(newest)
        ended = all(stream.ended for stream in self.state.streams.values())
        assert self.state.end_of_data == (ended and all(found.completed for found in segments.values()))

    @invariant()
    def the_plan_is_that_of_the_first_planner(self) -> None:
        assert balance.plan(self.state) == reference_planner.plan(self.state)

    @invariant()
    def each_owner_is_in_the_group_and_has_a_token(self) -> None:
        for found in self.state.segments.values():
            assert (found.owner is None) == (found.token is None)
            assert found.owner is None or found.owner in self.state.readers
            assert found.owner is None or found.readable

    @invariant()
    def tokens_grow_and_positions_do_not_go_back_within_an_assignment(self) -> None:
        for segment, found in self.state.segments.items():
            if found.token is None or found.owner is None:
                continue
            token, offset, owner = self.assignments.get(segment, (-1, 0, ""))
            assert found.token > token or (found.token == token and found.offset >= offset and found.owner == owner)
            self.assignments[segment] = (found.token, found.offset, found.owner)

    @invariant()
    def cuts_cover_each_key_once(self) -> None:
        at = 0.0
        inside = [self.state.segments[segment] for segment in self.state.cuts[STREAM].offsets]
        for found in sorted(inside, key=lambda found: found.low):
            assert found.low == at
            at = found.high
        assert at == 1.0

    @invariant()
    def a_checkpoint_names_the_segments_that_stood_in_the_cut_when_it_began(self) -> None:
        for checkpoint in self.state.checkpoints:
            assert {each for each in checkpoint.offsets if stream_of(each) == STREAM} == self.covered[checkpoint.token]

    @invariant()
    def a_checkpoint_waits_for_readers_that_were_there_and_have_not_left(self) -> None:
        for checkpoint in self.state.outstanding_checkpoints:
            for reader in checkpoint.waiting:
                assert self.state.readers[reader].incarnation < checkpoint.token

    @invariant()
    def a_position_in_a_checkpoint_that_was_passed_stays(self) -> None:
        for checkpoint in self.state.checkpoints:
            for segment, offset in checkpoint.offsets.items():
                if stream_of(segment) == OTHER:  # which may have begun elsewhere since
                    continue
                found = self.state.segments.get(segment)
                if found is None or found.owner not in checkpoint.waiting or found.token > checkpoint.token:
                    assert self.recorded.setdefault((checkpoint.token, segment), offset) == offset

    @invariant()
    def no_successor_is_readable_before_its_predecessors_are_completed(self) -> None:
        for segment, found in self.state.segments.items():
            if not found.waiting_for:
                assert self.predecessors.get(segment, set()) <= self.completed

    @invariant()
    def marks_are_for_readers_that_are_there(self) -> None:
        for segment in self.state.handing_over:
            found = self.state.segments[segment]
            assert found.owner is not None and found.target != found.owner
            assert self.state.readers[found.target].incarnation == found.target_incarnation

    @invariant()
    def nothing_is_forgotten_that_is_not_completed(self) -> None:
        known = {seg(number) for number in range(3)} | self.predecessors.keys()
        assert known - set(self.state.segments) <= self.completed


TestRandomHistories = RandomHistory.TestCase
TestRandomHistories.settings = settings(stateful_step_count=40)
