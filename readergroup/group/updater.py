"""Readers' changes of their group's state. Each method is one conditional update, decided on the newest state.

An update that changes who may own what (a reader joins or leaves, a segment is completed) carries the moves that
balance the group again in the same entry, so that no process sees the group in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from synchronizer import (
    AttributeChange,
    Deadline,
    NotFoundError,
    Proposal,
    ReaderGroupError,
    Revision,
    StateSynchronizer,
    StateTooLargeError,
    Update,
)
from synchronizer.arguments import check_count, check_type
from synchronizer.backoff import Backoff
from synchronizer.liveness.lease import Lease, Observed, lease_attribute, lease_value, read_leases
from synchronizer.loggers import get_logger
from synchronizer.store import MAX_ATTRIBUTE_CHANGES

from ..errors import ReaderNotInGroupError
from ..streams.config import KeyRange, SegmentId, StreamCut, number_of, stream_of
from ..streams.data.places import check_offset
from ..telemetry.counters import GroupCounters
from .model import balance, weights
from .model.config import ReaderGroupConfig
from .model.positions import Positions, SegmentPosition, current_offsets, positions
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
from .retention import note_skipped

if TYPE_CHECKING:  # a list of groups loads no streams
    from ..streams.manager import StreamManager
    from ..streams.state import StreamState

_logger = get_logger(__name__)

R = TypeVar("R")

Updates = Sequence[Update[ReaderGroupState]]


class GroupUpdater:
    """Makes the conditional updates of one group. Holds only the synchronizer, which it borrows. Threads may share it.

    A ``lease`` names one incarnation of a reader: another process with the same id has another lease.
    """

    def __init__(self, synchronizer: StateSynchronizer[ReaderGroupState], streams: StreamManager) -> None:
        self.synchronizer = synchronizer
        self.streams = streams

    @property
    def group(self) -> str:
        """The name of the group."""
        return self.synchronizer.name.removeprefix("group/")

    @property
    def counters(self) -> GroupCounters:
        """What this client has done in the group."""
        return self.streams.counters.groups[self.group]

    @property
    def state(self) -> ReaderGroupState:
        return self.synchronizer.state

    # ------------------------------------------------------------------ membership

    def add_reader(
        self, reader: str, lease: Lease, *, keeps: bool = False, alone: bool = False, timeout: float | None = None
    ) -> None:
        """Add the reader, which ``keeps`` something at checkpoints, and replace a reader of the same id.

        An exclusive reader (``alone``) replaces only another exclusive reader of its id, and only one replaces it.
        """

        def join(state: ReaderGroupState) -> Proposal[ReaderGroupState, None]:
            attributes = {lease.attribute: AttributeChange(None, lease.first_value)}
            updates: list[Update[ReaderGroupState]] = []
            before = state.readers.get(reader)
            if before is not None and before.alone == alone:
                removal, changes = _removal(state, reader, self.leases([before]), "replaced")
                updates.append(removal)
                attributes.update(changes)
            updates.append(AddReader(reader=reader, lease=lease.name, keeps=keeps, alone=alone))
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
        """Remove the reader, and return whether this call did. Its segments continue where it committed.

        ``reached`` are later positions that the reader itself knows. ``position`` overrides both, in either direction;
        its entries for other segments have no effect. With a ``lease``, another incarnation of the id stays.
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

    def remove_dead(self, dead: Observed) -> list[str]:
        """Remove these readers, each observed as an incarnation and its unchanged lease value, and return their ids.

        A reader that renewed since, or is another incarnation by now, stays. So do readers beyond the limit of one
        append.
        """

        def evict(state: ReaderGroupState) -> Proposal[ReaderGroupState, list[str]]:
            observed_lives = {
                reader: state.readers[reader]
                for reader, (incarnation, _) in dead.items()
                if reader in state.readers and state.readers[reader].incarnation == incarnation
            }
            observed_lives = dict(islice(observed_lives.items(), MAX_ATTRIBUTE_CHANGES))
            # The entry is conditional on these exact values, so that a renewal from now on saves the reader.
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

        return self._update_and_balance(evict)

    def leases(self, readers: Iterable[ReaderState] | None = None) -> Mapping[str, bytes]:
        """Return the lease values of these readers, by attribute; without ``readers``, of the whole group."""
        return read_leases(self.synchronizer.store, self.synchronizer.segment, readers)

    def check_position(self, position: Mapping[SegmentId, int], argument: str) -> None:
        """Refuse a position that no reader could continue from. Errors call it ``argument``."""
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
        """Begin a checkpoint of this name. It is the first that has the name and a greater token than the returned one.

        Returns None if too many checkpoints are outstanding.
        """

        def begin(state: ReaderGroupState) -> tuple[Updates, int | None]:
            if not can_begin_checkpoint(state, silent=silent):
                return (), None
            newest = max((each.token for each in state.checkpoints), default=0)
            return [CreateCheckpoint(name=name, silent=silent)], newest

        return self.synchronizer.update_state_returning(begin, timeout=timeout)

    def begin_automatic_checkpoint(self, *, after: int) -> None:
        """Begin an automatic checkpoint, unless one is outstanding or a newer one than ``after``, a token, exists."""

        def begin(state: ReaderGroupState) -> Updates:
            if state.outstanding_checkpoints or newest_checkpoint(state) != after:
                return ()
            return [CreateCheckpoint()]

        self.synchronizer.update_state(begin)

    def pass_checkpoint(
        self, reader: str, lease: str, checkpoint: int, positions: Positions, *, timeout: float | None = None
    ) -> None:
        """Report that the reader has saved its results at these positions. Does nothing if the checkpoint is over.

        If the group's state has no room for it, the checkpoint is given up, so that reading continues.
        """

        def go_on(state: ReaderGroupState) -> Updates:
            _check_member(state, reader, lease)
            if all(each.token != checkpoint for each in state.checkpoints_ahead_of(reader)):
                return ()
            position = {
                segment: reached.offset
                for segment, reached in positions.items()
                if _is_current(state, reader, segment, reached) and reached.offset > state.segments[segment].offset
            }
            return [PassCheckpoint(reader=reader, checkpoint=checkpoint, position=position or None)]

        try:
            self.synchronizer.update_state(go_on, timeout=timeout)
        except StateTooLargeError:
            self.fail_checkpoint(checkpoint, timeout=timeout)

    def fail_checkpoint(self, checkpoint: int, *, timeout: float | None = None) -> Collection[str] | None:
        """Give the checkpoint up, and return the readers that had not passed it; None if it is not outstanding."""

        def fail(state: ReaderGroupState) -> tuple[Updates, Collection[str] | None]:
            for each in state.outstanding_checkpoints:
                if each.token == checkpoint:
                    return [FailCheckpoint(checkpoint=checkpoint)], each.waiting
            return (), None

        return self.synchronizer.update_state_returning(fail, timeout=timeout)

    def cancel_checkpoint(self, name: str, *, timeout: float | None = None) -> bool:
        """Cancel the outstanding checkpoint of this name, and return whether there was one."""

        def cancel(state: ReaderGroupState) -> tuple[Updates, bool]:
            for each in state.outstanding_checkpoints:
                if each.name == name and not each.silent:
                    return [FailCheckpoint(checkpoint=each.token, cancelled=True)], True
            return (), False

        return self.synchronizer.update_state_returning(cancel, timeout=timeout)

    # ------------------------------------------------------------------ segments

    def rebalance(self) -> None:
        """Propose the planner's moves, if there are any."""
        self.synchronizer.update_state(balance.plan)

    def record_weights(self, rates: Mapping[SegmentId, float], lags: Mapping[SegmentId, float]) -> None:
        """Record the weights that have changed by these rates, in bytes per second, and lags, in bytes."""

        def record(state: ReaderGroupState) -> Proposal[ReaderGroupState, None]:
            is_wanted = state.config.balance == "load"
            return Proposal(weights.record(state, rates, lags) if is_wanted else (), None)

        self._update_and_balance(record)

    def release(self, reader: str, lease: str, positions: Positions, *, timeout: float | None = None) -> None:
        """Release these segments where the reader stands in them. Segments that it lost meanwhile are left alone."""

        def give_up(state: ReaderGroupState) -> Proposal[ReaderGroupState, None]:
            _check_member(state, reader, lease)
            updates = [
                ReleaseSegment(reader=reader, segment=segment, offset=reached.offset)
                for segment, reached in sorted(positions.items())  # in the same order in every process
                if _is_current(state, reader, segment, reached)
            ]
            return Proposal(updates, None)

        self._update_and_balance(give_up, timeout)

    def complete(
        self, reader: str, lease: str, segment: SegmentId, reached: SegmentPosition, *, timeout: float | None = None
    ) -> bool:
        """Record that the segment's last event is processed, at ``reached``; return False if that has to wait.

        It has to wait until the stream's metadata shows the segment's successors, or the end of the stream.
        """

        def finish(state: ReaderGroupState) -> Proposal[ReaderGroupState, bool]:
            _check_member(state, reader, lease)
            if not _is_current(state, reader, segment, reached):
                return Proposal((), True)
            if not state.knows_successors(segment):
                return Proposal((), False)
            return Proposal([CompleteSegment(reader=reader, segment=segment, offset=reached.offset)], True)

        return self._update_and_balance(finish, timeout)

    def _update_and_balance(
        self, propose: Callable[[ReaderGroupState], Proposal[ReaderGroupState, R]], timeout: float | None = None
    ) -> R:
        """Apply the updates that ``propose`` returns, and the moves that follow, as one entry.

        A state over its limit may have no room for the moves. Then the updates go in without them: otherwise no reader
        could leave a group that is too large.
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
        """Bring the group's view of the stream up to its metadata: new epochs, one entry each, and the end.

        Raises `NotFoundError` if the stream was deleted, or created again since.
        """
        known = self.state.streams.get(stream)
        if known is None or known.ended:
            return
        metadata = self.streams.fetch_state(stream, timeout=timeout)
        check_same_stream(metadata, known.incarnation)
        for epoch in range(known.epoch + 1, metadata.epoch + 1):
            self.synchronizer.update_state(_epoch_adder(stream, epoch, metadata), timeout=timeout)
        if metadata.sealed:
            self.synchronizer.update_state(_ender(stream, metadata), timeout=timeout)

    def follow_streams(self, *, strict: bool = False) -> Mapping[str, int]:
        """Follow all streams of the group. Return the lengths of their metadata logs as followed, to wait on.

        If ``strict``, raise `NotFoundError` with the fact ``stream`` for one that was created again under the group.
        """
        known = {}
        for stream, followed in self.state.streams.items():
            if followed.ended:
                continue
            try:
                synchronizer = self.streams.synchronizer(stream)
                known[synchronizer.segment] = synchronizer.applied_length
                self.follow_stream(stream)
            except NotFoundError:
                _logger.debug("stream %s was deleted", stream)  # its readers raise this when they read
                if strict and self.streams.exists(stream):
                    self.synchronizer.fetch_updates()  # the group may have been created again as well
                    self.follow_stream(stream)
        return known

    def note_skipped(
        self, head: StreamCut, reached: Mapping[SegmentId, int] | None = None, *, timeout: float | None = None
    ) -> None:
        """Note that events before ``head`` are deleted which the group has not processed.

        ``reached`` is what a reader knows of its positions, which may be newer than what it has committed.
        """
        leases = self.leases()  # first: what was committed before a segment changed hands is then in the state
        known = {**positions(self.synchronizer.fetch_updates(timeout=timeout), leases), **(reached or {})}
        self.synchronizer.update_state(partial(note_skipped, head=head, reached=known), timeout=timeout)

    def finish_scale(self, stream: str, *, timeout: float | None = None) -> None:
        """Finish a scale or seal of the stream that a client began and may have died over, and follow it."""
        self.streams.finish_pending(stream, timeout=timeout)
        self.follow_stream(stream, timeout=timeout)

    def reset_streams(
        self,
        resets: Sequence[tuple[ResetStream, StreamState]],
        config: ReaderGroupConfig,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Move the group in these streams. Each update comes with the metadata of its stream.

        Returns False if the group no longer has the streams and ends of ``config``, for which they were decided.
        """

        def reset(state: ReaderGroupState) -> Proposal[ReaderGroupState, bool]:
            if (state.config.streams, state.config.end) != (config.streams, config.end):
                return Proposal((), False)
            for each, metadata in resets:
                check_same_stream(metadata, state.streams[each.stream].incarnation)
            return Proposal([each for each, _ in resets], True)

        return self._update_and_balance(reset, timeout)

    def configure(
        self, propose: Callable[[ReaderGroupState], Proposal[ReaderGroupState, R]], *, timeout: float | None = None
    ) -> R:
        """Apply the updates that ``propose`` returns, and the moves that follow."""
        return self._update_and_balance(propose, timeout)


def leases_and_state(
    synchronizer: StateSynchronizer[ReaderGroupState], backoff: Backoff, deadline: Deadline
) -> tuple[Mapping[str, bytes], ReaderGroupState]:
    """Return all lease values of the group and its state, which together tell the committed positions."""
    # Leases first: a commit made before a segment changed hands is then in the state fetched after them.
    leases = backoff.retry(partial(read_leases, synchronizer.store, synchronizer.segment, None))
    return leases, synchronizer.fetch_updates(timeout=deadline.remaining())


def can_begin_checkpoint(state: ReaderGroupState, *, silent: bool) -> bool:
    """Return whether another checkpoint can begin. Silent checkpoints count separately, so that finding the group's
    cuts delays no other checkpoint.
    """
    alike = [each for each in state.outstanding_checkpoints if not each.automatic and each.silent == silent]
    return len(alike) < state.config.max_outstanding_checkpoints


def newest_checkpoint(state: ReaderGroupState) -> int:
    """Return the token of the last checkpoint in the state that is not silent; 0 if there is none."""
    return max((each.token for each in state.checkpoints if not each.silent), default=0)


def check_same_stream(metadata: StreamState, incarnation: str) -> None:
    """Refuse a stream that was created again under its name after the group was created."""
    if metadata.incarnation != incarnation:
        raise NotFoundError(
            "the stream was deleted and created again; delete the group and create it for the new stream",
            stream=metadata.name,
        )


def is_of_another_stream(error: ReaderGroupError) -> bool:
    """Return whether the error is that of `check_same_stream`, and not that the group was deleted."""
    return isinstance(error, NotFoundError) and "stream" in error.facts


def _removal(
    state: ReaderGroupState,
    reader: str,
    leases: Mapping[str, bytes],
    cause: Cause,
    reached: Positions | None = None,
    position: Mapping[SegmentId, int] | None = None,
) -> tuple[RemoveReader, Mapping[str, AttributeChange]]:
    """Return the update that removes the reader where it stands by its lease, and the deletion of the lease."""
    found = state.readers[reader]
    value = lease_value(found, leases)
    offsets = current_offsets(state, reader, value)
    for segment, each in (reached or {}).items():
        if _is_current(state, reader, segment, each) and each.offset > offsets.get(segment, 0):
            offsets[segment] = each.offset
    offsets.update(position or {})
    changes = {} if found.lease is None else {lease_attribute(found.lease): AttributeChange(value, None)}
    return RemoveReader(reader=reader, position=offsets or None, cause=cause), changes


def with_moves(state: ReaderGroupState, updates: Updates) -> Updates:
    """Return ``updates`` and, after them, the moves that balance the resulting state.

    During hand-overs, only unassigned segments move. The entry that ends the last hand-over carries the other moves; by
    then, more readers may have come.
    """
    for index, update in enumerate(updates):
        state = update.apply_to(state, Revision(0, index))
    return (*updates, *balance.plan(state, even_out=not state.handing_over))


def _epoch_adder(stream: str, epoch: int, metadata: StreamState) -> Callable[[ReaderGroupState], Updates]:
    def add(state: ReaderGroupState) -> Updates:
        known = state.streams.get(stream)
        if known is None or known.incarnation != metadata.incarnation or known.ended or known.epoch + 1 != epoch:
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
        added = AddEpoch(stream=stream, epoch=epoch, segments=segments)
        weighed = weights.inherited(state, added) if state.config.balance == "load" else []
        return with_moves(state, [added, *weighed])

    return add


def _comes_next(state: ReaderGroupState, forgotten: SegmentId, keys: KeyRange) -> bool:
    """Return whether a segment of these ``keys`` succeeds one that the stream itself has truncated and forgotten.

    The segments between the two may be forgotten as well, so only the keys can tell.
    """
    before = state.segments[forgotten]
    return _overlaps(before, keys) and not any(_overlaps(state.segments[each], keys) for each in before.successors)


def _overlaps(segment: SegmentState, keys: KeyRange) -> bool:
    return segment.low < keys.high and keys.low < segment.high


def _ender(stream: str, metadata: StreamState) -> Callable[[ReaderGroupState], Updates]:
    def end(state: ReaderGroupState) -> Updates:
        known = state.streams.get(stream)
        if known is None or known.incarnation != metadata.incarnation or known.ended or known.epoch != metadata.epoch:
            return ()
        return (EndStream(stream=stream),)

    return end


def _is_current(state: ReaderGroupState, reader: str, segment: SegmentId, reached: SegmentPosition) -> bool:
    """Return whether the position was reached under the present assignment of the segment."""
    found = state.segments.get(segment)
    return found is not None and found.owner == reader and found.token == reached.token


def _check_member(state: ReaderGroupState, reader: str, lease: str) -> None:
    if state.reader(reader).lease != lease:
        raise ReaderNotInGroupError("another process took over the reader's id", reader=reader)
