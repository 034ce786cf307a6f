"""Shows a parent process which events its worker process was handling when it died.

The worker writes the batch that it begins into memory shared with its parent, which survives a kill. Only after a
worker has died over a batch does the next worker write down each of its events. So events cost nothing as long as no
worker dies, and from the second death on the parent knows which event it was.
"""

from __future__ import annotations

import ctypes
import multiprocessing
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

    def __init__(self) -> None:
        self._numbers = _spawn.RawArray(ctypes.c_longlong, [_NOTHING, 0, 0])
        self._names = _spawn.RawArray(ctypes.c_char, _NAMES_BYTES)

    # ------------------------------------------------------------------ in the child

    def open(self) -> Hand:
        return Hand(memoryview(self._numbers).cast("B").cast("q"), self._names)

    # ------------------------------------------------------------------ in the parent, when the child has ended

    @property
    def found(self) -> InHand | None:
        """The events that the child was handling when it ended; None if there were none."""
        offset, end, _ = self._numbers
        if offset == _NOTHING:
            return None
        segment, incarnation = self._names.value.decode().split("\n")
        return InHand(SegmentId(segment), incarnation, offset, end)

    @property
    def reached(self) -> Positions:
        """The position of the child in that segment: the events before it are processed."""
        found = self.found
        return {} if found is None else {found.segment: SegmentPosition(self._numbers[2], found.offset)}


class Hand:
    """The child's side of `SharedHand`."""

    def __init__(self, numbers: memoryview, names: Any) -> None:
        self._numbers = numbers
        self._names = names

    def take(self, batch: EventBatch[Any]) -> None:
        """Record that the worker begins the batch."""
        self.put_down()  # the parent never sees an offset with half-written names
        self._names.value = f"{batch.segment}\n{batch.incarnation}".encode()
        self._numbers[1] = batch.end if len(batch) > 1 else 0
        self._numbers[2] = batch.fencing_token
        self._numbers[0] = batch.start

    def take_one(self, event: Event[Any]) -> None:
        """Record that the worker begins this event of the batch."""
        self.put_down()
        self._numbers[1] = 0
        self._numbers[0] = event.offset

    def put_down(self) -> None:
        """Record that the worker has finished."""
        self._numbers[0] = _NOTHING
