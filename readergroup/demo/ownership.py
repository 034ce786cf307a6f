"""Derives from the log of a group which reader owned which segment when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from synchronizer import Transition, TransitionFeed

from ..group.model.state import ReaderGroupState
from ..group.model.updates import RemoveReader
from ..group.reader_group import ReaderGroup
from ..streams.config import SegmentId


@dataclass
class Assignment:
    """A segment that a reader owned. Times are seconds since the follower started."""

    segment: SegmentId
    reader: str
    fencing_token: int
    start: float
    end: float | None = None
    #: Its owner was declared dead.
    died: bool = False


class Ownership:
    """The assignments of a group, folded from the transitions of its state."""

    def __init__(self) -> None:
        self.assignments: list[Assignment] = []
        self.readers: list[str] = []  # in the order in which they joined
        self.dead: set[str] = set()
        self._open: dict[SegmentId, Assignment] = {}

    def apply(self, transition: Transition[ReaderGroupState], at: float) -> None:
        """Apply one entry of the log, which arrived at ``at``."""
        if transition.after is None:
            return
        dead = {u.reader for u in transition.updates if isinstance(u, RemoveReader) and u.cause == "dead"}
        self.dead |= dead
        self.readers += [reader for reader in transition.after.readers if reader not in self.readers]
        owners = {
            segment: (found.owner, found.token)
            for segment, found in transition.after.segments.items()
            if found.owner is not None and found.token is not None
        }
        for segment, assignment in list(self._open.items()):
            if owners.get(segment) != (assignment.reader, assignment.fencing_token):
                assignment.end, assignment.died = at, assignment.reader in dead
                del self._open[segment]
        for segment, (reader, token) in owners.items():
            if segment not in self._open:
                self._open[segment] = Assignment(segment, reader, token, at)
                self.assignments.append(self._open[segment])

    @property
    def died(self) -> set[int]:
        """The fencing tokens of assignments whose owner was declared dead."""
        return {assignment.fencing_token for assignment in self.assignments if assignment.died}

    def segments_of(self, reader: str) -> Sequence[SegmentId]:
        """Return the segments that the reader owns now."""
        return sorted(segment for segment, assignment in self._open.items() if assignment.reader == reader)


class OwnershipFollower:
    """Follows the log of a group in a thread of its own during a block."""

    def __init__(self, group: ReaderGroup, now: Callable[[], float]) -> None:
        self.ownership = Ownership()
        self._group = group
        self._now = now
        self._stopping = threading.Event()
        self._feed: TransitionFeed[ReaderGroupState] = group.synchronizer.transitions()
        self._thread = threading.Thread(target=self._follow, name="demo ownership", daemon=True)

    def __enter__(self) -> Ownership:
        self._thread.start()
        return self.ownership

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._group.synchronizer.fetch_updates()
        self._drain()
        self._feed.close()

    def _follow(self) -> None:
        while not self._stopping.is_set():
            if self._group.synchronizer.wait_for_growth(0.2):
                self._group.synchronizer.fetch_updates()
            self._drain()

    def _drain(self) -> None:
        for transition in self._feed.drain():
            self.ownership.apply(transition, self._now())
