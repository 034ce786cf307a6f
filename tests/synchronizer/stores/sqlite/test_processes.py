"""Processes that share a SQLite file."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from synchronizer.errors import ClosedError, StoreUnavailableError
from synchronizer.store import ANY, Appended, AttributeChange
from synchronizer.stores import open_store
from synchronizer.stores.sqlite.notify import FileWatch, can_watch
from synchronizer.stores.sqlite.store import SqliteStore
from synchronizer.testing import ManualClock

from ..processes import (
    LONG,
    RECORD,
    append_until_killed,
    append_when_told,
    contend,
    copy_until_killed,
    fork_while_holding_the_gate,
    hold_the_gate,
    receive,
    running,
    wait_for_changes,
)
from .extents import check_extents


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    with open_store(f"sqlite:///{path}") as store:
        store.create("s")
    return path


def test_no_contender_starves_and_no_append_is_lost(path: Path) -> None:
    for turn in range(3):  # once the machine may have paused one of them
        successes = contended(path, f"s{turn}")
        with open_store(f"sqlite:///{path}") as store:
            data = store.read(f"s{turn}", 0, 1 << 30)
        assert len(data) == RECORD * sum(successes)
        records = Counter(data[first : first + RECORD] for first in range(0, len(data), RECORD))
        assert records == Counter(
            b"%03d:%07d;" % (process, number) for process, count in enumerate(successes) for number in range(count)
        )
        if min(successes) >= sum(successes) / len(successes) / 2:
            return
    pytest.fail(f"not all get their turn: {successes}")


def contended(path: Path, segment: str) -> list[int]:
    """How many appends each of eight processes has stored, until there are 800."""
    with open_store(f"sqlite:///{path}") as store:
        store.create(segment)
    with ExitStack() as processes:
        contenders = [
            processes.enter_context(running(contend, f"sqlite:///{path}", number, 800, segment))[1]
            for number in range(8)
        ]
        for connection in contenders:
            receive(connection)
        for connection in contenders:
            connection.send("go")
        return [receive(connection)[0] for connection in contenders]


def test_an_append_in_another_process_wakes_who_waits(path: Path) -> None:
    late = []
    with running(append_when_told, path) as (_, writer), open_store(f"sqlite:///{path}") as store:
        receive(writer)
        for turn in range(100):
            writer.send(True)
            assert store.wait({"s": turn * RECORD}, LONG) == {"s"}
            woken_at = time.monotonic()
            late.append(woken_at - receive(writer))
        writer.send(False)
    # The safety net looks once a second. Most must have been woken, also on a busy machine.
    assert sorted(late)[50] < 0.5, late


def test_who_waits_is_woken_and_does_not_find_out_by_looking_again(path: Path) -> None:
    """The clock stands still, so that the look once a second never comes."""
    with (
        running(append_when_told, path) as (_, writer),
        open_store(f"sqlite:///{path}", clock=ManualClock()) as store,
        ThreadPoolExecutor() as threads,
    ):
        receive(writer)
        for turn in range(20):
            waiting = threads.submit(store.wait, {"s": turn * RECORD}, LONG)
            writer.send(True)
            assert waiting.result(LONG) == {"s"}
        waiting = threads.submit(store.wait, {"s": 20 * RECORD}, LONG)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        store.close()
        with pytest.raises(ClosedError):
            waiting.result(LONG)
        writer.send(False)


@pytest.mark.skipif(not can_watch(), reason="without inotify everybody looks every 10 ms")
def test_nobody_is_woken_by_what_nobody_waits_for(path: Path) -> None:
    """Renewals of leases: each of many readers would wake all others."""
    with open_store(f"sqlite:///{path}") as store, closing(FileWatch(f"{path}.notify")) as watch:

        def wakes(change: Callable[[], object]) -> bool:
            change()
            was_woken = bool(watch._poll.poll(0))
            watch.wake()
            watch.wait()
            watch._wake_pipe.clear()
            return was_woken

        set_attribute = {"lease": AttributeChange(ANY, b"1")}
        assert not wakes(lambda: store.append("s", b"", attributes=set_attribute))
        assert not wakes(lambda: store.append("s", b"data", expected_offset=1))  # it is not
        assert wakes(lambda: store.append("s", b"data", attributes=set_attribute))
        assert wakes(lambda: store.seal("s"))
        assert wakes(lambda: store.delete("s"))


def test_waiting_takes_no_processor_time(path: Path) -> None:
    with running(wait_for_changes, path, 2.0) as (_, waiter):
        receive(waiter)
        used = receive(waiter)
    assert used < 0.1


def test_acknowledged_appends_survive_the_kill_of_all_writers(path: Path) -> None:
    acknowledged = {}
    with ExitStack() as processes:
        writers = [processes.enter_context(running(append_until_killed, path, number)) for number in range(4)]
        for _, connection in writers:
            while receive(connection) < 200:
                pass
        for process, _ in writers:
            process.kill()
        for number, (process, connection) in enumerate(writers):
            process.join(LONG)
            acknowledged[number] = 200
            while connection.poll():
                try:
                    acknowledged[number] = connection.recv()
                except EOFError:
                    break
    with open_store(f"sqlite:///{path}") as store:
        data = store.read("s", 0, 1 << 30)
        assert isinstance(store.append("s", b"more", expected_offset=len(data)), Appended)
    for number, last in acknowledged.items():
        stored = [record for record in data.split(b";") if record.startswith(b"%03d:" % number)]
        assert stored == [b"%03d:%07d" % (number, count) for count in range(len(stored))]
        assert len(stored) in (last + 1, last + 2)  # the last one may lack only its acknowledgement
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_writer_that_is_stopped_in_mid_write_does_not_hang_the_others(path: Path) -> None:
    with SqliteStore(str(path), write_timeout=0.3) as store, running(hold_the_gate, path) as (stopped, connection):
        receive(connection)
        with pytest.raises(StoreUnavailableError, match="suspended process"):
            store.append("s", b"lost")
        assert store.info("s").length == 0  # reading goes on
        assert stopped.pid
        os.kill(stopped.pid, signal.SIGCONT)
        assert receive(connection) == "released"
        assert store.append("s", b"kept") == Appended(0, 4)


def test_a_writer_that_is_killed_in_mid_write_blocks_nobody(path: Path) -> None:
    with SqliteStore(str(path), write_timeout=LONG) as store:
        with running(hold_the_gate, path) as (stopped, connection):
            receive(connection)
            stopped.kill()
        assert store.append("s", b"kept") == Appended(0, 4)


def test_a_writer_that_is_killed_in_mid_write_blocks_nobody_though_its_forked_child_lives(path: Path) -> None:
    with running(fork_while_holding_the_gate, path) as (parent, connection):
        child = receive(connection)
        assert isinstance(child, int)
        try:
            parent.kill()
            parent.join(LONG)
            assert parent.exitcode == -signal.SIGKILL
            with SqliteStore(str(path), write_timeout=2.0) as store:
                assert store.append("s", b"kept") == Appended(0, 4)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_store_can_be_opened_and_read_while_a_writer_is_stopped(path: Path) -> None:
    with running(hold_the_gate, path) as (_, connection):
        receive(connection)
        store = SqliteStore(str(path), write_timeout=0.2)
        assert store.read("s", 0, 1) == b""
        store.close()


def test_the_kill_of_those_who_copy_leaves_no_bytes_and_loses_none(path: Path) -> None:
    for number in range(3):
        with ExitStack() as processes:
            copiers = [processes.enter_context(running(copy_until_killed, path, 2 * number + each)) for each in (0, 1)]
            for _, connection in copiers:
                while receive(connection) < 2 + number:
                    pass
            for process, _ in copiers:
                process.kill()
    with open_store(f"sqlite:///{path}") as store:
        info = store.info("s")
        for start in range(info.start_offset, info.length, 200_000):
            data = store.read("s", start, 200_000)
            assert data == data[:8] * 25_000
        for name in [*store.list()]:
            store.delete(name)  # and, with it, what a deletion that was cut off left behind
    with closing(sqlite3.connect(path)) as connection:
        check_extents(connection)
        for table in ("extent", "blob", "sharing"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
