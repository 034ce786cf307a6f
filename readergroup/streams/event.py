"""Events, single and in batches, with their addresses. Readers hand them out."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar, overload

from synchronizer import InvalidArgumentError
from synchronizer.arguments import check_type
from synchronizer.threads.loading import loading

from .config import SegmentId
from .data.block import Headers
from .data.block_slice import BlockSlice
from .data.moments import time_of
from .serializers import Serializer, keeps_bytes

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")


class EventPointer(NamedTuple):
    """The address of one event, the same at every delivery. Its text is the key of an idempotent sink."""

    segment: SegmentId
    #: Tells the stream from one that was created again under its name.
    incarnation: str
    offset: int

    def __str__(self) -> str:
        return f"{self.segment}:{self.incarnation}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Self:
        check_type(text, str, "text")
        segment, incarnation, offset = (text.split(":") + ["", ""])[:3]
        if not incarnation or not offset.isdigit():
            raise InvalidArgumentError("a pointer must have the form segment:incarnation:offset", text=text)
        return cls(SegmentId(segment), incarnation, int(offset))


#: A reader's offset in each of its segments: that of the next event to process.
Position = Mapping[SegmentId, int]


class Event(Generic[T]):
    """One event of a batch. All but its bytes is looked up and decoded when first used."""

    # ``data`` is a slot that `__getattr__` fills when it is first used: a property would be a call for each event.
    __slots__ = ("_batch", "_index", "data")
    #: The value of the event, decoded when first used. Damaged data raises here, not in the reader.
    data: T

    def __init__(self, batch: EventBatch[T], index: int) -> None:
        self._batch = batch
        self._index = index

    def __getattr__(self, name: str) -> T:
        if name != "data":
            raise AttributeError(f"an event has no attribute {name!r}", name=name, obj=self)
        try:
            self.data = self._batch.serializer.loads(self._batch.raw[self._index])
        except Exception as error:
            _note_decoding(error, self._batch.serializer, f"the event at {self.pointer}")
            raise
        return self.data

    @property
    def raw(self) -> bytes:
        return self._batch.raw[self._index]

    @property
    def segment(self) -> SegmentId:
        return self._batch.segment

    @property
    def offset(self) -> int:
        return self._batch.offsets[self._index]

    @property
    def routing_key(self) -> str | None:
        return self._batch.routing_keys[self._index]

    @property
    def headers(self) -> Headers:
        """A copy for each use: what a handler changes in it reaches no other event and no dead letter."""
        return dict(self._batch.headers[self._index])

    @property
    def written_at(self) -> datetime:
        """When the event was written, by the writer's clock, in UTC."""
        return time_of(self._batch.written_at[self._index])

    @property
    def event_time(self) -> datetime | None:
        """When the event happened, in UTC, as its writer said; None if it did not."""
        time = self._batch.event_times[self._index]
        return None if time is None else time_of(time)

    @property
    def pointer(self) -> EventPointer:
        return EventPointer(self.segment, self._batch.incarnation, self.offset)

    @property
    def fencing_token(self) -> int:
        """Grows with every new owner of the segment. A sink that stores it can refuse a former owner."""
        return self._batch.fencing_token

    @property
    def group(self) -> str:
        """The group whose reader handed the event out; empty if none did."""
        return self._batch.group

    @property
    def next_offset(self) -> int:
        """The reader's offset in the segment once this event is processed."""
        return self._batch.offset_after(self._index + 1)

    def __repr__(self) -> str:
        key = "" if self.routing_key is None else f", routing_key={self.routing_key!r}"
        return f"Event({reprlib.repr(self.raw)}{key}, pointer={str(self.pointer)!r})"


class EventBatch(Sequence[Event[T]]):
    """Events of one segment, in order. Its columns are lists, the fastest way to use it; do not change them.

    An empty batch has ``segment`` "" and no offsets.
    """

    def __init__(
        self,
        slices: Sequence[BlockSlice],
        segment: SegmentId,
        incarnation: str,
        fencing_token: int,
        serializer: Serializer[T],
        *,
        group: str = "",
    ) -> None:
        self._slices = slices
        self._count = sum(each.size for each in slices)
        self.segment = segment
        self.incarnation = incarnation
        self.fencing_token = fencing_token
        self.serializer = serializer
        #: The group whose reader handed the batch out; empty if none did.
        self.group = group

    @cached_property
    def raw(self) -> list[bytes]:
        """The bytes of each event."""
        if len(self._slices) == 1:
            return _column(self._slices[0], self._slices[0].block.data)
        return list(chain.from_iterable(_column(each, each.block.data) for each in self._slices))

    @cached_property
    def data(self) -> Sequence[T]:
        """The values of the events. Damaged data raises here, not in the reader."""
        if keeps_bytes(self.serializer):
            return self.raw  # type: ignore[return-value]
        loads = self.serializer.loads
        try:
            return [loads(each) for each in self.raw]  # `map` would end at a StopIteration of the serializer
        except Exception as error:
            _note_decoding(error, self.serializer, f"an event of the batch at {self[0].pointer}")
            raise

    @cached_property
    def offsets(self) -> Sequence[int]:
        return [offset for each in self._slices for offset in _column(each, each.block.offsets)]

    @cached_property
    def routing_keys(self) -> Sequence[str | None]:
        return [key for each in self._slices for key in _column(each, each.block.keys)]

    @cached_property
    def headers(self) -> Sequence[Headers]:
        return [headers for each in self._slices for headers in _column(each, each.block.headers)]

    @cached_property
    def written_at(self) -> Sequence[int]:
        """Microseconds since 1970, by the writer's clock."""
        return [each.block.written_at for each in self._slices for _ in range(each.start, each.stop)]

    @cached_property
    def event_times(self) -> Sequence[int | None]:
        """Microseconds since 1970, or None for an event without one."""
        return [time for each in self._slices for time in _column(each, each.block.event_times)]

    @property
    def start(self) -> int:
        """The offset of the first event."""
        return self._slices[0].begin

    @cached_property
    def end(self) -> int:
        """The reader's offset in the segment once the batch is processed."""
        return self._slices[-1].end

    def offset_after(self, count: int) -> int:
        """Return the reader's offset in the segment once the first ``count`` events are processed."""
        return self.offsets[count] if count < self._count else self.end

    def slices_after(self, count: int) -> list[BlockSlice]:
        """Return the slices of the batch without its first ``count`` events."""
        rest = []
        for each in self._slices:
            dropped = min(count, each.size)
            count -= dropped
            if dropped < each.size:
                rest.append(each._replace(start=each.start + dropped))
        return rest

    def only(self, index: int) -> EventBatch[T]:
        """Return a batch of only the event at ``index``, which may be negative as that of a list."""
        place = range(self._count)[index]
        for each in self._slices:
            if place < each.size:
                break
            place -= each.size
        return self._of([each._replace(start=each.start + place, stop=each.start + place + 1)])

    def without(self, offsets: frozenset[int], *, start: int = 0) -> EventBatch[T]:
        """Return a batch of the events from ``start`` on, without those at these offsets."""
        slices: list[BlockSlice] = []
        index = 0
        for each in self._slices:
            for place in range(each.start, each.stop):
                offset, index = self.offsets[index], index + 1
                if offset < start or offset in offsets:
                    continue
                if slices and slices[-1].block is each.block and slices[-1].stop == place:
                    slices[-1] = slices[-1]._replace(stop=place + 1)
                else:
                    slices.append(each._replace(start=place, stop=place + 1))
        return self._of(slices)

    def _of(self, slices: Sequence[BlockSlice]) -> EventBatch[T]:
        return EventBatch(slices, self.segment, self.incarnation, self.fencing_token, self.serializer, group=self.group)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pyarrow.RecordBatch:
        """Return the events as an Arrow record batch, without Python code per event.

        The columns are those of `BatchClient.record_batches`. ``event`` has the bytes as they were written: the
        serializer is not used.

        Args:
            columns: Some of ``event``, ``scope``, ``stream``, ``segment_id``, ``offset``, ``routing_key``,
                ``written_at``, ``headers`` and ``event_time``, in the order you want. Default: all but the last two.

        Raises:
            UnsupportedError: pyarrow is not installed.
            InvalidArgumentError: A column is unknown or named twice, or there is none.
        """
        with loading():
            from .data.columns import record_batch, schema

        return record_batch(self._slices, self.segment, schema(columns))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Event[T]]:
        # Without a call of Python for each event.
        new, is_decoded = object.__new__, keeps_bytes(self.serializer)
        for index, raw in enumerate(self.raw):
            event: Event[Any] = new(Event)
            event._batch = self
            event._index = index
            if is_decoded:
                event.data = raw
            yield event

    @overload
    def __getitem__(self, index: int) -> Event[T]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event[T]]: ...
    def __getitem__(self, index: int | slice) -> Event[T] | Sequence[Event[T]]:
        chosen = range(self._count)[index]
        return Event(self, chosen) if isinstance(chosen, int) else [Event(self, each) for each in chosen]

    def __repr__(self) -> str:
        return f"EventBatch({self.segment!r}, {len(self)} events)"


W = TypeVar("W", Event[Any], EventBatch[Any])


def as_read(what: W) -> W:
    """Return the event or batch without its decoded data, which a handler that failed may have changed."""
    return Event(what._batch, what._index) if isinstance(what, Event) else what._of(what._slices)


def _note_decoding(error: Exception, serializer: Serializer[Any], what: str) -> None:
    error.add_note(f"{type(serializer).__name__} could not decode {what}. Read it with the serializer that wrote it.")


C = TypeVar("C")


def _column(each: BlockSlice, column: list[C]) -> list[C]:
    whole = each.start == 0 and each.stop == len(column)
    return column if whole else column[each.start : each.stop]
