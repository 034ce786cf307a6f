"""The dead letters of a queue: the events whose last attempt failed, in a segment of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgpack

from synchronizer.errors import NotFoundError, TruncatedError
from synchronizer.store import SegmentStore

from ...compare_and_set import Cell, Outcome
from .frames import encode_frame, read_frames

#: The space that a dead letter may take in addition to its event. The text of the error is cut to fit.
ENVELOPE_BYTES: Final = 64 * 1024
MAX_ERROR_LENGTH: Final = 10_000
#: The attribute with the consumer that may set events aside and the offset of the last event set aside.
_LAST = "last"


@dataclass(frozen=True, slots=True)
class DeadEvent:
    """An event that was set aside: its bytes, its offset in the queue, and the last error of its handler."""

    data: bytes
    offset: int
    error: str
    attempts: int
    #: Its start and end offsets in the segment of the dead letters.
    place: int
    end: int

    @classmethod
    def decode(cls, place: int, end: int, encoded: bytes) -> DeadEvent:
        found = msgpack.unpackb(encoded)
        return cls(found["data"], found["offset"], found["error"], found["attempts"], place, end)


def encode_dead_event(*, data: bytes, offset: int, error: str, attempts: int) -> bytes:
    letter = {"offset": offset, "error": error, "attempts": attempts, "data": data}
    return encode_frame(bytes(msgpack.packb(letter)))


class DeadLetters:
    """The dead letters of one queue. Each event is set aside once, and only by the latest consumer."""

    def __init__(self, store: SegmentStore, segment: str) -> None:
        self.segment = segment
        self._store = store

    def take_over(self, consumer_id: bytes) -> None:
        """Make this consumer the only one that can set events aside."""
        self._store.create(self.segment)
        cell = Cell(self._store, self.segment, _LAST)
        while True:
            last = cell.load()
            new = _encode_last(consumer_id, -1 if last is None else msgpack.unpackb(last)[1])
            if cell.change(new) is Outcome.STORED or cell.stored == new:
                return

    def put(self, consumer_id: bytes, event: bytes, offset: int) -> bool:
        """Append an encoded event, unless it is stored already; return False if another consumer has taken over."""
        cell = Cell(self._store, self.segment, _LAST)
        last = cell.load()
        present, last_offset = (b"", -1) if last is None else msgpack.unpackb(last)
        if present != consumer_id:
            return False
        return last_offset >= offset or cell.change(_encode_last(consumer_id, offset), event) is Outcome.STORED

    def read(self) -> Iterator[DeadEvent]:
        """Yield all dead letters, the oldest first."""
        with suppress(NotFoundError):  # no event was ever set aside
            at = self._store.info(self.segment).start_offset
            while True:
                try:
                    frames = read_frames(self._store, self.segment, at)
                except TruncatedError as error:
                    at = error.start_offset  # another process forgot them
                    continue
                if not frames:
                    return
                for frame in frames:
                    yield DeadEvent.decode(*frame)
                at = frames[-1].end

    def forget(self, upto: DeadEvent) -> None:
        self._store.truncate(self.segment, upto.end)

    def clear(self) -> None:
        with suppress(NotFoundError):
            self._store.truncate(self.segment, self._store.info(self.segment).length)


def _encode_last(consumer_id: bytes, offset: int) -> bytes:
    return bytes(msgpack.packb([consumer_id, offset]))
