"""Put the rows of an outbox into a stream, each once, whichever relay dies at which moment.

Each append also changes an attribute of its segment, in the same step: to the relay's fencing token, a number, and the
rows that this segment has and the outbox may still have. So there is no moment at which an event is stored and its
row is not known to be.

A relay that begins with a stream reads the attribute of all segments, and replaces it in those that take events, so
that every append of a former relay fails, also one whose answer was lost. A sealed segment takes none anyway, and
keeps its attribute. A segment of which a later relay has the attribute ends the work of a former one. The relay then
deletes the rows that it has read, and may append.

A row is recognised by its id and a checksum. The checksum matters if the database has lost committed transactions, and
gave their ids to other events.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import msgpack

from synchronizer import LeaseLostError, NotFoundError, SealedError, UnsupportedError
from synchronizer.compare_and_set import Cell, Outcome

from ..streams.data.write_batch import BATCH_BYTES, WriteBatch, check_size
from ..streams.manager import StreamManager
from ..streams.state import StreamState
from .table import Row

_FORMAT: Final = 1


class Published(NamedTuple):
    """The value of the attribute: what a relay has put into the segment."""

    #: The fencing token of the relay. A later relay has a greater one.
    token: int = 0
    #: Grows with each change by this relay.
    number: int = 0
    #: The rows in the segment that the outbox may still have: their checksums by id.
    rows: Mapping[int, int] = {}

    def encode(self) -> bytes:
        ids = sorted(self.rows)
        gaps = [after - before for before, after in pairwise([0, *ids])]
        checksums = b"".join(self.rows[each].to_bytes(2, "big") for each in ids)
        return bytes(msgpack.packb([_FORMAT, self.token, self.number, gaps, checksums]))

    @classmethod
    def decode(cls, stored: bytes | None) -> Published:
        if stored is None:
            return cls()
        version, *fields = msgpack.unpackb(stored)
        if version != _FORMAT:
            raise UnsupportedError(
                "a newer release of the SDK has moved events of this outbox; use that release", format=version
            )
        token, number, gaps, checksums = fields
        ids = accumulate(gaps)
        return cls(
            token,
            number,
            {each: int.from_bytes(checksums[2 * n : 2 * n + 2], "big") for n, each in enumerate(ids)},
        )


def checksum(row: Row) -> int:
    """Return 16 bits that other rows of the id hardly have."""
    return zlib.crc32(row.data, zlib.crc32((row.routing_key or "").encode("utf-8", "surrogatepass"))) & 0xFFFF


class _Segment:
    """A segment that takes events."""

    def __init__(self, cell: Cell, published: Published) -> None:
        self.cell = cell
        self.published = published


class Publisher:
    """Puts rows into one stream, for one relay as long as it has this fencing token. For one thread."""

    def __init__(
        self, streams: StreamManager, stream: str, outbox_id: bytes, token: int, timeout: float | None = None
    ) -> None:
        self.stream = stream
        self._streams = streams
        self._timeout = timeout
        self._outbox_id = outbox_id
        self._attribute = f"outbox/{outbox_id.hex()}"
        self._token = token
        self._counters = streams.counters.streams[stream]
        self._number = 0
        self._events = 0
        self._state: StreamState | None = None
        self._segments: dict[int, _Segment] = {}

    @property
    def has_begun(self) -> bool:
        return self._state is not None

    @property
    def undeleted(self) -> Sequence[int]:
        """The ids of the rows that this relay has put into the stream, and that the outbox may still have."""
        return [row_id for segment in self._segments.values() for row_id in segment.published.rows]

    def begin(self) -> Mapping[int, int]:
        """Make the appends of all former relays fail. Return the rows that are in the stream: checksums by id.

        Delete them, then call `deleted`.

        Raises:
            NotFoundError: The stream does not exist.
            LeaseLostError: A later relay works on this stream.
        """
        deadline = self._streams.metadata.deadline(self._timeout)
        while True:
            self.end()
            state = self._streams.finish_pending(self.stream, timeout=deadline.remaining())
            try:
                rows = dict(self._begin(state))
            except SealedError:  # scaled since the state was read
                if deadline.passed:
                    raise
            else:
                self._state = state
                return rows

    def _begin(self, state: StreamState) -> Iterator[tuple[int, int]]:
        for number in state.segments:
            cell = Cell(self._streams.store, state.data_segment(number), self._attribute)
            try:
                published = self._fence(cell, takes_events=number in state.current and not state.sealing)
            except NotFoundError:  # its data was given up
                continue
            if number in state.current:
                self._segments[number] = _Segment(cell, published)
            yield from published.rows.items()

    def _fence(self, cell: Cell, *, takes_events: bool) -> Published:
        while True:
            published = Published.decode(cell.load())
            if published.token > self._token:
                raise LeaseLostError(
                    "another relay has taken over", stream=self.stream, token=self._token, taken=published.token
                )
            if not takes_events:
                return published
            mine = self._next(published.rows)
            if cell.change(mine.encode()) is not Outcome.CONFLICT:
                return mine

    def _next(self, rows: Mapping[int, int]) -> Published:
        self._number += 1
        return Published(self._token, self._number, rows)

    def publish(self, rows: Iterable[Row]) -> Sequence[int]:
        """Append rows to the stream, in their order, and return the ids of those that are there now.

        Some may remain: those of a segment after its first megabyte, and after an error all that are not known to be
        stored. Then call `begin` again.

        Raises:
            SealedError: The stream takes no more events.
        """
        state = self._state
        assert state is not None
        if state.sealing:
            self.end()  # the stream may be deleted and created again
            state.check_takes_events()
        batches = self._batches(state, rows)
        stored: list[int] = []
        try:
            for number, (batch, new) in batches.items():
                if not self._append(self._segments[number], batch, new):
                    self.end()
                    break
                stored += new
        except (NotFoundError, SealedError):  # deleted or scaled
            self.end()
        except BaseException:  # perhaps an interrupt between the append and its note
            self.end()
            raise
        return stored

    def _batches(self, state: StreamState, rows: Iterable[Row]) -> Mapping[int, tuple[WriteBatch, dict[int, int]]]:
        """Return the next rows of each segment, and their checksums by id."""
        batches: dict[int, tuple[WriteBatch, dict[int, int]]] = {}
        segment_of = state.routes.segment_of
        keyless = state.current[(self._token + self._number) % len(state.current)]
        for row in rows:
            check_size([row.data], row.headers, self.stream)  # another program may have written the row
            number = keyless if row.routing_key is None else segment_of(row.routing_key)
            if number not in batches:
                batches[number] = WriteBatch(number), {}
            batch, new = batches[number]
            if batch.size < BATCH_BYTES:
                batch.add(row.data, row.routing_key, row.headers, row.event_time)
                new[row.id] = checksum(row)
        return batches

    def _append(self, segment: _Segment, batch: WriteBatch, new: Mapping[int, int]) -> bool:
        """Store the batch; return False if another relay has changed the segment's attribute."""
        published = self._next({**segment.published.rows, **new})
        now = int(self._streams.clock.time() * 1_000_000)
        data = batch.encode(self._events + 1, self._outbox_id, now)
        self._events += len(new)
        if segment.cell.change(published.encode(), data) is not Outcome.STORED:
            return False
        self._counters.count(len(new), len(data))
        segment.published = published
        return True

    def deleted(self) -> None:
        """Note that the outbox has none of the rows any more that are in the stream."""
        for segment in self._segments.values():
            segment.published = segment.published._replace(rows={})

    def end(self) -> None:
        """Forget the stream's segments. The next call must be `begin`."""
        self._state = None
        self._segments = {}
