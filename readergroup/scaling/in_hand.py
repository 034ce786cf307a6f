"""Shows a parent process which events its worker process was handling when it died.

The worker writes the batch that it begins into memory shared with its parent, which survives a kill. Only after a
worker has died over a batch does the next worker write down each of its events. So events cost nothing as long as no
worker dies, and from the second death on the parent knows which event it was. The parent counts in the same memory how
many deaths it has sent, so a worker that gets the segment of a dead one waits until it has received them.

A worker that handles many events at once has a slot for each. After a death, the next worker handles these events while
it handles nothing else.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..group.model.positions import Positions, SegmentPosition
from ..streams.config import SegmentId
from ..streams.event import Event, EventBatch, EventPointer

_spawn = multiprocessing.get_context("spawn")

#: More than the name of a segment and the incarnation of its stream need.
_NAMES_BYTES: Final = 2048
_NOTHING: Final = -1


class InHand(NamedTuple):
    """An event, or a batch, that a worker has not finished."""

    segment: SegmentId
    incarnation: str
    offset: int
    #: For several events, the offset after the last. 0: a single event.
    end: int = 0

    @classmethod
    def of(cls, event: Event[Any]) -> InHand:
        return cls(*event.pointer)

    @property
    def pointer(self) -> EventPointer:
        """The pointer of the event, or of the first of several."""
        return EventPointer(self.segment, self.incarnation, self.offset)

    def overlaps(self, batch: EventBatch[Any]) -> bool:
        """Whether the batch contains any of these events."""
        is_same = (self.segment, self.incarnation) == (batch.segment, batch.incarnation)
        return is_same and self.offset < batch.end and batch.start < max(self.end, self.offset + 1)

    def is_among(self, several: InHand) -> bool:
        """Whether this event is one of ``several``."""
        is_same = (self.segment, self.incarnation) == (several.segment, several.incarnation)
        return is_same and several.offset <= self.offset < several.end


class SharedHand:
    """Shared memory that the parent creates and passes to its child process. The child writes, the parent reads.

    While the child waits for events, its last batch is still here. A death then leads to a false suspicion, which costs
    only a little time.
    """

    def __init__(self, slots: int = 1) -> None:
        self._slots = slots
        self._numbers = _spawn.RawArray(ctypes.c_longlong, [_NOTHING, 0, 0] * slots)
        self._names = _spawn.RawArray(ctypes.c_char, _NAMES_BYTES * slots)
        #: How many deaths the parent has sent to this child. Written by the parent alone.
        self.deaths_sent = _spawn.RawValue(ctypes.c_longlong, 0)

    # ------------------------------------------------------------------ in the child

    def open(self) -> Hand:
        return self.open_all()[0]

    def open_all(self) -> Sequence[Hand]:
        """Return one hand per slot."""
        numbers = memoryview(self._numbers).cast("B").cast("q")
        names = memoryview(self._names).cast("B")
        return [
            Hand(numbers[3 * slot : 3 * slot + 3], names[_NAMES_BYTES * slot : _NAMES_BYTES * (slot + 1)])
            for slot in range(self._slots)
        ]

    # ------------------------------------------------------------------ in the parent, when the child has ended

    @property
    def found(self) -> Sequence[InHand]:
        """What the child was handling when it ended. Of several, none looks like a single event."""
        found = []
        for slot in range(self._slots):
            offset, end, _ = self._numbers[3 * slot : 3 * slot + 3]
            if offset != _NOTHING:
                names = self._names.raw[_NAMES_BYTES * slot : _NAMES_BYTES * (slot + 1)].partition(b"\0")[0]
                segment, incarnation = names.decode().split("\n")
                found.append(InHand(SegmentId(segment), incarnation, offset, end))
        if len(found) > 1:
            found = [each._replace(end=each.end or each.offset + 1) for each in found]
        return found

    @property
    def reached(self) -> Positions:
        """The position of a child with one slot, in that segment: the events before it are processed."""
        found = self.found if self._slots == 1 else ()
        return {each.segment: SegmentPosition(self._numbers[2], each.offset) for each in found}


class Hand:
    """The child's side of `SharedHand`."""

    def __init__(self, numbers: memoryview, names: memoryview) -> None:
        self._numbers = numbers
        self._names = names

    def take(self, what: Event[Any] | EventBatch[Any]) -> None:
        """Record that the worker begins the event or the batch."""
        self.put_down()  # the parent never sees an offset with half-written names
        if isinstance(what, Event):
            (segment, incarnation, start), end = what.pointer, 0
        else:
            segment, incarnation, start = what.segment, what.incarnation, what.start
            end = what.end if len(what) > 1 else 0
        names = f"{segment}\n{incarnation}\0".encode()
        self._names[: len(names)] = names
        self._numbers[1] = end
        self._numbers[2] = what.fencing_token
        self._numbers[0] = start

    def take_one(self, event: Event[Any]) -> None:
        """Record that the worker begins this event of the batch."""
        self.put_down()
        self._numbers[1] = 0
        self._numbers[0] = event.offset

    def put_down(self) -> None:
        """Record that the worker has finished."""
        self._numbers[0] = _NOTHING
