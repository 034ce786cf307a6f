"""The events of a group that wait for their next attempt, in a segment for each delay.

All events of one segment wait equally long, so the first one is due first. A segment is named after its delay, so a
process with other delays finds it too. Events that were returned to the group are truncated.

Each event waits once, though a process may die after it stored the event and before the position of its reader moved.
The append also changes an attribute of the segment that the event was read from, to the fencing token of its owner. A
new owner first sets the attribute, so that no append of the former one succeeds any more, and then reads which of its
events wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgpack

from synchronizer import Clock, Deadline, NotFoundError, SegmentStore, TruncatedError, UnsupportedError
from synchronizer.backoff import Backoff
from synchronizer.compare_and_set import Cell, Outcome
from synchronizer.recipes.queue.frames import encode_frame, read_frames

from ..streams.data.block import Headers
from ..streams.event import EventPointer

_FORMAT: Final = 1
_FORMAT_WITH_EVENT_TIME: Final = 2
_PREFIX: Final = "retries/"
#: Of a delay, in milliseconds.
_DIGITS: Final = 15
_SOURCES: Final = "from/"
#: `summary` counts no more events.
_MOST_COUNTED: Final = 100_000


class WaitingEvent(NamedTuple):
    """An event that waits for its next attempt."""

    #: In seconds since 1970.
    due: float
    #: That of the delivery that failed.
    pointer: EventPointer
    routing_key: str | None
    data: bytes
    headers: Headers
    #: In microseconds since 1970.
    event_time: int | None = None

    def encode(self) -> bytes:
        fields = [_FORMAT, self.due, list(self.pointer), self.routing_key, self.data, dict(self.headers)]
        if self.event_time is not None:
            fields = [_FORMAT_WITH_EVENT_TIME, *fields[1:], self.event_time]
        return encode_frame(bytes(msgpack.packb(fields, unicode_errors="surrogatepass")))

    @classmethod
    def decode(cls, encoded: bytes) -> WaitingEvent:
        version, *fields = msgpack.unpackb(encoded, unicode_errors="surrogatepass")
        if version not in (_FORMAT, _FORMAT_WITH_EVENT_TIME):
            raise UnsupportedError("a newer release of the SDK has stored this event; use that release", format=version)
        due, pointer, *rest = fields
        return cls(due, EventPointer(*pointer), *rest)


class WaitingFrame(NamedTuple):
    """A waiting event, and where it is in its segment."""

    event: WaitingEvent
    offset: int
    end: int


class Summary(NamedTuple):
    """What waits: how many events, at least if ``is_all`` is false, and when the first one is due."""

    events: int
    is_all: bool
    due: float | None


class DelayLog:
    """The events of a group that wait for one delay."""

    def __init__(self, store: SegmentStore, group: str, delay: float) -> None:
        self.group = group
        self.segment = f"{_prefix(group)}{max(1, round(delay * 1000))}"
        self.store = store

    @property
    def delay(self) -> float:
        return int(self.segment.rpartition("/")[2]) / 1000

    @classmethod
    def all_of(cls, store: SegmentStore, group: str | None = None) -> Sequence[DelayLog]:
        """Return those of the group, by default of all groups, that exist in the store."""
        found = []
        for name in store.list(_PREFIX if group is None else _prefix(group)):
            of, _, delay = name.removeprefix(_PREFIX).rpartition("/")
            if delay.isascii() and delay.isdigit() and len(delay) <= _DIGITS:
                log = cls(store, of, int(delay) / 1000)
                if log.segment == name:
                    found.append(log)
        return found

    def read(self, at: int | None = None) -> Sequence[WaitingFrame]:
        """Return some waiting events, by default the first ones; none only at the end."""
        if at is None:
            info = self.store.info(self.segment)
            if info.start_offset == info.length:
                return ()
            at = info.start_offset
        try:
            frames = read_frames(self.store, self.segment, at)
        except TruncatedError:  # returned to the group meanwhile
            return self.read()
        return [WaitingFrame(WaitingEvent.decode(frame.data), frame.offset, frame.end) for frame in frames]

    def all(self) -> Iterator[WaitingFrame]:
        frames = self.read()
        while frames:
            yield from frames
            frames = self.read(frames[-1].end)

    def forget_sources(self, known: frozenset[str]) -> None:
        """Remove the attributes of segments that the group reads no more."""
        sources = self.store.attributes(self.segment, _SOURCES)
        for name, value in sources.items():
            if name.removeprefix(_SOURCES).rpartition(":")[0] not in known:
                Cell(self.store, self.segment, name, value).change(None)


class _Source:
    """What an owner of a segment knows of its events that wait."""

    def __init__(self, cell: Cell, number: int, waiting: set[int]) -> None:
        self.cell = cell
        self.number = number
        #: The offset of the event of which it is not known whether it was stored.
        self.in_doubt: int | None = None
        #: What former owners have stored: offsets in the segment.
        self.waiting = waiting


class Diverting:
    """Stores events that wait, for the owner of the segments that they were read from. For one thread."""

    def __init__(
        self, store: SegmentStore, group: str, clock: Clock, timeout: float, stopping: threading.Event | None = None
    ) -> None:
        self._store = store
        self._group = group
        self._clock = clock
        self._timeout = timeout
        self._stopping = stopping
        self._sources: dict[tuple[str, EventPointer], tuple[int, _Source]] = {}

    def put(self, event: WaitingEvent, delay: float, token: int) -> bool:
        """Store the event, unless it waits already. Return False if its segment has a newer owner.

        Args:
            event: The event.
            delay: The delay of the policy, which says where it is stored.
            token: The fencing token of the owner of the segment that it was read from.
        """
        backoff = Backoff(self._clock, Deadline(self._clock, self._timeout), self._stopping)
        log = DelayLog(self._store, self._group, delay)
        key = log.segment, event.pointer._replace(offset=0)
        known, source = self._sources.get(key, (-1, None))
        while True:
            if source is None or known != token or source.in_doubt not in (None, event.pointer.offset):
                known, source = token, self._take_over(log, event.pointer, token, backoff)
                if source is None:
                    return False
                self._sources[key] = token, source
            if event.pointer.offset in source.waiting:
                # After a reset of the group it is read once more, and to be stored then.
                source.waiting.discard(event.pointer.offset)
                return True
            # After an error it may be stored, and even returned to the group. The same change finds that out. Another
            # event must not be stored with this value before.
            source.in_doubt = event.pointer.offset
            value = _encode_source(token, source.number + 1)
            outcome = backoff.retry(partial(source.cell.change, value, event.encode()))
            source.in_doubt = None
            if outcome is Outcome.STORED or source.cell.stored == value:
                source.number += 1
                return True
            # Another owner, or `forget_sources`. The cell now has that value, and would store the next event behind it.
            source = None
            del self._sources[key]

    def _take_over(self, log: DelayLog, pointer: EventPointer, token: int, backoff: Backoff) -> _Source | None:
        backoff.retry(partial(self._store.create, log.segment))
        cell = Cell(self._store, log.segment, f"{_SOURCES}{pointer.segment}:{pointer.incarnation}")
        while True:
            before, number = _decode_source(backoff.retry(cell.load))
            if before > token:
                return None
            value = _encode_source(token, number + 1)
            outcome = backoff.retry(partial(cell.change, value))
            if outcome is Outcome.STORED or cell.stored == value:
                break
        waiting = backoff.retry(
            lambda: {
                each.event.pointer.offset
                for each in log.all()
                if each.event.pointer._replace(offset=0) == pointer._replace(offset=0)
            }
        )
        return _Source(cell, number + 1, waiting)


def clear_waiting(store: SegmentStore, group: str, fetch: Callable[[], object]) -> None:
    """Drop what waits if the group is deleted. ``fetch`` raises `NotFoundError` if it is."""
    found = [(log, store.info(log.segment).length) for log in DelayLog.all_of(store, group)]
    if not found:
        return
    try:
        fetch()
    except NotFoundError:
        for log, length in found:  # what was stored since then may be of a new group of this name
            store.truncate(log.segment, length)
            log.forget_sources(frozenset())


def summary(store: SegmentStore, group: str) -> Summary:
    """Return what waits now."""
    events = 0
    due: list[float] = []
    for log in DelayLog.all_of(store, group):
        for number, each in enumerate(log.all()):
            if number == 0:
                due.append(each.event.due)
            events += 1
            if events >= _MOST_COUNTED:
                return Summary(events, False, min(due))
    return Summary(events, True, min(due, default=None))


def _prefix(group: str) -> str:
    return f"{_PREFIX}{group}/"


def _encode_source(token: int, number: int) -> bytes:
    return bytes(msgpack.packb([token, number]))


def _decode_source(stored: bytes | None) -> tuple[int, int]:
    if stored is None:
        return -1, 0
    token, number = msgpack.unpackb(stored)
    return token, number
