"""When a process checks a growing log again."""

from __future__ import annotations

from typing import Final

from synchronizer import Clock

#: A process checks at once this many times in a row. Then it checks in intervals, until two pass without news.
AT_ONCE: Final = 8
INTERVAL_SECONDS: Final = 0.05


class Pace:
    """When one thread checks its group again.

    When a thousand readers start, hundreds of entries per second arrive. If each reader checked after each entry, that
    would be a million calls of the store per second. So a fast series of entries shares one check.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_at = float("-inf")
        self._in_a_row = 0

    def looked(self) -> None:
        """Note that there was something new."""
        now = self._clock.monotonic()
        self._in_a_row = self._in_a_row + 1 if now - self._looked_at < 2 * INTERVAL_SECONDS else 0
        self._looked_at = now

    @property
    def pause(self) -> float:
        """How many seconds to wait before the next check."""
        if self._in_a_row < AT_ONCE:
            return 0.0
        return max(0.0, self._looked_at + INTERVAL_SECONDS - self._clock.monotonic())
