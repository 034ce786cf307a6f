"""The dead letters of a queue: the events whose last attempt failed, in a segment of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple

import msgpack

from synchronizer.backoff import Backoff
from synchronizer.errors import NotFoundError, TruncatedError, UnsupportedError
from synchronizer.spans import Spans, covers, from_offset, joined
from synchronizer.store import SegmentStore

from ...compare_and_set import Cell, Outcome
from .frames import encode_frame, read_frames

#: The space that a dead letter may take in addition to its event. The text of the error is cut to fit.
ENVELOPE_BYTES: Final = 64 * 1024
MAX_ERROR_LENGTH: Final = 10_000
#: The segments of event queues are this, and the name.
QUEUE_PREFIX: Final = "queue/"
#: The attribute of the queue with the dead letters that were replayed or discarded.
_DONE: Final = "dead-letters"
_DONE_FORMAT: Final = 1
#: How many spans of replayed or discarded letters are remembered. A value of an attribute is small in every store.
MAX_DONE_SPANS: Final = 20_000
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
    #: When it was set aside, in seconds since 1970. 0: by a release that did not store the time.
    written_at: float = 0.0

    @classmethod
    def decode(cls, place: int, end: int, encoded: bytes) -> DeadEvent:
        found = msgpack.unpackb(encoded)
        at = found.get("written_at", 0.0)
        return cls(found["data"], found["offset"], found["error"], found["attempts"], place, end, at)


def encode_dead_event(*, data: bytes, offset: int, error: str, attempts: int, written_at: float) -> bytes:
    letter = {"offset": offset, "error": error, "attempts": attempts, "written_at": written_at, "data": data}
    return encode_frame(bytes(msgpack.packb(letter)))


class DoneLetters(NamedTuple):
    """The dead letters that are no longer pending, as spans of the segment of dead letters."""

    replayed: Spans = ()
    discarded: Spans = ()

    def encode(self) -> bytes:
        return bytes(msgpack.packb([_DONE_FORMAT, *self]))

    @classmethod
    def decode(cls, stored: bytes | None) -> DoneLetters:
        if stored is None:
            return cls()
        version, *spans = msgpack.unpackb(stored, use_list=False)
        if version != _DONE_FORMAT:
            raise UnsupportedError(
                "a newer release of the SDK has replayed dead letters of this queue; use that release", format=version
            )
        return cls(*spans)

    def status_of(self, place: int) -> Literal["pending", "replayed", "discarded"]:
        if covers(self.replayed, place):
            return "replayed"
        return "discarded" if covers(self.discarded, place) else "pending"


class DeadLetters:
    """The dead letters of one queue. Each event is set aside once, and only by the latest consumer."""

    def __init__(self, store: SegmentStore, queue: str) -> None:
        self.segment = f"dead-letters/{queue}"
        self.queue_segment = f"{QUEUE_PREFIX}{queue}"
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

    def read(self, backoff: Callable[[], Backoff], start: int = 0) -> Iterator[DeadEvent]:
        """Yield the dead letters from this place on, the oldest first.

        Each call of the store is repeated with a ``backoff`` of its own.
        """
        with suppress(NotFoundError):  # no event was ever set aside
            at = max(start, backoff().retry(partial(self._store.info, self.segment)).start_offset)
            while True:
                try:
                    frames = backoff().retry(partial(read_frames, self._store, self.segment, at))
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

    def done(self) -> DoneLetters:
        """Return which letters were replayed or discarded. Raise `NotFoundError` if there is no such queue."""
        self._store.info(self.queue_segment)
        return DoneLetters.decode(Cell(self._store, self.queue_segment, _DONE).load())

    def replay(self, letters: Collection[DeadEvent], backoff: Backoff) -> int:
        """Add the events of letters that are pending to the queue, and mark them. Return how many.

        The append that adds the events also marks their letters. So whatever dies, each event is added once.
        """
        return self._finish(letters, backoff, replayed=True)

    def discard(self, letters: Collection[DeadEvent], backoff: Backoff) -> int:
        """Mark the letters that are pending as discarded. Return how many."""
        return self._finish(letters, backoff, replayed=False)

    def _finish(self, letters: Collection[DeadEvent], backoff: Backoff, *, replayed: bool) -> int:
        cell = Cell(self._store, self.queue_segment, _DONE)
        while True:
            done = DoneLetters.decode(backoff.retry(cell.load))
            # Read after the marks: those of forgotten letters are dropped, so these letters would seem to be pending.
            start = backoff.retry(lambda: self._store.info(self.segment)).start_offset
            pending = [each for each in letters if each.place >= start and done.status_of(each.place) == "pending"]
            if not pending:
                return 0
            spans: Spans = ()
            for each in pending:
                spans = joined(spans, (each.place, each.end))
            done = DoneLetters(from_offset(done.replayed, start), from_offset(done.discarded, start))
            if replayed:
                done = done._replace(replayed=joined(done.replayed, spans))
            else:
                done = done._replace(discarded=joined(done.discarded, spans))
            if len(done.replayed) + len(done.discarded) > 2 * MAX_DONE_SPANS:
                raise UnsupportedError(
                    "too many dead letters among pending ones were replayed or discarded one by one; forget old "
                    "letters with forget_dead_letters",
                    segment=self.segment,
                )
            data = b"".join(encode_frame(each.data) for each in pending) if replayed else b""
            value = done.encode()
            outcome = backoff.retry(partial(cell.change, value, data))
            # An equal value of another process is the same letters, which that process has added with it.
            if outcome is Outcome.STORED or cell.stored == value:
                return len(pending)


def _encode_last(consumer_id: bytes, offset: int) -> bytes:
    return bytes(msgpack.packb([consumer_id, offset]))
