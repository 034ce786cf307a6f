"""Staging one part of a transaction: its events in segments of their own, which no reader sees.

A part has one staged segment for each segment of the stream that it has events for, filled as a writer fills those,
and named by a rule: so it can be described in a few words, whatever its size. The stream may be scaled meanwhile;
a part goes on as it began, and its events are divided anew when they are merged.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from synchronizer import (
    Appended,
    ClosedError,
    Conflict,
    Deadline,
    NotFoundError,
    OutcomeUnknownError,
    Patience,
    ReaderGroupError,
    SealedError,
    StoreFullError,
    StoreUnavailableError,
)

from .block import Headers
from .committed import part_name
from .config import Record, check_name, staging_prefix
from .gathering import BATCH_BYTES, KNOWN_KEYS, MAX_UNSTORED_BYTES, Batch, check_key, check_size, checked_headers
from .manager import StreamManager
from .serializers import Serializer

T = TypeVar("T")


class StagedPart(Record):
    """What was staged, in a few words: to be sent to whoever commits. It pickles, and has a JSON form."""

    stream: str
    incarnation: str
    key: str
    generation: int
    name: str
    #: The segments of the stream for which it has events.
    segments: tuple[int, ...]
    events: int
    size: int

    @property
    def staged_segments(self) -> tuple[str, ...]:
        """The names, in the store, of the segments that hold the events."""
        prefix = staging_prefix(self.stream, self.incarnation, self.key, self.generation)
        return tuple(f"{prefix}{self.name}/{number}" for number in self.segments)


class _StagedSegment:
    """One of the segments of a part, and what is on its way into it."""

    __slots__ = ("batch", "length", "name", "number")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.length: int | None = None  # None: not created
        self.batch = Batch(number)


class Staging(Generic[T]):
    """Takes the events of one part. For one thread; a context manager that gives up what was not finished.

    ``finish`` stores all and returns the part, which counts once it is committed. A write that fails gives the part
    up: stage another. A store that is away is waited for up to ``timeout`` seconds.
    """

    def __init__(
        self,
        manager: StreamManager,
        stream: str,
        key: str,
        *,
        serializer: Serializer[T],
        timeout: float | None = None,
    ) -> None:
        self.stream = stream
        self.key = check_name(key, "transaction key")
        self.timeout = manager.timeout if timeout is None else timeout
        self._manager = manager
        self._store = manager.store
        self._clock = manager.clock
        self._dumps = serializer.dumps
        state = manager.fetch_state(stream, timeout=self.timeout)
        if state.sealing:
            raise SealedError("the stream is sealed and takes no events", stream=stream)
        self._incarnation = state.incarnation
        self._generation = state.known_transactions.committer(key).generation
        self._name = part_name(self._clock.time(), secrets.token_hex(8))
        self._routes = state.routes
        prefix = f"{staging_prefix(stream, state.incarnation, key, self._generation)}{self._name}/"
        self._segments = {number: _StagedSegment(number, f"{prefix}{number}") for number in state.current}
        self._segment_of_key: dict[str, _StagedSegment] = {}
        self._turn = secrets.randbelow(len(state.current))  # whose turn it is to get the events without a key
        self._writer_id = secrets.token_bytes(16)
        self._events = 0
        self._sent = 0  # events
        self._waiting = 0  # bytes
        self._given_up = False
        self._part: StagedPart | None = None

    def write(self, event: T, routing_key: str | None = None, headers: Headers | None = None) -> None:
        """Add one event. Those of one ``routing_key`` are read in the order of these calls."""
        self._check_open()
        headers = checked_headers(headers)
        data = self._dumps(event)
        check_size([data], headers, self.stream)
        segment = self._find_keyless() if routing_key is None else self._find(routing_key)
        before = segment.batch.size
        segment.batch.add(data, routing_key, headers)
        self._events += 1
        self._waiting += segment.batch.size - before
        if segment.batch.size >= BATCH_BYTES:
            self._turn += routing_key is None
            self._send([segment])
        elif self._waiting > MAX_UNSTORED_BYTES:
            self._send(self._segments.values())

    def finish(self) -> StagedPart:
        """Store what was written and return the part, which takes no more events. Twice returns the same."""
        if self._part is None:
            self._check_open()
            self._send(self._segments.values())
            filled = [segment for segment in self._segments.values() if segment.length]
            try:
                self._settle(filled)
            except BaseException:
                self._given_up = True
                raise
            self._part = StagedPart(
                stream=self.stream,
                incarnation=self._incarnation,
                key=self.key,
                generation=self._generation,
                name=self._name,
                segments=tuple(segment.number for segment in filled),
                events=self._events,
                size=sum(segment.length or 0 for segment in filled),
            )
        return self._part

    def discard(self) -> None:
        """Delete what was staged. Not for a part that somebody may be about to commit: abort its key instead."""
        self._given_up = True
        patience = self._patience()
        for segment in self._segments.values():
            if segment.length is not None:
                patience.call(partial(self._store.delete, segment.name))
                segment.length = None

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
            raise ClosedError("this part is finished, or was given up; stage another", stream=self.stream, key=self.key)

    def _find(self, routing_key: str) -> _StagedSegment:
        found = self._segment_of_key.get(routing_key)
        if found is None:
            check_key(routing_key, self.stream)
            if len(self._segment_of_key) >= KNOWN_KEYS:
                self._segment_of_key.clear()
            found = self._segment_of_key[routing_key] = self._segments[self._routes.segment_of(routing_key)]
        return found

    def _find_keyless(self) -> _StagedSegment:
        """Events without a key go on to another segment with every batch, so that a small part is in few segments."""
        numbers = self._routes.segments
        return self._segments[numbers[self._turn % len(numbers)]]

    # ------------------------------------------------------------------ storing

    def _send(self, segments: Iterable[_StagedSegment]) -> None:
        try:
            for segment in segments:
                if segment.batch.events:
                    self._store_batch(segment)
        except BaseException:
            self._given_up = True
            raise

    def _store_batch(self, segment: _StagedSegment) -> None:
        patience = self._patience()
        if segment.length is None:
            patience.call(lambda: self._store.create(segment.name))
            segment.length = 0
        batch, segment.batch = segment.batch, Batch(segment.number)
        data = batch.encode(self._sent + 1, self._writer_id, int(self._clock.time() * 1_000_000))
        self._append(segment.name, data, segment.length, patience)
        segment.length += len(data)
        self._sent += len(batch.events)
        self._waiting -= batch.size

    def _append(self, name: str, data: bytes, offset: int, patience: Patience) -> None:
        """Append at ``offset``: nobody else does, so what is found behind it after a lost answer is this."""
        while True:
            try:
                answer = self._store.append(name, data, expected_offset=offset)
            except NotFoundError as error:
                raise self._was_dropped() from error
            except (StoreUnavailableError, StoreFullError):
                if patience.wait():
                    continue
                raise
            if isinstance(answer, Appended) or (isinstance(answer, Conflict) and answer.length == offset + len(data)):
                return
            if isinstance(answer, Conflict) or not patience.wait():
                raise OutcomeUnknownError(
                    "whether events were staged cannot be found out; stage them anew", segment=name
                )

    def _settle(self, segments: Iterable[_StagedSegment]) -> None:
        """Seal them, so that a store can copy them; and see that the stream is there, with which they are deleted."""
        patience = self._patience()
        for segment in segments:
            try:
                patience.call(partial(self._store.seal, segment.name))
            except NotFoundError as error:
                raise self._was_dropped() from error
        state = self._manager.fetch_state(self.stream, timeout=self.timeout)
        if state.incarnation != self._incarnation:
            raise NotFoundError("the stream was deleted meanwhile, and another one created", stream=self.stream)

    def _was_dropped(self) -> NotFoundError:
        return NotFoundError(
            "what was staged is deleted: a transaction of the key was committed or aborted meanwhile, or the stream is "
            "gone; stage the events again",
            stream=self.stream,
            key=self.key,
        )

    def _patience(self) -> Patience:
        return Patience(self._clock, Deadline(self._clock, self.timeout))
