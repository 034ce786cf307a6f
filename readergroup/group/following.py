"""Follows the group's decisions on behalf of one reader: checkpoints to pass, segments to release and to take over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

from synchronizer import (
    Deadline,
    DeadlineExceededError,
    HandlerError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    Revision,
)
from synchronizer.callables import checked
from synchronizer.liveness.keeper import is_store_unavailable
from synchronizer.loggers import get_logger

from ..errors import EndOfDataError, ReaderNotInGroupError, SinkBehindError
from ..streams.config import SegmentId, data_segment, stream_of
from ..streams.serializers import Serializer
from ..telemetry.logs import LogAbout
from .assigned_segments import AssignedSegment, AssignedSegments, Claimed
from .member import GroupMember
from .model.checkpoint import CheckpointState
from .model.positions import Positions, SegmentPosition
from .model.state import ReaderGroupState, SegmentState
from .updater import GroupUpdater

T = TypeVar("T")

_logger = get_logger(__name__)

SegmentCallback = Callable[[SegmentId], object]
CheckpointCallback = Callable[[str], object]


@runtime_checkable
class Claims(Protocol):
    """Where the application stores how far each segment is processed."""

    #: Whether it has stored all that the group has processed, so that less than that is an error.
    knows_all: bool

    def claim(self, group: str, segment: SegmentId, incarnation: str, token: int, offset: int) -> Claimed:
        """Take the segment over from former owners, and return what is stored.

        ``offset`` is the group's position. Raise `ReaderNotInGroupError` if a newer owner has the segment, and
        `StoreUnavailableError` to be called again.
        """
        ...


class GroupFollower(Generic[T]):
    """Runs in the reading thread, between two events.

    Args:
        updater: Changes the group's state.
        member: The reader as a member of the group.
        segments: The reader's segments. Only the follower adds and drops them.
        serializer: Decodes the events.
        on_assign: Called before a segment's first event.
        on_release: Called before a segment is given up.
        on_checkpoint: Called once per checkpoint.
        is_settled: Asked whether the reader may pass a checkpoint or release the segment as far as the segment is
            concerned. Until it answers yes, it is asked at each call, and `frozen` has the segment. Default: always.
        claims: Asked where the reader continues in a segment that it takes over. Default: at the group's position.
        timeout: The longest wait, in seconds, for one answer of the store.
    """

    def __init__(
        self,
        updater: GroupUpdater,
        member: GroupMember,
        segments: AssignedSegments[T],
        serializer: Serializer[T],
        *,
        on_assign: SegmentCallback | None,
        on_release: SegmentCallback | None,
        on_checkpoint: CheckpointCallback | None,
        is_settled: Callable[[SegmentId], bool] | None,
        claims: Claims | None,
        timeout: float,
    ) -> None:
        self._updater = updater
        self._synchronizer = updater.synchronizer
        self._member = member
        self._segments = segments
        self._serializer = serializer
        self._on_assign = None if on_assign is None else checked(on_assign, "on_assign", "segment")
        self._on_release = None if on_release is None else checked(on_release, "on_release", "segment")
        self._on_checkpoint = None if on_checkpoint is None else checked(on_checkpoint, "on_checkpoint", "checkpoint")
        self._is_settled = is_settled
        self._claims = claims
        self._group = updater.group
        self._logger = LogAbout(_logger, group=updater.group, reader=member.reader_id)
        self._timeout = timeout
        #: The segments of which no further event may be started now.
        self.frozen: frozenset[SegmentId] = frozenset()
        #: Where the reader stood in segments whose next events are deleted, until the group's state notes it.
        self._missed: dict[SegmentId, int] = {}
        #: The checkpoint last announced to the application, and the reader's positions then.
        self._kept_at: tuple[int, Positions] | None = None
        self._followed: Revision | None = None

    @property
    def is_behind(self) -> bool:
        """Whether this process knows decisions that the reader does not follow yet."""
        return self._synchronizer.revision != self._followed

    def follow(self, deadline: Deadline) -> None:
        """Apply the group's decisions, and ensure the lease."""
        self._member.check()
        self._member.fetch_news(deadline)
        if self._missed:
            self._note_missed(deadline)
        self._follow_state(deadline)
        while not self._member.ensure_lease(deadline):
            self._follow_state(deadline)

    def complete_segments(self, deadline: Deadline) -> bool:
        """Report the first segment whose last event is processed, and return whether there was one."""
        return any(self._complete(each, deadline) for each in self._segments.ending if each.completed)

    def miss(self, segment: SegmentId, offset: int, deadline: Deadline) -> None:
        """Let all processes of the group know that events were deleted which the reader was to read at ``offset``."""
        self._missed[segment] = offset
        self._note_missed(deadline)

    def _note_missed(self, deadline: Deadline) -> None:
        for segment, offset in list(self._missed.items()):
            timeout = deadline.remaining(self._timeout)
            try:
                stream = self._updater.streams.fetch_state(stream_of(segment), timeout=timeout)
                self._updater.note_skipped(stream.cut(stream.head), {segment: offset}, timeout=timeout)
            except ReaderGroupError as error:
                if error.retryable or isinstance(error, OutcomeUnknownError):
                    return  # the next call tries again
                if not isinstance(error, NotFoundError):  # the stream is deleted, as the group will see
                    self._logger.warning("the group is not notified that a reader misses events: %s", error)
            del self._missed[segment]

    def _follow_state(self, deadline: Deadline) -> None:
        """Follow the group's state: join again, pass a checkpoint, release segments, take segments over, in this order.

        So a segment assigned after a checkpoint hands out no event before the reader has passed the checkpoint.
        """
        while True:
            state, revision = self._synchronizer.snapshot_of_state
            if revision == self._followed:
                return
            if not self._member.is_in(state):
                self._member.check()  # another thread may have closed it just now
                self._segments.drop(list(self._segments.by_id))
                self._member.join_again(state, deadline)
                continue
            self._member.lease.keep_to(state.config.reader_timeout_seconds)
            owned = state.segments_of(self._member.reader_id)
            assigned = self._segments
            assigned.drop(s for s, each in assigned.by_id.items() if s not in owned or owned[s].token != each.token)
            if ahead := state.checkpoints_ahead_of(self._member.reader_id):
                if len(self._settled(assigned.by_id)) < len(assigned.by_id):
                    return
                self._pass(ahead[0], deadline)
                continue
            handing_over = {segment: found for segment, found in owned.items() if found.target is not None}
            if settled := self._settled(handing_over):
                self._release({segment: handing_over[segment] for segment in settled}, deadline)
                continue
            self._acquire(state)
            self._member.has_read_news()
            if not handing_over:
                self._followed = revision
            return

    def _settled(self, segments: Iterable[SegmentId]) -> list[SegmentId]:
        """Freeze the segments, and return those that are settled."""
        if self._is_settled is None:
            return list(segments)
        self.frozen = frozenset(segments)
        return [segment for segment in self.frozen if self._is_settled(segment)]

    def _pass(self, checkpoint: CheckpointState, deadline: Deadline) -> None:
        """Call ``on_checkpoint`` once per checkpoint, and report it as passed. The state shows when it is done."""
        if self._kept_at is None or self._kept_at[0] != checkpoint.token:
            if self._on_checkpoint is not None and not checkpoint.silent:
                self._call(self._on_checkpoint, "on_checkpoint", checkpoint.name)
            # Commits made before the store has this report belong after the checkpoint.
            self._kept_at = checkpoint.token, {segment: each.position for segment, each in self._segments.by_id.items()}
        token, positions = self._kept_at
        try:
            self._updater.pass_checkpoint(
                self._member.reader_id,
                self._member.lease.name,
                token,
                positions,
                timeout=deadline.remaining(self._timeout),
            )
        except ReaderNotInGroupError:
            self._member.fetch(deadline)  # the state says what happened

    def _release(self, handing_over: Mapping[SegmentId, SegmentState], deadline: Deadline) -> None:
        """Release the segments marked for hand-over, where the reader stands. The state shows when it is done."""
        positions: dict[SegmentId, SegmentPosition] = {}
        for segment, found in handing_over.items():
            assigned = self._segments.by_id.get(segment)
            if assigned is not None:
                self._announce_release(assigned)
            # A segment that is assigned and marked before the reader took it over has its offset in the state.
            positions[segment] = (
                assigned.position if assigned is not None else SegmentPosition(cast(int, found.token), found.offset)
            )
        try:
            self._updater.release(
                self._member.reader_id, self._member.lease.name, positions, timeout=deadline.remaining(self._timeout)
            )
        except ReaderNotInGroupError:
            self._member.fetch(deadline)  # the state says what happened

    def _announce_release(self, assigned: AssignedSegment[T]) -> None:
        if self._on_release is not None and not assigned.leaving:
            self._call(self._on_release, "on_release", assigned.segment)
        assigned.leaving = True

    def _acquire(self, state: ReaderGroupState) -> None:
        """Take over the assigned segments that the reader does not have yet."""
        taken_over: dict[SegmentId, AssignedSegment[T]] = {}
        try:
            owned = state.segments_of(self._member.reader_id)
            # In an order that does not depend on the process, so that a simulation can be repeated.
            for segment in sorted(segment for segment in owned if segment not in self._segments.by_id):
                found = owned[segment]
                if self._on_assign is not None:
                    self._call(self._on_assign, "on_assign", segment)
                incarnation = state.streams[stream_of(segment)].incarnation
                taken_over[segment] = AssignedSegment(
                    self._synchronizer.store,
                    segment,
                    incarnation,
                    cast(int, found.token),
                    found.offset,
                    found.end,
                    self._serializer,
                    group=self._group,
                    stored=self._claim(segment, incarnation, found),
                )
        finally:  # keep those that were announced to the application
            self._segments.add(taken_over)
            number = len(taken_over)
            self._updater.counters.segments_acquired += number

    def _call(self, callback: Callable[[Any], object], what: str, name: str) -> None:
        try:
            with self._member.in_callback():
                callback(name)
        except (EndOfDataError, DeadlineExceededError, OutcomeUnknownError) as error:
            if is_store_unavailable(error):
                raise  # the reader waits for the store, and calls again
            raise HandlerError(
                "a callback of the reader failed; it is called again in the next read",
                reader=self._member.reader_id,
                callback=what,
                error=repr(error),
            ) from error

    def _claim(self, segment: SegmentId, incarnation: str, found: SegmentState) -> Claimed | None:
        """Return what the application has stored of the segment, if it says so."""
        if self._claims is None:
            return None
        with self._member.in_callback():
            stored = self._claims.claim(self._group, segment, incarnation, cast(int, found.token), found.offset)
        if stored.position < found.offset and self._claims.knows_all:
            name = data_segment(segment, incarnation)
            if self._synchronizer.store.info(name).start_offset < found.offset:  # else that was truncated
                raise SinkBehindError(
                    "the database has stored less of the segment than the group has processed: it was restored from a "
                    "backup, or events were handled without the sink; continue with sink.reset(group, to=...)",
                    group=self._group,
                    segment=segment,
                    stored=stored.position,
                    processed=found.offset,
                )
        return stored

    def _complete(self, assigned: AssignedSegment[T], deadline: Deadline) -> bool:
        """Report the segment as completed, and return whether it is no longer the reader's."""
        self._announce_release(assigned)
        arguments = (self._member.reader_id, self._member.lease.name, assigned.segment, assigned.position)
        try:
            if self._updater.complete(*arguments, timeout=deadline.remaining(self._timeout)):
                return True
            # This process does not know the successors yet, or the client that scaled the stream has not finished.
            self._updater.finish_scale(stream_of(assigned.segment), timeout=deadline.remaining(self._timeout))
            return self._updater.complete(*arguments, timeout=deadline.remaining(self._timeout))
        except ReaderNotInGroupError:
            self._member.fetch(deadline)
            return True
