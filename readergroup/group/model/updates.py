"""The updates of a reader group's state. Each is pure, refuses an impossible transition, and has a stable tag.

A fencing token is the token of the revision that assigned a segment to its owner, so the tokens of a segment grow and
never repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from readergroup.streams.config import SegmentId, StreamCut, stream_of
from synchronizer import InvalidArgumentError, Map, Revision, Update

from .checkpoint import AUTOMATIC, Checkpoints, CheckpointState, kept
from .config import ReaderGroupConfig
from .state import FollowedStream, ReaderGroupState, ReaderState, SegmentState

Offset = Annotated[int, Field(ge=0)]

#: Why a reader left: it closed; its lease ran out; a caller removed it; another reader took over its id.
Cause = Literal["closed", "dead", "removed", "replaced"]


class AddReader(Update[ReaderGroupState], tag="add_reader"):
    """Add a reader to the group. It owns nothing yet."""

    reader: str
    #: The name of its lease, whose attribute the same append creates. The name is random and never reused. The revision
    #: of this update could replace it, but is known only when the append is built, and changes with every attempt.
    lease: str | None = None
    #: Whether its application saves something at checkpoints.
    keeps: bool = False
    #: Whether it is an exclusive reader: it joins only a group without readers, and then no other can join.
    alone: bool = False

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        if (there := state.reader_alone) is not None:
            raise InvalidArgumentError(
                "the group has an exclusive reader, such as a Spark query; use another group, or remove that "
                "reader if it is gone",
                reader=there,
            )
        if self.alone and state.readers:
            raise InvalidArgumentError(
                "the group has readers, so an exclusive reader cannot join; use another group for it",
                readers=sorted(state.readers),
            )
        if self.reader in state.readers:
            raise InvalidArgumentError("the group has a reader with this id; choose another id", reader=self.reader)
        joined = ReaderState(incarnation=revision.token, lease=self.lease, keeps=self.keeps, alone=self.alone)
        return state.replace(readers=state.readers.set(self.reader, joined))


class RemoveReader(Update[ReaderGroupState], tag="remove_reader"):
    """Remove a reader from the group. Its segments continue at ``position``, or where its assignments began.

    A segment marked for hand-over goes to its target, the others become unassigned. Hand-overs to the reader are
    cancelled.
    """

    reader: str
    position: Mapping[SegmentId, Offset] | None = None
    cause: Cause = "removed"

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        state.reader(self.reader)
        position = self.position or {}
        for segment in state.owned.get(self.reader, ()):
            found = state.segments[segment]
            state = _hand_over(state, segment, found, position.get(segment, found.offset), revision)
        for segment in state.segment_index.planned.get(self.reader, ()):
            found = state.segments[segment]
            state = state.with_segment(segment, found.changed(target=None, target_incarnation=None))
        if self.cause != "closed" and state.readers[self.reader].has_something:
            state = state.replace(lost=state.lost + 1)
        for checkpoint in state.checkpoints_ahead_of(self.reader):
            state = _with_checkpoint(state, checkpoint.without(self.reader))
        return state.replace(readers=state.readers.delete(self.reader))


class ReassignSegment(Update[ReaderGroupState], tag="reassign"):
    """Assign an unassigned segment to a reader, or mark an owned segment for hand-over to it.

    Reassigning to the present owner cancels the hand-over.
    """

    segment: SegmentId
    reader: str

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        found = state.segment(self.segment)
        target = state.reader(self.reader)
        if not found.readable:
            raise InvalidArgumentError(
                "the segment cannot have an owner now: it is completed, or its predecessors are not",
                segment=self.segment,
            )
        if found.owner is None:
            after = found.changed(owner=self.reader, token=revision.token)
        elif found.owner == self.reader:
            after = found.changed(target=None, target_incarnation=None)
        else:
            after = found.changed(target=self.reader, target_incarnation=target.incarnation)
        return state.with_segment(self.segment, after)


class ReleaseSegment(Update[ReaderGroupState], tag="release"):
    """The owner releases a segment at ``offset``: to its hand-over target if that is in the group, else unassigned."""

    reader: str
    segment: SegmentId
    offset: Offset

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        found = state.owned_segment(self.reader, self.segment)
        return _hand_over(state, self.segment, found, _forward(found, self.segment, self.offset), revision)


class CompleteSegment(Update[ReaderGroupState], tag="complete"):
    """The last event of a segment is processed. A successor is readable when all its predecessors are completed."""

    reader: str
    segment: SegmentId
    offset: Offset

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        found = state.owned_segment(self.reader, self.segment)
        if not state.knows_successors(self.segment):
            raise InvalidArgumentError(
                "a segment can be completed only after its successors are known or its stream has ended",
                segment=self.segment,
            )
        offset = _forward(found, self.segment, self.offset)
        done = found.changed(
            offset=offset, completed=True, owner=None, token=None, target=None, target_incarnation=None
        )
        state = _record(state, self.segment, found, offset).with_segment(self.segment, done)
        finished = [self.segment]
        for successor in found.successors:
            waiting = state.segments[successor]
            if waiting.waiting_for == 1:
                finished += waiting.predecessors
                after = waiting.changed(waiting_for=0, predecessors=())
            else:
                after = waiting.changed(waiting_for=waiting.waiting_for - 1)
            state = state.with_segment(successor, after)
        return _drop_finished(state, finished)


class NewSegment(BaseModel):
    """A segment of a new epoch, with the predecessors that the group still knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: float
    high: float
    predecessors: tuple[SegmentId, ...]


class AddEpoch(Update[ReaderGroupState], tag="add_epoch"):
    """A stream was scaled. Its new segments wait until their predecessors are completed."""

    stream: str
    epoch: int
    segments: Mapping[SegmentId, NewSegment]

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        known = state.streams[self.stream]
        if known.ended or self.epoch != known.epoch + 1:
            raise InvalidArgumentError(
                "epochs must be added one by one", stream=self.stream, epoch=self.epoch, known_epoch=known.epoch
            )
        for segment, new in self.segments.items():
            waiting_for = 0
            for predecessor in new.predecessors:
                before = state.segment(predecessor)
                waiting_for += not before.completed
                after = before.changed(successors=(*before.successors, segment))
                state = state.with_segment(predecessor, after)
            added = SegmentState(
                low=new.low,
                high=new.high,
                predecessors=new.predecessors if waiting_for else (),
                waiting_for=waiting_for,
            )
            state = state.with_segment(segment, added)
        return state.replace(streams=state.streams.set(self.stream, known.model_copy(update={"epoch": self.epoch})))


class EndStream(Update[ReaderGroupState], tag="end_stream"):
    """A stream was sealed. No segments follow those of its last epoch."""

    stream: str

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        known = state.streams[self.stream]
        return state.replace(streams=state.streams.set(self.stream, known.model_copy(update={"ended": True})))


class RecordWeights(Update[ReaderGroupState], tag="record_weights"):
    """Set how much work segments are, as powers of two. The planner balances by these alone; the default is 0.

    Groups with ``balance="load"`` record them by themselves. In other groups, an application that knows how unequal its
    segments are applies it by ``group.synchronizer.update_state``.
    """

    weights: Mapping[SegmentId, Annotated[int, Field(ge=0, le=40)]]

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        for segment, weight in self.weights.items():
            state = state.with_segment(segment, state.segment(segment).changed(weight=weight))
        return state


class ConfigureGroup(Update[ReaderGroupState], tag="configure"):
    """Change the group's intervals and limits. Its streams and bounds stay: `ConfigureStreams` changes them."""

    config: ReaderGroupConfig

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        reads = ("streams", "start", "end")
        if any(getattr(self.config, field) != getattr(state.config, field) for field in reads):
            raise InvalidArgumentError(
                "this update cannot change the streams and bounds of a group; use ConfigureStreams"
            )
        return state.replace(config=self.config)


class StreamStart(BaseModel):
    """A stream where the group begins to read it: these segments, all unassigned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    incarnation: str
    #: The newest epoch with segments among these.
    epoch: int
    ended: bool
    segments: Mapping[SegmentId, SegmentState]


class ConfigureStreams(Update[ReaderGroupState], tag="configure_streams"):
    """Change the config, with the streams that the group reads and their bounds.

    The group forgets its positions in streams that the config no longer names. It begins to read ``starts``: added
    streams, and those whose end cut changed, at the group's positions. Commits and releases of earlier assignments of
    their segments have no effect. If a stream has another end, outstanding checkpoints fail. All other checkpoints lose
    the removed streams, and get the starts of the added ones: the group had read nothing of them.
    """

    config: ReaderGroupConfig
    starts: Mapping[str, StreamStart] | None = None

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        if (alone := state.reader_alone) is not None:
            raise InvalidArgumentError(
                "the streams of a group with an exclusive reader, such as a Spark query, cannot change", reader=alone
            )
        starts = self.starts or {}
        removed = state.streams.keys() - set(self.config.streams)
        added = starts.keys() - state.streams.keys()
        if state.streams.keys() - removed | starts.keys() != set(self.config.streams):
            raise InvalidArgumentError("each added stream needs its start", streams=self.config.streams)
        before = state.segments
        for segment in before:
            if stream_of(segment) in removed or stream_of(segment) in starts:
                state = state.with_segment(segment, None)
        streams, begun = state.streams, Map[SegmentId, int]()
        for stream, start in starts.items():
            streams = streams.set(
                stream, FollowedStream(incarnation=start.incarnation, epoch=start.epoch, ended=start.ended)
            )
            for segment, found in start.segments.items():
                weight = before[segment].weight if segment in before else found.weight
                state = state.with_segment(segment, found.changed(weight=weight))
                if stream in added and not found.waiting_for:
                    begun = begun.set(segment, found.offset)
        for stream in removed:
            streams = streams.delete(stream)
        return state.replace(
            config=self.config,
            streams=streams,
            checkpoints=_of_streams(state.checkpoints, removed, begun, only_completed=len(added) < len(starts)),
            retention_cuts=_without(state.retention_cuts, removed),
            skipped=_without(state.skipped, removed),
        )


class CreateCheckpoint(Update[ReaderGroupState], tag="create_checkpoint"):
    """Begin a checkpoint that all present readers have to pass. Without a name it is an automatic one."""

    name: str | None = None
    #: Whether it calls no ``on_checkpoint``.
    silent: bool = False

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        if any(each.name == self.name for each in state.outstanding_checkpoints):
            raise InvalidArgumentError(
                "a checkpoint of this name is outstanding; wait for it, or choose another name", checkpoint=self.name
            )
        begun = CheckpointState(
            name=self.name or f"{AUTOMATIC}{revision.token}",
            token=revision.token,
            automatic=self.name is None,
            silent=self.silent,
            waiting=frozenset(state.readers),
            offsets=Map(state.offsets),
        )
        return _with_checkpoint(state.replace(checkpoints=(*state.checkpoints, begun)), begun)


class PassCheckpoint(Update[ReaderGroupState], tag="pass_checkpoint"):
    """A reader has saved its results, and stands at ``position`` in its segments. The last completes the checkpoint."""

    reader: str
    #: The token of the revision that began it.
    checkpoint: int
    position: Mapping[SegmentId, Offset] | None = None

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        state.reader(self.reader)
        passed = next((each for each in state.checkpoints_ahead_of(self.reader) if each.token == self.checkpoint), None)
        if passed is None:
            raise InvalidArgumentError(
                "the checkpoint does not wait for this reader", checkpoint=self.checkpoint, reader=self.reader
            )
        for segment, offset in (self.position or {}).items():
            found = state.owned_segment(self.reader, segment)
            state = _note_progress(state, found, offset)
            state = state.with_segment(segment, found.changed(offset=_forward(found, segment, offset)))
        for segment, found in state.segments_of(self.reader).items():
            passed = passed.with_position(self.reader, _token(found), segment, found.offset)
        return _with_checkpoint(state, passed.without(self.reader))


class FailCheckpoint(Update[ReaderGroupState], tag="fail_checkpoint"):
    """Give a checkpoint up: readers no longer have to pass it."""

    #: The token of the revision that began it.
    checkpoint: int
    #: Whether a caller asked for it.
    cancelled: bool | None = None

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        if all(each.token != self.checkpoint for each in state.outstanding_checkpoints):
            raise InvalidArgumentError("there is no such outstanding checkpoint", checkpoint=self.checkpoint)
        left = tuple(each for each in state.checkpoints if each.token != self.checkpoint)
        return state.replace(checkpoints=left)


class ResetStream(Update[ReaderGroupState], tag="reset_stream"):
    """Move the group to another place in a stream, with these segments, all unassigned. Outstanding checkpoints fail.

    Commits and releases under earlier tokens have no effect any more.
    """

    stream: str
    #: The newest epoch with segments among these.
    epoch: int
    ended: bool
    segments: Mapping[SegmentId, SegmentState]
    #: Whether other streams of the group stay where they are. Then ``lost`` stays too.
    partial: bool = False

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        followed = FollowedStream(
            incarnation=state.streams[self.stream].incarnation, epoch=self.epoch, ended=self.ended
        )
        before = {segment: found for segment, found in state.segments.items() if stream_of(segment) == self.stream}
        for segment in before.keys() - self.segments.keys():
            state = state.with_segment(segment, None)
        for segment, found in self.segments.items():
            weight = before[segment].weight if segment in before else found.weight
            state = state.with_segment(segment, found.changed(weight=weight))
        completed = tuple(each for each in state.checkpoints if each.completed)
        state = state.replace(streams=state.streams.set(self.stream, followed), checkpoints=completed)
        if self.partial:
            return state
        readers = state.readers
        for reader, each in state.readers.items():
            if each.has_something:
                readers = readers.set(reader, each.model_copy(update={"has_something": False}))
        return state.replace(readers=readers, lost=0)


class SetRetentionCuts(Update[ReaderGroupState], tag="set_retention_cuts"):
    """Let a retention policy delete the events before these cuts. Streams without a cut keep theirs."""

    cuts: Map[str, StreamCut]

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        for stream in self.cuts:
            _check_is_read(state, stream)
        return state.replace(retention_cuts=(state.retention_cuts or Map()).update(dict(self.cuts)))


class NoteSkipped(Update[ReaderGroupState], tag="note_skipped"):
    """A retention policy deletes events before ``head`` that the group has not consumed."""

    head: StreamCut

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        _check_is_read(state, self.head.stream)
        return state.replace(skipped=(state.skipped or Map()).set(self.head.stream, self.head))


#: Every class of updates that the log of a group can hold. CONTRIBUTING.md has the steps for a new one, and names the
#: code that distinguishes updates by class.
UPDATES: Final[tuple[type[Update[Any]], ...]] = (
    AddReader,
    RemoveReader,
    ReassignSegment,
    ReleaseSegment,
    CompleteSegment,
    AddEpoch,
    EndStream,
    RecordWeights,
    ConfigureGroup,
    ConfigureStreams,
    CreateCheckpoint,
    PassCheckpoint,
    FailCheckpoint,
    ResetStream,
    SetRetentionCuts,
    NoteSkipped,
)


def _of_streams(
    checkpoints: Checkpoints, removed: Set[str], begun: Mapping[SegmentId, int], *, only_completed: bool
) -> Checkpoints:
    """Return the checkpoints without the removed streams, and with the ``begun`` segments. Empty ones are left out."""
    found = []
    for each in checkpoints:
        offsets = each.offsets
        for segment in each.offsets:
            if stream_of(segment) in removed:
                offsets = offsets.delete(segment)
        if offsets and (each.completed or not only_completed):
            found.append(each.model_copy(update={"offsets": offsets.update(begun)}))
    return tuple(found)


def _without(cuts: Map[str, StreamCut] | None, removed: Set[str]) -> Map[str, StreamCut] | None:
    if cuts is None or not (removed & cuts.keys()):
        return cuts
    return Map((stream, cut) for stream, cut in cuts.items() if stream not in removed) or None


def _check_is_read(state: ReaderGroupState, stream: str) -> None:
    if stream not in state.streams:
        raise InvalidArgumentError("the group does not read this stream", stream=stream)


def _forward(found: SegmentState, segment: SegmentId, offset: int) -> int:
    """Return ``offset``; refuse one before the place where the assignment began, since positions do not go back."""
    if offset < found.offset:
        raise InvalidArgumentError(
            "a position cannot move backwards within an assignment",
            segment=segment,
            offset=offset,
            began_at=found.offset,
        )
    return offset


def _hand_over(
    state: ReaderGroupState, segment: SegmentId, found: SegmentState, offset: int, revision: Revision
) -> ReaderGroupState:
    """Release the segment at ``offset``, to its target if that is in the group."""
    state = _record(state, segment, found, offset)
    target = state.readers.get(found.target) if found.target is not None else None
    # A hand-over names one incarnation of its target. The planner has to choose a later reader of the same id anew.
    if target is not None and target.incarnation == found.target_incarnation:
        after = found.changed(
            offset=offset, owner=found.target, token=revision.token, target=None, target_incarnation=None
        )
    else:
        after = found.changed(offset=offset, owner=None, token=None, target=None, target_incarnation=None)
    return state.with_segment(segment, after)


def _record(state: ReaderGroupState, segment: SegmentId, found: SegmentState, offset: int) -> ReaderGroupState:
    """Record that the segment, which its owner leaves, passes there the checkpoints that the owner has not passed."""
    assert found.owner is not None
    state = _note_progress(state, found, offset)
    for checkpoint in state.checkpoints_ahead_of(found.owner):
        recorded = checkpoint.with_position(found.owner, _token(found), segment, offset)
        state = _with_checkpoint(state, recorded)
    return state


def _note_progress(state: ReaderGroupState, found: SegmentState, offset: int) -> ReaderGroupState:
    """Note that the owner of the segment has committed up to ``offset``."""
    assert found.owner is not None
    owner: ReaderState = state.readers[found.owner]
    if not owner.keeps or owner.has_something or offset <= found.offset:
        return state
    return state.replace(readers=state.readers.set(found.owner, owner.model_copy(update={"has_something": True})))


def _token(found: SegmentState) -> int:
    assert found.token is not None, "only a segment without an owner has no token"
    return found.token


def _with_checkpoint(state: ReaderGroupState, checkpoint: CheckpointState) -> ReaderGroupState:
    """Return the state with a new value of one of its checkpoints."""
    if checkpoint.completed:
        checkpoint = checkpoint.model_copy(update={"lost": state.lost})
    checkpoints = tuple(checkpoint if each.token == checkpoint.token else each for each in state.checkpoints)
    if checkpoint.completed:
        checkpoints = kept(checkpoints, state.config.max_outstanding_checkpoints)
    return state.replace(checkpoints=checkpoints)


def _drop_finished(state: ReaderGroupState, completed: Iterable[SegmentId]) -> ReaderGroupState:
    """Forget completed segments once all their successors are readable. Until then, they belong to every cut."""
    for segment in completed:
        found = state.segments.get(segment)
        if found is None or not found.successors:
            continue
        if not any(
            state.segments[successor].waiting_for for successor in found.successors if successor in state.segments
        ):
            state = state.with_segment(segment, None)
    return state
