"""When a process counts as dead: the value that it renews has not changed for the timeout, on the observer's clock."""

from __future__ import annotations

from typing import Final

#: A holder stops acting when this fraction of the timeout has passed since it sent its last accepted renewal. The rest
#: allows for clocks that run at different speeds.
STOP_AFTER: Final = 0.8
#: Renewals per timeout.
RENEWALS: Final = 3
#: An observer looks at a value at this interval, or six times per timeout if that is shorter.
OBSERVE_SECONDS: Final = 0.5


def observe_interval(timeout_seconds: float) -> float:
    """Return how many seconds an observer waits between two looks at a value with this timeout."""
    return min(OBSERVE_SECONDS, timeout_seconds / (2 * RENEWALS))
