"""A log of entries in one segment: framed, checksummed, chained, appended conditionally, with a mark.

An entry on disk is a fixed header and a body. The header holds the body's length, a checksum of all that follows it,
the format version, the process and call that wrote the entry, and the checksum of the entry before it. The chain
reveals lost data: if the log lost acknowledged entries and continued with others, every process that had read the lost
ones notices.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import msgpack

from ..arguments import check_type
from ..compare_and_set import Cell, Outcome, append_at
from ..errors import CorruptStateError, InvalidArgumentError, NotFoundError, UnknownUpdateError
from ..store import MAX_APPEND_BYTES, AppendResult, AttributeChange, SegmentStart, SegmentStore

FORMAT_VERSION: Final = 1
MARK: Final = "mark"

#: body length, checksum | format version, process id, call number, checksum of the previous entry
_PREFIX = struct.Struct("<II")
_HEADER = struct.Struct("<B8sQI")
_OVERHEAD = _PREFIX.size + _HEADER.size

_READ_BYTES: Final = 1024 * 1024
#: Longer than any entry.
_MAX_ENTRY_BYTES: Final = 2 * MAX_APPEND_BYTES


@dataclass(frozen=True, slots=True, order=True)
class Revision:
    """The version of a state: the place in the log of the update that made it. Revisions compare in log order.

    ``offset`` is the byte at which the update's entry starts, ``index`` the update's number in that entry, from 0 on.
    """

    # The start of an entry is known before the entry is complete, so `apply_to` can run while other calls join the
    # append. The end, which Pravega uses, would not tell how many updates the entry has, which `token` depends on.
    # So the offset to continue from is kept separately: in `Replica.next_offset`, and in `Mark` for a snapshot.
    offset: int
    index: int

    @property
    def token(self) -> int:
        """A fencing token: an int that is unique in its log and grows with every update."""
        # An entry has more bytes than updates, so the tokens of two entries cannot overlap. 0 is left for "none".
        return self.offset + self.index + 1

    def __str__(self) -> str:
        return f"{self.offset}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the revision that `str` wrote as ``offset:index``; raise `InvalidArgumentError` for other text."""
        check_type(text, str, "text")
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if match is None:
            raise InvalidArgumentError("a revision must have the form offset:index, such as '120:0'", text=text)
        return cls(int(match[1]), int(match[2]))


class Mark(NamedTuple):
    """Where a reload may start: the snapshot of one revision, and the offset at which the log continues after it."""

    revision: Revision
    next_offset: int
    snapshot: str  # name of the segment that holds it
    state_format: int

    def encode(self) -> bytes:
        revision = self.revision
        return _encode_alone(
            msgpack.packb([revision.offset, revision.index, self.next_offset, self.snapshot, self.state_format])
        )

    @classmethod
    def decode(cls, segment: str, value: bytes) -> Self:
        offset, index, next_offset, snapshot, state_format = msgpack.unpackb(_decode_alone(segment, value))
        return cls(Revision(offset, index), next_offset, snapshot, state_format)


class Entry(NamedTuple):
    """One entry of the log, as read."""

    offset: int
    end: int
    writer_id: bytes
    call: int
    checksum: int
    body: bytes


def encode_entry(writer_id: bytes, call: int, previous: int, body: bytes) -> tuple[bytes, int]:
    """Return the entry's bytes and its checksum, which the header of the next entry repeats."""
    protected = _HEADER.pack(FORMAT_VERSION, writer_id, call, previous) + body
    checksum = zlib.crc32(protected)
    return _PREFIX.pack(len(body), checksum) + protected, checksum


def decode_entries(
    segment: str, data: bytes, offset: int, previous: int, *, max_body_bytes: int = MAX_APPEND_BYTES
) -> list[Entry]:
    """Return the complete entries of ``data``, which was read at ``offset`` after an entry of checksum ``previous``.

    Raise `CorruptStateError` for an entry that is damaged or does not follow its predecessor, and `UnknownUpdateError`
    for one of a newer release. An incomplete entry at the end is left out.
    """
    entries = []
    view, at = memoryview(data), 0
    while (entry := _decode_entry(segment, view[at:], offset + at, previous, max_body_bytes)) is not None:
        entries.append(entry)
        previous, at = entry.checksum, entry.end - offset
    return entries


def previous_of(data: bytes) -> int:
    """Return the checksum that the entry at the start of ``data`` repeats: that of the entry before it."""
    return int(_HEADER.unpack_from(data, _PREFIX.size)[3]) if len(data) >= _OVERHEAD else 0


def _decode_entry(segment: str, view: memoryview, offset: int, previous: int, max_body_bytes: int) -> Entry | None:
    """Return the entry at the start of ``view``; None if it is incomplete."""
    if len(view) < _OVERHEAD:
        return None
    length, checksum = _PREFIX.unpack_from(view)
    end = _OVERHEAD + length
    if length > max_body_bytes:
        raise _damaged(segment, offset)
    if end > len(view):
        return None
    if zlib.crc32(view[_PREFIX.size : end]) != checksum:
        raise _damaged(segment, offset)
    version, writer_id, call, named = _HEADER.unpack_from(view, _PREFIX.size)
    if version != FORMAT_VERSION:
        raise UnknownUpdateError(
            "a newer release wrote this entry; deploy that release here",
            segment=segment,
            offset=offset,
            version=version,
        )
    if named != previous:
        raise CorruptStateError(
            "the store lost acknowledged data: this entry does not follow the last one that was read; repair "
            "the store, then restart the process",
            segment=segment,
            offset=offset,
        )
    return Entry(offset, offset + end, writer_id, call, checksum, bytes(view[_OVERHEAD:end]))


def _damaged(segment: str, offset: int) -> CorruptStateError:
    return CorruptStateError(
        "an entry of the log is damaged; restore the store from a backup", segment=segment, offset=offset
    )


def _encode_alone(body: bytes) -> bytes:
    """Encode an entry outside the log, framed and checksummed like one in it."""
    return encode_entry(bytes(8), 0, 0, body)[0]


def _decode_alone(segment: str, data: bytes) -> bytes:
    entries = decode_entries(segment, data, 0, 0, max_body_bytes=len(data))
    if len(entries) != 1 or entries[0].end != len(data):
        raise _damaged(segment, 0)
    return entries[0].body


def log_is_shorter(segment: str, offset: int) -> CorruptStateError:
    return CorruptStateError(
        "the store lost acknowledged data: the log is shorter than before; repair the store, then restart the process",
        segment=segment,
        offset=offset,
    )


class EntryLog:
    """The log of entries in one segment. It keeps no position: callers pass the offset."""

    def __init__(self, store: SegmentStore, segment: str) -> None:
        self.store = store
        self.segment = segment

    def read(self, offset: int, previous: int) -> tuple[Sequence[Entry], bool]:
        """Return entries from ``offset`` on, some or all, and whether they are all that the log held.

        Args:
            offset: The byte at which an entry starts, or the end of the log.
            previous: The checksum of the entry before it, 0 at the start of the log.

        Raises:
            TruncatedError: The entry at ``offset`` was truncated.
            CorruptStateError: An entry is damaged, or the log is shorter than it was.
            UnknownUpdateError: A newer release wrote an entry.
        """
        data = b""
        while True:
            try:
                part = self.store.read(self.segment, offset + len(data), _READ_BYTES)
            except InvalidArgumentError as error:
                raise log_is_shorter(self.segment, offset) from error
            data += part
            entries = decode_entries(self.segment, data, offset, previous)
            end = entries[-1].end if entries else offset
            if end == offset + len(data):
                return entries, len(part) < _READ_BYTES
            if entries:
                return entries, False
            # No complete entry: it is longer than one read, or the store returned less, or it is damaged.
            is_all = not part or offset + len(data) >= self.store.info(self.segment).length
            if is_all or len(data) > _MAX_ENTRY_BYTES:
                raise _damaged(self.segment, offset)

    def read_beginning(self) -> tuple[int, Sequence[Entry], bool] | None:
        """Return where the log begins, its first entries, and whether they are all; None if the first one is gone."""
        start = self.store.read_starts([self.segment], _READ_BYTES).get(self.segment)
        if start is None:
            offset = self.store.info(self.segment).start_offset
            start = SegmentStart(offset, self.store.read(self.segment, offset, _READ_BYTES))
        if previous_of(start.data):
            return None
        if not start.data and start.offset and self.store.guarantees.atomic_multi_create:
            return None  # it was not created like this
        entries = decode_entries(self.segment, start.data, start.offset, 0)
        end = entries[-1].end if entries else start.offset
        return start.offset, entries, end == start.offset + len(start.data) and len(start.data) < _READ_BYTES

    def append(
        self, data: bytes, offset: int, attributes: Mapping[str, AttributeChange], *, flushes: bool = True
    ) -> AppendResult:
        """Append encoded entries if the log ends at ``offset`` and the attributes are as expected.

        Without ``flushes``, see `SegmentStore.append_unflushed`.
        """
        append = self.store.append if flushes else self.store.append_unflushed
        # Most entries change no attributes. The store need not check that an empty mapping is one.
        return append(self.segment, data, expected_offset=offset, attributes=attributes or None)

    def truncate(self, offset: int) -> None:
        """Delete the entries before ``offset``."""
        self.store.truncate(self.segment, offset)

    # The mark and its snapshots. A snapshot has a segment of its own, so writing it conflicts with no update. The
    # compare-and-set of the mark makes it valid as a whole.

    def mark(self) -> Mark | None:
        """Return the mark; None before the first compaction."""
        value = self.store.attributes(self.segment, MARK).get(MARK)
        return None if value is None else Mark.decode(self.segment, value)

    def move_mark(self, old: Mark | None, new: Mark) -> bool:
        """Set the mark if it is still ``old``; return whether it is ``new`` now. It only moves forward.

        Raise `StoreUnavailableError` if the answer is lost. Only the same call again settles whether the mark moved,
        and rules out that it moves later.
        """
        assert old is None or old.revision < new.revision
        cell = Cell(self.store, self.segment, MARK, None if old is None else old.encode())
        return cell.change(new.encode()) is Outcome.STORED or cell.stored == new.encode()

    def write_snapshot(self, revision: Revision, name: str, body: bytes) -> str:
        """Store a snapshot and return the name of its segment. It is not valid before the mark names it.

        After a failure, repeat the call: it continues where the last one stopped.
        """
        snapshot = f"{self._snapshots}{revision.offset:020d}-{revision.index:010d}-{name}"
        data = _encode_alone(body)
        self.store.create(snapshot)
        written = 0
        while written < len(data):
            part = data[written : written + MAX_APPEND_BYTES // 2]
            written = append_at(self.store, snapshot, part, written)  # or how far an earlier attempt came
        return snapshot

    def read_snapshot(self, mark: Mark) -> bytes:
        """Return the body of the snapshot. Raise `NotFoundError` if a newer mark has replaced it."""
        parts = []
        length = 0
        while part := self.store.read(mark.snapshot, length, _READ_BYTES):
            parts.append(part)
            length += len(part)
        return _decode_alone(mark.snapshot, b"".join(parts))

    def delete_snapshots(self, mark: Mark) -> None:
        """Delete every snapshot that is not newer than ``mark``, except its own.

        A compaction that is still writing one of them can no longer win: it expects an older mark. The next call
        deletes what it writes after this, so the store need not remember the names.
        """
        newest, _, _ = mark.snapshot.rpartition("-")
        for snapshot in list(self.store.list(self._snapshots)):
            revision, _, _ = snapshot.rpartition("-")
            if revision <= newest and snapshot != mark.snapshot:
                self.store.forget(snapshot)

    def forget(self, length: int) -> None:
        """Forget the log of a deleted state, and its snapshots, unless it is longer than this by now.

        Without a log of this name, it forgets the snapshots of one that had this length.
        """
        self.store.forget(self.segment, expected_offset=length)
        try:
            if self.store.info(self.segment).start_offset <= length:
                return  # it goes on, as the state began again, and may need the last snapshot
        except NotFoundError:
            pass
        for snapshot in list(self.store.list(self._snapshots)):
            if snapshot < f"{self._snapshots}{length:020d}":
                self.store.forget(snapshot)

    @property
    def _snapshots(self) -> str:
        return f"snapshot/{self.segment}@"
