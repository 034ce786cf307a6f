"""How soon a process looks again at a log that goes on growing."""

from __future__ import annotations

from typing import Final

from synchronizer import Clock

#: So many times in a row a process looks at once; from then on in intervals, until nothing came for two of them.
AT_ONCE: Final = 8
INTERVAL_SECONDS: Final = 0.05


class Pace:
    """When one thread looks at its group again.

    Where a thousand readers start, hundreds of entries come in a second. If each reader looked after each entry, that
    would be a million calls of the store a second. So what comes fast is looked at together.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_at = float("-inf")
        self._in_a_row = 0

    def looked(self) -> None:
        """There was something new."""
        now = self._clock.monotonic()
        self._in_a_row = self._in_a_row + 1 if now - self._looked_at < 2 * INTERVAL_SECONDS else 0
        self._looked_at = now

    @property
    def pause(self) -> float:
        """For how many seconds from now on nobody needs to look."""
        if self._in_a_row < AT_ONCE:
            return 0.0
        return max(0.0, self._looked_at + INTERVAL_SECONDS - self._clock.monotonic())
