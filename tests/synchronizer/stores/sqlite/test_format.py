"""A SQLite file of an older format becomes one of the present format when it is opened."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import pytest

from synchronizer.errors import AlreadyExistsError, NotFoundError, TruncatedError
from synchronizer.store import Appended, SegmentCopy, SegmentStore
from synchronizer.stores import open_store
from synchronizer.stores.sqlite.schema import migrate
from synchronizer.stores.sqlite.store import FORMAT
from tests.places import WIRE

from ..processes import open_when_told, receive, running
from .extents import check_extents

#: Made by the releases of these formats; never rewritten.
LARGE: Final = bytes(range(250)) * 400 + b"the end"


@pytest.fixture(params=[1, 2])
def old_format(request: pytest.FixtureRequest) -> int:
    old_format: int = request.param
    return old_format


@pytest.fixture
def path(tmp_path: Path, old_format: int) -> Path:
    path = tmp_path / "store.db"
    shutil.copy(WIRE / f"sqlite-v{old_format}.db", path)
    return path


def opened(path: Path) -> SegmentStore:
    return open_store(f"sqlite:///{path}")


def format_of(path: Path) -> int:
    """What the first release looks at before it opens a file. Another process reads it, because it ends its locks."""
    header = subprocess.run(["head", "--bytes=64", path], stdout=subprocess.PIPE, check=True).stdout
    return int.from_bytes(header[60:])


def check_contents(store: SegmentStore) -> None:
    assert set(store.list()) - {"shop/shared", "shop/whole"} == {"shop/large", "shop/small"}
    assert store.read("shop/small", 0, 1000) == b"".join(b"event %d;" % number for number in range(10))
    assert store.attributes("shop/small") == {"mark": b"27"}
    assert store.info("shop/large").sealed
    assert store.read("shop/large", 1000, 1 << 20) == LARGE[1000:]
    with pytest.raises(TruncatedError):
        store.read("shop/large", 999, 10)
    with pytest.raises(NotFoundError):
        store.info("shop/deleted")
    with pytest.raises(AlreadyExistsError):
        store.create("shop/deleted")


def test_a_file_of_an_older_format_is_taken_over(path: Path, old_format: int) -> None:
    assert format_of(path) == old_format
    with opened(path) as store:
        assert format_of(path) == FORMAT  # an older release refuses it from here on
        check_contents(store)
    with opened(path) as store:
        check_contents(store)
        assert store.append("shop/small", bytes(100_000)) == Appended(80, 100_080)
        assert store.concat("shop/small", "shop/large") == Appended(100_080, 199_087)
        assert store.copy_segments([SegmentCopy("shop/large", "copy", 2000, len(LARGE))])
        store.truncate("shop/large", 70_000)
        store.delete("shop/large")
        assert store.read("shop/small", 100_080, 1 << 20) == LARGE[1000:]
        assert store.read("copy", 2000, 1 << 20) == LARGE[2000:]
    with closing(sqlite3.connect(path)) as connection:
        check_extents(connection)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA page_size").fetchone() == (4096,)


@pytest.mark.parametrize("old_format", [2], indirect=True)
def test_shared_bytes_and_attributes_are_taken_over(path: Path) -> None:
    with opened(path) as store:
        assert list(store.list()) == ["shop/large", "shop/shared", "shop/small", "shop/whole"]
        assert store.attributes("shop/shared") == {"a": b"aa", "b": b"bb", "c/1": b"c/1c/1", "é": "éé".encode()}
        assert store.attributes("shop/shared", names=["a", "aa", "é", "z"]) == {"a": b"aa", "é": "éé".encode()}
        assert store.attributes("shop/shared", "c/") == {"c/1": b"c/1c/1"}
        assert store.create("new")  # with the number of one that is deleted
        store.delete("shop/whole")  # and, with it, what a process left that died while it deleted
        assert store.read("shop/shared", 0, 1 << 20) == b"before" + 2 * LARGE
        assert store.append("new", LARGE) == Appended(0, len(LARGE))
        store.delete("shop/shared")
        assert store.read("new", 0, 1 << 20) == LARGE
    with closing(sqlite3.connect(path)) as connection:
        check_extents(connection)
        numbers = connection.execute("SELECT DISTINCT key >> 40 FROM extent").fetchall()
        assert len(numbers) == 3  # small, large, new
        assert connection.execute("SELECT count(*) FROM blob").fetchone() == (2,)
        assert connection.execute("SELECT name FROM sqlite_master WHERE name LIKE 'old%'").fetchall() == []


def test_taking_over_rewrites_no_bytes(path: Path) -> None:
    before = path.stat().st_size
    with opened(path):
        assert path.stat().st_size <= before + 8 * 4096  # of the tables of names
        assert Path(f"{path}-wal").stat().st_size < before / 2


def test_threads_may_open_an_old_file_at_once(path: Path) -> None:
    begin = threading.Barrier(8)

    def open_and_check(number: int) -> bool:
        begin.wait(30)
        with opened(path) as store:
            check_contents(store)
            return store.append("shop/small", b"") == Appended(80, 80)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(open_and_check, range(8)))


def test_processes_may_open_an_old_file_at_once(path: Path) -> None:
    with ExitStack() as processes:
        openers = [processes.enter_context(running(open_when_told, path))[1] for _ in range(3)]
        for connection in openers:
            assert receive(connection) == "ready"
        for connection in openers:
            connection.send("go")
        assert [receive(connection) for connection in openers] == [LARGE[1000:]] * 3
    with opened(path) as store:
        assert store.info("shop/small").length == 80 + 3 * 100_000
    with closing(sqlite3.connect(path)) as connection:
        check_extents(connection)


def test_who_dies_before_the_file_says_its_format_leaves_that_to_the_next(path: Path, old_format: int) -> None:
    """The change is in the write-ahead log only, as after a kill; the file itself still says that it is the old one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("BEGIN")
        migrate(connection, format=old_format)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
        killed = path.with_name("killed.db")
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{killed}{suffix}")
    assert format_of(killed) == old_format
    with opened(killed) as store:
        check_contents(store)
    assert format_of(killed) == FORMAT


def test_a_takeover_that_is_cut_off_has_changed_nothing(path: Path, old_format: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        migrate(connection, format=old_format)
    assert format_of(path) == old_format
    with opened(path) as store:
        check_contents(store)


def test_a_process_that_goes_on_with_the_old_format_fails(path: Path) -> None:
    """Each of its calls begins with this question."""
    question = "SELECT id, start_offset, length, sealed FROM segment WHERE name = ? AND NOT deleted"
    with closing(sqlite3.connect(path)) as old:
        assert old.execute(question, ("shop/small",)).fetchone() == (1, 0, 80, 0)
        with opened(path):
            assert format_of(path) == FORMAT
            with pytest.raises(sqlite3.OperationalError, match="no such column"):
                old.execute(question, ("shop/small",))


def test_a_new_file_has_larger_pages(tmp_path: Path) -> None:
    with opened(tmp_path / "new.db"):
        pass
    with closing(sqlite3.connect(tmp_path / "new.db")) as connection:
        assert connection.execute("PRAGMA page_size").fetchone() == (16384,)
