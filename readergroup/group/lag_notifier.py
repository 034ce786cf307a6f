"""Notifies when a group falls behind and catches up, and when a segment stalls.

The lag is not in the log of the group: it is what this process measures at each poll. So each process notifies its own
listeners, and no listener is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from notifications import Change, Notification, PollingNotifier
from notifications.system import Listener
from synchronizer import InvalidArgumentError, NotFoundError, StateSynchronizer
from synchronizer.arguments import check_count, check_duration

from ..streams.config import SegmentId
from .lag import GroupLag, unmoved
from .model.state import ReaderGroupState
from .updater import is_of_another_stream

#: A group has caught up when its lag is at most this part of each threshold.
CAUGHT_UP: Final = 0.5
INTERVAL_SECONDS: Final = 2.0


class LagNotification(Notification):
    """The lag of the group has crossed a threshold, upward or downward, or segments have stalled or move again.

    Each process measures on its own, so ``key`` identifies a notification in one process only.
    """

    #: Whether the lag is above a threshold: True until it is at most half of each.
    behind: bool
    events: int
    bytes: int
    seconds: float
    #: The segments whose position does not move although events wait, each with its reader; None: it has none.
    stalled: Mapping[SegmentId, str | None]


class LagThresholds(NamedTuple):
    """When a group is behind. None: never because of this."""

    seconds: float | None
    events: int | None
    stalled_seconds: float | None

    def check(self) -> None:
        check_duration(self.seconds, "threshold_seconds", above_zero=True, finite=True, or_none=True)
        check_count(self.events, "threshold_events", or_none=True)
        check_duration(self.stalled_seconds, "stalled_seconds", above_zero=True, finite=True, or_none=True)
        if self.seconds is self.events is self.stalled_seconds is None:
            raise InvalidArgumentError("give a threshold: threshold_seconds, threshold_events or stalled_seconds")

    def level(self, lag: GroupLag, *, was_behind: bool) -> LagLevel:
        """Return the present level. Between half of a threshold and the threshold, it does not change."""
        measured = [(lag.seconds, self.seconds), (float(lag.events), self.events)]
        parts = [value / limit for value, limit in measured if limit is not None]
        stalled = {} if self.stalled_seconds is None else unmoved(lag, self.stalled_seconds)
        highest = max(parts, default=0.0)
        return LagLevel(highest > 1 or (was_behind and highest > CAUGHT_UP), stalled)


class LagLevel(NamedTuple):
    behind: bool
    stalled: Mapping[SegmentId, str | None]


class _Measured(NamedTuple):
    lag: GroupLag
    #: Seconds since 1970.
    at: float


class LagNotifier(PollingNotifier[ReaderGroupState, LagNotification]):
    """Notify when the lag crosses a threshold, and when segments stall or move again.

    A new listener hears the present level. The lag is measured every two seconds while there are listeners.
    """

    def __init__(
        self,
        synchronizer: StateSynchronizer[ReaderGroupState],
        *,
        source: str,
        lag: Callable[[], GroupLag],
        thresholds: LagThresholds,
    ) -> None:
        super().__init__(synchronizer, source=source, interval_seconds=INTERVAL_SECONDS)
        self._lag = lag
        self._thresholds = thresholds
        self._measured: _Measured | None = None  # by the last poll; None: it could not measure
        # What listeners were told; None: nothing, or so long ago that the next poll tells the level anew.
        self._told: LagLevel | None = None
        self._told_of = _Measured(GroupLag(segments={}), float("-inf"))

    def register_listener(
        self, listener: Listener[LagNotification], *, durable: str | None = None
    ) -> Callable[[], None]:
        """Tell ``listener`` the present level, and each change of it.

        Args:
            listener: As of `PollingNotifier.register_listener`.
            durable: Not for lag, which is not in the log.

        Raises:
            InvalidArgumentError: ``durable`` is given.
        """
        if durable is not None:
            raise InvalidArgumentError("lag is measured, not logged, so its listeners cannot be durable", name=durable)
        return super().register_listener(listener)

    def before_poll(self) -> None:
        self._measured = None
        try:
            lag = self._lag()
        except NotFoundError as error:
            if is_of_another_stream(error):  # the lag of the group is unknown
                raise
            lag = GroupLag(segments={})
        self._measured = _Measured(lag, self.synchronizer.clock.time())

    def detect(
        self, before: ReaderGroupState | None, after: ReaderGroupState, change: Change
    ) -> Iterable[LagNotification]:
        if before is not None:
            return
        if change.seen_at.timestamp() - self._told_of.at > 2 * INTERVAL_SECONDS:
            self._told = None  # nobody has listened meanwhile
        if self._told is not None:
            yield self._notification(change, self._told)

    def look(self, state: ReaderGroupState, change: Change) -> Iterable[LagNotification]:
        if self._measured is None:
            return
        self._told_of = self._measured
        was_behind = self._told is not None and self._told.behind
        level = self._thresholds.level(self._told_of.lag, was_behind=was_behind)
        if level != self._told:
            self._told = level
            yield self._notification(change, level)

    def step(self) -> float:
        self.poll()
        return self.synchronizer.clock.monotonic() + INTERVAL_SECONDS

    def _notification(self, change: Change, level: LagLevel) -> LagNotification:
        lag = self._told_of.lag
        return LagNotification(
            change=change,
            behind=level.behind,
            events=lag.events,
            bytes=lag.bytes,
            seconds=lag.seconds,
            stalled=dict(sorted(level.stalled.items())),
        )
