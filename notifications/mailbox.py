"""A bounded queue of notifications that never blocks its producer and never drops one silently."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from synchronizer.threads.flag import Flag

from .notification import Notification

N = TypeVar("N", bound=Notification)


class Mailbox(Generic[N]):
    """The queue of one listener, oldest notification first.

    When it is full, a new notification replaces the newest one in the queue and gets ``gap=True``. So the listener
    receives the queued ones in order, then the newest value.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._queue: deque[N] = deque()
        self.coalesced = 0
        self.closed = False
        #: Set while the queue is not empty, and always after `close`.
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
        """Remove and return the oldest notification, or return None."""
        with self._lock:
            notification = self._queue.popleft() if self._queue else None
            if not self._queue and not self.closed:
                self.filled.clear()
            return notification

    def close(self) -> None:
        """Drop all queued notifications and accept no more."""
        with self._lock:
            self.closed = True
            self._queue.clear()
            self.filled.set()
