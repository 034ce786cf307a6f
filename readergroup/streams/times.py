"""The cut of a stream at a time of day."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from synchronizer import Deadline
from synchronizer.backoff import Backoff

from .config import StreamCut
from .data.moments import microseconds_of
from .time_search import offsets_at

if TYPE_CHECKING:
    from .manager import StreamManager


def cut_at(streams: StreamManager, stream: str, time: datetime, *, timeout: float | None = None) -> StreamCut:
    """See `BatchClient.cut_at`."""
    microseconds = microseconds_of(time, "time")
    deadline = Deadline(streams.clock, streams.timeout if timeout is None else timeout)
    state = streams.fetch_state(stream, timeout=deadline.remaining())
    return state.cut(offsets_at(streams.store, state, microseconds, Backoff(streams.clock, deadline)))
