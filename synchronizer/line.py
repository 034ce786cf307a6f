"""Standing in line: how processes that keep losing races, or winning them, let each other have a turn.

Politeness only. What is safe is the compare of each append alone.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Final

from .clock import Deadline
from .errors import StoreUnavailableError
from .store import SegmentStore

#: A lost race counts for so much, an append for 1 off; from ``POLITE_FROM`` on a process queues for the store's fair
#: lock. So those who win most races get into line as well, and not only those who lose: a line that the winners stay
#: out of would keep the others waiting.
CONFLICT_WEIGHT: Final = 8
POLITE_FROM: Final = 16
MAX_CONTENTION: Final = 48
#: Who stands in line behind a process that is stopped waits in vain, for no longer than this: changes are to be told
#: within a second. It is far more than a line of those who run takes.
FAIR_LOCK_SECONDS: Final = 0.5
#: One who wins every race does not notice the others, and neither does one who has just come: at his first call, and
#: then every so many, he looks whether anybody stands in line; half as often after each look that found nobody, down
#: to a limit; much later, if the last time the line did not move.
LOOK_EVERY: Final = 16
LOOK_AT_LEAST_EVERY: Final = 64
LOOK_AGAIN_AFTER: Final = 1000


class Line:
    """The line for the fair lock of a segment, as one process stands in it: one place, whichever thread took it."""

    def __init__(self, store: SegmentStore, segment: str) -> None:
        self._store = store
        self._segment = segment
        self._contention = 0
        self._calls_until_look = 1
        self._look_every = LOOK_EVERY
        self._place: tuple[int, AbstractContextManager[bool]] | None = None  # the thread that took it, and the lock

    def won_race(self) -> None:
        self._contention = max(0, self._contention - 1)

    def lost_race(self) -> None:
        self._contention = min(MAX_CONTENTION, self._contention + CONFLICT_WEIGHT)
        self._look_every = LOOK_EVERY

    def join_if_polite(self, deadline: Deadline) -> bool:
        """Where races are lost, wait in line, so that those who are slow get their turn; whether this is now the turn.

        What is decided then, on the newest state, has everybody else in line behind it. The place is kept until this
        thread calls `leave`.
        """
        if self._place is not None or not self._store.guarantees.fair_lock:
            return False
        if self._contention < POLITE_FROM and not self._others_stand_in_line():
            return False
        try:
            lock = self._store.fair_lock(self._segment, deadline.remaining(FAIR_LOCK_SECONDS))
            has_turn = lock.__enter__()
        except StoreUnavailableError:
            return False
        self._place = threading.get_ident(), lock
        if not has_turn:  # whoever has it may be stopped
            self.leave()
            self._contention = 0
            self._calls_until_look = LOOK_AGAIN_AFTER
        return has_turn

    def leave(self) -> None:
        """Let the next process have its turn, if it was this thread that stood in line."""
        if self._place is not None and self._place[0] == threading.get_ident():
            lock, self._place = self._place[1], None
            lock.__exit__(None, None, None)

    def _others_stand_in_line(self) -> bool:
        """Whether others wait whom this process would keep waiting by winning every race. Looked up now and then."""
        self._calls_until_look -= 1
        if self._calls_until_look > 0:
            return False
        self._calls_until_look = self._look_every
        try:
            with self._store.fair_lock(self._segment, 0) as nobody:
                if nobody:
                    self._look_every = min(2 * self._look_every, LOOK_AT_LEAST_EVERY)
                    return False
        except StoreUnavailableError:
            return False
        self._contention = MAX_CONTENTION
        self._look_every = LOOK_EVERY
        return True
