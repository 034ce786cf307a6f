"""What a SQLite store makes of the file it is given: foreign, damaged, read-only, full."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import readergroup as rg
from synchronizer.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
)
from synchronizer.store import ANY, Appended, AttributeChange, Conflict, SegmentStore, UnknownOutcome
from synchronizer.stores import open_store
from synchronizer.stores.sqlite import file as sqlite_file
from synchronizer.stores.sqlite.file import APPLICATION_ID
from synchronizer.stores.sqlite.schema import FORMAT
from synchronizer.stores.sqlite.store import SqliteStore
from tests.waiting import PATIENCE_SECONDS

from ..users import as_nobody

LONG = PATIENCE_SECONDS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@contextmanager
def opened(path: Path) -> Iterator[SegmentStore]:
    with open_store(f"sqlite:///{path}") as store:
        yield store


def test_a_file_with_two_names_is_refused(path: Path) -> None:
    """Processes that open it by different names would have different locks and logs."""
    with opened(path) as store:
        store.create("s")
    other = path.with_name("other.db")
    os.link(path, other)
    for name in (path, other):
        with pytest.raises(StoreUnavailableError, match="has another name"), opened(name):
            pass
    path.unlink()
    with opened(other) as store:
        assert list(store.list()) == ["s"]


@pytest.mark.parametrize("name", ["store.db", "my store\t1\\2.db"])
def test_a_file_that_is_mounted_by_itself_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files next to it are not those of the other side, and may be gone with the container."""
    path, mounts = tmp_path / name, tmp_path / "mountinfo"
    escaped = str(path).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    monkeypatch.setattr("synchronizer.stores.sqlite.file._MOUNTS", str(mounts))
    for mounted, is_refused in ((tmp_path, False), (f"{escaped}2", False), (escaped, True)):
        mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:1 /a {mounted} rw,relatime - ext4 /dev/a rw\n")
        opening = pytest.raises(StoreUnavailableError, match="mount the folder") if is_refused else nullcontext()
        with opening, opened(path):
            path.stat()


def test_a_log_without_its_file_is_named(path: Path) -> None:
    with opened(path) as store:
        store.create("s")
        shutil.copy(f"{path}-wal", path.with_name("kept"))
    path.unlink()
    path.with_name("kept").rename(f"{path}-wal")
    for content in (None, b""):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(StoreUnavailableError, match="the SQLite file is gone, but not its log"), opened(path):
            pass


def test_a_file_that_another_process_makes_at_any_time_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, looks, maker_comes_after, path = os.stat, 0, 0, ""

    def stat_and_make(name: Any, **options: Any) -> os.stat_result:
        nonlocal looks
        try:
            return stat(name, **options)
        finally:
            if name in (path, f"{path}-wal"):
                looks += 1
                if looks == maker_comes_after:
                    stack.enter_context(opened(Path(path))).create("s")

    monkeypatch.setattr(os, "stat", stat_and_make)
    while maker_comes_after <= looks:
        looks, maker_comes_after = 0, maker_comes_after + 1
        path = str(tmp_path / f"store{maker_comes_after}.db")
        with ExitStack() as stack, opened(Path(path)) as store:
            assert list(store.list()) == (["s"] if maker_comes_after <= looks else [])
    assert maker_comes_after > 3


def test_a_log_that_another_user_has_just_made_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite makes it with the mode that the umask leaves, and then gives it that of the file."""
    look_at, attempts = sqlite_file.look_at, 0

    def fail(*arguments: Any) -> sqlite_file.Header | None:
        nonlocal attempts
        attempts += 1
        if attempts <= failures:
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode, error.sqlite_errorname = code, "SQLITE_TEST"
            raise error
        return look_at(*arguments)

    monkeypatch.setattr(sqlite_file, "look_at", fail)
    code, failures = sqlite3.SQLITE_CANTOPEN, 3
    with opened(path):
        assert attempts > 3
    attempts, failures = 0, 1000
    with pytest.raises(StoreUnavailableError, match="grant this user"), opened(path):
        pass
    assert attempts < 20
    attempts, code = 0, sqlite3.SQLITE_IOERR_READ
    with pytest.raises(StoreUnavailableError), opened(path):
        pass
    assert attempts == 1


def test_what_was_stored_is_there_after_opening_again(path: Path) -> None:
    with opened(path) as store:
        store.create("s")
        store.append("s", b"data", attributes={"a": AttributeChange(None, b"1")})
    with opened(path) as store:
        assert store.read("s", 0, 10) == b"data"
        assert store.attributes("s") == {"a": b"1"}
        assert store.append("s", b"more", expected_offset=4) == Appended(4, 8)


@pytest.mark.parametrize("name", ["with space.db", "100%.db", "a#b.db", "ü.db", "a&b=c.db"])
def test_the_path_may_hold_any_character(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / name) as store:
        store.create("s")
        assert store.url == f"sqlite:///{tmp_path}/{name}"
    assert (tmp_path / name).exists()


def test_two_handles_of_one_file_see_each_other(path: Path) -> None:
    with opened(path) as one, opened(path) as other:
        one.create("s")
        assert other.append("s", b"one", expected_offset=0) == Appended(0, 3)
        assert one.append("s", b"two", expected_offset=0) == Conflict(3, b"one")
        assert one.wait({"s": 0}, 0) == {"s"}


def test_a_link_leads_to_the_same_locks(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    with opened(path):
        link.symlink_to(path)
        with opened(link) as store:
            store.create("s")
    assert not list(tmp_path.glob("link.db.*"))


def test_many_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    for turn in range(10):
        begin = threading.Barrier(8)

        def open_and_create(number: int, turn: int = turn, begin: threading.Barrier = begin) -> bool:
            begin.wait(30)
            with opened(tmp_path / f"store{turn}.db") as store:
                return store.create("s") and store.create(f"s{number}")

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(open_and_create, range(8))) == 1


def test_a_new_file_that_was_left_half_made_is_finished(path: Path) -> None:
    opened_once(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")  # as if its maker had not come to the last step
    with opened(path) as store:
        store.create("s")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(NotFoundError, match=f"create it: directory='{missing}'"):
        open_store(f"sqlite:///{missing}/store.db")
    assert not missing.exists()


@pytest.mark.parametrize("length", [245, 246, 252, 256])
def test_a_name_that_leaves_no_room_for_the_files_next_to_it_is_refused(tmp_path: Path, length: int) -> None:
    url = f"sqlite:///{tmp_path / ('f' * length)}"
    if length <= 255 - len(".lock.next"):
        with open_store(url) as store:
            store.create("s")
            assert max(len(each.name) for each in tmp_path.iterdir()) == length + len(".lock.next")
    else:
        with pytest.raises(InvalidArgumentError, match="is too long: the files next to it need 10 bytes more"):
            open_store(url)
        assert not list(tmp_path.iterdir())


def test_a_path_that_is_too_long_for_sqlite_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 250)
    directory /= "d" * (499 - len(f"{directory}/"))
    directory.mkdir(parents=True)
    with open_store(f"sqlite:///{directory / 'shop'}") as store:  # of 504 bytes
        store.create("s")
    with pytest.raises(InvalidArgumentError, match="too long for SQLite; .* bytes=505 limit=504"):
        open_store(f"sqlite:///{directory / 'shops'}")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a character that no path can have"):
        open_store(f"sqlite:///{tmp_path}/{name}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [b"b\xff", "bücher".encode(), b"what?now", b"a%41#b", b"two\nlines"])
def test_a_directory_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    directory = tmp_path / os.fsdecode(name)
    directory.mkdir()
    with open_store(f"sqlite:///{directory}/shop.db") as store:
        store.create("s")
        with open_store(store.url, must_exist=True) as same:
            assert list(same.list()) == ["s"]
    assert {each.name for each in directory.iterdir() if not each.name.startswith("shop.db.")} == {"shop.db"}


def test_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="options that this store does not know"):
        open_store(f"sqlite:///{tmp_path}/what?/shop.db?mode=ro")


@pytest.mark.parametrize("file", ["shop.db", "./shop.db"])
def test_a_working_directory_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreUnavailableError, match=f"^the working directory was deleted; .*path='{file}'"):
        open_store(f"sqlite:///{file}")


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="is a directory"):
        open_store(f"sqlite:///{tmp_path}")


def test_a_file_that_is_no_database_is_refused_and_not_touched(path: Path) -> None:
    path.write_bytes(b"Dear diary, today I opened a database.\n" * 10)
    assert_refused_and_not_touched(path, CorruptStoreError, "not a database")


def test_the_database_of_another_application_is_refused_and_not_touched(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE segment (name TEXT)")
        connection.execute("PRAGMA application_id = 7")
    assert_refused_and_not_touched(path, CorruptStoreError, "another application")


@pytest.mark.parametrize("journal_mode", ["DELETE", "WAL"])
def test_a_newer_format_is_refused_and_not_touched(path: Path, journal_mode: str) -> None:
    opened_once(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
        connection.execute(f"PRAGMA journal_mode = {journal_mode}")
    assert_refused_and_not_touched(path, UnsupportedError, "upgrade to the release that wrote it")


def test_the_database_of_another_application_that_has_a_write_ahead_log_is_refused_and_not_touched(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE segment (name TEXT)")
    assert_refused_and_not_touched(path, CorruptStoreError, "another application")


def test_what_another_application_has_only_in_its_write_ahead_log_stays_there(path: Path) -> None:
    """As after a kill. Only ``-shm``, which SQLite makes from the log, is made again."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE segment (name TEXT)")
        killed = path.with_name("killed.db")
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{killed}{suffix}")
    before = killed.read_bytes(), Path(f"{killed}-wal").read_bytes()
    with pytest.raises(CorruptStoreError, match="another application"):
        open_store(f"sqlite:///{killed}")
    assert (killed.read_bytes(), Path(f"{killed}-wal").read_bytes()) == before
    assert not list(path.parent.glob("killed.db.*"))


def test_what_is_not_a_file_is_refused(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(InvalidArgumentError, match="not a regular file"):
        open_store(f"sqlite:///{path}")


def test_a_loop_of_links_is_refused(path: Path) -> None:
    path.symlink_to(path)
    with pytest.raises(StoreUnavailableError, match="correct its path"):
        open_store(f"sqlite:///{path}")


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_store_that_must_exist_is_not_made(path: Path, is_empty: bool) -> None:
    if is_empty:
        path.touch()
    before = os.listdir(path.parent)
    for connect in (open_store, rg.connect):
        with pytest.raises(NotFoundError, match=f"no SQLite file.*correct it: path='{path}'"):
            connect(f"sqlite:///{path}", must_exist=True)
    assert os.listdir(path.parent) == before
    opened_once(path)
    open_store(f"sqlite:///{path}", must_exist=True).close()
    rg.connect(f"sqlite:///{path}", must_exist=True).close()


def test_the_log_says_where_a_file_was_made(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(path.parent)
    with caplog.at_level("INFO", logger="synchronizer"):
        open_store("sqlite:///store.db").close()
        open_store("sqlite:///store.db").close()
    assert [each for each in caplog.messages if "created" in each] == [f"created a SQLite file: path='{path}'"]


def test_only_sqlite_opens_the_file(path: Path) -> None:
    """When Python closes a file, all locks of the process on it are gone, and SQLite does not notice."""
    code = f"""
import sys
from synchronizer import open_store
path, opened = {str(path)!r}, []
def audit(event, arguments):
    if event == "open" and not isinstance(arguments[0], int):
        opened.append(str(arguments[0]))
sys.addaudithook(audit)
for turn in range(2):
    with open_store(f"sqlite:///{{path}}") as store, open_store(f"sqlite:///{{path}}") as other:
        store.create("s")
        store.append("s", b"data")
        other.append_unread("s", b"data")
        other.wait({{"s": 0}}, 10)
        other.truncate("s", 1)
        with store.fair_lock("s", 1):
            pass
assert path + ".lock" in opened
assert path not in opened and path + "-shm" not in opened, opened
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONG)


def test_the_file_says_whose_it_is(path: Path) -> None:
    opened_once(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_an_empty_file_becomes_a_store(path: Path) -> None:
    path.touch()
    opened_once(path)
    assert path.read_bytes().startswith(b"SQLite format 3\0")


def test_a_damaged_file_is_reported_with_its_path(path: Path) -> None:
    with opened(path) as store:
        store.create("s")
        for _ in range(50):
            store.append("s", os.urandom(10_000))
    damaged = bytearray(path.read_bytes())
    damaged[4096:] = os.urandom(len(damaged) - 4096)
    path.write_bytes(damaged)
    with pytest.raises(CorruptStoreError, match=r"restore it from a backup.*store\.db"), opened(path) as store:
        store.read("s", 0, 1 << 20)


def test_a_schema_that_is_no_text_any_more_is_reported(path: Path) -> None:
    opened_once(path)
    damaged = path.read_bytes().replace(b"CREATE TABLE segment (", b"CREATE TABLE segment \xab")
    path.write_bytes(damaged)
    with pytest.raises(CorruptStoreError, match="restore it from a backup"), opened(path) as store:
        store.create("s")


def test_a_file_that_was_cut_short_is_reported(path: Path) -> None:
    with opened(path) as store:
        store.create("s")
        for _ in range(50):
            store.append("s", os.urandom(10_000))
    os.truncate(path, 20_000)
    with pytest.raises(CorruptStoreError), opened(path) as store:
        store.read("s", 0, 1 << 20)


def test_lost_bytes_in_the_middle_of_a_segment_are_reported(path: Path) -> None:
    with opened(path) as store:
        store.create("s")
        for _ in range(3):
            store.append("s", b"0123456789")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM extent WHERE key & 0xff = 10")
    with opened(path) as store:
        with pytest.raises(CorruptStoreError, match="missing"):
            store.read("s", 0, 30)
        assert store.read("s", 0, 10) == b"0123456789"


def test_of_a_deleted_segment_only_its_name_is_left(path: Path) -> None:
    with opened(path) as store:
        for name in ("deleted", "forgotten"):
            store.create(name)
            store.append(name, bytes(100_000), attributes={"a": AttributeChange(None, b"1")})
        store.delete("deleted")
        store.forget("forgotten")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM segment WHERE name > ''").fetchall() == [("deleted",)]
        for table in ("extent", "blob", "attribute"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


@pytest.mark.parametrize("give_up", ["truncate", "delete"])
def test_space_that_is_given_up_is_used_again(path: Path, give_up: str) -> None:
    with opened(path) as store:
        sizes = []
        for turn in range(8):
            store.create(f"s{turn}")
            for _ in range(8):
                store.append(f"s{turn}", os.urandom(1 << 20))
            if give_up == "truncate":
                store.truncate(f"s{turn}", 8 << 20)
            else:
                store.delete(f"s{turn}")
            sizes.append(total_size(path))
    assert sizes[-1] <= sizes[3], sizes


def test_a_large_segment_is_given_up_in_portions(path: Path) -> None:
    with opened(path) as store:
        store.create("s")
        for _ in range(5):
            store.append("s", bytes(16 << 20))
        store.truncate("s", 5 * (16 << 20) - 5)
        assert store.read("s", 5 * (16 << 20) - 5, 10) == bytes(5)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM extent").fetchone() == (1,)


def test_the_write_ahead_log_stays_small(path: Path) -> None:
    with opened(path) as store:
        store.create("s")
        for _ in range(60):
            store.append("s", bytes(1 << 20))
        assert os.stat(f"{path}-wal").st_size < 20 << 20


def test_a_full_database_loses_nothing(path: Path) -> None:
    with SqliteStore(str(path)) as store:
        store.create("s")
        store.append("s", b"kept", attributes={"a": AttributeChange(None, b"1")})
        store._writer.execute("PRAGMA max_page_count = 20")
        with pytest.raises(StoreFullError, match="free some space"):
            store.append("s", bytes(1 << 20), attributes={"a": AttributeChange(ANY, b"2")})
        assert store.read("s", 0, 10) == b"kept"
        assert store.attributes("s") == {"a": b"1"}
        assert store.append("s", b"small", expected_offset=4) == Appended(4, 9)
        store._writer.execute("PRAGMA max_page_count = 1000000")
        assert store.append("s", bytes(1 << 20), expected_offset=9) == Appended(9, 9 + (1 << 20))


def test_a_disk_that_refuses_a_write_loses_nothing(path: Path) -> None:
    """The limit on the size of a file stands for a quota; it needs no rights."""
    with opened(path) as store:
        store.create("s")
        store.append("s", b"kept")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(StoreUnavailableError, match="nothing was written"):
                store.append("s", bytes(4 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert store.append("s", b"more", expected_offset=4) == Appended(4, 8)
    with opened(path) as store:
        assert store.read("s", 0, 100) == b"keptmore"


class FailingSync:
    """The connection of a disk that stores the commit and then fails to sync it. No real disk does so on demand."""

    def __init__(self, connection: sqlite3.Connection, *, is_stored: bool) -> None:
        self._connection = connection
        self._is_stored = is_stored

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def execute(self, statement: str, *arguments: object) -> sqlite3.Cursor:
        if statement != "COMMIT":
            return self._connection.execute(statement, *arguments)
        self._connection.execute("COMMIT" if self._is_stored else "ROLLBACK")
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_commit_that_cannot_be_synced_has_an_unknown_outcome(path: Path, is_stored: bool) -> None:
    with SqliteStore(str(path)) as store:
        store.create("s")
        writer = store._writer
        store._writer = FailingSync(writer, is_stored=is_stored)
        assert isinstance(store.append("s", b"data", expected_offset=0), UnknownOutcome)
        store._writer = writer
        with pytest.raises(CorruptStoreError, match="open the file again"):
            store.info("s")
    with SqliteStore(str(path)) as store:
        assert store.info("s").length == (4 if is_stored else 0)
        store._writer, writer = FailingSync(store._writer, is_stored=is_stored), store._writer
        with pytest.raises(OutcomeUnknownError, match="may be"):
            store.seal("s")
        store._writer = writer
    with SqliteStore(str(path)) as store:
        assert store.info("s").sealed is is_stored


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with opened(tmp_path / "store.db") as store:
            store.create("s")
            length = 0
            with pytest.raises(StoreFullError, match="free some space"):
                while True:
                    length = appended(store.append("s", b"0123456789" * 1000, expected_offset=length)).length
            assert length > 0
            assert store.read("s", 0, 1 << 20) == b"0123456789" * (length // 10)
            assert store.append("s", b"", expected_offset=length) == Appended(length, length)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("read_only", ["store.db", "."])
def test_a_read_only_file_or_directory_is_reported(read_only: str) -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        opened_once(directory / "store.db")
        (directory / read_only).chmod(0o555)
        directory.chmod(0o555 if read_only == "." else 0o777)
        message = as_nobody(lambda: open_store(f"sqlite:///{directory}/store.db"))
        assert re.match("the (SQLite file|directory of the SQLite file) is not .*writable; grant this user", message)
    finally:
        directory.chmod(0o777)
        shutil.rmtree(directory)


def test_a_directory_that_this_user_may_not_enter_is_reported() -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        directory.chmod(0o600)
        message = as_nobody(lambda: open_store(f"sqlite:///{directory}/store.db"))
        assert message.startswith("a directory of the SQLite file cannot be entered; grant this user access: path=")
    finally:
        shutil.rmtree(directory)


def test_another_program_that_locks_the_file_is_waited_for_in_vain(path: Path) -> None:
    with SqliteStore(str(path), write_timeout=0.1) as store:
        store.create("s")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailableError, match="another program"):
                store.append("s", b"lost")
        assert store.append("s", b"kept") == Appended(0, 4)


def assert_refused_and_not_touched(path: Path, error: type[Exception], message: str) -> None:
    before, beside = path.read_bytes(), os.listdir(path.parent)
    with pytest.raises(error, match=message) as raised:
        open_store(f"sqlite:///{path}")
    assert str(path) in str(raised.value)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == beside


def opened_once(path: Path) -> None:
    with opened(path):
        pass


def appended(result: object) -> Appended:
    assert isinstance(result, Appended)
    return result


def total_size(path: Path) -> int:
    return sum(os.stat(f"{path}{suffix}").st_size for suffix in ("", "-wal"))


def test_what_nobody_reads_yet_is_on_the_disk_when_it_is_acknowledged_and_others_do_not_wait_for_that(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_flushing, may_flush = threading.Event(), threading.Event()
    flushed: list[bytes] = []

    def flush(file: int) -> None:
        flushed.append(os.pread(file, os.fstat(file).st_size, 0))
        is_flushing.set()
        assert may_flush.wait(LONG)

    monkeypatch.setattr(os, "fdatasync", flush)
    with opened(path) as store, opened(path) as other, ThreadPoolExecutor() as threads:
        store.create("s")
        append = threads.submit(store.append_unread, "s", b"staged " * 10_000)
        assert is_flushing.wait(LONG)
        other.create("meanwhile")
        assert isinstance(other.append("meanwhile", b"x"), Appended)
        assert isinstance(store.append("meanwhile", b"y"), Appended)
        assert not append.done()
        may_flush.set()
        assert append.result(LONG) == Appended(0, 70_000)
    assert len(flushed) == 1 and b"staged staged" in flushed[0]


def test_only_what_nobody_reads_yet_is_committed_without_waiting_for_the_disk(path: Path) -> None:
    with SqliteStore(str(path)) as store:
        store.create("s")
        store.append_unread("s", b"data")
        levels = [each.execute("PRAGMA synchronous").fetchone() for each in (store._writer, store._writer_of_unread())]
    assert levels == [(2,), (1,)]  # FULL and NORMAL


@pytest.mark.parametrize("is_unread", [False, True])
def test_a_write_that_was_interrupted_holds_up_no_other(path: Path, is_unread: bool) -> None:
    with SqliteStore(str(path), write_timeout=0.2) as store:
        store.create("s")
        (store._writer_of_unread() if is_unread else store._writer).execute("BEGIN IMMEDIATE")
        first, second = (store.append, store.append_unread) if is_unread else (store.append_unread, store.append)
        assert first("s", b"one") == Appended(0, 3)
        assert second("s", b"two") == Appended(3, 6)
