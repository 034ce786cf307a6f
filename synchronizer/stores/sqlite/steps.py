"""The reads and writes of the SQLite store. Each function runs in a transaction, and checks before it writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from synchronizer.errors import StoreFullError
from synchronizer.store import (
    ANY,
    MAX_DELTA_BYTES,
    Append,
    Appended,
    AppendResult,
    Conflict,
    SegmentCopy,
    SegmentInfo,
    SegmentStart,
)

from ..checks import (
    all_are_new,
    are_new,
    check_copy,
    check_read,
    check_source,
    check_within,
    name_is_used_up,
    not_found,
    sealed,
)
from . import extents as sqlite_extents
from . import rows as sqlite_rows
from .extents import MANY_EXTENTS, MAX_SEGMENT_BYTES
from .rows import MAX_SEGMENTS, Attribute, DamagedError, Row

#: One step of shrinking moves at most this many pages, in a few milliseconds.
SHRINK_PAGES: Final = 32
#: A file begins to shrink when more pages are free than these, 48 MiB, and than this share of its used pages: what
#: retention deletes at the speed of a writer, the next writes need again.
_MANY_PAGES: Final = 3072
_MANY_SHARE: Final = 1 / 2
#: Then it keeps this many, 16 MiB, or this share if that is more.
_SPARE_PAGES: Final = 1024
_SPARE_SHARE: Final = 1 / 4


class Garbage(NamedTuple):
    """Extents that can be freed: those of the truncated ``segment``, or of all deleted segments if it is None."""

    segment: str | None
    is_more: bool

    def collect(self, connection: sqlite3.Connection, most: int = MANY_EXTENTS) -> Garbage:
        """Free up to ``most`` extents; return what is left."""
        if self.segment is None:
            return _collect_deleted(connection, most)
        row = sqlite_rows.find(connection, self.segment)
        if row is None or row.is_over:
            return self._replace(is_more=False)
        return self._replace(is_more=sqlite_extents.free(connection, row.id, (row.start_offset, row.length), most))


def _collect_deleted(connection: sqlite3.Connection, most: int) -> Garbage:
    row = sqlite_rows.to_free(connection)
    if row is None:
        return Garbage(None, is_more=False)
    if sqlite_extents.free(connection, row.id, None, most):
        return Garbage(None, is_more=True)
    sqlite_rows.free(connection, row)
    return Garbage(None, is_more=sqlite_rows.to_free(connection) is not None)


def pages_to_shrink(connection: sqlite3.Connection) -> int:
    """Return `spare_pages`, or 0 while these are too few to begin with."""
    return spare_pages(connection) if _free_pages(connection, _MANY_PAGES, _MANY_SHARE) > 0 else 0


def spare_pages(connection: sqlite3.Connection) -> int:
    """Return how many pages the file has beyond those that new data will soon use; 0 in a file that cannot shrink."""
    return max(0, _free_pages(connection, _SPARE_PAGES, _SPARE_SHARE))


def _free_pages(connection: sqlite3.Connection, least: int, share: float) -> int:
    """Return how many more pages are free than ``least``, and than this share of the used ones."""
    (mode,) = connection.execute("PRAGMA auto_vacuum").fetchone()
    if not mode:  # made by a release before shrinking
        return 0
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    return int(free) - max(least, int((pages - free) * share))


def shrink(connection: sqlite3.Connection) -> int:
    """Move up to `SHRINK_PAGES` pages into free ones, so that the file can end before them; return what is spare."""
    for _ in range(min(SHRINK_PAGES, spare_pages(connection))):
        connection.execute("PRAGMA incremental_vacuum(1)")  # Python runs only the first page of more
    return spare_pages(connection)


def _row(connection: sqlite3.Connection, segment: str) -> Row:
    row = sqlite_rows.find(connection, segment)
    if row is None or row.is_over:
        raise not_found(segment)
    return row


def info(connection: sqlite3.Connection, segment: str) -> SegmentInfo:
    return _row(connection, segment).info


def infos(connection: sqlite3.Connection, segments: Sequence[str]) -> Mapping[str, SegmentInfo]:
    rows = sqlite_rows.find_any(connection, segments)
    found = {name: rows.get(name) or sqlite_rows.find(connection, name) for name in segments}
    return {name: row.info for name, row in found.items() if row is not None and not row.is_over}


def attributes(connection: sqlite3.Connection, segment: str, prefix: str) -> Mapping[str, bytes]:
    return sqlite_rows.attributes(connection, _row(connection, segment), prefix)


def attributes_named(connection: sqlite3.Connection, segment: str, names: Collection[str]) -> Mapping[str, bytes]:
    row = _row(connection, segment)
    found = (sqlite_rows.attribute(connection, row, name) for name in names)
    return {each.name: each.value for each in found if each is not None}


def create(connection: sqlite3.Connection, segment: str, start_offset: int = 0) -> bool:
    row = sqlite_rows.find(connection, segment)
    if row is None:
        sqlite_rows.insert(connection, segment, start_offset=start_offset, length=start_offset)
    elif row.is_over:
        raise name_is_used_up(segment)
    return row is None


def create_together(connection: sqlite3.Connection, segments: Mapping[str, bytes], starts: Mapping[str, int]) -> bool:
    found = {name: sqlite_rows.find(connection, name) for name in segments}
    if not all_are_new({name: row.is_over for name, row in found.items() if row is not None}):
        return False
    sqlite_rows.check_room(connection, len(segments))
    for name, data in segments.items():
        row = sqlite_rows.insert(connection, name, start_offset=starts[name], length=starts[name] + len(data))
        sqlite_extents.insert(connection, row.id, starts[name], data)
    return True


def append(connection: sqlite3.Connection, append: Append) -> AppendResult:
    match = _match(connection, append, len(append.data))
    return match if isinstance(match, Conflict) else _append(connection, append, match)


def append_together(
    connection: sqlite3.Connection, appends: Sequence[Append]
) -> tuple[Appended, ...] | Mapping[str, Conflict]:
    conflicts: dict[str, Conflict] = {}
    matches: list[_Match] = []
    for append in appends:
        match = _match(connection, append, len(append.data))
        if isinstance(match, Conflict):
            conflicts[append.segment] = match
        else:
            matches.append(match)
    if conflicts:
        return conflicts
    return tuple(_append(connection, append, match) for append, match in zip(appends, matches, strict=True))


def concat(connection: sqlite3.Connection, append: Append, source: str) -> AppendResult:
    copied = _row(connection, source)
    check_source(source, copied.is_sealed)
    size = copied.length - copied.start_offset
    match = _match(connection, append, size + len(append.data))
    if isinstance(match, Conflict):
        return match
    sqlite_extents.copy(connection, copied.id, copied.start_offset, copied.length, match.row.id, match.row.length)
    return _append(connection, append, match, size)


def copy_segments(connection: sqlite3.Connection, copies: Sequence[SegmentCopy]) -> bool:
    found = {each.segment: sqlite_rows.find(connection, each.segment) for each in copies}
    if not are_new(copies, {segment: row.is_over for segment, row in found.items() if row is not None}):
        return False
    sources = [_row(connection, each.source) for each in copies]
    for each, source in zip(copies, sources, strict=True):
        check_copy(each, source.start_offset, source.length)
    sqlite_rows.check_room(connection, len(copies))
    for each, source in zip(copies, sources, strict=True):
        made = sqlite_rows.insert(
            connection, each.segment, start_offset=each.start, length=each.end, state=sqlite_rows.SEALED
        )
        sqlite_extents.copy(connection, source.id, each.start, each.end, made.id, each.start)
    return True


class _Match(NamedTuple):
    """A segment that accepts the append now, and the attributes that the append names."""

    row: Row
    present: Mapping[str, Attribute | None]
    #: The attribute before the last one that the append may add or remove; None if there is none.
    before: Attribute | None


def _match(connection: sqlite3.Connection, append: Append, size: int) -> _Match | Conflict:
    """Return the segment if ``size`` bytes may be appended to it now, else the conflict."""
    row = _row(connection, append.segment)
    if row.is_sealed:
        raise sealed(append.segment, row.length)
    present: dict[str, Attribute | None] = {}
    before: Attribute | None = None
    for name, change in append.attributes.items():
        if change.new is None or change.expected in (None, ANY):  # it may be added or removed
            present[name], before = sqlite_rows.attribute_and_before(connection, row, name)
        else:
            present[name] = sqlite_rows.attribute(connection, row, name)
    if append.expected_offset not in (None, row.length) or (present and not _are_as_expected(append, present)):
        values = {name: None if each is None else each.value for name, each in present.items()}
        return Conflict(row.length, _delta(connection, row, append.expected_offset), values)
    if not sqlite_extents.has_room(connection, row.id, row.length, size):
        raise StoreFullError(
            "the segment has no room; truncate it, or seal it and use another",
            segment=append.segment,
            start_offset=row.start_offset,
            length=row.length,
            limit=MAX_SEGMENT_BYTES,
        )
    return _Match(row, present, before)


def _are_as_expected(append: Append, present: Mapping[str, Attribute | None]) -> bool:
    for name, change in append.attributes.items():
        found = present[name]
        if change.expected is not ANY and change.expected != (None if found is None else found.value):
            return False
    return True


def _append(connection: sqlite3.Connection, append: Append, match: _Match, copied: int = 0) -> Appended:
    """Write an append that `_match` allowed; ``copied`` bytes are already written."""
    before = match.row
    row = _change_attributes(connection, append, match) if append.attributes else before
    length = before.length + copied + len(append.data)
    if row is not before:
        sqlite_rows.update(connection, row._replace(length=length))
    elif length > before.length:
        sqlite_rows.set_length(connection, row, length)
    sqlite_extents.insert(connection, row.id, before.length + copied, append.data)
    return Appended(before.length, length)


def _change_attributes(connection: sqlite3.Connection, append: Append, match: _Match) -> Row:
    """Change first the attributes that stay, then add and remove: that changes the attribute before as well."""
    row = match.row
    come_or_go: list[str] = []
    for name, change in append.attributes.items():
        if (found := match.present[name]) is None or change.new is None:
            come_or_go.append(name)
        else:
            sqlite_rows.set_value(connection, row, found, change.new)
    for name in come_or_go:
        found, before = match.present[name], match.before
        if len(append.attributes) > 1:  # an earlier change may have replaced the attribute before
            found, before = sqlite_rows.attribute_and_before(connection, row, name)
        new = append.attributes[name].new
        if new is not None:
            row = sqlite_rows.add_attribute(connection, row, name, new, before)
        elif found is not None:
            row = sqlite_rows.remove_attribute(connection, row, found, before)
    return row


def _delta(connection: sqlite3.Connection, row: Row, expected_offset: int | None) -> bytes:
    if expected_offset is None or not row.start_offset <= expected_offset < row.length:
        return b""
    return _read(connection, row, expected_offset, MAX_DELTA_BYTES)


def _read(connection: sqlite3.Connection, row: Row, offset: int, max_bytes: int) -> bytes:
    try:
        return sqlite_extents.read(connection, row.id, offset, min(row.length, offset + max_bytes))
    except DamagedError as error:
        error.facts = {"segment": row.name, **error.facts}
        raise


def read(connection: sqlite3.Connection, segment: str, offset: int, max_bytes: int) -> bytes:
    row = _row(connection, segment)
    check_read(segment, offset, max_bytes, row.start_offset, row.length)
    return _read(connection, row, offset, max_bytes)


def read_starts(connection: sqlite3.Connection, segments: Sequence[str], max_bytes: int) -> Mapping[str, SegmentStart]:
    rows = sqlite_rows.find_any(connection, segments)
    return {
        name: SegmentStart(row.start_offset, _read(connection, row, row.start_offset, max_bytes))
        for name, row in rows.items()
        if not row.is_over
    }


def seal(connection: sqlite3.Connection, segment: str) -> SegmentInfo:
    row = _row(connection, segment)
    if row.is_sealed:
        return row.info
    row = row._replace(state=sqlite_rows.SEALED)
    sqlite_rows.update(connection, row)
    return row.info


def truncate(connection: sqlite3.Connection, segment: str, offset: int, most: int = MANY_EXTENTS) -> Garbage:
    row = _row(connection, segment)
    check_within(segment, offset, row.length)
    if offset > row.start_offset:
        sqlite_rows.update(connection, row._replace(start_offset=offset))
    return Garbage(segment, is_more=True).collect(connection, most)


def delete(connection: sqlite3.Connection, segment: str, most: int = MANY_EXTENTS) -> Garbage:
    row = sqlite_rows.find(connection, segment)
    if row is None:
        raise not_found(segment)
    return _delete(connection, row, sqlite_rows.DELETED, most)


def forget(connection: sqlite3.Connection, segment: str, most: int = MANY_EXTENTS) -> Garbage:
    row = sqlite_rows.find(connection, segment)
    if row is None:
        return Garbage(None, is_more=False)
    if row.id >= MAX_SEGMENTS:
        sqlite_rows.forget_name(connection, row)
        return Garbage(None, is_more=False)
    return _delete(connection, row, sqlite_rows.FORGOTTEN, most)


def forget_at(connection: sqlite3.Connection, segment: str, offset: int) -> None:
    """Forget the segment, all in this step, if its length is ``offset``."""
    row = sqlite_rows.find(connection, segment)
    if row is None or row.is_over or row.length != offset:
        return
    connection.execute("DELETE FROM attribute WHERE segment = ?", (row.id,))
    while sqlite_extents.free(connection, row.id, None, MANY_EXTENTS):
        pass
    sqlite_rows.free(connection, row._replace(state=sqlite_rows.FORGOTTEN))


def _delete(connection: sqlite3.Connection, row: Row, state: int, most: int) -> Garbage:
    """Advance the segment to ``state``, free up to ``most`` extents of deleted segments, and return what is left."""
    if row.id < MAX_SEGMENTS and row.state < state:
        connection.execute("DELETE FROM attribute WHERE segment = ?", (row.id,))
        sqlite_rows.update(connection, sqlite_rows.with_first_attribute(row, sqlite_rows.END)._replace(state=state))
    return _collect_deleted(connection, most)


def changed(connection: sqlite3.Connection, names: Sequence[str], known: Mapping[str, int]) -> set[str]:
    rows = sqlite_rows.find_any(connection, names)
    for name in names:
        if name not in rows and sqlite_rows.find(connection, name) is None:
            raise not_found(name)
    return {name for name, row in rows.items() if row.is_over or row.is_sealed or row.length != known[name]}
