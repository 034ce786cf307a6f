"""A writer that gives each event its event time by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from synchronizer import InvalidArgumentError
from synchronizer.callables import check_callable, check_returned

from ..data.block import Headers
from ..data.moments import time_of
from ..manager import StreamManager
from ..serializers import Serializer
from ..transactions.transaction import writes_singly
from ..writing.writer import EventWriter
from .defaults import EVENT_TIME_TIMEOUT_SECONDS
from .noting import EventTimeOf

T = TypeVar("T")


def open_writer(
    manager: StreamManager,
    stream: str,
    *,
    serializer: Serializer[T],
    event_time: EventTimeOf[T],
    event_time_timeout_seconds: float = EVENT_TIME_TIMEOUT_SECONDS,
    timeout: float | None = None,
    max_event_bytes: int | None = None,
) -> EventWriter[T]:
    """Return a writer with automatic event times. See `Client.writer`."""
    if event_time == "now":
        kind: type[_TimedWriter[T]] = _ClockWriter
    elif isinstance(event_time, str):
        raise InvalidArgumentError('event_time must be "now" or a function of the event', event_time=event_time)
    else:
        check_callable(event_time, "event_time", takes="event", stream=stream)
        event_time = _checked(event_time)
        kind = _TimedWriter
    return kind(
        manager,
        stream,
        serializer=serializer,
        event_time=event_time,
        event_time_timeout_seconds=event_time_timeout_seconds,
        timeout=timeout,
        max_event_bytes=max_event_bytes,
    )


def _checked(find_time: Callable[[T], datetime | None]) -> Callable[[T], datetime | None]:
    def checked(event: T) -> datetime | None:
        time = find_time(event)
        if type(time) is not datetime:  # the check takes as long as all the rest
            check_returned(time, "event_time")
        return time

    return checked


class _TimedWriter(EventWriter[T]):
    """Takes the event time of each event from a function, unless the call gives it."""

    def __init__(self, manager: StreamManager, stream: str, *, event_time: Any, **options: Any) -> None:
        self._find_time: Callable[[T], datetime | None] = event_time
        super().__init__(manager, stream, event_time_of=event_time, **options)

    def _times_of(self, events: Sequence[T], event_time: datetime | None) -> Sequence[datetime | None]:
        if event_time is not None:
            return [event_time] * len(events)
        return [self._find_time(each) for each in events]  # `map` would end at a StopIteration

    def write(
        self,
        event: T,
        routing_key: str | None = None,
        headers: Headers | None = None,
        event_time: datetime | None = None,
    ) -> None:
        (time,) = self._times_of([event], event_time)
        # With headers, if only empty ones: `EventWriter.write` then takes the way that admits times.
        super().write(event, routing_key, {} if headers is None else headers, event_time=time)

    def write_batch(self, events: Iterable[T], routing_keys: Iterable[str | None] | None = None) -> None:
        raise writes_singly(self.stream)

    def write_arrow(
        self, table: object, *, data: str, routing_key: str | None = None, headers: str | None = None
    ) -> None:
        raise writes_singly(self.stream)


class _ClockWriter(_TimedWriter[T]):
    """Takes the time of writing, and notes it by itself."""

    def __init__(self, manager: StreamManager, stream: str, **options: Any) -> None:
        super().__init__(manager, stream, **{**options, "event_time": self._now})
        self._notes.is_automatic = True
        try:
            self._notes.schedule()
        except BaseException:
            self._end()
            raise

    def _now(self, event: object = None) -> datetime:
        # A clock that goes back must not contradict the time that was noted.
        with self._lock:
            return time_of(max(int(self._clock.time() * 1_000_000), self._notes.noted))

    def _times_of(self, events: Sequence[T], event_time: datetime | None) -> Sequence[datetime | None]:
        return [event_time] * len(events)

    def _admitted(self, event_times: Sequence[datetime | None]) -> Sequence[int | None]:
        now = max(int(self._clock.time() * 1_000_000), self._notes.noted)
        return [now if time is None else time for time in super()._admitted(event_times)]
