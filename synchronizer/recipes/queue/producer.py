"""`QueueProducer`: adds to a queue. Threads that add at the same moment share an append, which is stored once.

Like a writer of a stream, a process keeps the number of its last append in an attribute of its own. An append changes
this number by compare-and-set, so it can be sent again after a lost answer and is still stored once. Numbers grow, and
the first one is stored without events. So after the attribute is removed, a delayed append finds no match and stores
nothing.
"""

from __future__ import annotations

import enum
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from synchronizer.clock import Clock, Deadline
from synchronizer.errors import (
    ClosedError,
    DeadlineExceededError,
    OutcomeUnknownError,
    ReaderGroupError,
    StoreFullError,
    StoreUnavailableError,
)
from synchronizer.patience import Patience
from synchronizer.store import SegmentStore
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
        patience = Patience(self._clock, deadline)
        while not self.has(size):
            self._moved.clear()
            handled, length = patience.call(self._look)
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


class _Status(enum.Enum):
    UNDECIDED = enum.auto()
    STORED = enum.auto()
    FAILED = enum.auto()


class _Batch:
    """The data that the calls of several threads share in one append."""

    def __init__(self) -> None:
        self.parts: dict[_Call, bytes] = {}  # in order
        self.callers: set[_Call] = set()
        self.status = _Status.UNDECIDED
        self.error: ReaderGroupError | None = None
        self.number: bytes | None = None  # set when it is sent
        self.lost_answer: BaseException | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.parts.values()))

    def add(self, call: _Call, data: bytes) -> None:
        call.batch = self  # first, so that an interrupted call leaves the batch
        self.callers.add(call)
        self.parts[call] = data

    def leave(self, call: _Call) -> None:
        """Remove a call that is finished or gives up, and its data, unless the data may be stored. May be repeated."""
        self.callers.discard(call)
        if self.status is _Status.UNDECIDED and self.lost_answer is None:
            self.parts.pop(call, None)

    def end(self, status: _Status, error: ReaderGroupError | None = None) -> None:
        self.status = status
        self.error = error


class _Call:
    """One call of `QueueProducer.add`, and its batch."""

    def __init__(self) -> None:
        self.batch: _Batch | None = None


class QueueProducer:
    """Appends to ``segment`` for one process, as ``backpressure`` allows. Threads share it."""

    def __init__(self, store: SegmentStore, segment: str, clock: Clock, backpressure: Backpressure) -> None:
        self._store = store
        self._segment = segment
        self._clock = clock
        self._backpressure = backpressure
        self._batch_bytes = min(backpressure.limit_bytes, BATCH_BYTES)
        self._closing = Flag()
        self._lock = threading.Lock()  # guards the attributes below
        self._changed = Bell()
        self._open = _Batch()
        self._sending: _Batch | None = None
        self._leader: _Call | None = None  # sends, or waits until the queue has space
        self._cell = Cell(store, segment, ADDERS + secrets.token_hex(8))  # the number of the last stored append
        self._numbers = 0
        self._process = os.getpid()

    def add(self, data: bytes, deadline: Deadline) -> None:
        """Store ``data`` durably, in one piece, exactly once."""
        if self._is_forked:  # the thread that held the lock or was sending does not exist here
            raise ClosedError(
                "the queue belongs to the process that this one was forked from; open it here anew",
                segment=self._segment,
            )
        call = _Call()
        try:
            batch = self._join(call, data, deadline)
            self._await(batch, call, deadline)
        finally:
            try:
                self._leave(call)
            except BaseException:  # interrupted: repeat it
                self._leave(call)
                raise
        if batch.error is not None:
            raise batch.error

    def close(self) -> None:
        """Refuse further data and remove this process's number from the segment. Closing twice is no error."""
        if self._closing.is_set() or self._is_forked:
            return
        self._closing.set()
        self._backpressure.close()
        with self._lock:
            self._changed.ring()
        if self._cell.stored is not None:
            with suppress(ReaderGroupError):  # the consumer removes it later
                remove_attributes(self._store, self._segment, {self._cell.attribute: self._cell.stored})

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("the queue is closed; open another", segment=self._segment)

    def _join(self, call: _Call, data: bytes, deadline: Deadline) -> _Batch:
        while True:
            with self._lock:
                self._check_open()
                if not self._open.parts or self._open.size + len(data) <= self._batch_bytes:
                    self._open.add(call, data)
                    return self._open
                change = self._changed.next_ring()
            if deadline.passed:
                raise DeadlineExceededError("others kept adding until the deadline", segment=self._segment)
            change.wait(deadline.remaining(1.0))

    def _await(self, batch: _Batch, call: _Call, deadline: Deadline) -> None:
        """Wait until the batch has its outcome. Send it if it is the next batch and no other call does."""
        while True:
            with self._lock:
                if batch.status is not _Status.UNDECIDED:
                    return
                if batch is self._open:  # otherwise it may be stored
                    self._check_open()
                if self._leader is None and (self._sending or self._open) is batch:
                    self._leader = call
                elif deadline.passed:
                    self._give_up(batch)
                change = self._changed.next_ring()
            if self._leader is call:
                self._send(batch, deadline)
                self._end_leading(call)
            else:
                change.wait(deadline.remaining(1.0))

    def _give_up(self, batch: _Batch) -> None:
        """Raise the error of a call that does not send the batch itself, at its deadline. The caller holds the lock."""
        if self._sending is batch:
            batch.lost_answer = batch.lost_answer or DeadlineExceededError("it was on its way")
            raise OutcomeUnknownError(
                "the deadline came while the events were on their way; they may be stored", segment=self._segment
            )
        raise DeadlineExceededError("the deadline came before the events were sent", segment=self._segment)

    def _leave(self, call: _Call) -> None:
        """Take a call that is finished or gives up out of its batch. May be repeated."""
        batch = call.batch
        if batch is None or (batch.status is not _Status.UNDECIDED and self._leader is not call):
            return
        self._end_leading(call)
        with self._lock:
            batch.leave(call)
            if self._sending is batch and not batch.callers and self._leader is None:
                self._sending = None  # no call waits for its outcome any more; the next number decides it
            self._changed.ring()

    def _end_leading(self, call: _Call) -> None:
        """Stop leading and wake the other calls. Only this call gets its error; another one continues to send.

        May be repeated.
        """
        with self._lock:
            if self._leader is call:
                if self._sending is not None and self._sending.status is not _Status.UNDECIDED:
                    self._sending = None
                self._leader = None
            self._changed.ring()

    def _send(self, batch: _Batch, deadline: Deadline) -> None:
        while self._sending is None:
            self._backpressure.wait(batch.size, deadline)
            with self._lock:
                if self._backpressure.has(batch.size):  # other calls may have joined it
                    self._sending, self._open = batch, _Batch()
        with self._lock:
            data = b"".join(batch.parts.values())
        try:
            self._append(batch, data, deadline)
        except ReaderGroupError as error:
            if batch.lost_answer is None:
                raise
            raise OutcomeUnknownError(
                "the answer to the append was lost, and it was not found out in time whether the events are stored",
                segment=self._segment,
            ) from error
        except BaseException as error:
            batch.lost_answer = error  # the store may have the events when an interrupt comes
            raise

    def _append(self, batch: _Batch, data: bytes, deadline: Deadline) -> None:
        patience = Patience(self._clock, deadline, self._closing)
        while True:
            if self._cell.stored is None and batch.number is not None and batch.lost_answer is not None:
                raise OutcomeUnknownError("the segment has forgotten this process meanwhile", segment=self._segment)
            problem: BaseException
            try:
                if self._cell.stored is None:
                    self._cell.change(self._next_number())  # a conflict is fine: then there is a number
                batch.number = batch.number or self._next_number()
                outcome = self._cell.change(batch.number, data)
            except (StoreUnavailableError, StoreFullError) as error:
                problem = error
                if self._cell.is_in_doubt(batch.number):
                    batch.lost_answer = error
            except ReaderGroupError as error:
                if batch.lost_answer is not None:
                    raise
                return batch.end(_Status.FAILED, error)
            else:
                if outcome is Outcome.STORED or self._cell.stored == batch.number:
                    return self._end_stored(batch)
                continue  # the segment has the number of a batch that all its calls gave up, or none any more
            if not patience.wait():
                self._check_open()
                raise DeadlineExceededError(
                    "the store did not take the events in time", segment=self._segment
                ) from problem

    def _end_stored(self, batch: _Batch) -> None:
        batch.status = _Status.STORED
        self._backpressure.learn(length=self._cell.length)

    def _next_number(self) -> bytes:
        self._numbers += 1
        return self._numbers.to_bytes(8)
