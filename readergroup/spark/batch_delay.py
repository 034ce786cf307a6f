"""Delays the batches of a query until enough data waits, because each batch costs a fixed time."""

from __future__ import annotations

import math

from .options import ReadOptions


class BatchDelay:
    """The delay of one query. It lives as long as the query runs; the first batch is not delayed."""

    def __init__(self, options: ReadOptions) -> None:
        self._min_bytes = options.min_bytes_per_trigger or 0
        self._seconds = options.max_trigger_delay
        #: When a batch of any size may begin.
        self.due_at = -math.inf

    def begun(self, now: float) -> None:
        """Record that a batch begins."""
        self.due_at = now + self._seconds if self._min_bytes else -math.inf

    def is_too_little(self, waiting_bytes: int) -> bool:
        """Whether a batch of this size waits for more, unless it is due."""
        return waiting_bytes < self._min_bytes
