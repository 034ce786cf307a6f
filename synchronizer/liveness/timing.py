"""When a process counts as gone: a value that it keeps changing has stood still, on the observer's own clock."""

from __future__ import annotations

from typing import Final

#: A holder stops acting when this part of the timeout has passed since it sent its last accepted renewal. The rest is
#: for clocks that run at different speeds.
STOP_AFTER: Final = 0.8
#: Renewals per timeout.
RENEWALS: Final = 3
#: What may stand still is looked at this often, or six times per timeout if that is shorter.
OBSERVE_SECONDS: Final = 0.5


def observe_interval(timeout_seconds: float) -> float:
    """How many seconds are between two looks at what may stand still for the timeout."""
    return min(OBSERVE_SECONDS, timeout_seconds / (2 * RENEWALS))
