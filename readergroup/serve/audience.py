"""Those who wait for news."""

from __future__ import annotations

import threading
from weakref import WeakSet

from ..aio.calls import News


class Audience:
    """The news of all who wait, as long as they hold them. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: WeakSet[News] = WeakSet()

    def add(self, news: News) -> None:
        with self._lock:
            self._news.add(news)

    def discard(self, news: News) -> None:
        with self._lock:
            self._news.discard(news)

    def ring(self) -> None:
        with self._lock:
            news = list(self._news)
        for each in news:
            each.ring()
