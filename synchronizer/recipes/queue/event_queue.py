"""`EventQueue`: adds events to a durable queue, which an `EventProcessor` consumes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self, TypeVar

from synchronizer.arguments import check_count, check_duration, check_items, check_type
from synchronizer.backoff import Backoff
from synchronizer.clock import Clock, Deadline, clock_or_system
from synchronizer.errors import DeadlineExceededError, InvalidArgumentError
from synchronizer.liveness.exclusive_role import RoleValue
from synchronizer.state_synchronizer import NAME_PATTERN, NAME_RULE
from synchronizer.store import SegmentStore

from ...compare_and_set import Cell, Outcome
from .dead_letters import ENVELOPE_BYTES, DeadEvent, DeadLetters
from .frames import encode_frame
from .limits import MAX_OUTSTANDING_BYTES
from .producer import Backpressure, Extent, QueueProducer

R = TypeVar("R")

#: The attribute with the role of the consumer. Its payload begins with the offset up to which events are handled.
CONSUMER: Final = "consumer"


def check_queue_name(name: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise InvalidArgumentError(NAME_RULE, name=name)
    return name


def handled_upto(role: RoleValue) -> int:
    return int(role.payload[0]) if role.payload else 0


class EventQueue:
    """Adds events to a durable queue. Threads may share it. The store is borrowed and never closed.

    Events wait until an `EventProcessor` of the same name handles them, in this process or another, now or later.

    Args:
        store: Holds the queue.
        name: The name of the queue.
        max_outstanding_bytes: Adding waits while more bytes than this are not handled.
        clock: The system's clock by default.
        timeout: The default of all calls, in seconds.
    """

    def __init__(
        self,
        store: SegmentStore,
        name: str,
        *,
        max_outstanding_bytes: int = MAX_OUTSTANDING_BYTES,
        clock: Clock | None = None,
        timeout: float = 30.0,
    ) -> None:
        check_type(store, SegmentStore, "store")
        check_queue_name(name)
        check_count(max_outstanding_bytes, "max_outstanding_bytes")
        check_duration(timeout, "timeout")
        self.store = store
        self.name = name
        self.clock: Clock = clock_or_system(clock)
        self.timeout = timeout
        self._dead_letters = DeadLetters(store, name)
        self.segment = self._dead_letters.queue_segment
        self._backpressure = Backpressure(self.segment, max_outstanding_bytes, self.clock, self._look)
        self._producer = QueueProducer(store, self.segment, self.clock, self._backpressure)
        self._patiently(lambda: store.create(self.segment))

    def add(self, event: bytes, *, timeout: float | None = None) -> None:
        """Store an event exactly once, as durably as the store guarantees.

        Args:
            event: At most the store's ``guarantees.largest_append`` less 64 KiB.
            timeout: Seconds to wait while the store is unavailable or the queue is full; by default the queue's.

        Raises:
            DeadlineExceededError: The store is unavailable, or the queue is full. Nothing was written.
            OutcomeUnknownError: The event may be stored or not.
            ClosedError: The queue is closed.
        """
        self.add_many([event], timeout=timeout)

    def add_many(self, events: Iterable[bytes], *, timeout: float | None = None) -> None:
        """Store several events, all or none. They are handled in order, with no other event between them. See `add`."""
        if type(events) is not list:
            check_items(events, Iterable, "events")
        frames = []
        for event in events:
            if not isinstance(event, bytes):
                raise InvalidArgumentError("an event must be bytes", queue=self.name, type=type(event).__name__)
            frames.append(encode_frame(event))
        data = b"".join(frames)
        limit = self.store.guarantees.largest_append - ENVELOPE_BYTES
        if len(data) > limit:
            raise InvalidArgumentError(
                "the events are too large for one append; add fewer at once",
                queue=self.name,
                bytes=len(data),
                limit=limit,
            )
        if data:
            self._producer.add(data, self._deadline(timeout))

    @property
    def handled_upto(self) -> int:
        """The stored position: the offset up to which events are handled, read from the store."""
        return self._patiently(self._look).handled

    @property
    def outstanding_bytes(self) -> int:
        """The number of bytes after the stored position of the consumer, read from the store."""
        handled, length = self._patiently(self._look)
        return length - handled

    def clear(self, *, timeout: float | None = None) -> None:
        """Discard all events of the queue and its dead letters. Offsets continue.

        A consumer may still handle the batch that it has begun. `DeadlineExceededError` if it keeps storing its
        position until the deadline.
        """
        backoff = Backoff(self.clock, self._deadline(timeout))
        while not backoff.retry(self._skip_to_end):
            if not backoff.wait():
                raise DeadlineExceededError(
                    "the consumer stored its position before every attempt; try again", queue=self.name
                )
        backoff.retry(lambda: self.store.truncate(self.segment, self._look().handled))
        backoff.retry(self._dead_letters.clear)

    def _skip_to_end(self) -> bool:
        """Set the position to the end of the segment and free the role; return False if another process was faster."""
        cell = Cell(self.store, self.segment, CONSUMER)
        role = RoleValue.decode(cell.load())
        length = self.store.info(self.segment).length
        skipped = RoleValue(b"", role.counter + 1, (length, *role.payload[1:]))
        return cell.change(skipped.encode()) is Outcome.STORED

    def dead_letters(self) -> Iterator[DeadEvent]:
        """Yield the events that were set aside and not forgotten, the oldest first."""
        return self._dead_letters.read(self._backoff)

    def forget_dead_letters(self, upto: DeadEvent) -> None:
        """Discard the dead letters up to and including ``upto``."""
        check_type(upto, DeadEvent, "upto")
        self._patiently(lambda: self._dead_letters.forget(upto))

    def close(self) -> None:
        """Refuse further events. Stored events stay, and the store stays open. Closing twice is no error."""
        self._producer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.store.url!r})"

    def _look(self) -> Extent:
        # Read the position before the length, so that it never lies past the length.
        role = self.store.attributes(self.segment, names=[CONSUMER]).get(CONSUMER)
        return Extent(handled_upto(RoleValue.decode(role)), self.store.info(self.segment).length)

    def _patiently(self, call: Callable[[], R]) -> R:
        return self._backoff().retry(call)

    def _backoff(self) -> Backoff:
        return Backoff(self.clock, self._deadline(None))

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.clock, self.timeout if timeout is None else timeout)
