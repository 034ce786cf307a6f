"""The notifications of a reader group: its segments, the end of its data, its readers and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from notifications import Change, Notification, PollingNotifier
from synchronizer import NotFoundError

from ..streams.config import SegmentId, StreamCut
from .model.checkpoint import Checkpoint
from .model.state import ReaderGroupState
from .model.updates import RemoveReader
from .updater import GroupUpdater


class SegmentNotification(Notification):
    """The segments of the group have changed: a stream was scaled, or some segments were read to their end."""

    #: Segments of the newest epochs that are not completed: more readers than this would be idle.
    # Pravega counts the segments that are readable now. These change only after the group has read everything before
    # a scale, perhaps long after the load that caused it. A sealed stream counts down to 0.
    number_of_segments: int
    number_of_readers: int
    segments: tuple[SegmentId, ...]


class EndOfDataNotification(Notification):
    """The group has read all of its streams to their end. ``cuts`` say where that is."""

    cuts: Mapping[str, StreamCut]


class ReaderNotification(Notification):
    """Readers joined or left. The first notification lists the readers that are present."""

    readers: tuple[str, ...]
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    #: Those of ``left`` whose leases ran out.
    dead: tuple[str, ...] = ()


class SegmentNotifier(PollingNotifier[ReaderGroupState, SegmentNotification]):
    """Notify of every change of the group's segments, as soon as the stream's metadata shows it.

    Listeners hear of a scale when it happens, not when its segments become readable. Before each poll the notifier
    brings the group's state up to the metadata of its streams, so that all listeners see one order of changes.
    """

    def __init__(self, updater: GroupUpdater, *, source: str) -> None:
        super().__init__(updater.synchronizer, source=source)
        self._updater = updater
        self._followed: Mapping[str, int] = {}

    def before_poll(self) -> None:
        try:
            self._followed = self._updater.follow_streams()
        except NotFoundError:  # the group was deleted
            self._followed = {}

    def watched(self) -> Mapping[str, int]:
        return self._followed

    def detect(
        self, before: ReaderGroupState | None, after: ReaderGroupState, change: Change
    ) -> Iterable[SegmentNotification]:
        if before is None or before.segment_index.newest != after.segment_index.newest:
            segments = after.newest_segments
            yield SegmentNotification(
                change=change,
                number_of_segments=len(segments),
                number_of_readers=after.number_of_readers,
                segments=tuple(sorted(segments)),
            )


class EndOfDataNotifier(PollingNotifier[ReaderGroupState, EndOfDataNotification]):
    """Notify once, when the group has read everything; again only if it had something to read in between."""

    def detect(
        self, before: ReaderGroupState | None, after: ReaderGroupState, change: Change
    ) -> Iterable[EndOfDataNotification]:
        if after.end_of_data and (before is None or not before.end_of_data):
            yield EndOfDataNotification(change=change, cuts=after.cuts)


class ReaderNotifier(PollingNotifier[ReaderGroupState, ReaderNotification]):
    """Notify of readers that joined, left, or were declared dead."""

    def detect(
        self, before: ReaderGroupState | None, after: ReaderGroupState, change: Change
    ) -> Iterable[ReaderNotification]:
        # By value: two threads that apply the same entries at once make equal states, and either may arrive here.
        if before is not None and before.readers == after.readers:
            return
        joined, left, dead = set(after.readers), set[str](), set[str]()
        if before is not None:
            # A new incarnation of an id means that the old one left and the new one joined.
            left = {reader for reader, each in before.readers.items() if after.readers.get(reader) != each}
            joined = {reader for reader, each in after.readers.items() if before.readers.get(reader) != each}
            dead = {u.reader for u in change.updates if isinstance(u, RemoveReader) and u.cause == "dead"}
        yield ReaderNotification(
            change=change,
            readers=tuple(sorted(after.readers)),
            joined=tuple(sorted(joined)),
            left=tuple(sorted(left)),
            dead=tuple(sorted(dead & left)),
        )


class CheckpointNotification(Notification):
    """Checkpoints were completed or given up. The first notification lists the last completed ones."""

    completed: tuple[Checkpoint, ...] = ()
    #: The names of the checkpoints that were given up.
    failed: tuple[str, ...] = ()


class CheckpointNotifier(PollingNotifier[ReaderGroupState, CheckpointNotification]):
    """Notify of the outcome of each checkpoint."""

    def detect(
        self, before: ReaderGroupState | None, after: ReaderGroupState, change: Change
    ) -> Iterable[CheckpointNotification]:
        if before is not None and before.checkpoints is after.checkpoints:
            return
        known = set() if before is None else {each.token for each in before.completed_checkpoints}
        new = [each for each in after.completed_checkpoints if each.token not in known]
        there = {each.token for each in after.checkpoints}
        failed: list[str] = []
        if before is not None and not change.gap:  # else later checkpoints may have displaced a completed one
            given_up = [each for each in before.outstanding_checkpoints if each.token not in there]
            failed = [each.name for each in given_up if not each.silent]
        if new or failed or before is None:
            completed = tuple(after.as_checkpoint(each, group=change.source) for each in new)
            yield CheckpointNotification(change=change, completed=completed, failed=tuple(failed))


class RetentionNotification(Notification):
    """Events were deleted that the group had not consumed. ``heads`` say where the rest begins."""

    heads: Mapping[str, StreamCut]


class RetentionNotifier(PollingNotifier[ReaderGroupState, RetentionNotification]):
    """Notify of events that were deleted before the group consumed them.

    A group that subscribes is notified when a retention policy deletes them, any other when a reader misses them. If it
    stays behind it is notified once, and again if that happens after it has read further.
    """

    def detect(
        self, before: ReaderGroupState | None, after: ReaderGroupState, change: Change
    ) -> Iterable[RetentionNotification]:
        known: Mapping[str, StreamCut] = (before.skipped if before is not None else None) or {}
        heads = {stream: head for stream, head in (after.skipped or {}).items() if known.get(stream) != head}
        if heads:
            yield RetentionNotification(change=change, heads=heads)


class StateNotifiers(NamedTuple):
    """The notifiers of a group, one of each kind. Those of lag are apart: there is one for each set of thresholds."""

    segments: SegmentNotifier
    end_of_data: EndOfDataNotifier
    readers: ReaderNotifier
    checkpoints: CheckpointNotifier
    retention: RetentionNotifier

    @classmethod
    def of(cls, updater: GroupUpdater, *, source: str) -> Self:
        synchronizer = updater.synchronizer
        return cls(
            SegmentNotifier(updater, source=source),
            EndOfDataNotifier(synchronizer, source=source),
            ReaderNotifier(synchronizer, source=source),
            CheckpointNotifier(synchronizer, source=source),
            RetentionNotifier(synchronizer, source=source),
        )
