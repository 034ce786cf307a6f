"""Events on their way into a segment: the checks at the call, and the batch that waits to be stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Final, Protocol

from readergroup.errors import EventTooLargeError
from synchronizer import InvalidArgumentError, SegmentStore
from synchronizer.arguments import check_count, check_type, type_name

from .block import (
    MAX_CHUNKED_BYTES,
    MAX_CHUNKED_HEADERS_BYTES,
    MAX_EVENT_BYTES,
    Headers,
    cut_into_blocks,
    encode_block,
    headers_bytes,
)

#: A batch of this many bytes is closed. The last event, or group of events, may exceed the limit.
BATCH_BYTES: Final = 1024 * 1024
#: A write waits while the events that are written and not yet stored are over this many bytes.
MAX_UNSTORED_BYTES: Final = 16 * 1024 * 1024
MAX_KEY_LENGTH: Final = 4096
#: Returns the segment for the events of each routing key.
SegmentsOf = Callable[[Sequence[str | None]], Sequence[int]]
#: For how many routing keys a writer remembers the segment.
KNOWN_KEYS: Final = 50_000
#: What an event costs in addition to its bytes and key.
EVENT_BYTES: Final = 16
#: The most that chunks add to an event of the size of one append: their headers, and the routing key.
_CHUNKS_OVERHEAD_BYTES: Final = 64 * 1024


def size_of(events: Sequence[bytes], headers: Headers | None) -> int:
    """Return the bytes of the events, each with these headers, as the limits count them."""
    return sum(map(len, events)) + len(events) * (headers_bytes(headers) if headers else 0)


def check_size(events: Sequence[bytes], headers: Headers | None, stream: str) -> None:
    """Refuse events that are too large to be stored together."""
    size = size_of(events, headers)
    if size > MAX_EVENT_BYTES:
        raise EventTooLargeError(
            "the events are too large together; write fewer at once"
            if len(events) > 1
            else "the event is too large; store the data elsewhere and write a reference to it, or call write of a "
            "writer that was opened with a larger max_event_bytes",
            stream=stream,
            bytes=size,
            limit=MAX_EVENT_BYTES,
            events=len(events),
        )


def check_max_event_bytes(max_event_bytes: int | None, store: SegmentStore) -> int:
    """Return the limit of an event, by default `MAX_EVENT_BYTES`. Refuse one that the store could not keep."""
    if max_event_bytes is None:
        return MAX_EVENT_BYTES
    check_count(max_event_bytes, "max_event_bytes", at_least=MAX_EVENT_BYTES)
    limit = MAX_CHUNKED_BYTES
    if not store.guarantees.server_side_copy:  # one append brings all chunks
        limit = store.guarantees.largest_append - _CHUNKS_OVERHEAD_BYTES
    if max_event_bytes > max(limit, MAX_EVENT_BYTES):
        raise InvalidArgumentError(
            "max_event_bytes is over the limit of this store", max_event_bytes=max_event_bytes, limit=limit
        )
    return max_event_bytes


def is_for_chunks(event: bytes, headers: Headers | None, max_event_bytes: int, stream: str) -> bool:
    """Return whether the event is stored in chunks. Refuse one that is too large for chunks."""
    size = size_of([event], headers)
    if size <= MAX_EVENT_BYTES or max_event_bytes <= MAX_EVENT_BYTES:
        return False
    if size > max_event_bytes:
        raise EventTooLargeError(
            "the event is over max_event_bytes of the writer; store the data elsewhere and write a reference to it",
            stream=stream,
            bytes=size,
            limit=max_event_bytes,
        )
    if headers and headers_bytes(headers) > MAX_CHUNKED_HEADERS_BYTES:
        raise EventTooLargeError(
            "the headers are too large for an event over 8 MiB; move data from the headers into the event",
            stream=stream,
            bytes=headers_bytes(headers),
            limit=MAX_CHUNKED_HEADERS_BYTES,
        )
    return True


def check_key(routing_key: object, stream: str) -> None:
    if not isinstance(routing_key, str):
        raise InvalidArgumentError("a routing key must be a str", stream=stream, found=type_name(routing_key))
    if len(routing_key) > MAX_KEY_LENGTH:
        raise InvalidArgumentError(
            f"a routing key must have at most {MAX_KEY_LENGTH} characters", stream=stream, characters=len(routing_key)
        )


def checked_headers(headers: Headers | None) -> Headers | None:
    if headers is None:
        return None
    if type(headers) is not dict:
        check_type(headers, Mapping, "headers", or_none=True)
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise InvalidArgumentError("headers must map str to bytes", header=name, type=type(value).__name__)
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            raise InvalidArgumentError("the name of a header must be text that UTF-8 can encode", header=ascii(name))
    return dict(headers) if headers else None


class Batch(Protocol):
    """Events for one segment that are stored together: a `WriteBatch`, or a `PackedBatch` of Arrow arrays."""

    in_doubt: bool

    @property
    def segment(self) -> int: ...
    @property
    def events(self) -> Sized: ...
    @property
    def size(self) -> int: ...
    def encode(self, first_number: int, writer_id: bytes, written_at: int) -> bytes: ...
    def split(self, segments_of: SegmentsOf) -> Iterable[Batch]: ...


class WriteBatch:
    """Events for one segment that are stored together."""

    __slots__ = ("event_times", "events", "has_extras", "headers", "in_doubt", "keys", "segment", "size")

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.events: list[bytes] = []
        self.keys: list[str | None] = []
        self.headers: list[Headers | None] | None = None  # as long as events, once one of them has headers
        self.event_times: list[int | None] | None = None  # as long as events, once one of them has a time
        self.has_extras = False  # headers or event times
        self.size = 0
        self.in_doubt = False  # sent without an answer: it may be stored

    def add(self, event: bytes, key: str | None, headers: Headers | None, event_time: int | None = None) -> None:
        self.events.append(event)
        self.keys.append(key)
        self.size += len(event) + (len(key) if key else 0) + EVENT_BYTES
        if headers or event_time is not None or self.has_extras:
            self.add_extras(headers, event_time)

    def add_extras(self, headers: Headers | None, event_time: int | None) -> None:
        """Add the headers and the event time of the last event."""
        self.has_extras = True
        if headers and self.headers is None:
            self.headers = [None] * (len(self.events) - 1)
        if self.headers is not None:
            self.headers.append(headers)
            self.size += headers_bytes(headers) if headers else 0
        if event_time is not None and self.event_times is None:
            self.event_times = [None] * (len(self.events) - 1)
        if self.event_times is not None:
            self.event_times.append(event_time)

    def mend(self, count: int | None = None) -> None:
        """Keep only whole events after an interrupt; given ``count``, only the first ``count`` of them."""
        lists = [each for each in (self.events, self.keys, self.headers, self.event_times) if each is not None]
        whole = min(map(len, lists))
        for each in lists:
            del each[whole if count is None else min(whole, count) :]
        keys = sum(len(key) for key in self.keys if key)
        headers = sum(headers_bytes(each) for each in self.headers or () if each)
        self.size = sum(map(len, self.events)) + keys + headers + EVENT_BYTES * len(self.events)

    def split(self, segments_of: SegmentsOf) -> Iterable[WriteBatch]:
        """Return the same events, in order, in batches for other segments."""
        parts: dict[int, WriteBatch] = {}
        segments = segments_of(self.keys)
        for index, (event, key, segment) in enumerate(zip(self.events, self.keys, segments, strict=True)):
            if segment not in parts:
                parts[segment] = WriteBatch(segment)
            headers = self.headers[index] if self.headers else None
            parts[segment].add(event, key, headers, self.event_times[index] if self.event_times else None)
        return parts.values()

    def encode(self, first_number: int, writer_id: bytes, written_at: int) -> bytes:
        keys = None if self.keys.count(None) == len(self.keys) else self.keys
        return b"".join(
            encode_block(
                self.events[start:end],
                written_at=written_at,
                writer_id=writer_id,
                first_number=first_number + start,
                keys=None if keys is None else keys[start:end],
                headers=None if self.headers is None else self.headers[start:end],
                event_times=None if self.event_times is None else self.event_times[start:end],
            )
            for start, end in cut_into_blocks(self.events, keys, self.headers)
        )
