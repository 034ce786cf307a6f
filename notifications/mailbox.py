"""A bounded queue of notifications that never blocks who fills it and never loses anything in silence."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from synchronizer import Flag

from .notification import Notification

N = TypeVar("N", bound=Notification)


class Mailbox(Generic[N]):
    """What one listener has still to hear, oldest first.

    When it is full, the newest entry gives way to the one that comes, which then tells of the gap: the listener hears
    what was queued in order, and then the newest value with ``gap=True``.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._queue: deque[N] = deque()
        self.coalesced = 0
        self.closed = False
        #: Set while there is something to take, and for ever after `close`.
        self.filled = Flag()

    def put(self, notification: N) -> None:
        with self._lock:
            if self.closed:
                return
            if len(self._queue) >= self._capacity:
                self._queue.pop()
                self.coalesced += 1
                notification = notification.after_gap()
            self._queue.append(notification)
            self.filled.set()

    def take(self) -> N | None:
        """The oldest notification, or None."""
        with self._lock:
            notification = self._queue.popleft() if self._queue else None
            if not self._queue and not self.closed:
                self.filled.clear()
            return notification

    def close(self) -> None:
        """Drop what is queued and take nothing more."""
        with self._lock:
            self.closed = True
            self._queue.clear()
            self.filled.set()
