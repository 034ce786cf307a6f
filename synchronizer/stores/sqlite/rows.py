"""The rows of segments and of their attributes in a SQLite file. Reading them detects damage.

A row's checksum covers all of its fields and detects a flipped bit. A chain detects a lost row: each row holds the name
of the next one, in order of the names. The chain of segments begins at a row with an empty name, the chain of a
segment's attributes in the segment's row.

Damage raises `DamagedError` wherever it is found, also in the middle of a transaction, which is rolled back.

A segment has a number, with which the keys of its extents begin. Another segment gets the number when the last extent
is freed. So the numbers limit how many segments exist at once. The name of a deleted segment stays in a row whose
number is larger than any that extents can have.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from zlib import crc32

from synchronizer.errors import StoreFullError
from synchronizer.store import SegmentInfo

#: How many bits of an extent's key are the offset, modulo a lap; the rest is the segment's number.
OFFSET_BITS: Final = 40
#: Segments that exist have smaller numbers, names that are used up have this number or a larger one.
MAX_SEGMENTS: Final = 1 << (63 - OFFSET_BITS)

# The states of a segment. A deleted or forgotten one may have extents left as long as its number is small.
OPEN, SEALED, DELETED, FORGOTTEN = range(4)

#: The number of the row at which the chain of segments begins. Its ``length`` counts the numbers given out, its
#: ``start_offset`` is the id of the last commit that took requests of other processes.
_BEGINNING: Final = 0
#: The ``next`` of the last row in a chain.
END: Final = ""


class DamagedError(sqlite3.DatabaseError):
    """Stored data differs from what was written. ``facts`` name the damaged place."""

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts


# ---------------------------------------------------------------------- segments


class Row(NamedTuple):
    """A segment. ``names_checksum`` covers the first four fields."""

    id: int
    name: str | None  # None: the number is free
    next: str
    first_attribute: str
    start_offset: int
    length: int
    state: int
    names_checksum: int

    @property
    def is_over(self) -> bool:
        return self.state >= DELETED

    @property
    def is_sealed(self) -> bool:
        return self.state == SEALED

    @property
    def info(self) -> SegmentInfo:
        assert self.name
        return SegmentInfo(self.name, self.start_offset, self.length, self.is_sealed)

    @property
    def stored(self) -> tuple[int | str | None, ...]:
        return (*self[:7], _checksum(self.names_checksum, self.start_offset, self.length, self.state))


def row(
    id: int,
    name: str | None,
    next: str,
    first_attribute: str = END,
    *,
    start_offset: int = 0,
    length: int = 0,
    state: int = OPEN,
) -> Row:
    names_checksum = _names_checksum(id, name, next, first_attribute)
    return Row(id, name, next, first_attribute, start_offset, length, state, names_checksum)


def _names_checksum(id: int, name: str | None, next: str, first_attribute: str) -> int:
    return crc32(f"{id}\0{name}\0{next}\0{first_attribute}".encode())


def _checksum(names_checksum: int, start_offset: int, length: int, state: int) -> int:
    return crc32(f"{start_offset} {length} {state}".encode(), names_checksum)


_FIELDS: Final = "id, name, next, first_attribute, start_offset, length, state, checksum"
_SELECT: Final = f"SELECT {_FIELDS} FROM segment WHERE"
_FIND: Final = "SELECT id, next, first_attribute, start_offset, length, state, checksum FROM segment WHERE name = ?"
_INSERT: Final = f"INSERT INTO segment ({_FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"

SCHEMA: Final = (
    "CREATE TABLE segment (id INTEGER PRIMARY KEY, name TEXT UNIQUE, next TEXT NOT NULL, first_attribute TEXT NOT NULL,"
    " start_offset INTEGER NOT NULL, length INTEGER NOT NULL, state INTEGER NOT NULL, checksum INTEGER NOT NULL)",
    f"CREATE INDEX segment_to_free ON segment (id) WHERE state > {SEALED} AND id < {MAX_SEGMENTS}",
    "CREATE TABLE attribute (segment INTEGER NOT NULL, name TEXT NOT NULL, next TEXT NOT NULL, value BLOB NOT NULL,"
    " checksum INTEGER NOT NULL, PRIMARY KEY (segment, name)) WITHOUT ROWID",
)


def begin(connection: sqlite3.Connection) -> None:
    """Create the row at which the chain of segments begins."""
    write(connection, row(_BEGINNING, "", END))


def write(connection: sqlite3.Connection, segment: Row) -> None:
    """Insert a row."""
    connection.execute(_INSERT, segment.stored)


def find(connection: sqlite3.Connection, name: str) -> Row | None:
    found = connection.execute(_FIND, (name,)).fetchone()
    if found is None:
        _before(connection, name)
        return None
    return _checked(name, *found)


def find_any(connection: sqlite3.Connection, names: Sequence[str]) -> dict[str, Row]:
    """Return the rows found, by name. It does not prove that a missing one was never there (no chain check)."""
    found = connection.execute(f"{_SELECT} name IN ({','.join('?' * len(names))})", names).fetchall()
    return {each[1]: _read(each) for each in found}


def names(connection: sqlite3.Connection, prefix: str, last: str) -> tuple[list[str], str | None]:
    """Return a page of names after ``last`` that start with ``prefix``, and the ``last`` of the next page or None."""
    first, before = ("name >= ?", "name < ?") if prefix > last else ("name > ?", "name <= ?")
    bound = max(prefix, last)
    expected = _last(connection, before, bound).next
    found = connection.execute(f"{_SELECT} {first} ORDER BY name LIMIT {_NAMES_AT_ONCE}", (bound,)).fetchall()
    named: list[str] = []
    for id, name, next, first_attribute, start_offset, length, state, checksum in found:
        if name != expected or checksum != _checksum(
            _names_checksum(id, name, next, first_attribute), start_offset, length, state
        ):
            raise _damaged(expected)
        if not name.startswith(prefix):
            return named, None
        if state < DELETED:
            named.append(name)
        last, expected = name, next
    if len(found) == _NAMES_AT_ONCE:
        return named, last
    if expected != END:
        raise _damaged(expected)
    return named, None


_NAMES_AT_ONCE: Final = 1000


def insert(
    connection: sqlite3.Connection, name: str, *, start_offset: int = 0, length: int = 0, state: int = OPEN
) -> Row:
    """Create a segment with a name that `find` has not found."""
    number, is_used_again = _take_number(connection)
    before = _before(connection, name)
    made = row(number, name, before.next, start_offset=start_offset, length=length, state=state)
    if is_used_again:
        _overwrite(connection, made)
    else:
        write(connection, made)
    _set_next(connection, before, name)
    return made


def last_shared_commit(connection: sqlite3.Connection) -> int:
    """Return the id of the last commit that took requests of other processes; 0 if there was none."""
    return _given_out(connection).start_offset


def set_last_shared_commit(connection: sqlite3.Connection, commit: int) -> None:
    update(connection, _given_out(connection)._replace(start_offset=commit))


def set_length(connection: sqlite3.Connection, segment: Row, length: int) -> None:
    checksum = _checksum(segment.names_checksum, segment.start_offset, length, segment.state)
    connection.execute("UPDATE segment SET length = ?, checksum = ? WHERE id = ?", (length, checksum, segment.id))


def update(connection: sqlite3.Connection, segment: Row) -> None:
    """Write all fields except ``name`` and ``next``."""
    _, _, _, *fields = segment.stored
    connection.execute(
        "UPDATE segment SET first_attribute = ?, start_offset = ?, length = ?, state = ?, checksum = ? WHERE id = ?",
        (*fields, segment.id),
    )


def with_first_attribute(segment: Row, first: str) -> Row:
    names_checksum = _names_checksum(segment.id, segment.name, segment.next, first)
    return segment._replace(first_attribute=first, names_checksum=names_checksum)


def to_free(connection: sqlite3.Connection) -> Row | None:
    """Return a segment that is deleted or forgotten and still has its number; None if there is none."""
    found = connection.execute(f"{_SELECT} state > {SEALED} AND id < {MAX_SEGMENTS} LIMIT 1").fetchone()
    return None if found is None else _read(found)


def free(connection: sqlite3.Connection, segment: Row) -> None:
    """Give up the number of a segment whose extents are all freed, and its name too if it is to be forgotten."""
    assert segment.name
    if segment.state == FORGOTTEN:
        _unlink(connection, segment)
    _overwrite(connection, row(segment.id, None, END))
    if segment.state == DELETED:
        (last,) = connection.execute("SELECT max(id) FROM segment").fetchone()
        number = max(last + 1, MAX_SEGMENTS)
        write(connection, row(number, segment.name, segment.next, state=DELETED))


def forget_name(connection: sqlite3.Connection, segment: Row) -> None:
    """Remove the name of a segment of which only the name is left."""
    _unlink(connection, segment)
    connection.execute("DELETE FROM segment WHERE id = ?", (segment.id,))


def check_room(connection: sqlite3.Connection, count: int) -> None:
    """Raise `StoreFullError` if fewer than ``count`` numbers are left for new segments."""
    free = f"SELECT count(*) FROM (SELECT 1 FROM segment WHERE name IS NULL LIMIT {int(count)})"
    if _given_out(connection).length + count - connection.execute(free).fetchone()[0] >= MAX_SEGMENTS:
        raise _no_number_left()


def _take_number(connection: sqlite3.Connection) -> tuple[int, bool]:
    """Return a number for a new segment, and whether a row with this number exists."""
    found = connection.execute(f"{_SELECT} name IS NULL LIMIT 1").fetchone()
    if found is not None:
        return _read(found).id, True
    given_out = _given_out(connection)
    number = given_out.length + 1
    if number >= MAX_SEGMENTS:
        raise _no_number_left()
    set_length(connection, given_out, number)
    return number, False


def _given_out(connection: sqlite3.Connection) -> Row:
    """Return the row at which the chain of segments begins."""
    return _last(connection, "name <= ?", "")


def _no_number_left() -> StoreFullError:
    return StoreFullError(
        "the file has the maximum number of segments; delete some, or use another file", limit=MAX_SEGMENTS
    )


def _overwrite(connection: sqlite3.Connection, segment: Row) -> None:
    """Write another segment, or a free number, into the row with this number."""
    _, *fields = segment.stored
    connection.execute(
        "UPDATE segment SET name = ?, next = ?, first_attribute = ?, start_offset = ?, length = ?, state = ?,"
        " checksum = ? WHERE id = ?",
        (*fields, segment.id),
    )


def _unlink(connection: sqlite3.Connection, segment: Row) -> None:
    assert segment.name
    before = _last(connection, "name < ?", segment.name)
    if before.next != segment.name:
        raise _damaged(before.next)
    _set_next(connection, before, segment.next)


def _set_next(connection: sqlite3.Connection, before: Row, next: str) -> None:
    *_, checksum = row(
        before.id,
        before.name,
        next,
        before.first_attribute,
        start_offset=before.start_offset,
        length=before.length,
        state=before.state,
    ).stored
    connection.execute("UPDATE segment SET next = ?, checksum = ? WHERE id = ?", (next, checksum, before.id))


def _before(connection: sqlite3.Connection, name: str) -> Row:
    """Return the row before the place of a missing name."""
    before = _last(connection, "name < ?", name)
    if before.next != END and before.next <= name:
        raise _damaged(before.next)
    return before


def _last(connection: sqlite3.Connection, condition: str, bound: str) -> Row:
    found = connection.execute(f"{_SELECT} {condition} ORDER BY name DESC LIMIT 1", (bound,)).fetchone()
    if found is None:
        raise _damaged("")
    return _read(found)


def _read(found: Sequence[Any]) -> Row:
    id, name, *others = found
    return _checked(name, id, *others)


def _checked(
    name: str | None,
    id: int,
    next: str,
    first_attribute: str,
    start_offset: int,
    length: int,
    state: int,
    checksum: int,
) -> Row:
    """Return the row if it is undamaged. A damaged field may have any type."""
    # Computes `_names_checksum` and `_checksum` in place.
    names_checksum = crc32(f"{id}\0{name}\0{next}\0{first_attribute}".encode())
    if checksum != crc32(f"{start_offset} {length} {state}".encode(), names_checksum):
        raise _damaged(name)
    return Row(id, name, next, first_attribute, start_offset, length, state, names_checksum)


def _damaged(name: object) -> DamagedError:
    if not name:
        return DamagedError("the list of segments is damaged; restore the file from a backup")
    return DamagedError("the row of a segment is damaged or lost; restore the file from a backup", segment=name)


# ---------------------------------------------------------------------- attributes


class Attribute(NamedTuple):
    """An attribute. ``names_checksum`` covers all fields except the value."""

    name: str
    next: str
    value: bytes
    names_checksum: int


_SELECT_ATTRIBUTE: Final = "SELECT name, next, value, checksum FROM attribute WHERE segment = ? AND"
_FIND_ATTRIBUTE: Final = "SELECT next, value, checksum FROM attribute WHERE segment = ? AND name = ?"


def attribute(connection: sqlite3.Connection, segment: Row, name: str) -> Attribute | None:
    found = connection.execute(_FIND_ATTRIBUTE, (segment.id, name)).fetchone()
    if found is None:
        return attribute_and_before(connection, segment, name)[0]
    return _checked_attribute(segment, name, *found)


def attribute_and_before(
    connection: sqlite3.Connection, segment: Row, name: str
) -> tuple[Attribute | None, Attribute | None]:
    """Return the attribute, None if absent, and the one before its place, None if there is none."""
    query = f"{_SELECT_ATTRIBUTE} name <= ? ORDER BY name DESC LIMIT 2"
    rows = [_checked_attribute(segment, *each) for each in connection.execute(query, (segment.id, name)).fetchall()]
    found = rows.pop(0) if rows and rows[0].name == name else None
    before = rows[0] if rows else None
    expected = _next(segment, before)
    if expected != name if found is not None else END < expected <= name:
        raise _damaged_attribute(segment, expected)
    return found, before


def attributes(connection: sqlite3.Connection, segment: Row, prefix: str) -> dict[str, bytes]:
    # Start at the attribute before the first match: it holds the name of the first match.
    query = (
        "SELECT name, next, value, checksum FROM attribute WHERE segment = :segment AND name >= coalesce("
        "(SELECT max(name) FROM attribute WHERE segment = :segment AND name < :prefix), '') ORDER BY name"
    )
    expected = segment.first_attribute
    values: dict[str, bytes] = {}
    for found in connection.execute(query, {"segment": segment.id, "prefix": prefix}):
        each = _checked_attribute(segment, *found)
        if each.name < prefix:
            expected = each.next
            continue
        if each.name != expected:
            raise _damaged_attribute(segment, expected)
        if not expected.startswith(prefix):
            return values
        values[expected] = each.value
        expected = each.next
    if expected != END:
        raise _damaged_attribute(segment, expected)
    return values


def set_value(connection: sqlite3.Connection, segment: Row, found: Attribute, value: bytes) -> None:
    """Change an attribute found in this transaction. No attribute may have been added or removed since then."""
    connection.execute(
        "UPDATE attribute SET value = ?, checksum = ? WHERE segment = ? AND name = ?",
        (value, crc32(value, found.names_checksum), segment.id, found.name),
    )


def add_attribute(
    connection: sqlite3.Connection, segment: Row, name: str, value: bytes, before: Attribute | None
) -> Row:
    """Add an attribute after ``before``, and return the segment, which the caller writes."""
    _insert_attribute(connection, segment.id, name, _next(segment, before), value)
    return _set_next_attribute(connection, segment, before, name)


def _insert_attribute(connection: sqlite3.Connection, segment_id: int, name: str, next: str, value: bytes) -> None:
    checksum = crc32(value, _attribute_checksum(segment_id, name, next))
    connection.execute("INSERT INTO attribute VALUES (?, ?, ?, ?, ?)", (segment_id, name, next, value, checksum))


def remove_attribute(connection: sqlite3.Connection, segment: Row, removed: Attribute, before: Attribute | None) -> Row:
    """Remove the attribute after ``before``, and return the segment, which the caller writes."""
    connection.execute("DELETE FROM attribute WHERE segment = ? AND name = ?", (segment.id, removed.name))
    return _set_next_attribute(connection, segment, before, removed.next)


def _next(segment: Row, before: Attribute | None) -> str:
    return segment.first_attribute if before is None else before.next


def _set_next_attribute(connection: sqlite3.Connection, segment: Row, before: Attribute | None, next: str) -> Row:
    if before is None:
        return with_first_attribute(segment, next)
    checksum = crc32(before.value, _attribute_checksum(segment.id, before.name, next))
    connection.execute(
        "UPDATE attribute SET next = ?, checksum = ? WHERE segment = ? AND name = ?",
        (next, checksum, segment.id, before.name),
    )
    return segment


def _attribute_checksum(segment_id: int, name: str, next: str) -> int:
    return crc32(f"{segment_id}\0{name}\0{next}".encode())


def _checked_attribute(segment: Row, name: str, next: str, value: bytes, checksum: int) -> Attribute:
    names_checksum = _attribute_checksum(segment.id, name, next)
    if type(value) is not bytes or checksum != crc32(value, names_checksum):
        raise _damaged_attribute(segment, name)
    return Attribute(name, next, value, names_checksum)


def _damaged_attribute(segment: Row, name: object) -> DamagedError:
    return DamagedError(
        "an attribute of a segment is damaged or lost; restore the file from a backup",
        segment=segment.name,
        attribute=name,
    )
