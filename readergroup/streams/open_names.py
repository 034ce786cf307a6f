"""The names of streams and groups that one client has open, and those that it knows to be deleted.

A deleted name keeps its log, which records the deletion, for a month. So it must cost a client next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, Generic, TypeVar
from weakref import WeakValueDictionary

from synchronizer import Clock, NotFoundError, SegmentStore
from synchronizer.store import MAX_START_OFFSET

T = TypeVar("T")

_PER_SECOND: Final = 1_000_000


def first_offset(clock: Clock) -> int:
    """Return where a new log begins: beyond all that an earlier log of its name held, which is forgotten.

    That one was forgotten a month after its last entry, and would have grown by a megabyte per second till today.
    """
    return min(max(0, int(clock.time() * _PER_SECOND)), MAX_START_OFFSET)


class OpenNames(Generic[T]):
    """The open object of each name. The caller's lock guards it."""

    def __init__(self) -> None:
        self._kept: dict[str, T] = {}
        self._all: WeakValueDictionary[str, T] = WeakValueDictionary()

    def __contains__(self, name: str) -> bool:
        """Whether the name is open, and not known to be deleted."""
        return name in self._kept

    def get(self, name: str) -> T | None:
        return self._all.get(name)

    def keep(self, name: str, opened: T) -> T:
        """Return the open object of the name: ``opened``, unless there is one already. It stays open."""
        found = self._all.setdefault(name, opened)
        self._kept[name] = found
        return found

    def let_go(self, name: str) -> None:
        """Forget the name. Its object stays in memory as long as it is used elsewhere."""
        self._kept.pop(name, None)

    def drop(self, name: str, opened: T) -> None:
        """Forget the name, and its object, which is of no use any more."""
        if self._all.get(name) is opened:
            del self._all[name]
            self._kept.pop(name, None)

    def values(self) -> Sequence[T]:
        return list(self._all.values())


class DeletedNames:
    """Logs that only record a deletion. Each is read once, and again when it has grown.

    It keeps those that were forgotten, until it is asked about one of them: a hundred bytes each.
    """

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._lengths: dict[str, int] = {}

    def others(self, logs: Sequence[str]) -> Sequence[str]:
        """Return the logs whose names may be in use."""
        with self._lock:
            known = {log: self._lengths[log] for log in logs if log in self._lengths}
        if not known:
            return logs
        try:
            grown = self._store.wait(known, 0)
        except NotFoundError:  # one was forgotten since they were listed
            grown = frozenset(known)
        with self._lock:
            for log in grown:
                self._lengths.pop(log, None)
        return [log for log in logs if log not in known or log in grown]

    def length(self, log: str) -> int:
        """Return the length of the log. Call this before checking whether the name is in use, for `add`."""
        return self._store.info(log).length

    def add(self, log: str, length: int) -> None:
        """Record that the name was not in use when its log had this length."""
        with self._lock:
            self._lengths[log] = length
