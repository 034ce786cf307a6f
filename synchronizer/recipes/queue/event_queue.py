"""`EventQueue`: the durable queue that one `EventProcessor` consumes, as those see it who add to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self, TypeVar

from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.clock import Clock, Deadline, clock_or_system
from synchronizer.errors import DeadlineExceededError, InvalidArgumentError
from synchronizer.liveness.exclusive_role import RoleValue
from synchronizer.patience import Patience
from synchronizer.state_synchronizer import NAME_PATTERN, NAME_RULE
from synchronizer.store import SegmentStore

from ...compare_and_set import Cell, Outcome
from .dead_letters import ROOM_BYTES, DeadEvent, DeadLetters
from .frames import encode_frame
from .producer import Backpressure, Extent, QueueProducer

R = TypeVar("R")

MAX_OUTSTANDING_BYTES: Final = 64 * 1024 * 1024

#: The attribute with the role of the consumer. What that remembers is the offset up to which events are handled.
CONSUMER: Final = "consumer"


def handled_upto(role: RoleValue) -> int:
    return int(role.payload[0]) if role.payload else 0


class EventQueue:
    """The queue ``name`` on ``store``, for those who add events. Threads may share it; it borrows the store.

    What was added waits until an `EventProcessor` of the same name handles it, in this process or another, now or
    later. When more than ``max_outstanding_bytes`` wait, adding waits too. ``timeout`` is the default of all calls, in
    seconds.
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
        if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
            raise InvalidArgumentError(NAME_RULE, name=name)
        check_count(max_outstanding_bytes, "max_outstanding_bytes")
        check_duration(timeout, "timeout")
        self.store = store
        self.name = name
        self.segment = f"queue/{name}"
        self.clock: Clock = clock_or_system(clock)
        self.timeout = timeout
        self._dead_letters = DeadLetters(store, f"dead-letters/{name}")
        self._backpressure = Backpressure(self.segment, max_outstanding_bytes, self.clock, self._look)
        self._producer = QueueProducer(store, self.segment, self.clock, self._backpressure)
        self._patiently(lambda: store.create(self.segment), None)

    def add(self, event: bytes, *, timeout: float | None = None) -> None:
        """Return when the event is stored, durably as far as the store's guarantees say, and once.

        At the deadline it raises `DeadlineExceededError`, with nothing written: the store is away, or the queue is
        full; or `OutcomeUnknownError`.
        """
        self.add_many([event], timeout=timeout)

    def add_many(self, events: Iterable[bytes], *, timeout: float | None = None) -> None:
        """As `add`, for several that are handled one after the other, with no other one between. All or none."""
        if type(events) is not list:
            check_type(events, Iterable, "events")
        frames = []
        for event in events:
            if not isinstance(event, bytes):
                raise InvalidArgumentError("an event is bytes", queue=self.name, type=type(event).__name__)
            frames.append(encode_frame(event))
        data = b"".join(frames)
        limit = self.store.guarantees.largest_append - ROOM_BYTES
        if len(data) > limit:
            raise InvalidArgumentError(
                "the events are too large for one append", queue=self.name, bytes=len(data), limit=limit
            )
        if data:
            self._producer.add(data, self._deadline(timeout))

    @property
    def handled_upto(self) -> int:
        """Events that begin before this offset of the segment are handled, and given up. Asked of the store."""
        return self._patiently(self._look, None).handled

    @property
    def outstanding_bytes(self) -> int:
        """How many bytes of the segment are not known to be handled, asked of the store."""
        handled, length = self._patiently(self._look, None)
        return length - handled

    def clear(self, *, timeout: float | None = None) -> None:
        """Give up all that is in the queue, handled or not, and the dead letters. Offsets go on.

        A consumer may still handle what it has begun, up to its ``max_batch``.
        """
        patience = Patience(self.clock, self._deadline(timeout))
        while not patience.call(self._skip_to_end):
            if not patience.wait():
                raise DeadlineExceededError("its consumer kept storing its position", queue=self.name)
        patience.call(lambda: self.store.truncate(self.segment, self._look().handled))
        patience.call(self._dead_letters.clear)

    def _skip_to_end(self) -> bool:
        """Put the position to the end, as if by a consumer that came and went; False if another one was faster."""
        cell = Cell(self.store, self.segment, CONSUMER)
        role = RoleValue.decode(cell.load())
        length = self.store.info(self.segment).length
        skipped = RoleValue(b"", role.counter + 1, (length, *role.payload[1:]))
        return cell.change(skipped.encode()) is Outcome.STORED

    def dead_letters(self) -> Iterator[DeadEvent]:
        """The events that were set aside, the oldest first."""
        return self._dead_letters.read()

    def forget_dead_letters(self, upto: DeadEvent) -> None:
        """Give up this event that was set aside, and those before it."""
        check_type(upto, DeadEvent, "upto")
        self._patiently(lambda: self._dead_letters.forget(upto), None)

    def close(self) -> None:
        """Take nothing more. What was added stays. The store stays open. Twice is no error."""
        self._producer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.store.url!r})"

    def _look(self) -> Extent:
        # The position first: what is handled later is not before the length that is seen then.
        role = self.store.attributes(self.segment, names=[CONSUMER]).get(CONSUMER)
        return Extent(handled_upto(RoleValue.decode(role)), self.store.info(self.segment).length)

    def _patiently(self, call: Callable[[], R], timeout: float | None) -> R:
        return Patience(self.clock, self._deadline(timeout)).call(call)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.clock, self.timeout if timeout is None else timeout)
