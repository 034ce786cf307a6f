"""What readers do to the state of their group: each method is one conditional update, decided on the newest state.

Whatever changes who may own what (a reader joins or leaves, a segment is completed) carries the moves that balance the
group again in the same entry, so that the group is never seen in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from synchronizer import AttributeChange, InvalidArgumentError, Map, Proposal, Revision, StateSynchronizer, Update

from . import balance
from .config import ReaderGroupConfig
from .errors import ReaderNotInGroupError
from .liveness import PREFIX, Held, Lease, Positions, current_offsets, lease_attribute
from .state import ReaderGroupState, ReaderState, SegmentState, StreamState
from .streams.config import SegmentId, StreamCut
from .streams.manager import StreamManager
from .streams.state import StreamState as StreamMetadata
from .updates import (
    AddEpoch,
    AddReader,
    Cause,
    CompleteSegment,
    EndStream,
    NewSegment,
    ReleaseSegment,
    RemoveReader,
)

Updates = Sequence[Update[ReaderGroupState]]


class ReaderGroupStateManager:
    """The updates of one group. Holds nothing but the synchronizer, which it borrows. Threads may share it."""

    def __init__(self, synchronizer: StateSynchronizer[ReaderGroupState], streams: StreamManager) -> None:
        self.synchronizer = synchronizer
        self.streams = streams

    @property
    def state(self) -> ReaderGroupState:
        return self.synchronizer.state

    # ------------------------------------------------------------------ membership

    def add_reader(self, reader: str, lease: Lease) -> int:
        """Let the reader in and return its incarnation. One of the same id that is in the group is replaced."""

        def join(state: ReaderGroupState) -> Proposal[ReaderGroupState, None]:
            attributes = {lease.attribute: AttributeChange(None, lease.first_value)}
            updates: list[Update[ReaderGroupState]] = []
            before = state.readers.get(reader)
            if before is not None:
                removal, changes = self._removal(state, reader, before, "replaced")
                updates.append(removal)
                attributes.update(changes)
            updates.append(AddReader(reader=reader, lease=lease.name))
            return Proposal(with_moves(state, updates), None, attributes)

        sent_at = self.synchronizer.clock.monotonic()
        self.synchronizer.update_state_with_attributes(join)
        joined = self.state.readers.get(reader)
        if joined is None or joined.lease != lease.name:
            raise ReaderNotInGroupError("another reader took over the id at once", reader=reader)
        lease.begin(sent_at, self.state.config.reader_timeout_seconds)
        return int(joined.incarnation)

    def remove_reader(
        self,
        reader: str,
        *,
        incarnation: int | None = None,
        position: Mapping[SegmentId, int] | None = None,
        reached: Positions | None = None,
        cause: Cause = "removed",
    ) -> bool:
        """Take the reader out, and whether this call did it; its segments go on where it committed.

        ``reached`` are later positions that the reader itself knows of. ``position`` overrules both, in either
        direction. With an ``incarnation``, another life of the id is left alone.
        """

        def leave(state: ReaderGroupState) -> Proposal[ReaderGroupState, bool]:
            found = state.readers.get(reader)
            if found is None or incarnation not in (None, found.incarnation):
                return Proposal((), False)
            removal, attributes = self._removal(state, reader, found, cause, reached or {}, position or {})
            return Proposal(with_moves(state, [removal]), True, attributes)

        return self.synchronizer.update_state_with_attributes(leave)

    def remove_dead(self, dead: Mapping[str, tuple[int, bytes | None]]) -> list[str]:
        """Take out these readers, of whom an incarnation and the unchanged value of its lease were observed.

        One that has renewed since, or is another incarnation by now, stays. Returns those that were removed.
        """

        def evict(state: ReaderGroupState) -> Proposal[ReaderGroupState, list[str]]:
            values = self.leases()
            updates: list[Update[ReaderGroupState]] = []
            attributes: dict[str, AttributeChange] = {}
            for reader, (incarnation, observed) in dead.items():
                found = state.readers.get(reader)
                if found is None or found.incarnation != incarnation or _value(found, values) != observed:
                    continue
                removal, changes = self._removal(state, reader, found, "dead")
                updates.append(removal)
                attributes.update(changes)
            removed = [update.reader for update in updates if isinstance(update, RemoveReader)]
            return Proposal(with_moves(state, updates) if updates else (), removed, attributes)

        return self.synchronizer.update_state_with_attributes(evict)

    def leases(self) -> Mapping[str, bytes]:
        """The values of all leases of the group, by attribute."""
        return self.synchronizer.store.attributes(self.synchronizer.segment, PREFIX)

    def _removal(
        self,
        state: ReaderGroupState,
        reader: str,
        found: ReaderState,
        cause: Cause,
        reached: Positions | None = None,
        position: Mapping[SegmentId, int] | None = None,
    ) -> tuple[RemoveReader, Mapping[str, AttributeChange]]:
        """The update that takes the reader out where it stands by its lease, and the lease's deletion."""
        value = _value(found, self.leases())
        offsets = current_offsets(state, reader, value)
        for segment, held in (reached or {}).items():
            if _holds(state, reader, segment, held) and held.offset > offsets.get(segment, 0):
                offsets[segment] = held.offset
        offsets.update(position or {})
        changes = {} if found.lease is None else {lease_attribute(found.lease): AttributeChange(value, None)}
        return RemoveReader(reader=reader, position=offsets or None, cause=cause), changes

    # ------------------------------------------------------------------ segments

    def rebalance(self) -> None:
        """Propose the planner's moves, if there are any."""
        self.synchronizer.update_state(balance.plan)

    def release(self, reader: str, incarnation: int, positions: Positions) -> None:
        """Give up these segments where the reader stands in them; those that it lost meanwhile are left alone."""

        def give_up(state: ReaderGroupState) -> Updates:
            _check_member(state, reader, incarnation)
            updates = [
                ReleaseSegment(reader=reader, segment=segment, offset=held.offset)
                for segment, held in positions.items()
                if _holds(state, reader, segment, held)
            ]
            return with_moves(state, updates) if updates else ()

        self.synchronizer.update_state(give_up)

    def complete(self, reader: str, incarnation: int, segment: SegmentId, held: Held) -> bool:
        """Record that the segment's last event is processed, at ``held``; False where that has to wait.

        It has to wait for the stream's metadata to say what comes after the segment: its successors, or the end.
        """

        def finish(state: ReaderGroupState) -> tuple[Updates, bool]:
            _check_member(state, reader, incarnation)
            if not _holds(state, reader, segment, held):
                return (), True
            found = state.segments[segment]
            stream, _, _ = segment.rpartition("/")
            if not found.successors and not state.streams[stream].ended and found.end is None:
                return (), False
            update = CompleteSegment(reader=reader, segment=segment, offset=held.offset)
            return with_moves(state, [update]), True

        return self.synchronizer.update_state_returning(finish)

    # ------------------------------------------------------------------ streams

    def follow_streams(self, streams: Iterable[str] | None = None) -> None:
        """Bring what the group knows of its streams up to their metadata: new epochs, one entry each, and the end.

        A scale that somebody began and did not finish is finished.
        """
        state = self.state
        for stream in streams if streams is not None else state.streams:
            known = state.streams[stream]
            if known.ended:
                continue
            metadata = self.streams.fetch_state(stream)
            if metadata.is_pending:
                metadata = self.streams.finish_pending(stream)
            if metadata.incarnation != known.incarnation:
                raise ReaderNotInGroupError(
                    "the stream was deleted and created again; create a group for the new one", stream=stream
                )
            for epoch in range(known.epoch + 1, metadata.epoch + 1):
                self.synchronizer.update_state(_epoch_adder(stream, epoch, metadata))
            if metadata.sealed:
                self.synchronizer.update_state(_ender(stream))


def with_moves(state: ReaderGroupState, updates: Updates) -> Updates:
    """``updates`` and, after them, the moves that balance what they make of ``state``."""
    for index, update in enumerate(updates):
        state = update.apply_to(state, Revision(0, index))
    return (*updates, *balance.plan(state))


def initial_state(config: ReaderGroupConfig, streams: StreamManager) -> ReaderGroupState:
    """The state of a new group: its streams' segments from the start cut on, nobody in it."""
    followed = {}
    segments: dict[SegmentId, SegmentState] = {}
    for stream in config.streams:
        metadata = streams.fetch_state(stream)
        end = config.end.get(stream)
        start = config.start.get(stream, "head")
        if start == "head":
            start = metadata.head_cut
        elif start == "tail":
            start = streams.tail_cut(metadata)
        segments.update(_segments(metadata, start, end))
        ended = metadata.sealed or end is not None
        followed[stream] = StreamState(incarnation=metadata.incarnation, epoch=metadata.epoch, ended=ended)
    return ReaderGroupState(config=config, streams=Map(followed), segments=Map(segments))


def _segments(metadata: StreamMetadata, start: StreamCut, end: StreamCut | None) -> Mapping[SegmentId, SegmentState]:
    """The segments from ``start`` to ``end``, each with those of its neighbours in time that are among them."""
    metadata.check_cut(start)
    reached = metadata.segments_from(start)
    if end is not None:
        metadata.check_cut(end)
        if not metadata.precedes(start, end):
            raise InvalidArgumentError("the start cut lies behind the end cut", start=str(start), end=str(end))
        beyond = metadata.segments_from(end).keys() - end.offsets.keys()
        reached = {segment: before for segment, before in reached.items() if segment not in beyond}
    segments = {}
    for segment, predecessors in reached.items():
        keys = metadata.key_range(segment)
        segments[segment] = SegmentState(
            low=keys.low,
            high=keys.high,
            offset=start.offsets.get(segment, 0),
            waiting_for=len(predecessors),
            predecessors=predecessors,
            successors=tuple(after for after in metadata.successors(segment) if after in reached),
            end=None if end is None else end.offsets.get(segment),
        )
    return segments


def _epoch_adder(stream: str, epoch: int, metadata: StreamMetadata) -> Callable[[ReaderGroupState], Updates]:
    def add(state: ReaderGroupState) -> Updates:
        if state.streams[stream].epoch + 1 != epoch or state.streams[stream].ended:
            return ()
        segments = {
            metadata.segment(number): NewSegment(
                low=each.keys.low,
                high=each.keys.high,
                predecessors=tuple(
                    before for before in map(metadata.segment, each.predecessors) if before in state.segments
                ),
            )
            for number, each in metadata.segments.items()
            if each.epoch == epoch
        }
        return with_moves(state, [AddEpoch(stream=stream, epoch=epoch, segments=segments)])

    return add


def _ender(stream: str) -> Callable[[ReaderGroupState], Updates]:
    return lambda state: () if state.streams[stream].ended else (EndStream(stream=stream),)


def _value(found: ReaderState, values: Mapping[str, bytes]) -> bytes | None:
    return None if found.lease is None else values.get(lease_attribute(found.lease))


def _holds(state: ReaderGroupState, reader: str, segment: SegmentId, held: Held) -> bool:
    found = state.segments.get(segment)
    return found is not None and found.owner == reader and found.token == held.token


def _check_member(state: ReaderGroupState, reader: str, incarnation: int) -> None:
    if state.reader(reader).incarnation != incarnation:
        raise ReaderNotInGroupError("another process took over the reader's id", reader=reader)
