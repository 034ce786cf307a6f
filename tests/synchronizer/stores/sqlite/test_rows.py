"""What a SQLite file says of segments and attributes is what was written, or an error that names what is damaged."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from synchronizer.errors import CorruptStoreError, NotFoundError, StoreFullError
from synchronizer.store import Appended, AttributeChange, SegmentCopy, SegmentStore
from synchronizer.stores import open_store
from synchronizer.stores.sqlite import rows as sqlite_rows
from synchronizer.stores.sqlite.extents import BLOB_BYTES
from synchronizer.stores.sqlite.rows import MAX_SEGMENTS
from synchronizer.stores.sqlite.store import SqliteStore

Ask = Callable[[SegmentStore], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with three segments, of which the second has attributes."""
    path = tmp_path / "store.db"
    with opened(path) as store:
        for name in "prs":
            store.create(name)
        store.append("r", b"0123456789", attributes={name: AttributeChange(None, b"1") for name in "bdf"})
    return path


def opened(path: Path) -> SegmentStore:
    return open_store(f"sqlite:///{path}")


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(statement).rowcount == 1


#: Whatever may be asked about a segment: none of it changes anything where that one is damaged.
ASKS: Final[list[Ask]] = [
    lambda store: store.info("r"),
    lambda store: store.create("r"),
    lambda store: store.append("r", b"x"),
    lambda store: store.append("r", b"", attributes={"b": AttributeChange(b"1", b"2")}),
    lambda store: store.read("r", 0, 1),
    lambda store: store.attributes("r"),
    lambda store: store.truncate("r", 1),
    lambda store: store.seal("r"),
    lambda store: store.delete("r"),
    lambda store: store.forget("r"),
    lambda store: store.wait({"p": 0, "r": 10}, 0),
    lambda store: list(store.list()),
    lambda store: list(store.list("r")),
    lambda store: store.copy_segments([SegmentCopy("r", "copy", 0, 10)]),
]
ASKS_OF_ATTRIBUTES: Final[list[Ask]] = [
    lambda store: store.attributes("r"),
    lambda store: store.attributes("r", "d"),
    lambda store: store.attributes("r", names=["d"]),
    lambda store: store.append("r", b"x", attributes={"d": AttributeChange(b"1", b"2")}),
    lambda store: store.append("r", b"x", attributes={"d": AttributeChange(None, b"2")}),
]


@pytest.mark.parametrize(
    "damage",
    [
        "next = 't'",
        "first_attribute = ''",
        "first_attribute = 'c'",
        "start_offset = 8",
        "length = 2",
        "length = 'ten'",
        "length = 10.5",
        "state = 1",
        "state = 2",
        "checksum = checksum + 1",
    ],
)
def test_a_damaged_segment_is_told_by_name(path: Path, damage: str) -> None:
    change(path, f"UPDATE segment SET {damage} WHERE name = 'r'")
    with opened(path) as store:
        for ask in ASKS:
            with pytest.raises(CorruptStoreError) as told:
                ask(store)
            assert told.value.facts == {"path": str(path), "segment": "r"}
        assert store.info("p").length == 0
        assert store.append("s", b"x") == Appended(0, 1)


@pytest.mark.parametrize(
    "damage", ["DELETE FROM segment WHERE name = 'r'", "UPDATE segment SET name = 'q' WHERE name = 'r'"]
)
def test_a_lost_segment_is_missed(path: Path, damage: str) -> None:
    change(path, damage)
    with opened(path) as store:
        for ask in ASKS:
            with pytest.raises(CorruptStoreError) as told:
                ask(store)
            assert told.value.facts["segment"] in ("r", "q")
        with pytest.raises(NotFoundError):
            store.info("o")  # what never was is not missed


def test_a_deleted_name_that_is_lost_is_missed(path: Path) -> None:
    with opened(path) as store:
        store.delete("r")
    change(path, "DELETE FROM segment WHERE name = 'r'")
    with opened(path) as store, pytest.raises(CorruptStoreError, match="segment='r'"):
        store.create("r")


def test_a_lost_beginning_is_missed(path: Path) -> None:
    change(path, "DELETE FROM segment WHERE id = 0")
    with opened(path) as store:
        for call in (lambda: store.create("a"), lambda: list(store.list()), lambda: store.info("a")):
            with pytest.raises(CorruptStoreError):
                call()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE attribute SET value = x'32' WHERE name = 'd'",
        "UPDATE attribute SET value = 'text' WHERE name = 'd'",
        "UPDATE attribute SET next = 'e' WHERE name = 'd'",
        "UPDATE attribute SET name = 'e' WHERE name = 'd'",
        "UPDATE attribute SET segment = 1 WHERE name = 'd'",
        "UPDATE attribute SET checksum = checksum + 1 WHERE name = 'd'",
        "DELETE FROM attribute WHERE name = 'd'",
    ],
)
def test_a_damaged_or_lost_attribute_is_told_by_name(path: Path, damage: str) -> None:
    change(path, damage)
    with opened(path) as store:
        for ask in ASKS_OF_ATTRIBUTES:
            with pytest.raises(CorruptStoreError, match="'r'") as told:
                ask(store)
            assert told.value.facts["attribute"] in ("d", "e")
        assert store.attributes("r", names=["a", "b", "f"]) == {"b": b"1", "f": b"1"}
        assert store.read("r", 0, 100) == b"0123456789"


def test_the_first_attribute_is_missed_too(path: Path) -> None:
    change(path, "DELETE FROM attribute WHERE name = 'b'")
    with opened(path) as store, pytest.raises(CorruptStoreError, match="attribute='b'"):
        store.attributes("r", names=["b"])


def test_a_reference_to_other_bytes_is_told(path: Path) -> None:
    with opened(path) as store:
        for name in "ps":
            store.append(name, name.encode() * BLOB_BYTES)
    change(
        path,
        "UPDATE extent SET data = (SELECT max(data) FROM extent WHERE typeof(data) = 'integer') WHERE key >> 40 = 1",
    )
    with opened(path) as store, pytest.raises(CorruptStoreError, match="segment='p'"):
        store.read("p", 0, 1 << 20)


@pytest.mark.parametrize("damage", ["DELETE FROM sharing", "UPDATE sharing SET count = 0"])
def test_a_damaged_count_of_references_frees_nothing(path: Path, damage: str) -> None:
    with opened(path) as store:
        store.append("p", bytes(BLOB_BYTES))
        store.copy_segments([SegmentCopy("p", "copy", 0, BLOB_BYTES)])
    change(path, damage)
    with opened(path) as store:
        with pytest.raises(CorruptStoreError, match="reference count"):
            store.delete("p")
        assert store.read("copy", 0, 1 << 20) == store.read("p", 0, 1 << 20) == bytes(BLOB_BYTES)


def test_bytes_in_another_order_are_told(path: Path) -> None:
    with opened(path) as store:
        for _ in range(4):
            store.append("p", bytes(16))
    change(path, "UPDATE extent SET key = key + 33 WHERE key = (1 << 40) + 16")
    with opened(path) as store, pytest.raises(CorruptStoreError, match="missing"):
        store.read("p", 0, 100)


def test_a_file_with_a_damaged_table_description_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = 1")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'name TEXT', 'name TEXU') WHERE name = 'segment'"
        )
    with pytest.raises(CorruptStoreError, match="tables"):
        opened(path)


# ---------------------------------------------------------------------- the numbers of segments


@pytest.fixture
def nearly_used_up(path: Path) -> Iterator[SegmentStore]:
    """A file that has given out all numbers but three."""
    with closing(sqlite3.connect(path)) as connection, connection:
        beginning = sqlite_rows.row(0, "", "p", length=MAX_SEGMENTS - 4)
        connection.execute("DELETE FROM segment WHERE id = 0")
        sqlite_rows.write(connection, beginning)
    with opened(path) as store:
        yield store


@pytest.mark.parametrize("is_remembered", [True, False])
def test_numbers_of_deleted_segments_are_used_again(nearly_used_up: SegmentStore, is_remembered: bool) -> None:
    store = nearly_used_up
    for number in range(50):
        name = f"t{number}"
        assert store.create(name)
        assert store.append(name, b"%d" % number * BLOB_BYTES)
        assert store.read(name, 0, 4) == (b"%d" % number * 4)[:4]
        if is_remembered:
            store.delete(name)
        else:
            store.forget(name)
    assert list(store.list()) == ["p", "r", "s"]
    assert store.read("r", 0, 100) == b"0123456789"


def test_only_segments_that_exist_at_once_have_a_limit(nearly_used_up: SegmentStore) -> None:
    store = nearly_used_up
    for name in ("t1", "t2", "t3"):
        store.create(name)
    with pytest.raises(StoreFullError, match="maximum number of segments"):
        store.create("t4")
    with pytest.raises(StoreFullError):
        store.copy_segments([SegmentCopy("r", "t4", 0, 10)])
    assert store.append("t3", b"x") == Appended(0, 1)
    store.delete("t2")
    assert store.copy_segments([SegmentCopy("r", "t4", 0, 10)])
    assert store.read("t4", 0, 100) == b"0123456789"


def test_a_number_is_free_only_when_its_last_extent_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies while it frees many extents: who deletes next goes on, and nobody meets old bytes."""
    with opened(path) as store:
        for _ in range(10):
            store.append("p", b"old bytes")
        monkeypatch.setattr(SqliteStore, "_free", lambda self, free: self._write(partial(free, most=3)))
        store.forget("p")
        store.create("t")
        assert store.append("t", b"new") == Appended(0, 3)
        monkeypatch.undo()
        store.forget("s")
        assert store.read("t", 0, 100) == b"new"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM extent").fetchone() == (2,)  # of r and t
        assert connection.execute("SELECT count(*) FROM segment WHERE name IS NULL").fetchone() == (2,)
