"""Processes that wait for the gate: the next process through it commits for all of them, once each."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from synchronizer.errors import NotFoundError, StoreUnavailableError
from synchronizer.store import ANY, Append, Appended, AttributeChange, Conflict, UnknownOutcome
from synchronizer.stores.sqlite import commit_slots, futex
from synchronizer.stores.sqlite import requests as sqlite_requests
from synchronizer.stores.sqlite import rows as sqlite_rows
from synchronizer.stores.sqlite.commit_slots import CommitSlots, Reply, Taken
from synchronizer.stores.sqlite.file_lock import Gate
from synchronizer.stores.sqlite.requests import Request
from synchronizer.stores.sqlite.store import SqliteStore
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.skipif(not CommitSlots.is_available(), reason="no shared commits on this system")

STORES = 4


class Line:
    """Some stores on one file, each as it is in a process of its own, and a hand that holds the gate."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "store.db")
        self._threads = ThreadPoolExecutor()
        self.stores = [SqliteStore(self.path, write_timeout=2.0) for _ in range(STORES)]
        self.gate = Gate(f"{self.path}.lock", self.path)
        self.slots = CommitSlots(f"{self.path}.commits", self.path)
        self.stores[0].create("s")
        for store in self.stores:
            self._let_wait_once(store)

    def _let_wait_once(self, store: SqliteStore) -> None:
        """A process takes a slot when it has waited for the gate."""
        self.gate.acquire(1.0)
        call = self.call(store.append, "s", b"")
        until(lambda: _is_locked(f"{self.path}.lock.next"))
        self.gate.release()
        call.result(PATIENCE_SECONDS)

    def call(self, call: Callable[..., Any], *args: object, **named: object) -> Future[Any]:
        return self._threads.submit(call, *args, **named)

    def shared_commits(self) -> int:
        return sqlite_rows.shared_commits(self.stores[0]._writer)

    def waiting(self, calls: int = 1) -> bool:
        return sum(1 for _ in self.slots._posted()) == calls

    def take(self) -> list[Taken]:
        return self.slots.take(self.shared_commits())

    def close(self) -> None:
        self.gate.close()
        self.slots.close()
        for store in self.stores:
            store.close()


def _is_locked(path: str) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path)
    yield line
    line.close()


def test_all_that_wait_are_committed_at_once(line: Line) -> None:
    line.gate.acquire(1.0)
    calls = [line.call(store.append, "s", b"12345678") for store in line.stores]
    until(lambda: line.waiting(STORES))
    line.gate.release()
    assert sorted(call.result(PATIENCE_SECONDS).offset for call in calls) == [0, 8, 16, 24]
    assert line.shared_commits() == 1
    assert line.stores[0].info("s").length == 32


def test_each_call_gets_its_own_answer(line: Line) -> None:
    first, *_ = line.stores
    first.append("s", b"there")
    first.append("s", b"", attributes={"a": AttributeChange(None, b"1")})
    large = first.append("s", bytes(8000))
    assert isinstance(large, Appended)
    calls: list[Callable[[SqliteStore], object]] = [
        lambda store: store.append("s", b"x", expected_offset=0),  # the delta has no room in a slot
        lambda store: store.append("nowhere", b"x"),
        lambda store: store.append_together(
            [
                Append("s", b"", None, {"a": AttributeChange(ANY, b"2"), "b": AttributeChange(None, b"3")}),
                Append("s2", b"y" * 10, 0),
            ]
        ),
        lambda store: store.append("s", b"x", attributes={"a": AttributeChange(b"9", None)}),
    ]
    first.create("s2")
    line.gate.acquire(1.0)
    waiting = [line.call(call, store) for store, call in zip(line.stores, calls, strict=True)]
    until(lambda: line.waiting(4))
    line.gate.release()
    conflict = waiting[0].result(PATIENCE_SECONDS)
    assert isinstance(conflict, Conflict) and conflict.length == 8005 and conflict.delta == b"there" + bytes(8000)
    with pytest.raises(NotFoundError, match="nowhere"):
        waiting[1].result(PATIENCE_SECONDS)
    assert waiting[2].result(PATIENCE_SECONDS) == (Appended(8005, 8005), Appended(0, 10))
    refused = waiting[3].result(PATIENCE_SECONDS)
    assert isinstance(refused, Conflict) and refused.attributes["a"] in (b"1", b"2")
    assert first.attributes("s") == {"a": b"2", "b": b"3"}


def test_threads_of_a_process_wait_with_one_request(line: Line) -> None:
    line.gate.acquire(1.0)
    store = line.stores[0]
    first = line.call(store.append, "s", b"1")
    until(lambda: line.waiting(1))
    calls = [line.call(store.append, "s", b"1") for _ in range(5)]
    until(lambda: len(store._commits._queue) == 6)
    line.gate.release()
    assert sorted(call.result(PATIENCE_SECONDS).offset for call in [first, *calls]) == [*range(6)]


def test_a_request_whose_leader_died_before_the_commit_is_run_once(line: Line) -> None:
    line.gate.acquire(1.0)
    call = line.call(line.stores[0].append, "s", b"once")
    until(line.waiting)
    (taken,) = line.take()
    line.slots.prepare(taken, b"whatever it was")
    line.gate.release()  # as the system does for a process that dies
    assert call.result(PATIENCE_SECONDS) == Appended(0, 4)
    assert line.stores[0].info("s").length == 4


def test_a_request_whose_leader_died_after_the_commit_is_not_run_again(line: Line) -> None:
    line.gate.acquire(1.0)
    call = line.call(line.stores[0].append, "s", b"once")
    until(line.waiting)
    writer, before = line.stores[1]._writer, line.shared_commits()
    (taken,) = line.take()
    writer.execute("BEGIN IMMEDIATE")
    requests = sqlite_requests.decode(taken.request)
    line.slots.prepare(taken, sqlite_requests.answer(writer, requests, commit_slots.MAX_BYTES))
    sqlite_rows.set_shared_commits(writer, before + 1)
    writer.execute("COMMIT")
    line.gate.release()
    assert call.result(PATIENCE_SECONDS) == Appended(0, 4)
    assert line.stores[0].info("s").length == 4


def test_a_request_is_withdrawn_at_the_deadline(line: Line) -> None:
    line.gate.acquire(1.0)
    with pytest.raises(StoreUnavailableError, match="suspended process"):
        line.stores[0].append("s", b"never")
    assert line.take() == []
    line.gate.release()
    assert line.stores[0].append("s", b"now") == Appended(0, 3)


def test_a_leader_that_stops_leaves_an_unknown_outcome(line: Line) -> None:
    line.gate.acquire(1.0)
    call = line.call(line.stores[0].append, "s", b"perhaps", expected_offset=0)
    until(line.waiting)
    assert line.take()
    answer = call.result(PATIENCE_SECONDS)
    assert isinstance(answer, UnknownOutcome) and "suspended process" in str(answer.cause)
    line.gate.release()
    assert line.stores[0].append("s", b"perhaps", expected_offset=0) == Appended(0, 7)


def test_a_request_that_is_withdrawn_while_it_is_taken_is_not_run(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.gate.acquire(1.0)
    owner = CommitSlots(f"{line.path}.commits", line.path)
    owner.claim(line.shared_commits)
    owner.post(b"request")
    barrier = futex.wake

    def withdraw(address: int) -> None:
        monkeypatch.setattr(futex, "wake", barrier)
        assert not owner.withdraw()  # it is marked as taken: the owner cannot know

    monkeypatch.setattr(futex, "wake", withdraw)
    assert line.take() == []
    assert owner.reply is Reply.DECLINED
    owner.close()
    line.gate.release()


def test_what_a_killed_process_posted_is_not_taken_later(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.gate.acquire(1.0)
    owner = CommitSlots(f"{line.path}.commits", line.path)
    owner.claim(line.shared_commits)
    owner.post(b"request")
    now = commit_slots._now_ms()
    monkeypatch.setattr(commit_slots, "_now_ms", lambda: now + 1000)
    assert line.take() == []
    monkeypatch.setattr(commit_slots, "_now_ms", lambda: now + 100)
    assert [taken.request for taken in line.take()] == [b"request"]
    owner.close()
    line.gate.release()


def test_a_damaged_request_is_run_by_its_owner(line: Line) -> None:
    line.gate.acquire(1.0)
    call = line.call(line.stores[0].append, "s", b"1234")
    until(line.waiting)
    ((slot, *_),) = line.slots._posted()
    line.slots._memory[line.slots._at(slot) + 70] ^= 1
    assert line.take() == []
    line.slots.wake()
    line.gate.release()
    assert call.result(PATIENCE_SECONDS) == Appended(0, 4)


def test_requests_for_another_database_are_not_taken(line: Line, tmp_path: Path) -> None:
    line.gate.acquire(1.0)
    call = line.call(line.stores[0].append, "s", b"1234")
    until(line.waiting)
    other = tmp_path / "other.db"
    other.touch()
    slots = CommitSlots(f"{line.path}.commits", str(other))
    assert slots.are_posted()
    assert slots.take(0) == []
    slots.close()
    line.gate.release()
    assert call.result(PATIENCE_SECONDS) == Appended(0, 4)


def test_a_slot_is_free_when_its_process_closes_or_ends_though_its_child_lives(line: Line) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(0)
    try:
        line.gate.acquire(1.0)
        held = {store._slots._own for store in line.stores}
        line.stores[-1].close()
        owner = CommitSlots(f"{line.path}.commits", line.path)
        owner.claim(line.shared_commits)
        assert owner._own in held
        owner.close()
        line.gate.release()
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)


def test_without_slots_processes_take_the_gate_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommitSlots, "is_available", staticmethod(lambda: False))
    stores = [SqliteStore(str(tmp_path / "store.db")) for _ in range(3)]
    stores[0].create("s")

    def append(store: SqliteStore) -> None:
        for _ in range(50):
            assert isinstance(store.append("s", b"1"), Appended)

    with ThreadPoolExecutor() as threads:
        list(threads.map(append, stores))
    assert stores[0].info("s").length == 150
    for store in stores:
        store.close()


def test_an_interrupted_commit_is_never_reported_as_stored(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit of the interrupted process runs no requests, and must not settle those of the one before."""
    leader, waiting = line.stores[0], line.stores[1]
    line.gate.acquire(1.0)
    own, other = line.call(leader.append, "s", b"1"), line.call(waiting.append, "s", b"2")
    until(lambda: line.waiting(2))
    run = leader._others.run_requests

    def interrupted(connection: sqlite3.Connection) -> list[Request]:
        run(connection)
        monkeypatch.undo()
        monkeypatch.setattr(waiting._gate, "try_to_acquire", lambda: False)
        raise KeyboardInterrupt

    monkeypatch.setattr(leader._others, "run_requests", interrupted)
    monkeypatch.setattr(waiting._gate, "try_to_acquire", lambda: False)
    line.gate.release()
    assert isinstance(own.exception(PATIENCE_SECONDS), KeyboardInterrupt)
    assert leader.append_unread("s", b"3") == Appended(0, 1)
    assert not other.done()
    monkeypatch.undo()
    assert other.result(PATIENCE_SECONDS) == Appended(1, 2)
