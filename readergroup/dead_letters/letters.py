"""`DeadLetters`: lists, replays and discards the dead letters in a stream, or of a queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Final, Literal, NamedTuple, NoReturn, Protocol, get_args

from pydantic import ValidationError

from synchronizer import (
    HeldLock,
    InvalidArgumentError,
    LeaseLostError,
    Map,
    NotFoundError,
    ReaderGroupError,
    SealedError,
    StateSynchronizer,
    TruncatedError,
)
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.callables import checked
from synchronizer.recipes.queue.dead_letters import QUEUE_PREFIX
from synchronizer.spans import Spans, joined

from ..batch.client import BatchClient
from ..batch.ranges import SegmentRange
from ..batch.reading import MAX_EVENTS, Batches, Events
from ..errors import CorruptDataError
from ..outbox.table import Row
from ..scaling.retry import DeadLetter
from ..streams.config import SegmentId, check_stream_name, number_of, stream_of
from ..streams.data.block import Headers
from ..streams.data.moments import microseconds_of
from ..streams.data.places import Place
from ..streams.event import Event, EventPointer
from ..streams.manager import StreamManager
from ..streams.serializers import BytesSerializer
from ..streams.state import StreamState
from .replaying import Replay, letter_id, place_of
from .statuses import ForgetLetters, LetterStatuses, MarkLetters, Status

#: The header of a replayed event: the pointer of the event that failed.
REPLAYED_FROM: Final = "readergroup-replayed-from"
#: How many letters, and about how many bytes of them, are replayed in one step.
#: Called with a number of letters.
OnProgress = Callable[[int], object]

_CHUNK_LETTERS: Final = 500
_CHUNK_BYTES: Final = 4 * 1024 * 1024
#: The incarnation in pointers to events and dead letters of a queue: a queue cannot be deleted.
QUEUE_INCARNATION: Final = "queue"


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """A dead letter of a pool or of a queue, and what became of it."""

    #: The address of the letter in the stream of dead letters, or in those of the queue.
    pointer: EventPointer
    #: The event that failed, and why.
    letter: DeadLetter
    #: ``"pending"``, ``"replayed"`` or ``"discarded"``.
    status: Status
    #: None, as its headers are empty, if the event comes from a queue.
    routing_key: str | None
    headers: Headers
    #: When the event was set aside, in UTC. 1970 if an old release of a queue did not store it.
    written_at: datetime
    #: The offset of the next letter.
    end: int
    #: When the event happened, as its writer said.
    event_time: datetime | None = None

    @property
    def is_of_queue(self) -> bool:
        """Whether the event comes from an event queue."""
        return self.letter.pointer.incarnation == QUEUE_INCARNATION

    @property
    def stream(self) -> str:
        """The stream or the queue that the event came from, to which it is replayed."""
        segment = self.letter.pointer.segment
        return segment.removeprefix(QUEUE_PREFIX) if self.is_of_queue else stream_of(segment)


class Filters(NamedTuple):
    """Which letters are meant, as `DeadLetters.list` takes it."""

    status: Status | None = "pending"
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    routing_key: str | None = None
    limit: int | None = None

    def check(self) -> None:
        if self.status not in (None, *get_args(Status)):
            raise InvalidArgumentError("status must be 'pending', 'replayed', 'discarded' or None", status=self.status)
        check_type(self.error, str, "error", or_none=True)
        check_type(self.routing_key, str, "routing_key", or_none=True)
        check_count(self.limit, "limit", at_least=0, or_none=True)
        for name, time in (("since", self.since), ("until", self.until)):
            check_type(time, datetime, name, or_none=True)
            if time is not None and time.tzinfo is None:
                raise InvalidArgumentError(f"{name} needs a timezone, such as that of datetime.now(UTC)", time=time)


class Locking(Protocol):
    def __call__(self, name: str, *, timeout: float | None) -> AbstractContextManager[HeldLock]:
        """Hold the lock during the block, as `Client.lock`."""


class DeadLetters:
    """The dead letters in one stream, which pools with ``RetryPolicy(dead_letters=...)`` write, or those of one queue.

    Threads may share it. A letter is pending until it is replayed or discarded, once, by any process. Both leave it
    where it is: the retention policy of the stream, or `StreamManager.truncate`, deletes it; in a queue,
    `EventQueue.forget_dead_letters` does. The client closes the object.

    Open it with `Client.dead_letters`.
    """

    def __init__(
        self,
        stream: str,
        streams: StreamManager,
        batch: BatchClient,
        lock: Locking,
        open_statuses: Callable[[LetterStatuses | None, float | None], StateSynchronizer[LetterStatuses]],
    ) -> None:
        self.stream = check_stream_name(stream)
        self._streams = streams
        self._batch = batch
        self._lock = lock
        self._open_statuses = open_statuses
        self._opened: StateSynchronizer[LetterStatuses] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stream!r})"

    # ------------------------------------------------------------------ reading

    def list(
        self,
        *,
        status: Status | None = "pending",
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        routing_key: str | None = None,
        limit: int | None = None,
    ) -> Iterator[StoredDeadLetter]:
        """Return an iterator over the letters that are there now. Letters of one routing key are in their order.

        Args:
            status: ``"pending"``, ``"replayed"`` or ``"discarded"``; None for all. Default: pending.
            error: Only letters with this text in their error, such as ``"ValueError"``.
            since: Only letters that were written at this time or later; it has a timezone.
            until: Only letters that were written before this time.
            routing_key: Only letters of this key. Events of a queue have none.
            limit: The largest number of letters. Default: no limit.

        Raises:
            NotFoundError: The stream or the queue does not exist.
            InvalidArgumentError: A filter is wrong, or the iterator finds an event that is no dead letter.
        """
        return self._list(Filters(status, error, since, until, routing_key, limit), None)

    def _list(self, filters: Filters, timeout: float | None) -> Iterator[StoredDeadLetter]:
        """`list`, which waits up to ``timeout`` seconds for the store in each step."""
        filters.check()
        return islice(self._select(filters, timeout), filters.limit)

    def show(self, pointer: EventPointer | str) -> StoredDeadLetter:
        """Return the letter at ``pointer``, or that of the event at ``pointer``, as `list` gives it.

        Args:
            pointer: The pointer of a letter, also as text, or as `readergroup dead-letters list` prints it: the number
                of the segment and the offset, such as ``"0:1234"``, and of a queue the offset. Or the pointer of the
                event that failed, as logs have it: this reads all letters, and finds a pending one if the event has
                several.

        Raises:
            NotFoundError: There is no such letter, or it was truncated.
            InvalidArgumentError: The text has none of these forms.
        """
        (found,) = self._of_letters([pointer], None)
        return self._show(found, None)

    def _select(self, filters: Filters, timeout: float | None) -> Iterator[StoredDeadLetter]:
        status, error, since, until, routing_key, _ = filters
        # The statuses are read first: a letter that is written later is pending anyway.
        statuses = self._statuses(timeout)
        return (
            letter
            for event in self._events(since, timeout)
            if (since is None or event.written_at >= since)
            and (until is None or event.written_at < until)
            and (routing_key is None or event.routing_key == routing_key)
            and status in (None, statuses.status_of(_place(event.pointer), event.offset))
            for letter in [_decoded(event, statuses)]
            if error is None or error in letter.letter.error
        )

    def _show(self, pointer: EventPointer, timeout: float | None) -> StoredDeadLetter:
        return self._at(pointer, self._statuses(timeout), timeout)

    def _events(self, since: datetime | None, timeout: float | None) -> Iterator[Event[bytes]]:
        start: Place = "head" if since is None else self._batch.cut_at(self.stream, since, timeout=timeout)
        ranges = self._batch.segment_ranges(self.stream, start=start, timeout=timeout)
        return (event for each in ranges for event in self._read(each, timeout))

    def _read(self, segment_range: SegmentRange, timeout: float | None = None) -> Iterator[Event[bytes]]:
        events = self._events_of(segment_range, timeout)
        while True:
            try:
                yield from events
            except TruncatedError:
                continue  # with what is left
            return

    def _events_of(self, segment_range: SegmentRange, timeout: float | None) -> Events[bytes]:
        return Events(Batches(self._streams, segment_range, BytesSerializer(), MAX_EVENTS, timeout))

    def _at(self, pointer: EventPointer, statuses: LetterStatuses, timeout: float | None) -> StoredDeadLetter:
        state = self._streams.fetch_state(self.stream, timeout=timeout)
        number = number_of(pointer.segment)
        event = None
        if pointer.incarnation == state.incarnation and number in state.segments:
            length = self._streams.segment_lengths(state, [number], timeout=timeout)[number]
            if pointer.offset < length:
                event = self._first(
                    SegmentRange(
                        segment=pointer.segment, incarnation=pointer.incarnation, start=pointer.offset, end=length
                    ),
                    timeout,
                )
        if event is None or event.offset != pointer.offset:
            raise NotFoundError("there is no such dead letter, or it was truncated", pointer=str(pointer))
        return _decoded(event, statuses)

    def _first(self, segment_range: SegmentRange, timeout: float | None) -> Event[bytes] | None:
        try:
            return next(self._events_of(segment_range, timeout), None)
        except (CorruptDataError, TruncatedError):  # no event begins there; or not any more
            return None

    def _of_letters(self, pointers: Iterable[EventPointer | str], timeout: float | None) -> Collection[EventPointer]:
        """Return the pointers of these letters, each once, in place of those of their events."""
        named = [self._parse(each, timeout) if isinstance(each, str) else each for each in pointers]
        for each in named:
            check_type(each, EventPointer, "pointer")
        missing = {each for each in named if not self._contains(each)}
        found: dict[EventPointer, EventPointer] = {}
        for letter in self._list(Filters(status=None), timeout) if missing else ():
            event = letter.letter.pointer
            if event in missing and (event not in found or letter.status == "pending"):
                found[event] = letter.pointer
        for each in named:
            if each in missing and each not in found:
                raise NotFoundError(
                    "there is no dead letter at this pointer, nor one of an event there, or it was truncated",
                    pointer=str(each),
                    stream=self.stream,
                )
        return dict.fromkeys(found.get(each, each) for each in named)

    def _parse(self, text: str, timeout: float | None) -> EventPointer:
        number, _, offset = text.partition(":")
        if not (is_number(number) and is_number(offset)):
            return parse_pointer(text, "0:1234")
        incarnation = self._streams.fetch_state(self.stream, timeout=timeout).incarnation
        return EventPointer(SegmentId(f"{self.stream}/{number}"), incarnation, int(offset))

    def _contains(self, pointer: EventPointer) -> bool:
        return stream_of(pointer.segment) == self.stream

    # ------------------------------------------------------------------ replay and discard

    def replay(
        self,
        *pointers: EventPointer | str,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        routing_key: str | None = None,
        limit: int | None = None,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> int:
        """Write the events of pending letters back to the streams that they came from, each once. Return how many.

        Each event gets its data, routing key and headers, and `REPLAYED_FROM` as a header with the pointer of the event
        that failed; events of a queue have only data. It comes after all events that the stream has now. Repeat the
        call after any error, and after a crash: what was replayed is not replayed again, whatever the processes that
        replay do, and when they die.

        Args:
            *pointers: The letters, by their pointers or those of their events, as for `show`. Default: all pending
                letters, of which the filters select.
            error: As `list`.
            since: As `list`.
            until: As `list`.
            routing_key: As `list`.
            limit: As `list`.
            timeout: Seconds to wait for another process that replays or discards, and in each step for the store. The
                work itself may take longer. Default: the client's.
            on_progress: Called with the number of letters done so far, a few hundred at a time.

        Returns:
            The number of letters that this call has replayed, or has found replayed by one that died.

        Raises:
            NotFoundError: A letter does not exist; or a stream that events came from was deleted. Letters of other
                streams are replayed nevertheless.
            SealedError: A stream that events came from is sealed. As above.
            InvalidArgumentError: A letter that is named was discarded; or as `list`.
            LeaseLostError: This process could not renew its lock, and another may replay. Call again.
            DeadlineExceededError: Another process replays or discards until the timeout; or the store does not answer
                until then.
            StoreUnavailableError: The store does not answer until the timeout.
        """
        filters = Filters("pending", error, since, until, routing_key, limit)
        return self._work("replay", pointers, filters, timeout, on_progress)

    def discard(
        self,
        *pointers: EventPointer | str,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        routing_key: str | None = None,
        limit: int | None = None,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> int:
        """Mark pending letters as discarded, so that no replay takes them. Return how many. Arguments: as `replay`.

        Raises:
            InvalidArgumentError: A letter that is named was replayed; or as `list`.
            ReaderGroupError: As `replay`.
        """
        filters = Filters("pending", error, since, until, routing_key, limit)
        return self._work("discard", pointers, filters, timeout, on_progress)

    def _work(
        self,
        what: str,
        pointers: Collection[EventPointer | str],
        filters: Filters,
        timeout: float | None,
        on_progress: OnProgress | None,
    ) -> int:
        if pointers and any(value is not None for value in filters._replace(status=None)):
            raise InvalidArgumentError("name letters by their pointers or by filters, not by both")
        check_duration(timeout, "timeout", or_none=True)
        named = self._of_letters(pointers, timeout)
        self._list(filters, timeout)  # refuses what is wrong before anything is opened
        on_progress = (lambda _: None) if on_progress is None else checked(on_progress, "on_progress", "done")
        return self._finish(what, named, filters, timeout, on_progress)

    def _finish(
        self,
        what: str,
        named: Collection[EventPointer],
        filters: Filters,
        timeout: float | None,
        on_progress: OnProgress,
    ) -> int:
        with self._lock(f"dead-letters/{self.stream}", timeout=timeout) as held:
            work = _Work(self, self._synchronizer(timeout), held, timeout)
            found = self._named(named, what, timeout) if named else self._list(filters, timeout)
            try:
                for chunk in chunks(found):
                    held.check()
                    work.replay(chunk) if what == "replay" else work.discard(chunk)
                    on_progress(work.done)
            except LeaseLostError as error:
                raise LeaseLostError(
                    "another process may replay or discard these dead letters by now; call again", stream=self.stream
                ) from error
            work.forget_truncated()
        return work.finish()

    def _named(self, pointers: Iterable[EventPointer], what: str, timeout: float | None) -> Iterator[StoredDeadLetter]:
        letters = [self._show(pointer, timeout) for pointer in pointers]
        done = {"replay": "replayed", "discard": "discarded"}[what]
        for each in letters:
            if each.status not in ("pending", done):
                raise InvalidArgumentError(f"the dead letter was {each.status} before", pointer=str(each.pointer))
        return (each for each in letters if each.status == "pending")

    # ------------------------------------------------------------------ statuses

    def _synchronizer(self, timeout: float | None) -> StateSynchronizer[LetterStatuses]:
        if self._opened is None:
            self._opened = self._open_statuses(LetterStatuses(), timeout)
        return self._opened

    def _statuses(self, timeout: float | None = None) -> LetterStatuses:
        self._streams.fetch_state(self.stream, timeout=timeout)  # raises if there is no such stream
        if self._opened is None:
            try:
                self._opened = self._open_statuses(None, timeout)
            except NotFoundError:  # reading creates nothing
                return LetterStatuses()
        return self._opened.fetch_updates(timeout=timeout)


def pending_in(letters: DeadLetters, ranges: Iterable[SegmentRange]) -> Iterator[StoredDeadLetter]:
    """Return the pending letters in these ranges of their stream."""
    statuses = letters._statuses()
    return (
        _decoded(event, statuses)
        for each in ranges
        for event in letters._read(each)
        if statuses.status_of(_place(event.pointer), event.offset) == "pending"
    )


class _Work:
    """Replays or discards letters, for the holder of the lock."""

    def __init__(
        self,
        letters: DeadLetters,
        statuses: StateSynchronizer[LetterStatuses],
        held: HeldLock,
        timeout: float | None,
    ) -> None:
        self._letters = letters
        self._timeout = timeout
        self._streams = letters._streams
        self._statuses = statuses
        self._token = held.fencing_token
        self._state: StreamState = self._streams.fetch_state(letters.stream, timeout=timeout)
        self._replays: dict[str, Replay] = {}
        self._failed: dict[str, ReaderGroupError] = {}
        self._ends: dict[int, int] = {}  # of the letters in hand
        self.done = self._left = 0

    def replay(self, chunk: Collection[StoredDeadLetter]) -> None:
        for stream, letters in self._begin(chunk).items():
            if stream in self._failed:
                self._left += len(letters)
                continue
            try:
                self._replay_to(stream).run({letter_id(each.pointer): _row(each) for each in letters})
            except (NotFoundError, SealedError) as error:
                self._failed[stream] = error
                statuses = self._statuses.state
                pending = [each for each in letters if _status(statuses, each) == "pending"]
                self.done += len(letters) - len(pending)
                self._left += len(pending)
            else:
                self.done += len(letters)

    def discard(self, chunk: Collection[StoredDeadLetter]) -> None:
        for stream, letters in self._begin(chunk).items():
            try:
                replayed = set(self._replay_to(stream).settle())  # of a replay that died, or that will fail now
            except NotFoundError:  # the stream was deleted
                replayed = set()
            rest = [each for each in map(_id, letters) if each not in replayed]
            self._mark("discarded", rest)
            self.done += len(rest)

    def _begin(self, chunk: Collection[StoredDeadLetter]) -> Mapping[str, Collection[StoredDeadLetter]]:
        """Return the letters by the streams that they came from."""
        self._ends = {letter_id(each.pointer): each.end for each in chunk}
        by_stream: dict[str, list[StoredDeadLetter]] = {}
        for each in chunk:
            by_stream.setdefault(each.stream, []).append(each)
        return by_stream

    def _replay_to(self, stream: str) -> Replay:
        if stream not in self._replays:
            letters = (self._letters.stream, self._state.incarnation)
            replay = Replay(self._streams, letters, stream, self._token, self._replayed, self._timeout)
            self._replays[stream] = replay
        return self._replays[stream]

    def _replayed(self, letters: Collection[int]) -> None:
        self._mark("replayed", letters)

    def _mark(self, status: Literal["replayed", "discarded"], letters: Iterable[int]) -> None:
        """Mark the letters durably that are pending. Of letters that are not in hand, some may be truncated."""
        spans: dict[str, Spans] = {}
        for each in letters:
            number, offset = place_of(each)
            pointer = EventPointer(self._state.segment(number), self._state.incarnation, offset)
            if self._statuses.state.status_of(_place(pointer), offset) != "pending":
                continue
            end = self._ends.get(each)
            if end is None:
                try:
                    end = self._letters._at(pointer, self._statuses.state, self._timeout).end
                except NotFoundError:
                    continue
            spans[_place(pointer)] = joined(spans.get(_place(pointer), ()), (offset, end))
        if spans:
            mark = MarkLetters(status=status, spans=Map(spans))
            self._statuses.update_state_unconditionally(mark, timeout=self._timeout)

    def forget_truncated(self) -> None:
        """Forget the statuses of letters that are no longer in the stream."""
        statuses = self._statuses.state
        state = self._streams.fetch_state(self._letters.stream, timeout=self._timeout)
        info = self._streams.info(self._letters.stream, timeout=self._timeout)
        head = {
            _place(EventPointer(segment, state.incarnation, 0)): offset for segment, offset in info.head.offsets.items()
        }
        known = {_place(EventPointer(state.segment(number), state.incarnation, 0)) for number in state.segments}
        starts: dict[str, int | None] = {place: None for place in statuses.places if place not in known}
        starts.update((place, start) for place, start in head.items() if statuses.is_before(place, start))
        if starts:
            forget = ForgetLetters(starts=Map(starts))
            self._statuses.update_state_unconditionally(forget, timeout=self._timeout)

    def finish(self) -> int:
        """Return how many letters were replayed or discarded; raise if a stream did not take its events."""
        for stream, error in self._failed.items():
            self._raise(stream, error)
        return self.done

    def _raise(self, stream: str, error: ReaderGroupError) -> NoReturn:
        reason = "is sealed" if isinstance(error, SealedError) else "does not exist any more"
        raise type(error)(
            f"the stream that events came from {reason}, and takes none back; their dead letters stay pending, and you "
            "can discard them",
            stream=stream,
            replayed=self.done,
            left=self._left,
        ) from error


def _place(pointer: EventPointer) -> str:
    return f"{pointer.segment}:{pointer.incarnation}"


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def parse_pointer(text: str, short_form: str) -> EventPointer:
    try:
        return EventPointer.parse(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"this names no dead letter; use a name such as {short_form}, or a pointer segment:incarnation:offset",
            text=text,
        ) from error


def _id(letter: StoredDeadLetter) -> int:
    return letter_id(letter.pointer)


def _status(statuses: LetterStatuses, letter: StoredDeadLetter) -> Status:
    return statuses.status_of(_place(letter.pointer), letter.pointer.offset)


def _row(letter: StoredDeadLetter) -> Row:
    headers = {**letter.headers, REPLAYED_FROM: str(letter.letter.pointer).encode()}
    time = None if letter.event_time is None else microseconds_of(letter.event_time, "event_time")
    return Row(_id(letter), letter.routing_key, letter.letter.data, headers, event_time=time)


def _decoded(event: Event[bytes], statuses: LetterStatuses) -> StoredDeadLetter:
    try:
        letter = DeadLetter.model_validate_json(event.raw)
    except ValidationError as error:
        raise InvalidArgumentError(
            "the stream has an event that is no dead letter; use the stream of RetryPolicy(dead_letters=...)",
            pointer=str(event.pointer),
        ) from error
    return StoredDeadLetter(
        pointer=event.pointer,
        letter=letter,
        status=statuses.status_of(_place(event.pointer), event.offset),
        routing_key=event.routing_key,
        headers=event.headers,
        written_at=event.written_at.astimezone(UTC),
        end=event.next_offset,
        event_time=event.event_time,
    )


def chunks(letters: Iterable[StoredDeadLetter]) -> Iterator[list[StoredDeadLetter]]:
    chunk: list[StoredDeadLetter] = []
    size = 0
    for each in letters:
        chunk.append(each)
        size += len(each.letter.data)
        if len(chunk) >= _CHUNK_LETTERS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
