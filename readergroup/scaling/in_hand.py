"""What a worker process has in hand, where its parent can see it after the worker's death.

The worker writes which batch it has begun into memory that it shares with its parent. A process that is killed leaves
it as it is. Only where a worker has died over a batch, the next one writes down each event of it: so events cost
nothing as long as nobody dies, and from the second death on it is known which one it was.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from typing import Any, Final, NamedTuple

from ..group.model.positions import Held, Positions
from ..streams.config import SegmentId
from ..streams.event import Event, EventBatch, EventPointer

_spawn = multiprocessing.get_context("spawn")

#: More than the names of a segment and of its stream's incarnation take.
_NAMES_BYTES: Final = 2048
_NOTHING: Final = -1


class InHand(NamedTuple):
    """An event, or a batch, that a worker did not get done with."""

    segment: SegmentId
    incarnation: str
    offset: int
    #: Of several events: the offset after them. 0: it is a single one.
    end: int = 0

    @classmethod
    def of(cls, event: Event[Any]) -> InHand:
        return cls(*event.pointer)

    @property
    def pointer(self) -> EventPointer:
        """The event, or the first of several."""
        return EventPointer(self.segment, self.incarnation, self.offset)

    def overlaps(self, batch: EventBatch[Any]) -> bool:
        """Whether the batch has events of this."""
        is_same = (self.segment, self.incarnation) == (batch.segment, batch.incarnation)
        return is_same and self.offset < batch.end and batch.start < max(self.end, self.offset + 1)

    def is_among(self, several: InHand) -> bool:
        """Whether this event is one of these."""
        is_same = (self.segment, self.incarnation) == (several.segment, several.incarnation)
        return is_same and several.offset <= self.offset < several.end


class SharedHand:
    """Made by the parent; goes to a child as an argument of its process. The child writes, the parent reads.

    A child that waits for events still has its last batch in it. To suspect that costs no more than a little time.
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
        """What the child had in hand at its end."""
        offset, end, _ = self._numbers
        if offset == _NOTHING:
            return None
        segment, incarnation = self._names.value.decode().split("\n")
        return InHand(SegmentId(segment), incarnation, offset, end)

    @property
    def reached(self) -> Positions:
        """What the child has processed before that, in the segment of it."""
        found = self.found
        return {} if found is None else {found.segment: Held(self._numbers[2], found.offset)}


class Hand:
    """The child's side."""

    def __init__(self, numbers: memoryview, names: Any) -> None:
        self._numbers = numbers
        self._names = names

    def take(self, batch: EventBatch[Any]) -> None:
        """The worker begins with the batch."""
        self.put_down()  # nothing is in hand while the names change
        self._names.value = f"{batch.segment}\n{batch.incarnation}".encode()
        self._numbers[1] = batch.end if len(batch) > 1 else 0
        self._numbers[2] = batch.fencing_token
        self._numbers[0] = batch.start

    def take_one(self, event: Event[Any]) -> None:
        """Of the batch, the worker begins with this event."""
        self.put_down()
        self._numbers[1] = 0
        self._numbers[0] = event.offset

    def put_down(self) -> None:
        """The worker has done with it."""
        self._numbers[0] = _NOTHING
