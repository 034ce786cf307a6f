"""`Scaler`: checks the load of a group and decides by a policy, with its earlier decisions in mind."""

from __future__ import annotations

import threading
from typing import Final

from .policy import GroupLoad, ReaderScalingPolicy, ScalingDecision, ScalingHistory, decide
from .scaled_group import ScaledGroup

#: How often a pool or an autoscaling callback checks the lag.
LOOK_SECONDS: Final = 2.0


class Scaler:
    """Decides by one policy for one group. Threads may share it."""

    def __init__(
        self, group: ScaledGroup, policy: ReaderScalingPolicy, *, history: ScalingHistory | None = None
    ) -> None:
        self._group = group
        self._policy = policy
        self._history = history
        self._lock = threading.Lock()

    def decide(self, *, readers: int | None = None) -> ScalingDecision:
        """Return the decision now. ``readers`` replaces the number of readers in the group."""
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
        """The number of segments that the last decision was based on."""
        return None if self._history is None else self._history.number_of_segments
