"""`QueueProducer`: adds to a queue. Threads that add at the same moment share an append, which is stored once.

Like a writer of a stream, a process keeps the number of its last append in an attribute of its own. An append changes
this number by compare-and-set, so it can be sent again after a lost answer and is still stored once. Numbers grow, and
the first one is stored without events. So after the attribute is removed, a delayed append finds no match and stores
nothing.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from synchronizer.backoff import Backoff
from synchronizer.clock import Clock, Deadline
from synchronizer.errors import (
    ClosedError,
    DeadlineExceededError,
    OutcomeUnknownError,
    ReaderGroupError,
    StoreFullError,
    StoreUnavailableError,
)
from synchronizer.store import SegmentStore
from synchronizer.threads.batching import Batch, Batcher, Call, Status
from synchronizer.threads.flag import Bell, Flag

from ...compare_and_set import Cell, Outcome, remove_attributes

#: The attributes that hold the numbers of the processes that add.
ADDERS: Final = "adder/"
#: The largest shared append. One call with more bytes is an append of its own.
BATCH_BYTES: Final = 1024 * 1024
#: The pauses between checks of a full queue. A consumer in this process ends them at once.
_FIRST_LOOK_SECONDS: Final = 0.005
_LAST_LOOK_SECONDS: Final = 0.25


class Extent(NamedTuple):
    """The outstanding part of a segment: from the first offset that is not handled to its length."""

    handled: int
    length: int


class Backpressure:
    """Limits the outstanding bytes, as far as this process knows them. Threads share it.

    A process learns of the appends of others with its own next append, so each may exceed the limit by one append.
    """

    def __init__(self, segment: str, limit_bytes: int, clock: Clock, look: Callable[[], Extent]) -> None:
        self.limit_bytes = limit_bytes
        self._segment = segment
        self._clock = clock
        self._look = look
        self._known: Extent | None = None
        self._lock = threading.Lock()
        self._moved = Flag()
        self._closed = False

    def has(self, size: int) -> bool:
        """Return whether ``size`` bytes may be added. An append above the limit may be added to an empty queue."""
        if self._known is None:
            return False
        outstanding = self._known.length - self._known.handled
        return outstanding == 0 or outstanding + size <= self.limit_bytes

    def learn(self, *, handled: int = 0, length: int = 0) -> None:
        """Take note of newer offsets. Both only grow."""
        self._take_up(Extent(handled, length))
        self._moved.set()

    def wait(self, size: int, deadline: Deadline) -> None:
        """Wait until ``size`` bytes may be added, according to the store."""
        pause = _FIRST_LOOK_SECONDS
        backoff = Backoff(self._clock, deadline)
        while not self.has(size):
            self._moved.clear()
            handled, length = backoff.retry(self._look)
            self._take_up(Extent(handled, length))
            if self._closed:
                raise ClosedError("the queue is closed; open another", segment=self._segment)
            if self.has(size):
                return
            if deadline.passed:
                raise DeadlineExceededError(
                    "the queue is full and its consumer does not keep up; nothing was written",
                    segment=self._segment,
                    outstanding_bytes=length - handled,
                    limit=self.limit_bytes,
                )
            self._clock.wait(self._moved, deadline.remaining(pause))
            pause = min(2 * pause, _LAST_LOOK_SECONDS)

    def close(self) -> None:
        self._closed = True
        self._moved.set()

    def _take_up(self, seen: Extent) -> None:
        with self._lock:
            known = self._known or seen
            self._known = Extent(max(known.handled, seen.handled), max(known.length, *seen))


class _Batch(Batch):
    """The data that the calls of several threads share in one append."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[Call[_Batch], bytes] = {}  # in order
        self.number: bytes | None = None  # set when it is sent

    @property
    def size(self) -> int:
        return sum(map(len, self.parts.values()))

    def withdraw(self, call: Call[_Batch]) -> bool:
        self.parts.pop(call, None)
        return True


class _Batcher(Batcher[_Batch]):
    """Appends batches once each, as the backpressure allows."""

    def __init__(
        self, store: SegmentStore, segment: str, clock: Clock, backpressure: Backpressure, closing: Flag
    ) -> None:
        super().__init__(segment, threading.Lock(), Bell())
        self.cell = Cell(store, segment, ADDERS + secrets.token_hex(8))  # the number of the last stored append
        self._clock = clock
        self._backpressure = backpressure
        self._batch_bytes = min(backpressure.limit_bytes, BATCH_BYTES)
        self._closing = closing
        self._numbers = 0

    def join(self, call: Call[_Batch], data: bytes, deadline: Deadline) -> _Batch:
        while True:
            with self.lock:
                self.check_open()
                batch = self.open or _Batch()
                if not batch.parts or batch.size + len(data) <= self._batch_bytes:
                    self.wait_with(call, batch)
                    batch.parts[call] = data
                    self.open = batch
                    return batch
                change = self.changed.next_ring()
            if deadline.passed:
                raise DeadlineExceededError(
                    "other threads filled every batch until the deadline; nothing was written, try again",
                    segment=self.segment,
                )
            change.wait(deadline.remaining(1.0))

    def check_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("the queue is closed; open another", segment=self.segment)

    def may_go(self, batch: _Batch) -> bool:
        return self._backpressure.has(batch.size)

    def wait_to_go(self, batch: _Batch, deadline: Deadline) -> None:
        with self.lock:
            size = batch.size
        self._backpressure.wait(size, deadline)

    def append(self, batch: _Batch, deadline: Deadline) -> None:
        data = b"".join(batch.parts.values())
        backoff = Backoff(self._clock, deadline, self._closing)
        while True:
            if self.cell.stored is None and batch.number is not None and batch.lost_answer is not None:
                raise OutcomeUnknownError(
                    "the segment no longer has this process's number; the events may be stored", segment=self.segment
                )
            problem: BaseException
            try:
                if self.cell.stored is None:
                    self.cell.change(self._next_number())  # a conflict is fine: then there is a number
                batch.number = batch.number or self._next_number()
                outcome = self.cell.change(batch.number, data)
            except (StoreUnavailableError, StoreFullError) as error:
                problem = error
                if self.cell.is_in_doubt(batch.number):
                    batch.lost_answer = error
            except ReaderGroupError as error:
                if batch.lost_answer is not None:
                    raise
                return batch.end(Status.FAILED, error)
            else:
                if outcome is Outcome.STORED or self.cell.stored == batch.number:
                    self._backpressure.learn(length=self.cell.length)
                    return batch.end(Status.STORED)
                continue  # the segment has the number of a batch that all its calls gave up, or none any more
            if not backoff.wait(problem):
                self.check_open()
                raise DeadlineExceededError(
                    "the store did not accept the events in time; nothing was written", segment=self.segment
                ) from problem

    def _next_number(self) -> bytes:
        self._numbers += 1
        return self._numbers.to_bytes(8)


class QueueProducer:
    """Appends to ``segment`` for one process, as ``backpressure`` allows. Threads share it."""

    def __init__(self, store: SegmentStore, segment: str, clock: Clock, backpressure: Backpressure) -> None:
        self._store = store
        self._segment = segment
        self._backpressure = backpressure
        self._closing = Flag()
        self._batcher = _Batcher(store, segment, clock, backpressure, self._closing)
        self._process = os.getpid()

    def add(self, data: bytes, deadline: Deadline) -> None:
        """Store ``data`` durably, in one piece, exactly once."""
        if self._is_forked:  # the thread that held the lock or was sending does not exist here
            raise ClosedError(
                "the queue belongs to the parent process; open another after the fork",
                segment=self._segment,
            )
        call: Call[_Batch] = Call()
        try:
            self._add(data, call, deadline)
        finally:
            try:
                self._batcher.leave(call)
            except BaseException:  # interrupted: repeat it
                self._batcher.leave(call)
                raise

    def _add(self, data: bytes, call: Call[_Batch], deadline: Deadline) -> None:
        while True:
            batch = self._batcher.join(call, data, deadline)
            status = self._batcher.outcome(batch, call, deadline)
            if status is Status.STORED:
                return
            if batch.error is not None:
                raise batch.error
            if deadline.passed:
                raise DeadlineExceededError(
                    "the call that appended the batch failed before the deadline; nothing was written, try again",
                    segment=self._segment,
                )

    def close(self) -> None:
        """Refuse further data and remove this process's number from the segment. Closing twice is no error."""
        if self._closing.is_set() or self._is_forked:
            return
        self._closing.set()
        self._backpressure.close()
        batcher = self._batcher
        with batcher.lock:
            batcher.drop_open()  # its calls find the queue closed
            batcher.changed.ring()
        cell = batcher.cell
        if cell.stored is not None:
            with suppress(ReaderGroupError):  # the consumer removes it later
                remove_attributes(self._store, self._segment, {cell.attribute: cell.stored})

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process
