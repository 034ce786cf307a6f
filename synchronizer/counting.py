"""What a process has done, as plain numbers that cost an addition each, once for each append, batch or commit.

Nothing here takes a lock: a signal handler or a forked child could wait for it forever. An addition to an attribute or
an item is one step for other threads if the summand is ready, because the interpreter changes threads only where it
calls or jumps. So compute the summand in a statement of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Final

#: The upper bounds, in seconds, by which durations are counted. The last count is of longer ones.
LATENCY_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Latencies:
    """How many calls took how long."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        #: One for each bound, and one for longer calls.
        self.counts = [0] * (len(LATENCY_BOUNDS) + 1)
        #: The sum of all durations.
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        index = bisect_left(LATENCY_BOUNDS, seconds)
        self.counts[index] += 1
        self.seconds += seconds


class StoreCounters:
    """What was asked of one store."""

    __slots__ = ("appends", "errors")

    def __init__(self) -> None:
        #: The appends that the store answered, refused ones included.
        self.appends = Latencies()
        #: The calls that the store did not answer, by the kind of the error.
        self.errors: defaultdict[str, int] = defaultdict(int)
