"""Writing events: batched, in the background, each stored once, those of a key in their order.

A write puts the event into the open batch of its segment. One thread takes what has gathered, round by round, and
appends each batch in one step, so batches grow by themselves while an append is on its way. Those of different segments
are sent at the same time, and a store that commits what comes together does so once for them all.

Stored once: every append also moves the writer's own attribute on the segment, from the number of the last event that
it stored there to that of the last one in this batch, or does nothing. After a lost answer the same append is sent
again; whether the first had arrived shows in the attribute. Numbers are given when a batch is made up, so they grow in
every segment, with holes.

Across a scale: an append that finds its segment sealed is settled by the attribute, read after the seal. A round ends
only when all of it is stored, and nothing newer is sent meanwhile. So when the successors are published, the events
that are not stored are all here, those of one key in one place, and go to the successors before anything newer does.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from synchronizer import (
    Appended,
    AttributeChange,
    ClosedError,
    Conflict,
    Deadline,
    DeadlineExceededError,
    NotFoundError,
    OutcomeUnknownError,
    Patience,
    ReaderGroupError,
    SealedError,
    StoreFullError,
    StoreUnavailableError,
    UnknownOutcome,
)

from .block import MAX_EVENT_BYTES, Headers
from .gathering import (
    BATCH_BYTES,
    EVENT_BYTES,
    KNOWN_KEYS,
    MAX_UNSTORED_BYTES,
    Batch,
    check_key,
    check_size,
    checked_headers,
)
from .manager import StreamManager
from .serializers import Serializer
from .state import StreamState
from .transaction import Transaction

T = TypeVar("T")

#: How long the sending thread lets events gather when nobody waits for them and there are less than a batch.
LINGER_SECONDS: Final = 0.002

#: Appends to different segments that are on their way at the same time.
_SENDERS: Final = 16
#: How long closing waits for an append that is on its way, after the deadline.
_JOIN_SECONDS: Final = 1.0
_WRITER_ATTRIBUTE: Final = "writer/"


class _Lane:
    """The batches of one segment that wait to be sent. The last one is open."""

    __slots__ = ("batch", "full", "segment")

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.full: list[Batch] = []
        self.batch = Batch(segment)

    def next_batch(self) -> None:
        self.full.append(self.batch)
        self.batch = Batch(self.segment)

    def take(self) -> list[Batch]:
        if self.batch.events:
            self.next_batch()
        batches, self.full = self.full, []
        return batches


class EventWriter(Generic[T]):
    """Writes events to a stream. Threads may share it; a context manager that stores everything when it is left.

    ``write`` returns before the event is stored; ``flush`` and ``close`` return when everything written before is.
    A write that fails is raised there, or by the next ``write``, and says how many events were not stored; after that
    the writer takes no more. A store that is away is waited for up to ``timeout`` seconds.
    """

    def __init__(
        self, manager: StreamManager, stream: str, *, serializer: Serializer[T], timeout: float | None = None
    ) -> None:
        self.stream = stream
        self.timeout = manager.timeout if timeout is None else timeout
        self._manager = manager
        self._store = manager.store
        self._clock = manager.clock
        self._serializer = serializer
        self._dumps = serializer.dumps
        self._id = secrets.token_bytes(16)
        self._attribute = _WRITER_ATTRIBUTE + self._id.hex()
        self._last_number = 0
        self._marks: dict[int, bytes | None] = {}  # the writer's attribute on each segment
        self._unsettled: set[int] = set()  # segments where an append of which the answer was lost may still arrive
        self._stop = threading.Event()
        self._fresh_locks()
        self._lanes: dict[int, _Lane] = {}
        self._lane_of_key: dict[str | None, _Lane] = {}  # never None: events without a key go from lane to lane
        self._unstored = 0  # bytes
        self._rounds_taken = 0
        self._rounds_done = 0
        self._closed = False
        self._failure: ReaderGroupError | None = None
        self._failure_told = False
        state = manager.fetch_state(stream, timeout=self.timeout)
        if state.known_transactions.open is not None:  # of a writer before this one, perhaps
            state = manager.finish_pending(stream, timeout=self.timeout)
        if state.sealing:
            raise SealedError("the stream is sealed and takes no events", stream=stream)
        self._follow(state)
        _writers.add(self)
        self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix=f"writer of {stream}")
        self._thread = threading.Thread(target=self._run, name=f"writer of {stream}", daemon=True)
        self._thread.start()

    def _fresh_locks(self) -> None:
        self._lock = threading.Lock()  # guards the lanes and all counters
        self._work = threading.Condition(self._lock)  # there is something to send, or nothing ever again
        self._progress = threading.Condition(self._lock)  # a batch is stored, a round is done, or the writer failed
        self._sender_waits = False
        self._flushing = 0  # calls that wait for everything to be stored

    # ------------------------------------------------------------------ writing

    def write(self, event: T, routing_key: str | None = None, headers: Headers | None = None) -> None:
        """Write one event; it is stored in the background. Events of one ``routing_key`` are read in their order.

        Waits while too much is not stored yet. An event over 8 MiB raises `EventTooLargeError`.
        """
        data = self._dumps(event)
        size = len(data) + EVENT_BYTES
        if headers or size > MAX_EVENT_BYTES:
            self._write_group([data], routing_key, headers)
            return
        with self._lock:
            lane = self._lane_of_key.get(routing_key) or self._find_lane(routing_key)
            if routing_key:
                size += len(routing_key)
            # The inlined `Batch.add` of an event without headers: this is the hot path.
            batch = lane.batch
            batch.events.append(data)
            batch.keys.append(routing_key)
            batch.size += size
            if batch.headers is not None:
                batch.headers.append(None)
            if batch.size >= BATCH_BYTES:
                lane.next_batch()
            self._unstored += size
            if self._sender_waits:
                self._work.notify()
            if self._unstored > MAX_UNSTORED_BYTES:
                self._wait_for_room()

    def write_many(self, events: Iterable[T], routing_key: str | None = None, headers: Headers | None = None) -> None:
        """Write these events together: all are stored or none, with no other event between them."""
        self._write_group([self._dumps(event) for event in events], routing_key, headers)

    def _write_group(self, events: Sequence[bytes], routing_key: str | None, headers: Headers | None) -> None:
        headers = checked_headers(headers)
        check_size(events, headers, self.stream)
        with self._lock:
            lane = self._lane_of_key.get(routing_key) or self._find_lane(routing_key)
            before = lane.batch.size
            for event in events:
                lane.batch.add(event, routing_key, headers)
            self._unstored += lane.batch.size - before
            if lane.batch.size >= BATCH_BYTES:
                lane.next_batch()
            if self._sender_waits and events:
                self._work.notify()
            if self._unstored > MAX_UNSTORED_BYTES:
                self._wait_for_room()

    def _find_lane(self, routing_key: str | None) -> _Lane:
        """The lane of a key that is new here. A writer that takes no more events has no lanes. Lock held."""
        self._check_usable()
        if routing_key is None:
            return self._lanes[next(self._turns)]
        check_key(routing_key, self.stream)
        if len(self._lane_of_key) >= KNOWN_KEYS:
            self._lane_of_key.clear()
        lane = self._lane_of_key[routing_key] = self._lanes[self._routes.segment_of(routing_key)]
        return lane

    def _wait_for_room(self) -> None:
        """Wait until there is room for more, or the writer fails. Lock held."""
        deadline = Deadline(self._clock, self.timeout)
        while self._unstored > MAX_UNSTORED_BYTES and self._failure is None:
            if deadline.passed:
                raise DeadlineExceededError(
                    "the store is too slow: the event is written, but too much is not stored yet", stream=self.stream
                )
            self._progress.wait(deadline.remaining(1.0))

    def transaction(self) -> Transaction[T]:
        """Events that are stored all or not at all: ``with writer.transaction() as txn: txn.write(...)``.

        They come into the stream when the block is left without an exception, after those written here before.
        """
        with self._lock:
            self._check_usable()
        return Transaction(
            self._manager, self.stream, serializer=self._serializer, timeout=self.timeout, before_commit=self.flush
        )

    # ------------------------------------------------------------------ waiting for it

    def flush(self, *, timeout: float | None = None) -> None:
        """Return when every event written before is stored."""
        deadline = Deadline(self._clock, self.timeout if timeout is None else timeout)
        with self._lock:
            self._check_usable()
            self._await_stored(deadline)

    def _await_stored(self, deadline: Deadline) -> None:
        waiting = any(lane.full or lane.batch.events for lane in self._lanes.values())
        round_number = self._rounds_taken + waiting
        self._flushing += 1
        self._work.notify()
        try:
            while self._rounds_done < round_number and self._failure is None:
                if deadline.passed:
                    raise DeadlineExceededError(
                        "not everything is stored yet", stream=self.stream, bytes_not_stored=self._unstored
                    )
                self._progress.wait(deadline.remaining(1.0))
        finally:
            self._flushing -= 1
        self._raise_failure()

    def close(self, *, timeout: float | None = None) -> None:
        """Store what was written, and take no more. Closing twice is no error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lane_of_key = {}
        deadline = Deadline(self._clock, self.timeout if timeout is None else timeout)
        try:
            with self._lock:
                if not self._failure_told:
                    self._await_stored(deadline)
        except DeadlineExceededError:
            self._end_thread()
            with self._lock:
                self._raise_failure()  # it tells how many events are left
            raise
        finally:
            self._end_thread()
            _writers.discard(self)
        self._remove_marks()

    def _end_thread(self) -> None:
        self._stop.set()
        with self._lock:
            self._work.notify()
        self._thread.join(_JOIN_SECONDS)
        self._senders.shutdown(wait=False)

    def _remove_marks(self) -> None:
        """Leave no attribute behind, except where it still keeps a late append of ours out."""
        for number, mark in self._marks.items():
            if mark is not None and number not in self._unsettled:
                try:
                    change = AttributeChange(mark, None)
                    self._store.append(self._state.data_segment(number), b"", attributes={self._attribute: change})
                except ReaderGroupError:
                    continue  # it goes with the segment

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ReaderGroupError as failure:
            if error is None:
                raise
            error.add_note(f"Closing the writer failed too: {failure}")

    def _check_usable(self) -> None:
        self._raise_failure()
        if self._closed:
            raise ClosedError("the writer is closed; open another", stream=self.stream)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure_told = True
            raise type(self._failure)(self._failure.message, **self._failure.facts) from self._failure

    # ------------------------------------------------------------------ the sending thread

    def _run(self) -> None:
        while batches := self._take_round():
            try:
                self._send_round(batches)
            except ReaderGroupError as error:
                self._fail(error, batches)
                return
            except Exception as error:
                failure = ReaderGroupError("the writer failed", cause=repr(error))
                failure.__cause__ = error
                self._fail(failure, batches)
                return
            with self._lock:
                self._rounds_done += 1
                self._progress.notify_all()

    def _take_round(self) -> list[Batch]:
        """All that was written since the last round; nothing when the writer stops."""
        with self._lock:
            while not self._unstored and not self._stop.is_set():
                self._sender_waits = True
                self._work.wait()
                self._sender_waits = False
            if not self._flushing and self._unstored < BATCH_BYTES:
                self._work.wait(LINGER_SECONDS)
            self._rounds_taken += 1
            return [batch for lane in self._lanes.values() for batch in lane.take()]

    def _send_round(self, batches: list[Batch]) -> None:
        """Store these batches, those of a segment in their order. Those that are not stored yet stay in the list."""
        while batches:
            if self._stop.is_set():
                raise DeadlineExceededError("the writer was closed and not everything could be stored in time")
            refused = self._send_first(batches)
            if refused:
                batches[:] = self._reroute(batches, refused)

    def _send_first(self, batches: list[Batch]) -> list[Batch]:
        """Store the first batch of each segment, and return those that their segments do not take.

        All at once, for a store that can put them into one commit.
        """
        firsts = list({batch.segment: batch for batch in reversed(batches)}.values())
        attempts = [self._attempt(firsts[0])] if len(firsts) == 1 else list(self._senders.map(self._attempt, firsts))
        outcomes = list(zip(firsts, attempts, strict=True))
        stored = {batch for batch, outcome in outcomes if outcome is True}
        with self._lock:
            batches[:] = [batch for batch in batches if batch not in stored]
            self._unstored -= sum(batch.size for batch in stored)
            self._progress.notify_all()
        errors = [outcome for outcome in attempts if isinstance(outcome, Exception)]
        if errors:
            raise next((error for error in errors if isinstance(error, OutcomeUnknownError)), errors[0])
        return [batch for batch, outcome in outcomes if outcome is False]

    def _attempt(self, batch: Batch) -> bool | Exception:
        """`_is_stored`, or what it raised."""
        try:
            return self._is_stored(batch)
        except Exception as error:
            batch.in_doubt = isinstance(error, OutcomeUnknownError)
            return error

    def _is_stored(self, batch: Batch) -> bool:
        """Store the batch, or find that its segment takes no more and does not have it."""
        segment = self._state.data_segment(batch.segment)
        data, new_mark = self._encode(batch)
        changes = {self._attribute: AttributeChange(self._marks.get(batch.segment), new_mark)}
        patience = Patience(self._clock, Deadline(self._clock, self.timeout), self._stop)
        in_doubt = False
        while True:
            try:
                answer = self._store.append(segment, data, attributes=changes)
            except SealedError:
                return self._was_stored(segment, new_mark, in_doubt)
            except NotFoundError as error:
                if in_doubt:
                    raise _outcome_unknown(segment, "was deleted") from error
                return False
            except (StoreUnavailableError, StoreFullError) as error:
                if patience.wait():
                    continue
                if in_doubt:
                    raise _outcome_unknown(segment, "could not be reached") from error
                raise
            if isinstance(answer, Conflict):
                if in_doubt and answer.attributes.get(self._attribute) == new_mark:
                    break
                raise OutcomeUnknownError("somebody else changed this writer's mark on the segment", segment=segment)
            if isinstance(answer, Appended):
                break
            assert isinstance(answer, UnknownOutcome)
            in_doubt = True
            self._unsettled.add(batch.segment)
            if not patience.wait():
                raise _outcome_unknown(segment, "did not answer") from answer.cause
        self._marks[batch.segment] = new_mark
        return True

    def _encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The batch under the next numbers, and the mark that tells that it is stored."""
        with self._lock:
            first_number, self._last_number = self._last_number + 1, self._last_number + len(batch.events)
            last_number = self._last_number
        data = batch.encode(first_number, self._id, int(self._clock.time() * 1_000_000))
        return data, last_number.to_bytes(8, "big")

    def _was_stored(self, segment: str, new_mark: bytes, in_doubt: bool) -> bool:
        """Whether a sealed segment has the batch that ends at ``new_mark``: nothing can arrive there any more."""
        if not in_doubt:
            return False
        patience = Patience(self._clock, Deadline(self._clock, self.timeout), self._stop)
        try:
            marks = patience.call(lambda: self._store.attributes(segment, self._attribute))
        except NotFoundError as error:
            raise _outcome_unknown(segment, "was deleted") from error
        return marks.get(self._attribute) == new_mark

    # ------------------------------------------------------------------ across a scale

    def _reroute(self, batches: list[Batch], refused: list[Batch]) -> list[Batch]:
        """These batches, and what waits in the lanes, for the segments of the newest epoch."""
        deadline = Deadline(self._clock, self.timeout)
        patience = Patience(self._clock, deadline, self._stop)
        while True:
            state = self._manager.finish_pending(self.stream, timeout=deadline.remaining(self.timeout))
            if state.incarnation != self._state.incarnation:
                raise NotFoundError("the stream was deleted, and another one created", stream=self.stream)
            if state.sealed:
                raise SealedError("the stream is sealed and takes no more events", stream=self.stream)
            if not any(batch.segment in state.current for batch in refused):
                break
            if not patience.wait():
                raise SealedError(
                    "the segment is sealed and has no successors", segment=state.segment(refused[0].segment)
                )
        with self._lock:
            waiting = [batch for lane in self._lanes.values() for batch in lane.take()]
            self._follow(state)
            for batch in self._split_by_segment(waiting):
                self._lanes[batch.segment].full.append(batch)
            return self._split_by_segment(batches)

    def _split_by_segment(self, batches: list[Batch]) -> list[Batch]:
        """The same events, in their order, in one batch per old batch and segment of the newest epoch."""
        return [part for batch in batches for part in self._split(batch)]

    def _split(self, batch: Batch) -> Iterable[Batch]:
        if batch.segment in self._lanes:
            return [batch]
        parts: dict[int, Batch] = {}
        # All events without a key stay together, because they may be one group.
        keyless = next(self._turns)
        for index, (event, key) in enumerate(zip(batch.events, batch.keys, strict=True)):
            segment = keyless if key is None else self._routes.segment_of(key)
            if segment not in parts:
                parts[segment] = Batch(segment)
            parts[segment].add(event, key, batch.headers[index] if batch.headers else None)
        return parts.values()

    def _follow(self, state: StreamState) -> None:
        """Write to the segments of this epoch from now on. What waits in the lanes was taken out. Lock held."""
        self._state = state
        self._routes = state.routes
        self._lane_of_key = {}
        self._lanes = {number: _Lane(number) for number in state.current}
        # The others are sealed: nothing arrives there any more, and what they hold is settled.
        self._marks = {number: self._marks[number] for number in state.current if number in self._marks}
        self._unsettled.intersection_update(state.current)
        # Writers start at different segments, so that few events without a key do not all go to the first one.
        turn = secrets.randbelow(len(state.current))
        self._turns = cycle(state.current[turn:] + state.current[:turn])

    def _fail(self, error: ReaderGroupError, batches: list[Batch]) -> None:
        """Take no more events, and say how many were not stored."""
        with self._lock:
            waiting = [batch for lane in self._lanes.values() for batch in lane.take()]
            unstored = sum(len(batch.events) for batch in batches + waiting)
            unknown = sum(len(batch.events) for batch in batches if batch.in_doubt)
            facts = {**error.facts, "stream": self.stream, "events_not_stored": unstored - unknown}
            if unknown:
                facts["events_in_doubt"] = unknown
            self._failure = type(error)(error.message, **facts)
            self._failure.__cause__ = error
            self._lane_of_key = {}
            self._unstored = 0
            self._progress.notify_all()

    def _abandon(self) -> None:
        """In a forked child: the parent's thread sends what was written, and this one refuses."""
        self._fresh_locks()
        self._lane_of_key = {}
        self._failure = ClosedError("the writer belongs to the parent process; open one here", stream=self.stream)
        self._closed = self._failure_told = True


def _outcome_unknown(segment: str, happened: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"an answer was lost, and then the segment {happened}: look whether the last events are there before you "
        "write them again",
        segment=segment,
    )


_writers: weakref.WeakSet[EventWriter[Any]] = weakref.WeakSet()


def _abandon_writers() -> None:
    for writer in list(_writers):
        writer._abandon()
    _writers.clear()


os.register_at_fork(after_in_child=_abandon_writers)
