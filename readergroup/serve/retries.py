"""The events that wait for their next attempt, by group."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final

from synchronizer import NotFoundError, ReaderGroupError, SegmentStore

from ..retries.waiting import DelayLog

#: How many waiting events are counted for each delay of a group.
MAX_COUNTED: Final = 10_000


@dataclass(frozen=True, slots=True)
class Waiting:
    """The events of a group that wait."""

    events: int = 0
    #: Whether there are more.
    is_partial: bool = False
    #: When the first one is due, in seconds since 1970.
    next_at: float | None = None


NOTHING: Final = Waiting()


class WaitingRetries:
    """Counts the events that wait. For the thread of the sampler, but any thread may ask for what it has found."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._logs: dict[str, list[_Counted]] = {}
        self._found: Mapping[str, Waiting] = {}

    def of(self, group: str) -> Waiting:
        return self._found.get(group, NOTHING)

    def find(self) -> None:
        """Look for delays, and groups, with events that wait."""
        known = {each.log.segment: each for logs in self._logs.values() for each in logs}
        self._logs = {}
        for log in DelayLog.all_of(self._store):
            self._logs.setdefault(log.group, []).append(known.get(log.segment) or _Counted(log))

    def count(self) -> None:
        """Read what was added since the last time."""
        self._found = {group: self._counted(logs) for group, logs in self._logs.items()}

    def _counted(self, logs: list[_Counted]) -> Waiting:
        for each in list(logs):
            try:
                each.read()
            except NotFoundError:  # deleted meanwhile
                logs.remove(each)
            except ReaderGroupError as error:
                if error.retryable:
                    raise
                each.is_partial = True  # a newer release has stored it
        return Waiting(
            sum(len(each.waiting) for each in logs),
            any(each.is_partial for each in logs),
            min((each.waiting[0][1] for each in logs if each.waiting), default=None),
        )


class _Counted:
    """The events that wait for one delay."""

    def __init__(self, log: DelayLog) -> None:
        self.log = log
        #: Where each event ends, and when it is due.
        self.waiting: deque[tuple[int, float]] = deque()
        self.is_partial = False
        self._read_to = 0

    def read(self) -> None:
        info = self.log.store.info(self.log.segment)
        if not info.start_offset <= self._read_to <= info.length:  # also a log that was deleted and made again
            self.waiting.clear()
            self._read_to = info.start_offset
        while self.waiting and self.waiting[0][0] <= info.start_offset:
            self.waiting.popleft()
        while self._read_to < info.length and len(self.waiting) < MAX_COUNTED:
            frames = self.log.read(self._read_to)
            if not frames:
                break
            self.waiting.extend((each.end, _shown(each.event.due)) for each in frames)
            self._read_to = frames[-1].end
        self.is_partial = self._read_to < info.length


def _shown(due: float) -> float:
    """Return a time that JSON can hold, whatever is stored."""
    return due if isinstance(due, (int, float)) and isfinite(due) else 0.0
