"""The cut of a stream at a time of day."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from synchronizer import Deadline, InvalidArgumentError
from synchronizer.backoff import Backoff

from .config import StreamCut
from .manager import StreamManager
from .time_search import offsets_at

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def cut_at(streams: StreamManager, stream: str, time: datetime, *, timeout: float | None = None) -> StreamCut:
    """See `BatchClient.cut_at`."""
    if not isinstance(time, datetime):
        raise InvalidArgumentError("time must be a datetime with a timezone, such as datetime.now(UTC)", time=time)
    if time.tzinfo is None:
        raise InvalidArgumentError("time needs a timezone, such as that of datetime.now(UTC)", time=time.isoformat())
    microseconds = (time - _EPOCH) // timedelta(microseconds=1)
    deadline = Deadline(streams.clock, streams.timeout if timeout is None else timeout)
    state = streams.fetch_state(stream, timeout=deadline.remaining())
    return state.cut(offsets_at(streams.store, state, microseconds, Backoff(streams.clock, deadline)))
