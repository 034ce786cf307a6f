"""What readers do to the state of their group: each method is one conditional update, decided on the newest state.

Whatever changes who may own what (a reader joins or leaves, a segment is completed) carries the moves that balance the
group again in the same entry, so that the group is never seen in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from synchronizer import (
    AttributeChange,
    NotFoundError,
    Proposal,
    Revision,
    StateSynchronizer,
    StateTooLargeError,
    Update,
)
from synchronizer.arguments import check_count, check_type
from synchronizer.liveness.lease import Lease, Observed, lease_attribute, lease_value, read_leases
from synchronizer.store import MAX_ATTRIBUTE_CHANGES

from ..errors import ReaderNotInGroupError
from ..streams.config import KeyRange, SegmentId, number_of, stream_of
from ..streams.data.places import check_offset
from ..streams.manager import StreamManager
from ..streams.state import StreamState
from .model import balance
from .model.positions import Held, Positions, current_offsets
from .model.state import ReaderGroupState, ReaderState, SegmentState
from .model.updates import (
    AddEpoch,
    AddReader,
    Cause,
    CompleteSegment,
    CreateCheckpoint,
    EndStream,
    FailCheckpoint,
    NewSegment,
    PassCheckpoint,
    ReleaseSegment,
    RemoveReader,
    ResetStream,
)

R = TypeVar("R")

Updates = Sequence[Update[ReaderGroupState]]


class ReaderGroupStateManager:
    """The updates of one group. Holds nothing but the synchronizer, which it borrows. Threads may share it.

    A ``lease`` names one life of a reader: another process that came with the same id has another one.
    """

    def __init__(self, synchronizer: StateSynchronizer[ReaderGroupState], streams: StreamManager) -> None:
        self.synchronizer = synchronizer
        self.streams = streams

    @property
    def state(self) -> ReaderGroupState:
        return self.synchronizer.state

    # ------------------------------------------------------------------ membership

    def add_reader(
        self, reader: str, lease: Lease, *, keeps: bool = False, alone: bool = False, timeout: float | None = None
    ) -> None:
        """Let the reader in, which ``keeps`` something at checkpoints. One of the same id that is there is replaced.

        One that is to be ``alone`` in the group takes the place of its like only, and its like takes no other's.
        """

        def join(state: ReaderGroupState) -> Proposal[ReaderGroupState, None]:
            attributes = {lease.attribute: AttributeChange(None, lease.first_value)}
            updates: list[Update[ReaderGroupState]] = []
            before = state.readers.get(reader)
            if before is not None and before.alone == alone:
                removal, changes = _removal(state, reader, self.leases([before]), "replaced")
                updates.append(removal)
                attributes.update(changes)
            updates.append(AddReader(reader=reader, lease=lease.name, keeps=keeps or None, alone=alone or None))
            return Proposal(updates, None, attributes)

        sent_at = self.synchronizer.clock.monotonic()
        self._update_and_balance(join, timeout)
        lease.begin(sent_at, self.state.config.reader_timeout_seconds)

    def remove_reader(
        self,
        reader: str,
        *,
        lease: str | None = None,
        position: Mapping[SegmentId, int] | None = None,
        reached: Positions | None = None,
        cause: Cause = "removed",
        timeout: float | None = None,
    ) -> bool:
        """Take the reader out, and whether this call did it; its segments go on where it committed.

        ``reached`` are later positions that the reader itself knows of. ``position`` overrules both, in either
        direction; what it says of other segments has no effect. With a ``lease``, another life of the id is left alone.
        """
        if position is not None:
            self.check_position(position, "position")

        def leave(state: ReaderGroupState) -> Proposal[ReaderGroupState, bool]:
            found = state.readers.get(reader)
            if found is None or lease not in (None, found.lease):
                return Proposal((), False)
            removal, attributes = _removal(state, reader, self.leases([found]), cause, reached or {}, position or {})
            return Proposal([removal], True, attributes)

        return self._update_and_balance(leave, timeout)

    def remove_dead(self, dead: Observed, *, timeout: float | None = None) -> list[str]:
        """Take out these readers, of whom an incarnation and the unchanged value of its lease were observed.

        One that has renewed since, or is another incarnation by now, stays; so do those that are too many for one
        append. Returns those that were removed.
        """

        def evict(state: ReaderGroupState) -> Proposal[ReaderGroupState, list[str]]:
            observed_lives = {
                reader: state.readers[reader]
                for reader, (incarnation, _) in dead.items()
                if reader in state.readers and state.readers[reader].incarnation == incarnation
            }
            observed_lives = dict(islice(observed_lives.items(), MAX_ATTRIBUTE_CHANGES))
            # The entry compares with these very values, so that a renewal from now on saves the reader.
            values = self.leases(observed_lives.values())
            updates: list[Update[ReaderGroupState]] = []
            removed: list[str] = []
            attributes: dict[str, AttributeChange] = {}
            for reader, found in observed_lives.items():
                if lease_value(found, values) != dead[reader][1]:
                    continue
                removal, changes = _removal(state, reader, values, "dead")
                updates.append(removal)
                removed.append(reader)
                attributes.update(changes)
            return Proposal(updates, removed, attributes)

        return self._update_and_balance(evict, timeout)

    def leases(self, readers: Iterable[ReaderState] | None = None) -> Mapping[str, bytes]:
        """The values of the leases of these readers, by attribute; without ``readers``, of all leases of the group."""
        return read_leases(self.synchronizer.store, self.synchronizer.segment, readers)

    def check_position(self, position: Mapping[SegmentId, int], argument: str) -> None:
        """Refuse a place that no reader could go on from. ``argument`` is what an error calls it."""
        check_type(position, Mapping, argument)
        state = self.state
        for segment, offset in position.items():
            check_type(segment, str, f"each segment of {argument}")
            check_count(offset, f"each offset of {argument}", at_least=0)
            if segment in state.segments:
                incarnation = state.streams[stream_of(segment)].incarnation
                check_offset(self.synchronizer.store, segment, incarnation, offset)

    # ------------------------------------------------------------------ checkpoints

    def begin_checkpoint(self, name: str, *, silent: bool = False, timeout: float | None = None) -> int | None:
        """Begin a checkpoint of this name: it is the first that has the name and a greater token than this returns.

        None: as many as may be are under way.
        """

        def begin(state: ReaderGroupState) -> tuple[Updates, int | None]:
            if not has_room(state, silent=silent):
                return (), None
            newest = max((each.token for each in state.checkpoints or ()), default=0)
            return [CreateCheckpoint(name=name, silent=silent or None)], newest

        return self.synchronizer.update_state_returning(begin, timeout=timeout)

    def begin_automatic_checkpoint(self, *, after: int, timeout: float | None = None) -> None:
        """Begin one, unless there is one under way, or one newer than that which had the token ``after``."""

        def begin(state: ReaderGroupState) -> Updates:
            if state.outstanding_checkpoints or newest_checkpoint(state) != after:
                return ()
            return [CreateCheckpoint()]

        self.synchronizer.update_state(begin, timeout=timeout)

    def pass_checkpoint(
        self, reader: str, lease: str, checkpoint: int, positions: Positions, *, timeout: float | None = None
    ) -> None:
        """The reader stands at these positions and has kept what it needs. Nothing if nobody waits for that any more.

        For a group that is too large a checkpoint is no reason to stand still: it is given up.
        """

        def go_on(state: ReaderGroupState) -> Updates:
            _check_member(state, reader, lease)
            if all(each.token != checkpoint for each in state.checkpoints_ahead_of(reader)):
                return ()
            position = {
                segment: held.offset
                for segment, held in positions.items()
                if _holds(state, reader, segment, held) and held.offset > state.segments[segment].offset
            }
            return [PassCheckpoint(reader=reader, checkpoint=checkpoint, position=position or None)]

        try:
            self.synchronizer.update_state(go_on, timeout=timeout)
        except StateTooLargeError:
            self.fail_checkpoint(checkpoint, timeout=timeout)

    def fail_checkpoint(self, checkpoint: int, *, timeout: float | None = None) -> Collection[str] | None:
        """Give the checkpoint up: the readers that had not passed it. None: it is not under way."""

        def fail(state: ReaderGroupState) -> tuple[Updates, Collection[str] | None]:
            for each in state.outstanding_checkpoints:
                if each.token == checkpoint:
                    return [FailCheckpoint(checkpoint=checkpoint)], each.waiting
            return (), None

        return self.synchronizer.update_state_returning(fail, timeout=timeout)

    # ------------------------------------------------------------------ segments

    def rebalance(self, *, timeout: float | None = None) -> None:
        """Propose the planner's moves, if there are any."""
        self.synchronizer.update_state(balance.plan, timeout=timeout)

    def release(self, reader: str, lease: str, positions: Positions, *, timeout: float | None = None) -> None:
        """Give up these segments where the reader stands in them; those that it lost meanwhile are left alone."""

        def give_up(state: ReaderGroupState) -> Proposal[ReaderGroupState, None]:
            _check_member(state, reader, lease)
            updates = [
                ReleaseSegment(reader=reader, segment=segment, offset=held.offset)
                for segment, held in positions.items()
                if _holds(state, reader, segment, held)
            ]
            return Proposal(updates, None)

        self._update_and_balance(give_up, timeout)

    def complete(
        self, reader: str, lease: str, segment: SegmentId, held: Held, *, timeout: float | None = None
    ) -> bool:
        """Record that the segment's last event is processed, at ``held``; False where that has to wait.

        It has to wait for the stream's metadata to say what comes after the segment: its successors, or the end.
        """

        def finish(state: ReaderGroupState) -> Proposal[ReaderGroupState, bool]:
            _check_member(state, reader, lease)
            if not _holds(state, reader, segment, held):
                return Proposal((), True)
            if not state.knows_successors(segment):
                return Proposal((), False)
            return Proposal([CompleteSegment(reader=reader, segment=segment, offset=held.offset)], True)

        return self._update_and_balance(finish, timeout)

    def _update_and_balance(
        self, propose: Callable[[ReaderGroupState], Proposal[ReaderGroupState, R]], timeout: float | None
    ) -> R:
        """Apply what ``propose`` answers, and the moves that it calls for, as one entry.

        A state that is over its limit may have no room for the moves. What they are to follow goes in without them:
        otherwise nobody could leave a group that is too large.
        """

        def with_its_moves(state: ReaderGroupState) -> Proposal[ReaderGroupState, R]:
            proposal = propose(state)
            return proposal._replace(updates=with_moves(state, proposal.updates)) if proposal.updates else proposal

        try:
            return self.synchronizer.update_state_with_attributes(with_its_moves, timeout=timeout)
        except StateTooLargeError:
            return self.synchronizer.update_state_with_attributes(propose, timeout=timeout)

    # ------------------------------------------------------------------ streams

    def follow_stream(self, stream: str, *, timeout: float | None = None) -> None:
        """Bring what the group knows of the stream up to its metadata: new epochs, one entry each, and the end.

        Raises `NotFoundError` where the stream was deleted, or is another one of its name by now.
        """
        known = self.state.streams[stream]
        if known.ended:
            return
        metadata = self.streams.fetch_state(stream, timeout=timeout)
        check_same_stream(metadata, known.incarnation)
        for epoch in range(known.epoch + 1, metadata.epoch + 1):
            self.synchronizer.update_state(_epoch_adder(stream, epoch, metadata), timeout=timeout)
        if metadata.sealed:
            self.synchronizer.update_state(_ender(stream), timeout=timeout)

    def finish_scale(self, stream: str, *, timeout: float | None = None) -> None:
        """Finish what somebody began with the stream and perhaps died over, a scale or its sealing, and follow that."""
        self.streams.finish_pending(stream, timeout=timeout)
        self.follow_stream(stream, timeout=timeout)

    def reset_streams(self, resets: Sequence[tuple[ResetStream, StreamState]], *, timeout: float | None = None) -> None:
        """Go on elsewhere in these streams, of which this is the metadata."""

        def reset(state: ReaderGroupState) -> Proposal[ReaderGroupState, None]:
            for each, metadata in resets:
                check_same_stream(metadata, state.streams[each.stream].incarnation)
            return Proposal([each for each, _ in resets], None)

        self._update_and_balance(reset, timeout)


def has_room(state: ReaderGroupState, *, silent: bool) -> bool:
    """Whether another checkpoint may begin: those that applications are told of, and the others, count by themselves,
    so that whoever asks where the group stands holds up no checkpoint."""
    alike = [each for each in state.outstanding_checkpoints if not each.automatic and bool(each.silent) == silent]
    return len(alike) < state.config.max_outstanding_checkpoints


def newest_checkpoint(state: ReaderGroupState) -> int:
    """The token of the last checkpoint that applications are told of, of those that the state holds; 0: of none."""
    return max((each.token for each in state.checkpoints or () if not each.silent), default=0)


def check_same_stream(metadata: StreamState, incarnation: str) -> None:
    """Refuse another stream of the name than the one that the group was created for."""
    if metadata.incarnation != incarnation:
        raise NotFoundError(
            "the stream was deleted and created again; delete the group and create it for the new one",
            stream=metadata.name,
        )


def _removal(
    state: ReaderGroupState,
    reader: str,
    leases: Mapping[str, bytes],
    cause: Cause,
    reached: Positions | None = None,
    position: Mapping[SegmentId, int] | None = None,
) -> tuple[RemoveReader, Mapping[str, AttributeChange]]:
    """The update that takes the reader out where it stands by its lease, and the lease's deletion."""
    found = state.readers[reader]
    value = lease_value(found, leases)
    offsets = current_offsets(state, reader, value)
    for segment, held in (reached or {}).items():
        if _holds(state, reader, segment, held) and held.offset > offsets.get(segment, 0):
            offsets[segment] = held.offset
    offsets.update(position or {})
    changes = {} if found.lease is None else {lease_attribute(found.lease): AttributeChange(value, None)}
    return RemoveReader(reader=reader, position=offsets or None, cause=cause), changes


def with_moves(state: ReaderGroupState, updates: Updates) -> Updates:
    """``updates`` and, after them, the moves that balance what they make of ``state``.

    While segments are being handed over, only those that nobody has are given out. What else there is to move goes into
    the entry that ends the last hand-over; by then, more readers may have come.
    """
    for index, update in enumerate(updates):
        state = update.apply_to(state, Revision(0, index))
    return (*updates, *balance.plan(state, even_out=not state.marked))


def _epoch_adder(stream: str, epoch: int, metadata: StreamState) -> Callable[[ReaderGroupState], Updates]:
    def add(state: ReaderGroupState) -> Updates:
        if state.streams[stream].epoch + 1 != epoch or state.streams[stream].ended:
            return ()
        forgotten = [
            segment
            for segment in state.segments
            if stream_of(segment) == stream and number_of(segment) not in metadata.segments
        ]
        segments = {
            metadata.segment(number): NewSegment(
                low=each.keys.low,
                high=each.keys.high,
                predecessors=(
                    *(before for before in map(metadata.segment, each.predecessors) if before in state.segments),
                    *(before for before in forgotten if _comes_next(state, before, each.keys)),
                ),
            )
            for number, each in metadata.segments.items()
            if each.epoch == epoch
        }
        return with_moves(state, [AddEpoch(stream=stream, epoch=epoch, segments=segments)])

    return add


def _comes_next(state: ReaderGroupState, forgotten: SegmentId, keys: KeyRange) -> bool:
    """Whether a segment of these ``keys`` takes over from one that the stream itself has forgotten, truncated as it is.

    Those that were between the two may be forgotten as well, so only the keys can tell.
    """
    before = state.segments[forgotten]
    return _overlaps(before, keys) and not any(_overlaps(state.segments[each], keys) for each in before.successors)


def _overlaps(segment: SegmentState, keys: KeyRange) -> bool:
    return segment.low < keys.high and keys.low < segment.high


def _ender(stream: str) -> Callable[[ReaderGroupState], Updates]:
    return lambda state: () if state.streams[stream].ended else (EndStream(stream=stream),)


def _holds(state: ReaderGroupState, reader: str, segment: SegmentId, held: Held) -> bool:
    found = state.segments.get(segment)
    return found is not None and found.owner == reader and found.token == held.token


def _check_member(state: ReaderGroupState, reader: str, lease: str) -> None:
    if state.reader(reader).lease != lease:
        raise ReaderNotInGroupError("another process took over the reader's id", reader=reader)
