"""A cache of what a process has seen of segments. It saves round trips and is never trusted.

The server confirms every decision based on it: an append by its expected sequence, a read by the head that the leader
returns at the same time.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from typing import Final, NamedTuple

from .wire import Head

#: Names are never reused, so the cache must be limited. A forgotten segment costs a round trip.
_MAX_SEGMENTS: Final = 500
_MAX_STARTS: Final = 64
_MAX_VALUES: Final = 200


class MessageStart(NamedTuple):
    """Where a message starts in a segment: the messages from ``sequence`` on hold the bytes from ``offset`` on."""

    offset: int
    sequence: int


class AttributeValue(NamedTuple):
    """The value of an attribute (None: absent), and the sequence to expect on its subject."""

    value: bytes | None
    sequence: int


class _Known:
    def __init__(self) -> None:
        self.head: Head | None = None
        self.life: int | None = None
        self.changes = 0
        self.starts: list[MessageStart] = []
        self.values: OrderedDict[str, AttributeValue] = OrderedDict()
        self.written: OrderedDict[str, None] = OrderedDict()


class Hints:
    """The last seen state of each segment. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        #: The newest sequence seen in the whole stream.
        self.newest = 0

    def head(self, segment: str) -> Head | None:
        known = self._known.get(segment)
        return None if known is None else known.head

    def see_head(self, segment: str, head: Head) -> None:
        """Remember the head, unless a newer one is known."""
        with self._lock:
            known = self._of(segment)
            if known.head is None or known.head.sequence < head.sequence:
                known.head = head
            self.newest = max(self.newest, head.sequence)
            _insert(known.starts, MessageStart(head.length, head.sequence + 1))

    def forget_head(self, segment: str) -> None:
        with self._lock:
            self._of(segment).head = None

    def forget(self, segment: str) -> None:
        with self._lock:
            self._known.pop(segment, None)

    def changes(self, segment: str) -> int:
        """Return the sequence of the newest change of attributes seen; 0 if none was."""
        known = self._known.get(segment)
        return 0 if known is None else known.changes

    def see_changes(self, segment: str, sequence: int) -> None:
        with self._lock:
            known = self._of(segment)
            known.changes = max(known.changes, sequence)
            self.newest = max(self.newest, sequence)

    def life(self, segment: str) -> int | None:
        known = self._known.get(segment)
        return None if known is None else known.life

    def see_life(self, segment: str, sequence: int | None) -> None:
        with self._lock:
            self._of(segment).life = sequence

    def value(self, segment: str, attribute: str) -> AttributeValue | None:
        known = self._known.get(segment)
        return None if known is None else known.values.get(attribute)

    def see_value(self, segment: str, attribute: str, value: AttributeValue | None) -> None:
        """Remember the value of the attribute; None if it is not known, or the head carries it."""
        with self._lock:
            values = self._of(segment).values
            values.pop(attribute, None)
            if value is not None:
                values[attribute] = value
            if len(values) > _MAX_VALUES:
                values.popitem(last=False)

    def was_written(self, segment: str, attribute: str) -> bool:
        """Return whether this process has changed the attribute last in an append of data."""
        known = self._known.get(segment)
        return known is not None and attribute in known.written

    def see_written(self, segment: str, attribute: str, *, with_data: bool) -> None:
        with self._lock:
            written = self._of(segment).written
            written.pop(attribute, None)
            if with_data:
                written[attribute] = None
            if len(written) > _MAX_VALUES:
                written.popitem(last=False)

    def note_start(self, segment: str, start: MessageStart) -> None:
        with self._lock:
            _insert(self._of(segment).starts, start)

    def start_before(self, segment: str, offset: int) -> MessageStart | None:
        """Return the last known start of a message at or before the offset."""
        with self._lock:
            known = self._known.get(segment)
            index = bisect_right(known.starts, MessageStart(offset, 1 << 63)) if known else 0
            return known.starts[index - 1] if known and index else None

    def start_after(self, segment: str, offset: int) -> MessageStart | None:
        """Return the first known start of a message after the offset."""
        with self._lock:
            known = self._known.get(segment)
            index = bisect_right(known.starts, MessageStart(offset, 1 << 63)) if known else 0
            return known.starts[index] if known and index < len(known.starts) else None

    def _of(self, segment: str) -> _Known:
        known = self._known.get(segment)
        if known is None:
            known = self._known[segment] = _Known()
            if len(self._known) > _MAX_SEGMENTS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(segment)
        return known


def _insert(starts: list[MessageStart], start: MessageStart) -> None:
    index = bisect_right(starts, start)
    if index and starts[index - 1].offset == start.offset:
        starts[index - 1] = start  # keep the later message: those between are empty
        return
    starts.insert(index, start)
    if len(starts) > _MAX_STARTS:
        del starts[1:-1:2]  # every second one, so that the rest stays spread
