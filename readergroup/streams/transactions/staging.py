"""Stage one part of a transaction: its events go to segments of their own, which no reader sees.

A part has a staged segment for each segment of the stream that it has events for. An event in chunks has one of its
own, so that one step of the merge brings all its chunks. A staged segment is filled as a
writer fills a segment, and named by a rule, so that a few words describe a part of any size. If the stream is scaled
meanwhile, the part continues as it began, and the merge divides its events anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Final, Generic, NamedTuple, Self, TypeVar

from synchronizer import (
    ClosedError,
    Deadline,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
)
from synchronizer.arguments import check_duration
from synchronizer.backoff import Backoff
from synchronizer.compare_and_set import append_at

from ..config import FrozenModel, check_name, staged_segments, staging_prefix
from ..data.block import Headers, encode_chunks
from ..data.moments import microseconds_of
from ..data.write_batch import (
    BATCH_BYTES,
    KNOWN_KEYS,
    MAX_UNSTORED_BYTES,
    Batch,
    WriteBatch,
    check_key,
    check_max_event_bytes,
    check_size,
    checked_headers,
    is_for_chunks,
)
from ..manager import StreamManager
from ..serializers import Serializer, checked_dumps
from .committed import part_name

T = TypeVar("T")

#: A staged segment of this size is followed by another one. Each is merged in one step, while other writes wait.
STAGED_BYTES: Final = 32 * 1024 * 1024


class StagedPart(FrozenModel):
    """The description of a staged part, to send to the committer. It pickles, and has a JSON form."""

    stream: str
    incarnation: str
    key: str
    generation: int
    name: str
    #: The segments of the stream that it has events for, each once per staged segment.
    segments: tuple[int, ...]
    events: int
    size: int

    @property
    def staged_segments(self) -> tuple[str, ...]:
        """The names, in the store, of the segments that hold the events."""
        prefix = staging_prefix(self.stream, self.incarnation, self.key, self.generation)
        return tuple(staged_segments(prefix, self.name, self.segments))


class EncodedBatch(NamedTuple):
    """Events for one segment of the stream, in their stored encoding."""

    segment: int
    data: bytes


class _SegmentStaging:
    """A part's staged segments for one segment of the stream, and the batch for the last of them."""

    __slots__ = ("batch", "is_full", "lengths", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lengths: list[int] = []
        self.is_full = False  # the last of them takes no more
        self.batch = WriteBatch(number)


class Staging(Generic[T]):
    """Stages the events of one part. For one thread. It is a context manager that gives up a part that was not
    finished.

    ``finish`` stores all events and returns the part, which counts once it is committed. A write that fails gives the
    part up: stage another. If the store is away, a call waits up to ``timeout`` seconds.
    """

    def __init__(
        self,
        manager: StreamManager,
        stream: str,
        key: str,
        *,
        serializer: Serializer[T],
        timeout: float | None = None,
        max_event_bytes: int | None = None,
    ) -> None:
        self.stream = stream
        self._max_event_bytes = check_max_event_bytes(max_event_bytes, manager.store)
        self.key = check_name(key, "transaction key")
        check_duration(timeout, "timeout", or_none=True)
        self.timeout = manager.timeout if timeout is None else timeout
        self._manager = manager
        self._store = manager.store
        self._clock = manager.clock
        self._dumps = checked_dumps(serializer)
        state = manager.fetch_state(stream, timeout=self.timeout)
        state.check_takes_events()
        self._incarnation = state.incarnation
        self._generation = state.transactions.committer(key).generation
        # A process whose clock was ahead may have ended the time of all parts that are begun now.
        begun_at = max(self._clock.time(), state.transactions.expired_before)
        self._name = part_name(begun_at, secrets.token_hex(8))
        self._routes = state.routes
        self._prefix = staging_prefix(stream, state.incarnation, key, self._generation)
        self._segments = {number: _SegmentStaging(number) for number in state.current}
        self._segment_of_key: dict[str, _SegmentStaging] = {}
        self._round_robin = secrets.randbelow(len(state.current))  # which segment gets the next event without a key
        self._writer_id = secrets.token_bytes(16)
        self._encoded = 0  # events
        self._waiting = 0  # bytes
        self._given_up = False
        self._part: StagedPart | None = None

    def write(
        self,
        event: T,
        routing_key: str | None = None,
        headers: Headers | None = None,
        *,
        event_time: datetime | None = None,
    ) -> None:
        """Add one event. Events of one ``routing_key`` are read in the order of these calls.

        Args:
            event: A value that the serializer takes, at most 8 MiB, or the writer's ``max_event_bytes``, with its
                headers.
            routing_key: Selects the segment; at most 4096 characters. Default: none.
            headers: Stored with the event.
            event_time: When it happened, with a timezone. Default: none.

        Raises:
            EventTooLargeError: The event is over this limit.
            NotFoundError: The staged events were deleted: a transaction of the key was committed or aborted meanwhile.
            ClosedError: The part is finished, or was given up.
        """
        self._check_open()
        headers = checked_headers(headers)
        time = None if event_time is None else microseconds_of(event_time, "event_time")
        data = self._dumps(event)
        self._check_open()  # the serializer may have ended the transaction
        if is_for_chunks(data, headers, self._max_event_bytes, self.stream):
            self._stage_chunks(data, routing_key, headers, time)
            return
        check_size([data], headers, self.stream)
        staging = self._find_keyless() if routing_key is None else self._find(routing_key)
        before = staging.batch.size
        staging.batch.add(data, routing_key, headers, time)
        self._waiting += staging.batch.size - before
        if staging.batch.size >= BATCH_BYTES:
            self._round_robin += routing_key is None
            self._send([staging])
        elif self._waiting > MAX_UNSTORED_BYTES:
            self._send(self._segments.values())

    def _stage_chunks(
        self, event: bytes, routing_key: str | None, headers: Headers | None, event_time: int | None
    ) -> None:
        """Store the event in a staged segment of its own, behind the events of its segment so far."""
        staging = self._segments[self._segment_of(routing_key)]
        self._send([staging])
        at = int(self._clock.time() * 1_000_000)
        number = self._encoded = self._encoded + 1
        with self._giving_up():
            self._begin(staging, self._backoff())
            chunks = encode_chunks(
                event,
                written_at=at,
                writer_id=self._writer_id,
                number=number,
                key=routing_key,
                headers=headers,
                event_time=event_time,
            )
            for chunk in chunks:
                self._append(self._last_name(staging), chunk, staging.lengths[-1], self._backoff())
                staging.lengths[-1] += len(chunk)
            staging.is_full = True

    def _segment_of(self, routing_key: str | None) -> int:
        """Return the segment of the stream for events of this key; without a key, round robin."""
        if routing_key is None:
            self._round_robin += 1
            return self._find_keyless().number
        return self._find(routing_key).number

    def segments_of(self, routing_keys: Sequence[str | None]) -> Sequence[int]:
        """Return the segments of the stream for events of these keys."""
        return self._routes.segments_of(routing_keys, self._segment_of(None))

    def encode(self, batch: Batch) -> EncodedBatch:
        """Encode events for one segment, from `segments_of`, for `write_encoded`. Other threads may write meanwhile."""
        data = batch.encode(self._encoded + 1, self._writer_id, int(self._clock.time() * 1_000_000))
        self._encoded += len(batch.events)
        return EncodedBatch(batch.segment, data)

    def write_encoded(self, batch: EncodedBatch) -> None:
        """Add these events, and store them at once."""
        self._check_open()
        staging = self._segments[batch.segment]
        self._send([staging])
        with self._giving_up():
            self._store_batch(staging, batch)

    def finish(self) -> StagedPart:
        """Store all events and return the part, which takes no more. Calling it twice returns the same part."""
        if self._part is None:
            self._check_open()
            self._send(self._segments.values())
            with self._giving_up():
                self._seal()
            self._part = StagedPart(
                stream=self.stream,
                incarnation=self._incarnation,
                key=self.key,
                generation=self._generation,
                name=self._name,
                segments=self._numbers,
                events=self._encoded,
                size=sum(sum(staging.lengths) for staging in self._segments.values()),
            )
        return self._part

    def give_up(self) -> None:
        """Take no more events, and do not let this part be finished."""
        self._given_up = True

    def discard(self) -> None:
        """Delete the staged events. If the part may be about to be committed, abort its key instead."""
        self.give_up()
        backoff = self._backoff()
        for name in staged_segments(self._prefix, self._name, self._numbers):
            backoff.retry(partial(self._store.forget, name))
        for staging in self._segments.values():
            staging.lengths.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._part is None:
            try:
                self.discard()
            except ReaderGroupError:
                return  # it is deleted when it is old

    # ------------------------------------------------------------------ where to

    def _check_open(self) -> None:
        if self._part is not None or self._given_up:
            raise ClosedError("this part is finished or discarded; stage another", stream=self.stream, key=self.key)

    def _find(self, routing_key: str) -> _SegmentStaging:
        try:
            found = self._segment_of_key.get(routing_key)
        except TypeError:  # an unhashable key
            check_key(routing_key, self.stream)
            raise
        if found is None:
            check_key(routing_key, self.stream)
            if len(self._segment_of_key) >= KNOWN_KEYS:
                self._segment_of_key.clear()
            found = self._segment_of_key[routing_key] = self._segments[self._routes.segment_of(routing_key)]
        return found

    def _find_keyless(self) -> _SegmentStaging:
        """Return the segment for events without a key. It changes with each batch: a small part is in few segments."""
        numbers = self._routes.segments
        return self._segments[numbers[self._round_robin % len(numbers)]]

    # ------------------------------------------------------------------ storing

    @property
    def _numbers(self) -> tuple[int, ...]:
        """For each staged segment, the number of the segment of the stream."""
        return tuple(staging.number for staging in self._segments.values() for _ in staging.lengths)

    def _send(self, stagings: Iterable[_SegmentStaging]) -> None:
        with self._giving_up():
            for staging in stagings:
                if staging.batch.events:
                    batch, staging.batch = staging.batch, WriteBatch(staging.number)
                    self._waiting -= batch.size
                    self._store_batch(staging, self.encode(batch))

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Give the part up if this block fails."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    def _store_batch(self, staging: _SegmentStaging, batch: EncodedBatch) -> None:
        backoff = self._backoff()
        if not staging.lengths or staging.is_full or staging.lengths[-1] >= STAGED_BYTES:
            self._begin(staging, backoff)
        self._append(self._last_name(staging), batch.data, staging.lengths[-1], backoff)
        staging.lengths[-1] += len(batch.data)

    def _begin(self, staging: _SegmentStaging, backoff: Backoff) -> None:
        """Begin another staged segment."""
        staging.lengths.append(0)
        staging.is_full = False
        backoff.retry(partial(self._store.create, self._last_name(staging)))

    def _last_name(self, staging: _SegmentStaging) -> str:
        *_, name = staged_segments(self._prefix, self._name, [staging.number] * len(staging.lengths))
        return name

    def _append(self, name: str, data: bytes, offset: int, backoff: Backoff) -> None:
        """Append at ``offset``. No other process does, so data found there after a lost answer is from this append."""
        try:
            length = backoff.retry(partial(append_at, self._store, name, data, offset, unread=True))
        except NotFoundError as error:
            raise self._was_dropped() from error
        if length != offset + len(data):
            raise OutcomeUnknownError(
                "the store's answer was lost, and the events may be staged; stage the part again", segment=name
            )

    def _seal(self) -> None:
        """Seal the staged segments, so that a store can copy them, and check that their stream still exists."""
        backoff = self._backoff()
        for name in staged_segments(self._prefix, self._name, self._numbers):
            try:
                backoff.retry(partial(self._store.seal, name))
            except NotFoundError as error:
                raise self._was_dropped() from error
        state = self._manager.fetch_state(self.stream, timeout=self.timeout)
        if state.incarnation != self._incarnation:
            raise NotFoundError("the stream was deleted and created again", stream=self.stream)

    def _was_dropped(self) -> NotFoundError:
        return NotFoundError(
            "the staged events were deleted, because a transaction of the key was committed or aborted, or the "
            "stream was deleted; stage the events again",
            stream=self.stream,
            key=self.key,
        )

    def _backoff(self) -> Backoff:
        return Backoff(self._clock, Deadline(self._clock, self.timeout))
