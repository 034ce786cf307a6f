"""The names of streams and groups that one client has open, and those that it knows to be deleted.

A name that was used once keeps a log, which records its deletion, because revisions of a name only grow. So a deleted
name must cost a client next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from synchronizer import SegmentStore

T = TypeVar("T")


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

    def values(self) -> Sequence[T]:
        return list(self._all.values())


class DeletedNames:
    """Logs that only record a deletion. Each is read once, and again when it has grown."""

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
        grown = self._store.wait(known, 0)
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
