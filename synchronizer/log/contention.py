"""Standing in line: how processes that keep losing races, or winning them, let each other have a turn.

Politeness only. What is safe is the compare of each append alone.
"""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, suppress
from typing import Final

from ..clock import Clock, Deadline, growing_pause
from ..errors import ReaderGroupError
from ..store import SegmentStore

#: A lost race counts for so much, an append for 1 off; from ``POLITE_FROM`` on a process queues for the store's fair
#: lock. So those who win most races get into line as well, and not only those who lose: a line that the winners stay
#: out of would keep the others waiting.
CONFLICT_WEIGHT: Final = 8
POLITE_FROM: Final = 16
MAX_CONTENTION: Final = 48
#: One who wins every race does not notice the others, and neither does one who has just come: at his first call, and
#: then every so many, he looks whether anybody stands in line; half as often after each look that found nobody, down
#: to a limit.
LOOK_EVERY: Final = 16
LOOK_AT_LEAST_EVERY: Final = 64
#: Who stands in line behind a process that is stopped waits in vain, for no longer than this: changes are to be told
#: within a second. It is far more than a line of those who run takes.
PATIENCE_SECONDS: Final = 0.5
#: Then he goes on without, and stands there again after a pause that doubles each time the line has not moved.
FIRST_PAUSE_SECONDS: Final = 0.1
MAX_PAUSE_SECONDS: Final = 5.0


class Trust:
    """How long to stand in a line that may not move. Times are seconds of one clock that does not go back.

    Who was there in vain stands there next for as long as he has paused before. That is long enough for a line that
    has begun to move slowly, since those who are not in it outrun whoever has his turn. A line that never moves takes
    at most half of the time of a process at first, and an eleventh in the long run.
    """

    def __init__(self) -> None:
        self._times_in_vain = 0
        self._pause = 0.0
        self._again_at = -math.inf

    @property
    def is_whole(self) -> bool:
        return self._times_in_vain == 0

    def patience(self, now: float) -> float:
        """How many seconds to stand in line now; 0 for going on without."""
        if self.is_whole:
            return PATIENCE_SECONDS
        return min(self._pause, PATIENCE_SECONDS) if now >= self._again_at else 0.0

    def line_moved(self) -> None:
        self._times_in_vain = 0

    def line_stood_still(self, now: float) -> None:
        self._times_in_vain += 1
        self._pause = growing_pause(self._times_in_vain, first=FIRST_PAUSE_SECONDS, most=MAX_PAUSE_SECONDS)
        self._again_at = now + self._pause


class Line:
    """The line for the fair lock of a segment, as one process stands in it: one place, whichever thread took it."""

    def __init__(self, store: SegmentStore, segment: str, clock: Clock) -> None:
        self._store = store
        self._segment = segment
        self._clock = clock
        self._trust = Trust()
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
        thread calls `leave`, which it does also when this raises.
        """
        if self._place is not None or not self._store.guarantees.fair_lock:
            return False
        patience = PATIENCE_SECONDS if self._trust.is_whole else self._trust.patience(self._clock.monotonic())
        if not patience or (self._contention < POLITE_FROM and not self._others_stand_in_line()):
            return False
        try:
            has_turn = self._stand(deadline.remaining(patience))
        except ReaderGroupError:  # what is asked of the store next meets the same, if it lasts
            self._place = None
            return False
        if has_turn:
            self._trust.line_moved()
        else:  # whoever has it may be stopped
            self.leave()
            self._trust.line_stood_still(self._clock.monotonic())
            self._calls_until_look = 1
        return has_turn

    def leave(self) -> None:
        """Let the next process have its turn, if it was this thread that stood in line. It may be called twice."""
        place = self._place
        if place is not None and place[0] == threading.get_ident():
            with suppress(ReaderGroupError):  # the store lets go of it when it can
                place[1].__exit__(None, None, None)
            self._place = None

    def _stand(self, patience: float) -> bool:
        """Whether it is this thread's turn, within ``patience`` seconds. `leave` has to be called in any case."""
        lock = self._store.fair_lock(self._segment, patience)
        self._place = threading.get_ident(), lock  # before it is taken: an interrupted thread lets go of it
        return lock.__enter__()

    def _others_stand_in_line(self) -> bool:
        """Whether others wait whom this process would keep waiting by winning every race. Looked up now and then."""
        self._calls_until_look -= 1
        if self._calls_until_look > 0:
            return False
        self._calls_until_look = self._look_every
        try:
            is_free = self._stand(0)
        except ReaderGroupError:
            self._place = None
            return False
        self.leave()
        if is_free:
            self._trust.line_moved()
            self._look_every = min(2 * self._look_every, LOOK_AT_LEAST_EVERY)
            return False
        self._contention = MAX_CONTENTION
        self._look_every = LOOK_EVERY
        return True
