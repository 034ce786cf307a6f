"""Where a group stands in the event time of its streams, as one of its readers sees it."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from synchronizer import Deadline, InvalidArgumentError, NotFoundError

from ..streams.config import FrozenModel
from ..streams.data.moments import time_of
from ..streams.event_time.marks import Watermark
from ..streams.state import StreamState
from .model.positions import Positions, positions
from .updater import GroupUpdater, check_same_stream, leases_and_state

#: For how long an answer is repeated.
_FRESH_SECONDS: Final = 1.0


class TimeWindow(FrozenModel):
    """Between which watermarks of a stream a reader group stands."""

    #: The group has processed all earlier events of the writers that counted; None if no watermark is that early.
    lower_bound: datetime | None
    #: What ``lower_bound`` becomes when the group has reached the next watermark; None if there is no later one yet.
    upper_bound: datetime | None


class TimeWindows:
    """Looks up time windows for one reader, each at most once a second."""

    def __init__(self, updater: GroupUpdater) -> None:
        self._updater = updater
        self._known: dict[str, tuple[float, TimeWindow]] = {}

    def of(self, stream: str, own: Positions, deadline: Deadline) -> TimeWindow:
        """Return the window of the group in a stream. ``own`` are the positions of the reader, committed or not."""
        now = self._updater.synchronizer.clock.monotonic()
        known = self._known.get(stream)
        if known is None or now >= known[0] + _FRESH_SECONDS:
            known = self._known[stream] = now, self._look(stream, own, deadline)
        return known[1]

    def _look(self, stream: str, own: Positions, deadline: Deadline) -> TimeWindow:
        backoff = self._updater.streams.metadata.backoff(deadline)
        leases, state = leases_and_state(self._updater.synchronizer, backoff, deadline)
        if stream not in state.streams:
            raise InvalidArgumentError(
                "the group does not read this stream", stream=stream, reads=", ".join(sorted(state.streams))
            )
        offsets = dict(positions(state, leases))
        for segment, position in own.items():
            found = state.segments.get(segment)
            if found is not None and found.token == position.token:
                offsets[segment] = max(offsets[segment], position.offset)
        streams = self._updater.streams
        metadata = streams.fetch_state(stream, timeout=deadline.remaining())
        check_same_stream(metadata, state.streams[stream].incarnation)
        history = streams.watermarks.history(stream, metadata.incarnation, deadline)
        cut = state.cuts_at({segment: offsets[segment] for segment in state.offsets})[stream]

        def is_passed(watermark: Watermark) -> bool:
            return _is_forgotten(metadata, watermark) or metadata.precedes(metadata.cut(watermark.offsets), cut)

        lower, upper = history.bounds(is_passed)
        return TimeWindow(lower_bound=_time_of(lower), upper_bound=_time_of(upper))


def _time_of(watermark: int | None) -> datetime | None:
    return None if watermark is None else time_of(watermark)


def _is_forgotten(metadata: StreamState, watermark: Watermark) -> bool:
    """Return whether the stream was truncated so far, and so long ago, that nothing before the watermark is left."""
    try:
        metadata.check_cut(metadata.cut(watermark.offsets))
    except (NotFoundError, InvalidArgumentError):
        return True
    return False
