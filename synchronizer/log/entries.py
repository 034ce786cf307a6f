"""A log of entries in one segment: framed, checksummed, chained, appended conditionally, with a mark.

An entry on disk is a fixed header and a body. The header holds the body's length, a checksum of all that follows it,
the format version, the process and call that wrote the entry, and the checksum of the entry before it. The chain makes
a log that lost acknowledged entries, and went on with others, visible to every process that had read the lost ones.
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
from ..errors import CorruptStateError, InvalidArgumentError, UnknownUpdateError
from ..store import MAX_APPEND_BYTES, AppendResult, AttributeChange, SegmentStore

FORMAT_VERSION: Final = 1
MARK: Final = "mark"

#: body length, checksum | format version, process id, call number, checksum of the entry before
_PREFIX = struct.Struct("<II")
_HEADER = struct.Struct("<B8sQI")
_OVERHEAD = _PREFIX.size + _HEADER.size

_READ_BYTES: Final = 1024 * 1024
#: More than the longest entry.
_MAX_ENTRY_BYTES: Final = 2 * MAX_APPEND_BYTES


@dataclass(frozen=True, slots=True, order=True)
class Revision:
    """The version of a state: the place of the update that made it, ordered as the log is.

    ``offset`` is where the update's entry starts in the log, ``index`` the update's number in that entry.
    """

    # The start of an entry is known before the entry is complete, so `apply_to` can run while other calls join the
    # append. The end, which Pravega uses, would not tell how many updates the entry has, which `token` depends on.
    # The offset to read on from is therefore kept separately: `Replica.next_offset`, and `Mark` for a snapshot.
    offset: int
    index: int

    @property
    def token(self) -> int:
        """A whole number that is unique in its log and grows from update to update, for fencing."""
        # An entry is longer than it has updates, so the numbers of two entries cannot meet. 0 is left for "none".
        return self.offset + self.index + 1

    def __str__(self) -> str:
        return f"{self.offset}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        check_type(text, str, "text")
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if match is None:
            raise InvalidArgumentError("a revision is written offset:index, as in '120:0'", text=text)
        return cls(int(match[1]), int(match[2]))


class Mark(NamedTuple):
    """Where a reload may start: the snapshot of one revision, and the offset at which the log goes on after it."""

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
    process_id: bytes
    call: int
    checksum: int
    body: bytes


def encode_entry(process_id: bytes, call: int, previous: int, body: bytes) -> tuple[bytes, int]:
    """The entry's bytes and its checksum, which the next entry is to name."""
    protected = _HEADER.pack(FORMAT_VERSION, process_id, call, previous) + body
    checksum = zlib.crc32(protected)
    return _PREFIX.pack(len(body), checksum) + protected, checksum


def decode_entries(
    segment: str, data: bytes, offset: int, previous: int, *, max_body_bytes: int = MAX_APPEND_BYTES
) -> list[Entry]:
    """The whole entries at the start of ``data``, which was read at ``offset`` after an entry of checksum ``previous``.

    A damaged entry, or one that does not follow its predecessor, raises `CorruptStateError`. An incomplete entry at
    the end is left out.
    """
    entries = []
    view, at = memoryview(data), 0
    while (entry := _decode_entry(segment, view[at:], offset + at, previous, max_body_bytes)) is not None:
        entries.append(entry)
        previous, at = entry.checksum, entry.end - offset
    return entries


def _decode_entry(segment: str, view: memoryview, offset: int, previous: int, max_body_bytes: int) -> Entry | None:
    """The entry that starts with ``view``; None if not all of it is there."""
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
    version, process_id, call, named = _HEADER.unpack_from(view, _PREFIX.size)
    if version != FORMAT_VERSION:
        raise UnknownUpdateError(
            "a newer release wrote this entry; deploy that release here",
            segment=segment,
            offset=offset,
            version=version,
        )
    if named != previous:
        raise CorruptStateError(
            "the store lost acknowledged data: this entry does not follow the one read before it; "
            "restart the process once the store is whole",
            segment=segment,
            offset=offset,
        )
    return Entry(offset, offset + end, process_id, call, checksum, bytes(view[_OVERHEAD:end]))


def _damaged(segment: str, offset: int) -> CorruptStateError:
    return CorruptStateError("this entry is damaged; restore the store from a backup", segment=segment, offset=offset)


def _encode_alone(body: bytes) -> bytes:
    """An entry outside the log, framed and checksummed like one in it."""
    return encode_entry(bytes(8), 0, 0, body)[0]


def _decode_alone(segment: str, data: bytes) -> bytes:
    entries = decode_entries(segment, data, 0, 0, max_body_bytes=len(data))
    if len(entries) != 1 or entries[0].end != len(data):
        raise _damaged(segment, 0)
    return entries[0].body


def log_is_shorter(segment: str, offset: int) -> CorruptStateError:
    return CorruptStateError(
        "the store lost acknowledged data: the log is shorter than it was; restart the process once the store is whole",
        segment=segment,
        offset=offset,
    )


class RevisionedStream:
    """The log of one segment. Holds no position of its own: callers say where they are."""

    def __init__(self, store: SegmentStore, segment: str) -> None:
        self.store = store
        self.segment = segment

    def read(self, offset: int, previous: int) -> tuple[Sequence[Entry], bool]:
        """The entries from ``offset`` on, some or all, and whether they are all that the log held.

        Raises `TruncatedError` where they are gone, `CorruptStateError` where they are damaged or the log is shorter
        than it was.
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
            # Not one whole entry: it is longer than what was asked for, or the store gave less, or it is damaged.
            is_all = not part or offset + len(data) >= self.store.info(self.segment).length
            if is_all or len(data) > _MAX_ENTRY_BYTES:
                raise _damaged(self.segment, offset)

    def append(self, data: bytes, offset: int, attributes: Mapping[str, AttributeChange]) -> AppendResult:
        """Append encoded entries if the log ends at ``offset`` and the attributes are as expected."""
        return self.store.append(self.segment, data, expected_offset=offset, attributes=attributes)

    def truncate(self, offset: int) -> None:
        self.store.truncate(self.segment, offset)

    # The mark and the snapshots it names. A snapshot has a segment of its own, so that writing it conflicts with no
    # update, and becomes valid whole, by the mark's compare-and-set.

    def mark(self) -> Mark | None:
        value = self.store.attributes(self.segment, MARK).get(MARK)
        return None if value is None else Mark.decode(self.segment, value)

    def move_mark(self, old: Mark | None, new: Mark) -> bool:
        """Set the mark if it is still ``old``. It only moves forward.

        A lost answer raises `StoreUnavailableError`: only the same call again settles whether the mark moved, and that
        it will not move later.
        """
        assert old is None or old.revision < new.revision
        cell = Cell(self.store, self.segment, MARK, None if old is None else old.encode())
        return cell.change(new.encode()) is Outcome.STORED or cell.stored == new.encode()

    def write_snapshot(self, revision: Revision, name: str, body: bytes) -> str:
        """Store a snapshot and return its segment. It is not valid before the mark names it.

        After a failure the same call goes on where the one before stopped.
        """
        snapshot = f"{self._snapshots}{revision.offset:020d}-{revision.index:010d}-{name}"
        data = _encode_alone(body)
        self.store.create(snapshot)
        written = 0
        while written < len(data):
            part = data[written : written + MAX_APPEND_BYTES // 2]
            written = append_at(self.store, snapshot, part, written)  # or what an earlier attempt has brought there
        return snapshot

    def read_snapshot(self, mark: Mark) -> bytes:
        """The body of the snapshot. Raises `NotFoundError` where a newer mark has replaced it."""
        parts = []
        length = 0
        while part := self.store.read(mark.snapshot, length, _READ_BYTES):
            parts.append(part)
            length += len(part)
        return _decode_alone(mark.snapshot, b"".join(parts))

    def delete_snapshots(self, mark: Mark) -> None:
        """Delete every snapshot that is not newer than ``mark``, but for its own.

        A compaction that is still writing one of them can no longer win: it expects an older mark. What it makes after
        this is deleted by the next call, so the names need not be remembered.
        """
        newest, _, _ = mark.snapshot.rpartition("-")
        for snapshot in list(self.store.list(self._snapshots)):
            revision, _, _ = snapshot.rpartition("-")
            if revision <= newest and snapshot != mark.snapshot:
                self.store.forget(snapshot)

    @property
    def _snapshots(self) -> str:
        return f"snapshot/{self.segment}@"
