"""A SQLite file that is deleted, replaced or moved while stores have it open."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from synchronizer.errors import CorruptStoreError, OutcomeUnknownError, StoreUnavailableError
from synchronizer.store import Appended, SegmentStore, UnknownOutcome
from synchronizer.stores import open_store
from synchronizer.stores.sqlite.store import SqliteStore
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

from ..processes import append_until_killed, append_until_refused, receive, running
from ..users import NOBODY, as_nobody

LONG = PATIENCE_SECONDS
SUFFIXES = ("", "-wal", "-shm", ".lock")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    with open_store(f"sqlite:///{path}") as store:
        store.create("s")
    return path


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    other.replace(path)


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def pass_a_while() -> None:
    """Until the files are looked at again before something is written."""
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 0.002)


def calls(store: SegmentStore) -> list[Callable[[], object]]:
    return [
        lambda: store.append("s", b"data"),
        lambda: store.append_unread("s", b"data"),
        lambda: store.create("t"),
        lambda: store.truncate("s", 0),
        lambda: store.info("s"),
        lambda: store.read("s", 0, 10),
        lambda: store.attributes("s"),
        lambda: list(store.list()),
        lambda: store.wait({"s": 4}, LONG),
    ]


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("happen", [delete, replace, move])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_gone_is_named_by_every_call_from_then_on(
    path: Path, suffix: str, happen: Callable[[Path], None], is_settled: bool
) -> None:
    gone = Path(f"{path}{suffix}")
    with open_store(f"sqlite:///{path}") as store:
        kept = gone.with_name("kept")
        os.link(gone, kept)
        if is_settled:  # as if nothing had happened in the directory for long
            os.utime(path.parent, (0, 0))
        assert store.append("s", b"data") == Appended(0, 4)
        happen(gone)
        pass_a_while()
        with pytest.raises(CorruptStoreError, match=f"stop all processes.*file='{gone}'"):
            store.append("s", b"lost")
        kept.replace(gone)  # even if it is as it was: nobody knows what others have done meanwhile
        for call in calls(store):
            with pytest.raises(CorruptStoreError, match=f"file='{gone}'"):
                call()


@pytest.mark.parametrize("happen", [delete, replace, move])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_written_right_after_a_file_is_gone_is_not_acknowledged(
    path: Path, suffix: str, happen: Callable[[Path], None]
) -> None:
    gone = Path(f"{path}{suffix}")
    with open_store(f"sqlite:///{path}") as store:
        store.append("s", b"data")
        happen(gone)
        with suppress(CorruptStoreError):
            assert isinstance(store.append("s", b"lost"), UnknownOutcome)


def test_a_directory_that_is_moved_away_is_noticed(path: Path) -> None:
    with open_store(f"sqlite:///{path}") as store:
        os.utime(path.parent, (0, 0))
        store.append("s", b"data")
        elsewhere = path.parent.with_name("elsewhere")
        path.parent.rename(elsewhere)
        pass_a_while()
        with pytest.raises(CorruptStoreError, match=f"file='{path.parent}'"):
            store.append("s", b"lost")
        shutil.copytree(elsewhere, path.parent)
        with pytest.raises(CorruptStoreError):
            store.read("s", 0, 10)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_whoever_reads_or_waits_hears_that_a_file_is_gone(path: Path, suffix: str) -> None:
    with open_store(f"sqlite:///{path}") as store, open_store(f"sqlite:///{path}") as other:
        waiting = CallInThread(lambda: store.wait({"s": 0}, LONG))
        until(lambda: store._waiters._waiters)
        delete(Path(f"{path}{suffix}"))
        assert isinstance(waiting.ended(), CorruptStoreError)

        def is_refused() -> bool:
            try:
                other.read("s", 0, 10)
            except CorruptStoreError:
                return True
            return False

        until(is_refused)


def test_a_wait_that_begins_when_the_file_is_gone_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the waiting thread opens its connection a moment after the deletion."""
    monkeypatch.setattr("synchronizer.stores.sqlite.store.can_watch", lambda: False)
    with SqliteStore(str(path)) as store:
        path.unlink()
        with pytest.raises(CorruptStoreError, match="was deleted"):
            store._open_watch()


@pytest.mark.parametrize("is_unread", [False, True])
def test_what_goes_into_a_deleted_file_is_not_acknowledged(path: Path, is_unread: bool) -> None:
    with SqliteStore(str(path)) as store:

        def delete_and_write(connection: sqlite3.Connection) -> None:
            path.unlink()
            connection.execute("UPDATE segment SET sealed = 1")

        with pytest.raises(OutcomeUnknownError, match="may be lost"):
            store._write(delete_and_write, alone=is_unread)


def test_what_was_flushed_into_a_deleted_file_is_not_acknowledged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(f"sqlite:///{path}") as store:
        flush = os.fdatasync

        def flush_and_delete(file: int) -> None:
            flush(file)
            path.unlink(missing_ok=True)

        monkeypatch.setattr(os, "fdatasync", flush_and_delete)
        answer = store.append_unread("s", b"data")
        assert isinstance(answer, UnknownOutcome) and "may be lost" in str(answer.cause)


def test_a_directory_that_may_not_be_entered_is_not_taken_for_a_deleted_file() -> None:
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)

    def use() -> None:
        with open_store(f"sqlite:///{directory}/store.db") as store:
            store.create("s")
            directory.chmod(0)
            try:
                answer = store.append("s", b"lost")
            except StoreUnavailableError as error:
                told, written = str(error), b""
            else:  # the last look was less than a millisecond ago
                assert isinstance(answer, UnknownOutcome)
                told, written = str(answer.cause), b"lost"
            finally:
                directory.chmod(0o777)
            assert "grant this user access" in told
            assert store.append("s", b"kept") == Appended(len(written), len(written) + 4)
            assert store.read("s", 0, 100) == written + b"kept"

    try:
        os.chown(directory, NOBODY, NOBODY) if os.geteuid() == 0 else None
        assert as_nobody(use) == ""
    finally:
        shutil.rmtree(directory)


_LEAVE = """
import sys
from synchronizer import open_store
store = open_store(sys.argv[1])
store.append("s", b"old")
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2] == "close":
    store.close()
"""


@pytest.mark.parametrize("how", ["close", "end"])
@pytest.mark.parametrize("deleted", [("", "-wal", "-shm"), ("-shm",)], ids=["all", "-shm"])
def test_a_process_that_leaves_what_was_deleted_takes_nothing_of_others_with_it(
    path: Path, deleted: tuple[str, ...], how: str
) -> None:
    """The last one to leave moves the write-ahead log that it knows into the file, and deletes the one at the path."""
    command = [sys.executable, "-c", _LEAVE, f"sqlite:///{path}", how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        for suffix in deleted:
            Path(f"{path}{suffix}").unlink()
        with open_store(f"sqlite:///{path}") as store:
            store.create("new")
            store.append("new", b"data")
        process.communicate("leave\n", LONG)
        assert process.returncode == 0
    with open_store(f"sqlite:///{path}") as store:
        assert store.read("new", 0, 10) == b"data"


@pytest.mark.parametrize("suffix", ["-shm", ".lock"])
def test_nothing_that_was_acknowledged_is_lost_with_a_file_beside_the_database(path: Path, suffix: str) -> None:
    """Two processes write, the file is deleted under them, and a third one comes."""
    acknowledged: set[bytes] = set()
    with ExitStack() as processes:
        writers = [processes.enter_context(running(append_until_refused, path, number))[1] for number in range(2)]
        for connection in writers:
            while receive(connection) != 50:
                pass
        Path(f"{path}{suffix}").unlink()
        third = processes.enter_context(running(append_until_killed, path, 2))[1]
        for number, connection in enumerate(writers):
            last = 50
            while isinstance(answer := receive(connection), int):
                last = answer
            assert isinstance(answer, str) and "deleted or replaced" in answer
            acknowledged |= {b"%03d:%07d" % (number, count) for count in range(last + 1)}
        while receive(third) != 50:
            pass
        acknowledged |= {b"002:%07d" % count for count in range(51)}
    with open_store(f"sqlite:///{path}") as store:
        stored = store.read("s", 0, 1 << 30).split(b";")
    assert acknowledged <= set(stored)
    assert len(stored) == len(set(stored))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
