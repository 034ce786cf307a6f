"""The record of notifications in a simulation: who writes it, and what has to be in it, whoever dies over that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import readergroup as rg
from notifications import Notification
from readergroup.record.record import NotificationRecord
from synchronizer import Revision

from .world import Process

if TYPE_CHECKING:
    from .auditor import Auditor

_GROUP: Final = "billing"
_LOG: Final = f"group/{_GROUP}"
#: What tells of each kind of change, and what it says of it.
_KINDS: Final[dict[str, tuple[type[Notification], Callable[[Any], Any]]]] = {
    "segments": (rg.SegmentNotification, lambda n: frozenset(n.segments)),
    "readers": (rg.ReaderNotification, lambda n: frozenset(n.readers)),
    "end of data": (rg.EndOfDataNotification, lambda n: True),
}


class Recordings:
    """Who records, and what is recorded of the present life of the group."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self.recorders: list[Process] = []

    def record(self, process: Process, group: rg.ReaderGroup, *, lag_interval_seconds: float | None) -> None:
        self.recorders.append(process)
        group.record_notifications(
            lag_interval_seconds=lag_interval_seconds, retention_seconds=None, retention_bytes=None
        )

    def read(self) -> Sequence[Notification]:
        """What is recorded, but for the samples of the lag."""
        world = self._auditor.world
        clock = world.processes["admin"].clock
        record = NotificationRecord(world.memory, group=_GROUP, log=_LOG, clock=clock, timeout=1.0)
        return [each for each in record.read() if isinstance(each, tuple(kind for kind, _ in _KINDS.values()))]

    @property
    def missing(self) -> str | None:
        """What somebody who records is still to write."""
        if not any(process.runs for process in self.recorders):
            return None
        told = self.read()
        for kind, (notification, _) in _KINDS.items():
            last = max((each.revision for each in told if isinstance(each, notification)), default=Revision(0, 0))
            for revision, value in self._changes(kind):
                if revision > last:
                    return f"nobody recorded {kind}: {value} at {revision}"
        return None

    def check(self) -> None:
        """S8: since the record begins, each change is in it once, in order, or under a gap where the log is gone."""
        told = self.read()
        if not told:
            return
        revisions = [each.revision for each in told]
        if revisions != sorted(revisions):
            self._auditor.broken("S8", f"what is recorded goes back: {list(map(str, revisions))}")
        compacted = {mark.revision for mark in self._auditor.marks[_LOG]}
        gaps = {each.revision for each in told if each.gap}
        if gaps - compacted:
            self._auditor.broken("S8", f"a gap is recorded at {min(gaps - compacted)}, and the log has none")
        for kind in _KINDS:
            self._check_kind(kind, told, gaps)

    def _check_kind(self, kind: str, told: Sequence[Notification], gaps: set[Revision]) -> None:
        notification, value_of = _KINDS[kind]
        begun, end = told[0].revision, told[-1].revision
        changes = self._changes(kind)
        due = [revision for revision, _ in changes if begun < revision <= end]
        mine = [each for each in told if isinstance(each, notification)]
        revisions = [each.revision for each in mine]
        for each in mine:
            expected = next((value for revision, value in reversed(changes) if revision <= each.revision), None)
            if value_of(each) != expected:
                self._auditor.broken("S8", f"{each} is recorded, it was {expected}")
            if revisions.count(each.revision) > 1:
                self._auditor.broken("S8", f"{kind} at {each.revision} are recorded more than once")
            if each.revision not in (begun, *due, *gaps):
                self._auditor.broken("S8", f"{each} is recorded, and nothing changed then")
        for revision in due:
            if revision not in revisions and not self._is_covered(revision, told):
                self._auditor.broken("S8", f"{kind} at {revision} are not in the record")

    def _is_covered(self, revision: Revision, told: Sequence[Notification]) -> bool:
        return next(each.gap for each in told if each.revision >= revision)

    def _changes(self, kind: str) -> list[tuple[Revision, Any]]:
        """Those of the present life of the group."""
        auditor = self._auditor
        return [each for each in auditor.changes[kind] if each[0] >= auditor.created and each[1] is not None]
