"""How many readers a group should have, decided on the newest sample."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from ..scaling.policy import GroupLoad, ReaderScalingPolicy, ScalingDecision, ScalingHistory, decide
from .sample import GroupSample

#: How many groups and policies are remembered. Another one begins without a history.
MAX_HISTORIES: Final = 256


class Decisions:
    """Decides by any policy for any group, with the earlier decisions in mind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histories: OrderedDict[tuple[str, ReaderScalingPolicy], ScalingHistory] = OrderedDict()

    def decide(
        self, sample: GroupSample, policy: ReaderScalingPolicy, now: float
    ) -> tuple[ScalingDecision, int | None]:
        """Return the decision, and the number of readers of the one before. ``now`` is a time of the clock."""
        load = GroupLoad(
            number_of_segments=sample.state.number_of_segments,
            number_of_readers=sample.state.number_of_readers,
            events_behind=sample.lag.events,
            seconds_behind=sample.lag.seconds,
            revision=sample.revision,
        )
        key = sample.name, policy
        with self._lock:
            before = self._histories.pop(key, None)
            decision, self._histories[key] = decide(policy, load, before, now)
            if len(self._histories) > MAX_HISTORIES:
                self._histories.popitem(last=False)
        return decision, None if before is None else before.desired_readers
