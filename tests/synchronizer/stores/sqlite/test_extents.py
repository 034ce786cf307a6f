"""Bytes that segments of a SQLite file share: never lost with one of those who share them, never left with none."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from synchronizer.errors import AlreadyExistsError
from synchronizer.store import ANY, Append, AttributeChange, SegmentCopy
from synchronizer.stores.sqlite import extents as sqlite_extents
from synchronizer.stores.sqlite import rows as sqlite_rows
from synchronizer.stores.sqlite import schema as sqlite_schema
from synchronizer.stores.sqlite import steps as sqlite_steps
from synchronizer.stores.sqlite.extents import BLOB_BYTES
from synchronizer.stores.sqlite.rows import DamagedError
from synchronizer.stores.sqlite.steps import Garbage

from .extents import check_extents

SIZES = st.integers(0, 200)


@pytest.fixture
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few bytes are many blobs, and are freed in many steps."""
    monkeypatch.setattr(sqlite_extents, "_EXTENT_BYTES", 64)
    monkeypatch.setattr(sqlite_extents, "BLOB_BYTES", 16)


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = memory()
    yield connection
    connection.close()


def memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    sqlite_schema.make(connection)
    return connection


class Segments(RuleBasedStateMachine):
    """Segments beside what they should hold: all their bytes, and from where on they have them."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = memory()
        self.held: dict[str, bytes] = {}
        self.starts: dict[str, int] = {}
        self.sealed: set[str] = set()
        self.deleted: set[str] = set()
        self.attributes: dict[tuple[str, str], bytes] = {}
        self.garbage: list[Garbage] = []
        self.made = 0
        self.create()

    def teardown(self) -> None:
        self.connection.close()

    def new_name(self) -> str:
        self.made += 1
        return f"s{self.made}"

    def one_of(self, data: st.DataObject, names: set[str]) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    @property
    def open(self) -> set[str]:
        return self.held.keys() - self.sealed

    @rule()
    def create(self) -> None:
        name = self.new_name()
        sqlite_steps.create(self.connection, name)
        self.held[name], self.starts[name] = b"", 0

    @precondition(lambda self: self.open)
    @rule(data=st.data(), size=SIZES)
    def append(self, data: st.DataObject, size: int) -> None:
        name = self.one_of(data, self.open)
        added = bytes((len(self.held[name]) + at + self.made) % 251 for at in range(size))
        sqlite_steps.append(self.connection, Append(name, added))
        self.held[name] += added

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        name = self.one_of(data, self.open)
        sqlite_steps.seal(self.connection, name)
        self.sealed.add(name)

    @precondition(lambda self: self.open and self.sealed)
    @rule(data=st.data())
    def concat(self, data: st.DataObject) -> None:
        name, source = self.one_of(data, self.open), self.one_of(data, self.sealed)
        sqlite_steps.concat(self.connection, Append(name), source)
        self.held[name] += self.held[source][self.starts[source] :]

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        source, name = self.one_of(data, set(self.held)), self.new_name()
        start = data.draw(st.integers(self.starts[source], len(self.held[source])))
        end = data.draw(st.integers(start, len(self.held[source])))
        sqlite_steps.copy_segments(self.connection, [SegmentCopy(source, name, start, end)])
        self.held[name], self.starts[name] = self.held[source][:end], start
        self.sealed.add(name)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = self.one_of(data, set(self.held))
        offset = data.draw(st.integers(0, len(self.held[name])) | st.just(len(self.held[name])))
        self.garbage.append(sqlite_steps.truncate(self.connection, name, offset, most=2))
        self.starts[name] = max(offset, self.starts[name])

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data(), is_remembered=st.booleans())
    def delete(self, data: st.DataObject, is_remembered: bool) -> None:
        name = self.one_of(data, set(self.held))
        step = sqlite_steps.delete if is_remembered else sqlite_steps.forget
        self.garbage.append(step(self.connection, name, most=2))
        del self.held[name], self.starts[name]
        self.sealed.discard(name)
        if is_remembered:
            self.deleted.add(name)

    @precondition(lambda self: self.deleted)
    @rule(data=st.data())
    def forget_deleted(self, data: st.DataObject) -> None:
        name = self.one_of(data, self.deleted)
        self.garbage.append(sqlite_steps.forget(self.connection, name))
        self.deleted.remove(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), attribute=st.sampled_from("abcdef"), value=st.none() | st.binary(max_size=3))
    def change_attribute(self, data: st.DataObject, attribute: str, value: bytes | None) -> None:
        name = self.one_of(data, self.open)
        other = chr(ord(attribute) + 1)
        changes = {each: AttributeChange(ANY, value) for each in (attribute, other)}
        sqlite_steps.append(self.connection, Append(name, attributes=changes))
        for each in changes:
            self.attributes.pop((name, each), None)
            if value is not None:
                self.attributes[name, each] = value

    @precondition(lambda self: self.garbage)
    @rule()
    def collect(self) -> None:
        garbage = self.garbage.pop()
        while garbage.is_more:
            garbage = garbage.collect(self.connection, most=2)

    @invariant()
    def nothing_is_lost(self) -> None:
        for name, held in self.held.items():
            start = self.starts[name]
            assert sqlite_steps.read(self.connection, name, start, 10_000) == held[start:]
            middle = (start + len(held)) // 2
            assert sqlite_steps.read(self.connection, name, middle, 50) == held[middle : middle + 50]

    @invariant()
    def all_names_are_listed(self) -> None:
        assert sqlite_rows.names(self.connection, "", "") == (sorted(self.held), None)
        for name in self.deleted:
            with pytest.raises(AlreadyExistsError):
                sqlite_steps.create(self.connection, name)

    @invariant()
    def attributes_are_what_they_were_set_to(self) -> None:
        for name in self.held:
            values = {each: value for (segment, each), value in self.attributes.items() if segment == name}
            assert sqlite_steps.attributes(self.connection, name, "") == values
            assert sqlite_steps.attributes_named(self.connection, name, set("abcdefg")) == values

    @invariant()
    def nothing_is_left(self) -> None:
        check_extents(self.connection)
        if not any(garbage.is_more for garbage in self.garbage):
            expected = {sqlite_steps._row(self.connection, name).id for name in self.held if self.size_of(name)}
            found = self.connection.execute("SELECT DISTINCT key >> 40 FROM extent")
            assert {number for (number,) in found} == expected
            assert sqlite_rows.to_free(self.connection) is None

    def size_of(self, name: str) -> int:
        return len(self.held[name]) - self.starts[name]


TestCopiesTruncationsAndDeletions = pytest.mark.usefixtures("small_extents")(Segments.TestCase)
TestCopiesTruncationsAndDeletions.settings = settings(stateful_step_count=40)


@pytest.mark.usefixtures("small_extents")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(SIZES, min_size=1, max_size=6), cuts=st.tuples(SIZES, SIZES))
def test_any_range_can_be_copied_and_read(sizes: list[int], cuts: tuple[int, int]) -> None:
    connection = memory()
    sqlite_steps.create(connection, "s")
    whole = bytes(at % 251 for at in range(sum(sizes)))
    at = 0
    for size in sizes:
        sqlite_steps.append(connection, Append("s", whole[at : at + size]))
        at += size
    start, end = sorted(min(cut, len(whole)) for cut in cuts)
    sqlite_steps.copy_segments(connection, [SegmentCopy("s", "copy", start, end)])
    assert sqlite_steps.read(connection, "copy", start, 10_000) == whole[start:end]
    sqlite_steps.create(connection, "target")
    sqlite_steps.append(connection, Append("target", b"before"))
    sqlite_steps.concat(connection, Append("target"), "copy")
    sqlite_steps.append(connection, Append("target", b"after"))
    assert sqlite_steps.read(connection, "target", 0, 10_000) == b"before" + whole[start:end] + b"after"
    check_extents(connection)
    connection.close()


def test_a_copy_inside_the_store_takes_no_bytes(connection: sqlite3.Connection) -> None:
    sqlite_steps.create(connection, "source")
    for _ in range(4):
        sqlite_steps.append(connection, Append("source", bytes(1 << 20)))
    sqlite_steps.seal(connection, "source")
    sqlite_steps.create(connection, "target")
    (before,) = connection.execute("PRAGMA page_count").fetchone()
    sqlite_steps.concat(connection, Append("target"), "source")
    sqlite_steps.copy_segments(connection, [SegmentCopy("source", "copy", 0, 4 << 20)])
    (after,) = connection.execute("PRAGMA page_count").fetchone()
    assert after - before < 10  # of a thousand
    assert sqlite_steps.read(connection, "target", 0, 5 << 20) == bytes(4 << 20)


def test_the_bytes_are_freed_with_the_last_who_has_them(connection: sqlite3.Connection) -> None:
    def blobs() -> int:
        (count,) = connection.execute("SELECT count(*) FROM blob").fetchone()
        return int(count)

    sqlite_steps.create(connection, "a")
    sqlite_steps.append(connection, Append("a", bytes(BLOB_BYTES)))
    sqlite_steps.copy_segments(connection, [SegmentCopy("a", name, 0, BLOB_BYTES) for name in ("b", "c")])
    for name, left in (("b", 1), ("a", 1), ("c", 0)):
        sqlite_steps.delete(connection, name)
        assert blobs() == left
        check_extents(connection)


def test_small_appends_make_no_blobs(connection: sqlite3.Connection) -> None:
    sqlite_steps.create(connection, "s")
    sqlite_steps.append(connection, Append("s", bytes(BLOB_BYTES - 1)))
    assert connection.execute("SELECT count(*) FROM blob").fetchone() == (0,)
    sqlite_steps.append(connection, Append("s", bytes(BLOB_BYTES)))
    assert connection.execute("SELECT count(*) FROM blob").fetchone() == (1,)


def test_a_blob_that_is_lost_is_reported(connection: sqlite3.Connection) -> None:
    sqlite_steps.create(connection, "s")
    for _ in range(3):
        sqlite_steps.append(connection, Append("s", bytes(BLOB_BYTES)))
    connection.execute("DELETE FROM blob WHERE id = 3")
    with pytest.raises(DamagedError, match="missing"):
        sqlite_steps.read(connection, "s", 0, 1 << 20)
    assert sqlite_steps.read(connection, "s", 0, 2 * BLOB_BYTES) == bytes(2 * BLOB_BYTES)
