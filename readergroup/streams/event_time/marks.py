"""The times that the writers of a stream have noted, and its watermarks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Self

import msgpack

from synchronizer import Map, UnknownUpdateError

from ..thinning import thinned

_FORMAT: Final = 1
#: Neighbours of a watermark are at most this part of its age apart.
_PRECISION: Final = 1 / 8
#: Beyond this size, which hundreds of segments reach, watermarks are further apart.
_MAX_BYTES: Final = 64 * 1024


class Mark(NamedTuple):
    """What one writer of a stream has noted: all its earlier events are stored, and it writes no further ones."""

    incarnation: str
    #: In microseconds since 1970, as all event times.
    time: int
    #: When, by the clock of the writer, in seconds since 1970.
    stored_at: float
    #: After how many seconds without a new mark the writer counts no more.
    timeout_seconds: float

    @property
    def ends_at(self) -> float:
        """When the writer counts no more, unless it stores a new mark, in seconds since 1970."""
        return self.stored_at + self.timeout_seconds

    def counts_at(self, now: float) -> bool:
        return abs(now - self.stored_at) <= self.timeout_seconds

    def encode(self) -> bytes:
        return bytes(msgpack.packb([_FORMAT, *self]))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls(*_unpacked(data))


def watermark_of(marks: Iterable[Mark], incarnation: str, now: float) -> int | None:
    """Return the time before which all events of the writers that count are stored; None if no writer counts."""
    times = (mark.time for mark in marks if mark.incarnation == incarnation and mark.counts_at(now))
    return min(times, default=None)


def held_until(own: Mark, marks: Iterable[Mark], now: float) -> float | None:
    """Return when the earliest of the marks ends, in seconds since 1970: then the watermark may move up to ``own``.

    None: no mark is earlier, or ``own`` ends before that.
    """
    counting = [mark for mark in marks if mark.incarnation == own.incarnation and mark.counts_at(now)]
    earliest = min((mark.time for mark in counting), default=own.time)
    if earliest >= own.time:
        return None
    ends_at = max(mark.ends_at for mark in counting if mark.time == earliest)
    return ends_at if ends_at < own.ends_at else None


class Watermark(NamedTuple):
    """All events before ``time``, of the writers that counted, are before the cut."""

    time: int
    #: When it was found, in seconds since 1970.
    at: float
    #: The cut, by number of segment.
    offsets: Mapping[int, int]


class WatermarkHistory(NamedTuple):
    """Watermarks of one incarnation of a stream, the earliest first. The older they are, the further apart."""

    incarnation: str
    watermarks: tuple[Watermark, ...]

    def encode(self) -> bytes:
        rows = [[time, at, dict(sorted(offsets.items()))] for time, at, offsets in self.watermarks]
        return bytes(msgpack.packb([_FORMAT, self.incarnation, rows]))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raise `UnknownUpdateError` if a newer release wrote it."""
        incarnation, rows = _unpacked(data)
        return cls(incarnation, tuple(Watermark(time, at, Map(offsets)) for time, at, offsets in rows))

    @property
    def time(self) -> int | None:
        """The newest watermark."""
        return self.watermarks[-1].time if self.watermarks else None

    @property
    def at(self) -> float:
        """When the newest watermark was found, in seconds since 1970."""
        return self.watermarks[-1].at if self.watermarks else -math.inf

    def with_watermark(self, found: Watermark) -> Self:
        """Add a later watermark."""

        def is_small(watermarks: tuple[Watermark, ...]) -> bool:
            return len(self._replace(watermarks=watermarks).encode()) <= _MAX_BYTES

        return self._replace(watermarks=thinned((*self.watermarks, found), _PRECISION, is_small))

    def bounds(self, is_passed: Callable[[Watermark], bool]) -> tuple[int | None, int | None]:
        """Return the times between which a group stands: the last watermark that it has passed, and the next one.

        ``is_passed`` says whether it has processed all that is before the cut of a watermark.
        """
        later: int | None = None
        for each in reversed(self.watermarks):
            if is_passed(each):
                return each.time, later
            later = each.time
        return None, later


def _unpacked(data: bytes) -> list[Any]:
    rest: list[Any]
    number, *rest = msgpack.unpackb(data, strict_map_key=False)
    if number != _FORMAT:
        raise UnknownUpdateError("a newer release wrote the event time of this stream; deploy that release here")
    return rest
