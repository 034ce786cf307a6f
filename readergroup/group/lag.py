"""How far a group is behind its streams."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from synchronizer import NotFoundError, SegmentInfo, SegmentStore, TruncatedError

from ..errors import CorruptDataError
from ..html import html_table
from ..streams.config import SegmentId, data_segment, stream_of
from ..streams.data.block import (
    HEADER_BYTES,
    block_count,
    block_end_of_events,
    block_length,
    block_time,
    parse_blocks,
)
from ..streams.data.segment_reader import block_start, read_block, read_fully
from .model.state import ReaderGroupState

#: How much of a segment is read to find the age and size of its next events.
_SAMPLE_BYTES: Final = 128 * 1024
#: How long a `LagMemory` keeps what it knows of events that wait: no one tells of their truncation.
_REMEMBERED_SECONDS: Final = 60.0
#: After how long without a move a segment with events counts as stalled.
STALLED_SECONDS: Final = 60.0

T = TypeVar("T")


class SegmentLag(BaseModel):
    """How far the group is behind in one segment."""

    model_config = ConfigDict(frozen=True)

    owner: str | None
    offset: int
    bytes: int
    #: Counted if up to about 128 KiB are left, else estimated from the next events, up to the end of the block that is
    #: at 128 KiB. If those behind them are much smaller or larger, the estimate is far off.
    events: int
    #: How long ago the next event was written, by the clocks of its writer and of this process; 0 without one.
    seconds: float
    #: For how long events have waited here without a move of the position, as far as this `ReaderGroup` has measured
    #: the lag, by `ReaderGroup.lag` or a `ReaderGroup.lag_notifier`.
    unmoved_seconds: float = 0.0

    @property
    def stalled(self) -> bool:
        """Whether the position has not moved for a minute although events wait."""
        return self.unmoved_seconds >= STALLED_SECONDS


class LagTotals(NamedTuple):
    """How far a group is behind in all of its segments together."""

    events: int
    bytes: int
    #: Of the segment that is furthest behind.
    seconds: float


class GroupLag(BaseModel):
    """How far the group is behind, per segment and in total, by the positions committed last."""

    model_config = ConfigDict(frozen=True)

    segments: Mapping[SegmentId, SegmentLag]

    def __repr__(self) -> str:
        total = f"{self.events} events, {self.bytes} bytes, {self.seconds:.3g} s"
        return f"GroupLag({total}, in {len(self.segments)} segments)"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return html_table(
            ("segment", "reader", "events", "bytes", "seconds"),
            [
                (segment, lag.owner or "", lag.events, lag.bytes, f"{lag.seconds:.3g}")
                for segment, lag in self.segments.items()
            ],
        )

    @property
    def totals(self) -> LagTotals:
        return LagTotals(self.events, self.bytes, self.seconds)

    @property
    def events(self) -> int:
        return sum(lag.events for lag in self.segments.values())

    @property
    def bytes(self) -> int:
        return sum(lag.bytes for lag in self.segments.values())

    @property
    def seconds(self) -> float:
        """The lag of the segment that is furthest behind."""
        return max((lag.seconds for lag in self.segments.values()), default=0.0)

    @property
    def stalled(self) -> Mapping[SegmentId, str | None]:
        """The segments that have `SegmentLag.stalled`, each with its reader; None: it has none."""
        return unmoved(self, STALLED_SECONDS)


def unmoved(lag: GroupLag, seconds: float) -> Mapping[SegmentId, str | None]:
    """Return the segments whose position has not moved for so long although events wait, each with its reader."""
    return {segment: each.owner for segment, each in lag.segments.items() if each.unmoved_seconds >= seconds}


class Movement:
    """Watches for how long positions have not moved although events wait. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[SegmentId, tuple[int, float]] = {}  # the offset of each segment with events, and since when

    def added_to(self, lag: GroupLag, now: float) -> GroupLag:
        """Return the lag with `SegmentLag.unmoved_seconds`. ``now`` is the time on a monotonic clock."""
        with self._lock:
            before = self._since
            self._since = {
                segment: before[segment] if before.get(segment, (None, 0.0))[0] == each.offset else (each.offset, now)
                for segment, each in lag.segments.items()
                if each.bytes
            }
            unmoved = {segment: now - since for segment, (_, since) in self._since.items()}
        return GroupLag(
            segments={
                segment: each.model_copy(update={"unmoved_seconds": unmoved[segment]}) if segment in unmoved else each
                for segment, each in lag.segments.items()
            }
        )


class StoredSegment(NamedTuple):
    """The data of a segment."""

    #: In the store.
    name: str
    #: Of the whole segment; 0 if it is deleted.
    length: int
    #: Whether the events that are left to read were counted: neither estimated nor deleted.
    is_counted: bool = True


class LagMemory:
    """What was measured of each segment. One that has not changed since then is not read again. For one thread."""

    def __init__(self) -> None:
        self._measured: dict[SegmentId, _Measured] = {}

    def unchanged(
        self, store: SegmentStore, wanted: Mapping[SegmentId, _Range], now: float
    ) -> Mapping[SegmentId, _Measured]:
        """Return what is known of the segments that need not be read. It asks the store once for all of them."""
        self._measured = {
            segment: found
            for segment, found in self._measured.items()
            if wanted.get(segment) == found.range and (not found.bytes or 0 <= now - found.at < _REMEMBERED_SECONDS)
        }
        known = {found.range.name: found.length for found in self._measured.values() if not found.is_final}
        try:
            changed = store.wait(known, 0.0) if known else frozenset()
        except NotFoundError:  # of one of them
            changed = frozenset(known)
        return {segment: found for segment, found in self._measured.items() if found.range.name not in changed}

    def remember(self, segment: SegmentId, measured: _Measured) -> None:
        self._measured[segment] = measured

    def stored(self) -> Mapping[SegmentId, StoredSegment]:
        """Return what is known of the data of each segment."""
        return {
            segment: StoredSegment(found.range.name, found.length, found.is_counted)
            for segment, found in self._measured.items()
        }


class _Ask(Protocol):
    def __call__(self, ask: Callable[[], T], /) -> T: ...


class _Range(NamedTuple):
    """What is left to read in a data segment: from the group's offset to its end, or as far as it is written."""

    name: str
    offset: int
    end: int | None


class _Measured(NamedTuple):
    range: _Range
    #: Of the whole segment, and whether it stays.
    length: int
    is_final: bool
    offset: int
    bytes: int
    events: int
    is_counted: bool
    #: When the next event was written, in seconds since 1970.
    written_at: float | None
    at: float

    def lag(self, owner: str | None, now: float) -> SegmentLag:
        seconds = 0.0 if self.written_at is None else max(0.0, now - self.written_at)
        return SegmentLag(owner=owner, offset=self.offset, bytes=self.bytes, events=self.events, seconds=seconds)


def group_lag(
    state: ReaderGroupState,
    offsets: Mapping[SegmentId, int],
    store: SegmentStore,
    now: float,
    memory: LagMemory | None = None,
    *,
    retry: _Ask = lambda ask: ask(),
) -> GroupLag:
    """Return the lag of a group that stands at ``offsets``. ``now`` is the time of day, in seconds since 1970.

    With a ``memory``, a truncation of events that wait shows up to a minute later. ``retry`` calls its argument, which
    asks the store, and may repeat that.
    """
    ranges = {
        segment: _Range(
            data_segment(segment, state.streams[stream_of(segment)].incarnation), offsets[segment], found.end
        )
        for segment, found in sorted(state.segments.items())
        if not found.completed
    }
    known = {} if memory is None else memory.unchanged(store, ranges, now)
    changed = [wanted.name for segment, wanted in ranges.items() if segment not in known]
    infos = retry(partial(store.infos, changed)) if changed else {}
    lags = {}
    for segment, wanted in ranges.items():
        measured = known.get(segment) or retry(partial(_measured, store, wanted, infos.get(wanted.name), now))
        if memory is not None:
            memory.remember(segment, measured)
        lags[segment] = measured.lag(state.segments[segment].owner, now)
    return GroupLag(segments=lags)


def _measured(store: SegmentStore, wanted: _Range, info: SegmentInfo | None, now: float) -> _Measured:
    try:
        if info is None:
            info = store.info(wanted.name)
        offset = max(wanted.offset, info.start_offset)
        end = info.length if wanted.end is None else min(wanted.end, info.length)
        sample = _sampled(store, wanted.name, offset, end, info.length) if end > offset else None
    except NotFoundError:  # the data was truncated, or the stream deleted
        return _Measured(wanted, 0, True, wanted.offset, 0, 0, False, None, now)
    except TruncatedError as error:  # since the store was asked for the info
        found = _measured(store, wanted._replace(offset=error.start_offset), None, now)
        return found._replace(range=wanted)
    behind = max(0, end - offset)
    events, looked_at, written_at = sample or (0, end, None)
    is_counted = looked_at >= end
    if not is_counted:
        # The rest has at least one event.
        events = max(events + 1, round(events * behind / (looked_at - offset)))
    return _Measured(wanted, info.length, info.sealed, offset, behind, events, is_counted, written_at, now)


class _Sample(NamedTuple):
    """The next events of a segment."""

    events: int
    #: Where these events end.
    end: int
    #: Of the first one, in seconds since 1970.
    written_at: float


def _sampled(store: SegmentStore, name: str, offset: int, end: int, length: int) -> _Sample:
    """Count the events before ``end`` in the next blocks, of which one read brings the headers.

    A block that is longer than the read counts as a whole: without it, the small events before a large one would stand
    for all bytes.
    """
    at = start = block_start(store, name, offset)
    data = memoryview(read_fully(store, name, start, min(_SAMPLE_BYTES, length - start)))
    if len(data) < HEADER_BYTES:
        raise CorruptDataError(
            "the segment ends inside a block; restore the store from a backup", segment=name, offset=start
        )
    events = 0
    while at < end and len(rest := data[at - start :]) >= HEADER_BYTES:
        events += _events_between(store, name, at, rest, offset, end)
        at = block_end_of_events(at, rest)
    return _Sample(events, at, block_time(data) / 1_000_000)


def _events_between(store: SegmentStore, name: str, at: int, data: memoryview, offset: int, end: int) -> int:
    """Return how many events from ``offset`` on and before ``end`` the block has that starts at ``at``."""
    length, count = block_length(name, at, data), block_count(data)
    if offset <= at and (count <= 1 or at + length <= end):
        return count
    if length <= len(data):
        block = parse_blocks(name, at, bytes(data[:length]))[0][0]
    else:
        block = read_block(store, name, at, length)
    return bisect_left(block.starting_at(max(offset, at)).offsets, end)
