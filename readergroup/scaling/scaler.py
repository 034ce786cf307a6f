"""`Scaler`: looks at a group's load and decides by a policy, remembering what it decided before."""

from __future__ import annotations

import threading
from typing import Final

from .policy import GroupLoad, ReaderScalingPolicy, ScalingDecision, ScalingHistory, decide
from .scaled_group import ScaledGroup

#: How often those who scale look at the lag.
LOOK_SECONDS: Final = 2.0


class Scaler:
    """The decisions of one policy for one group. Threads may share it."""

    def __init__(
        self, group: ScaledGroup, policy: ReaderScalingPolicy, *, history: ScalingHistory | None = None
    ) -> None:
        self._group = group
        self._policy = policy
        self._history = history
        self._lock = threading.Lock()

    def decide(self, *, readers: int | None = None) -> ScalingDecision:
        """The decision now. ``readers`` are counted in place of those in the group."""
        with self._lock:
            lag = self._group.lag()
            state, revision = self._group.synchronizer.snapshot_of_state
            load = GroupLoad(
                number_of_segments=state.number_of_segments,
                number_of_readers=state.number_of_readers if readers is None else readers,
                events_behind=lag.events,
                seconds_behind=lag.seconds,
                revision=revision,
            )
            now = self._group.synchronizer.clock.monotonic()
            decision, self._history = decide(self._policy, load, self._history, now)
            return decision

    @property
    def number_of_segments(self) -> int | None:
        """As the last decision saw it."""
        return None if self._history is None else self._history.number_of_segments
