"""Tells listeners which streams the events of an outbox do not reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from notifications import Change, Notification, PollingNotifier
from synchronizer import StateSynchronizer, Update

from .state import OutboxState, ReportMoving, ReportStuck
from .table import StreamRows

_TOO_OLD: Final = "no relay has moved the events"


class OutboxNotification(Notification):
    """Events wait in the outbox because their streams take none or no relay runs, or they move again."""

    #: The reason for each stream whose events wait; empty when all events move.
    stuck: Mapping[str, str]


class OutboxNotifier(PollingNotifier[OutboxState, OutboxNotification]):
    """Notify when the events of a stream are stuck in an outbox, and when they move again.

    A relay reports a stream that refuses its events. The notifier reports events that are older than
    ``stuck_after_seconds``, for any reason, such as that no relay runs.
    """

    def __init__(
        self,
        synchronizer: StateSynchronizer[OutboxState],
        *,
        source: str,
        lag: Callable[[], Sequence[StreamRows]],
        stuck_after_seconds: float,
    ) -> None:
        super().__init__(synchronizer, source=source)
        self._lag = lag
        self._stuck_after_seconds = stuck_after_seconds

    def before_poll(self) -> None:
        seconds = {each.stream: each.seconds for each in self._lag()}
        stuck = {stream for stream, age in seconds.items() if age > self._stuck_after_seconds}
        reason = f"{_TOO_OLD} for {self._stuck_after_seconds:g} s; see that one runs"

        def report(state: OutboxState) -> Iterable[Update[OutboxState]]:
            yield from (ReportStuck(stream=each, reason=reason) for each in sorted(stuck - set(state.stuck)))
            too_old = {stream for stream, why in state.stuck.items() if why.startswith(_TOO_OLD)}
            moving = (too_old - stuck) | (set(state.stuck) - set(seconds))
            yield from (ReportMoving(stream=each) for each in sorted(moving))

        self.synchronizer.update_state(report)

    def detect(self, before: OutboxState | None, after: OutboxState, change: Change) -> Iterable[OutboxNotification]:
        if after.stuck != (OutboxState() if before is None else before).stuck:
            yield OutboxNotification(change=change, stuck=dict(sorted(after.stuck.items())))
