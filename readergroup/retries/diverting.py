"""Stores the events of one worker that failed until their next attempt is due, or tells what goes to dead letters."""

from __future__ import annotations

import threading
from typing import Any

from synchronizer import Clock

from ..scaling.retry import DelayedRetry
from ..streams.data.moments import microseconds_of
from ..streams.data.write_batch import check_size
from ..streams.event import Event
from ..streams.manager import StreamManager
from .attempts import FailedAttempts
from .waiting import Diverting, WaitingEvent


class DelayedEvents:
    """The failed events of one worker. For one thread."""

    def __init__(
        self, streams: StreamManager, group: str, retry: DelayedRetry, clock: Clock, stopping: threading.Event
    ) -> None:
        self._retry = retry
        self._clock = clock
        self._diverting = Diverting(streams.store, group, clock, streams.timeout, stopping)

    def failed(self, event: Event[Any]) -> FailedAttempts:
        """Return where the event comes from, and the attempts before this delivery."""
        return FailedAttempts.of(event, self._retry.retry_stream)

    def divert(self, event: Event[Any], error: str, attempts: int) -> float | None:
        """Store the event until its next attempt. Return the delay; None after the last one.

        Raises:
            EventTooLargeError: The event and what is to be known of its attempts are too large.
        """
        failed = self.failed(event).with_failure(error, attempts)
        if len(failed.errors) > len(self._retry.delays):
            return None
        delay = self._retry.delays[len(failed.errors) - 1]
        headers = failed.all_headers
        check_size([event.raw], headers, self._retry.retry_stream)
        time = None if event.event_time is None else microseconds_of(event.event_time, "event_time")
        waiting = WaitingEvent(self._clock.time() + delay, event.pointer, event.routing_key, event.raw, headers, time)
        # If the segment has a newer owner, that one decides about the event.
        self._diverting.put(waiting, delay, event.fencing_token)
        return delay
