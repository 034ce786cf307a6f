"""What the tests of this folder share: a small state, a notifier of it, and a listener that can be waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from notifications import Change, Notification, PollingNotifier
from synchronizer import Clock, Revision, SegmentStore, State, StateSynchronizer, Update
from tests.waiting import PATIENCE_SECONDS


class Counter(State):
    value: int = 0


class Add(Update[Counter], tag="add"):
    amount: int = 1

    def apply_to(self, state: Counter, revision: Revision) -> Counter:
        return state.replace(value=state.value + self.amount)


class Counted(Notification):
    value: int


class CountNotifier(PollingNotifier[Counter, Counted]):
    """Tells every value."""

    def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
        yield Counted(change=change, value=after.value)


def counter(store: SegmentStore, *, clock: Clock | None = None, timeout: float = 30.0) -> StateSynchronizer[Counter]:
    """A replica of its own, as another process would have it."""
    return StateSynchronizer(
        store, "visits", initial=Counter(), updates=[Add], clock=clock, timeout=timeout, compaction_bytes=None
    )


class Heard:
    """A listener that remembers what it was told, and in which threads."""

    def __init__(self) -> None:
        self.notifications: list[Counted] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, notification: Counted) -> None:
        with self._changed:
            self.notifications.append(notification)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()

    @property
    def values(self) -> list[int]:
        with self._changed:
            return [n.value for n in self.notifications]

    def wait_for(self, value: int, timeout: float = PATIENCE_SECONDS) -> list[int]:
        """All values told when ``value`` is among them."""
        with self._changed:
            if not self._changed.wait_for(lambda: value in [n.value for n in self.notifications], timeout):
                pytest.fail(f"{value} was not told within {timeout} s: {self.notifications}")
            return [n.value for n in self.notifications]
