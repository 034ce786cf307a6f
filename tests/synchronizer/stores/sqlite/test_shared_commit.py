"""Processes that wait for the gate: the next process through it commits for all of them, once each."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from synchronizer.errors import CorruptStoreError, NotFoundError, OutcomeUnknownError, StoreUnavailableError
from synchronizer.store import ANY, Append, Appended, AttributeChange, Conflict, UnknownOutcome
from synchronizer.stores.sqlite import commit_slots, futex, shared_commit
from synchronizer.stores.sqlite import requests as sqlite_requests
from synchronizer.stores.sqlite import rows as sqlite_rows
from synchronizer.stores.sqlite import steps as sqlite_steps
from synchronizer.stores.sqlite.commit_slots import CommitSlots, Reply, Taken, commit_after
from synchronizer.stores.sqlite.file_lock import Gate
from synchronizer.stores.sqlite.group_commit import Step, StepBatch
from synchronizer.stores.sqlite.notify import FileWatch
from synchronizer.stores.sqlite.requests import Request
from synchronizer.stores.sqlite.store import SqliteStore
from tests.clean_processes import CLEAN
from tests.waiting import PATIENCE_SECONDS, busyness, until

from .gates import give_slot, held, is_locked, is_posted, patient_processes

pytestmark = pytest.mark.skipif(not CommitSlots.is_available(), reason="no shared commits on this system")

STORES = 4
#: One byte more than another process may commit.
TOO_LARGE = sqlite_requests.MAX_BYTES + 1


class Line:
    """Some stores on one file, each as it is in a process of its own, and a hand that holds the gate."""

    def __init__(self, path: Path, *, write_timeout: float = PATIENCE_SECONDS) -> None:
        self.path = str(path / "store.db")
        self._threads = ThreadPoolExecutor()
        self.stores = [SqliteStore(self.path, write_timeout=write_timeout) for _ in range(STORES)]
        self.gate = Gate(f"{self.path}.lock", self.path)
        self.slots = CommitSlots(f"{self.path}.requests", self.path)
        self.stores[0].create("s")
        for store in self.stores:
            self.let_wait_once(store)

    def let_wait_once(self, store: SqliteStore) -> None:
        """A process takes a slot when it has waited for the gate."""
        give_slot(store, self.gate, lambda: self.call(store.append, "s", b""))

    def call(self, call: Callable[..., Any], *args: object, **named: object) -> Future[Any]:
        return self._threads.submit(call, *args, **named)

    def last_commit(self) -> int:
        return sqlite_rows.last_shared_commit(self.stores[0]._writer)

    def waiting(self, calls: int = 1) -> bool:
        return sum(1 for _ in self.slots._posted()) == calls

    def take(self) -> list[Taken]:
        return self.slots.take(self.last_commit(), commit_after(self.last_commit()))

    def close(self) -> None:
        self.gate.close()
        self.slots.close()
        for store in self.stores:
            store.close()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    """A process of it waits as long as it takes."""
    with patient_processes():
        line = Line(tmp_path)
        yield line
        line.close()


@pytest.fixture
def impatient_line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path, write_timeout=2.0)
    yield line
    line.close()


@pytest.mark.parametrize("size", [8, sqlite_requests.MAX_BYTES])
def test_all_that_wait_are_committed_at_once(line: Line, size: int) -> None:
    line.gate.acquire(PATIENCE_SECONDS)
    calls = [line.call(store.append, "s", bytes([number]) * size) for number, store in enumerate(line.stores)]
    until(lambda: line.waiting(STORES))
    line.gate.release()
    offsets = [call.result(PATIENCE_SECONDS).offset for call in calls]
    assert sorted(offsets) == [size * number for number in range(STORES)]
    assert line.last_commit() >> commit_slots._RANDOM_BITS == 1
    for number, offset in enumerate(offsets):
        assert line.stores[0].read("s", offset, size) == bytes([number]) * size


def test_the_file_takes_room_only_for_slots_that_are_used(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    with SqliteStore(path), closing(CommitSlots(f"{path}.requests", path)) as slots:
        assert os.stat(f"{path}.requests").st_blocks * 512 <= 8192
        slots.claim()
        assert os.stat(f"{path}.requests").st_blocks * 512 <= 8192 + commit_slots._SLOT_BYTES


def test_a_process_without_room_for_a_slot_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    path = str(tmp_path / "store.db")
    with SqliteStore(path), closing(CommitSlots(f"{path}.requests", path)) as slots:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            slots.claim()
        assert not slots.can_post
        with closing(CommitSlots(f"{path}.requests", path)) as other:
            other.claim()
            assert other.can_post and other._own == 0


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
    line.gate.acquire(PATIENCE_SECONDS)
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
    line.gate.acquire(PATIENCE_SECONDS)
    store = line.stores[0]
    first = line.call(store.append, "s", b"1")
    until(lambda: line.waiting(1))
    calls = [line.call(store.append, "s", b"1") for _ in range(5)]
    until(lambda: len(store._commits._queue) == 6)
    line.gate.release()
    assert sorted(call.result(PATIENCE_SECONDS).offset for call in [first, *calls]) == [*range(6)]


def test_a_request_whose_leader_died_before_the_commit_is_run_once(line: Line) -> None:
    line.gate.acquire(PATIENCE_SECONDS)
    call = line.call(line.stores[0].append, "s", b"once")
    until(line.waiting)
    (taken,) = line.take()
    line.slots.prepare(taken, b"whatever it was")
    line.gate.release()  # as the system does for a process that dies
    assert call.result(PATIENCE_SECONDS) == Appended(0, 4)
    assert line.stores[0].info("s").length == 4


def test_a_request_whose_leader_died_after_the_commit_is_not_run_again(line: Line) -> None:
    line.gate.acquire(PATIENCE_SECONDS)
    call = line.call(line.stores[0].append, "s", b"once")
    until(line.waiting)
    writer, commit = line.stores[1]._writer, commit_after(line.last_commit())
    (taken,) = line.slots.take(line.last_commit(), commit)
    writer.execute("BEGIN IMMEDIATE")
    requests = sqlite_requests.decode(taken.request)
    line.slots.prepare(taken, sqlite_requests.answer(writer, requests, commit_slots.MAX_ANSWERS_BYTES))
    sqlite_rows.set_last_shared_commit(writer, commit)
    writer.execute("COMMIT")
    with closing(FileWatch(f"{line.path}.notify")) as watch:
        line.gate.release()
        assert call.result(PATIENCE_SECONDS) == Appended(0, 4)
        assert watch._poll.poll(0), "the dead leader has told nobody of the change"
    assert line.stores[0].info("s").length == 4


def test_a_request_of_a_dead_leader_is_not_taken_for_one_of_the_next_commit(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner has begun to withdraw it when the next leader comes."""
    call = taken_by_a_leader_that_dies(line, monkeypatch)
    commit_together(line, line.stores[1:3])
    monkeypatch.undo()
    assert call.result(PATIENCE_SECONDS) == Appended(2, 6)
    assert line.stores[0].read("s", 0, 100) == b"..once"


@pytest.mark.parametrize("commits", [1, 2])
def test_a_request_of_a_dead_leader_is_not_taken_for_one_of_leaders_with_another_file_of_slots(
    commits: int, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same database, but somebody has deleted the file of slots in between."""
    os.unlink(f"{line.path}.requests")
    others = [SqliteStore(line.path, write_timeout=PATIENCE_SECONDS) for _ in range(2)]
    for other in others:
        line.let_wait_once(other)
    call = taken_by_a_leader_that_dies(line, monkeypatch)
    commit_together(line, others)
    if commits == 2:  # now nothing tells any more whether it was in the first one
        line.gate.acquire(PATIENCE_SECONDS)
        commit_together(line, others)
    monkeypatch.undo()
    answer = call.result(PATIENCE_SECONDS)
    assert answer == Appended(2, 6) if commits == 1 else isinstance(answer, UnknownOutcome)
    assert line.stores[0].read("s", 0, 100) == (b"..once" if commits == 1 else b"....")
    for other in others:
        other.close()


def taken_by_a_leader_that_dies(line: Line, monkeypatch: pytest.MonkeyPatch) -> Future[Any]:
    """An append of "once" by the first store, which does not get the gate. This hand still holds it."""
    line.gate.acquire(PATIENCE_SECONDS)
    monkeypatch.setattr(line.stores[0]._gate, "try_to_acquire", lambda: False)
    call = line.call(line.stores[0].append, "s", b"once")
    until(line.waiting)
    (taken,) = line.take()
    line.slots.prepare(taken, msgpack.packb([[0, 0, 4]]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_commit, "_PATIENCE_SECONDS", 0.0)
        until(lambda: line.waiting(0))  # by now the owner wants to withdraw it
    return call


def commit_together(line: Line, stores: list[SqliteStore]) -> None:
    """Let the stores append a byte each, all in one commit. This hand holds the gate until then."""
    before = line.last_commit()
    for store in stores:
        store._others.is_answered = False  # a store that hands over leads nobody
    calls = [line.call(store.append, "s", b".") for store in stores]
    until(lambda: all(is_posted(store) for store in stores))
    line.gate.release()
    assert all(isinstance(call.result(PATIENCE_SECONDS), Appended) for call in calls)
    assert line.last_commit() > before


def test_where_the_last_commit_cannot_be_read_the_outcome_is_unknown(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.gate.acquire(PATIENCE_SECONDS)
    owner = line.stores[0]
    call = line.call(owner.append, "s", b"perhaps")
    until(line.waiting)
    assert line.take()

    def unreadable() -> int:
        raise StoreUnavailableError("another program keeps the SQLite file locked")

    monkeypatch.setattr(owner._others, "_last_commit", unreadable)
    line.gate.release()
    answer = call.result(PATIENCE_SECONDS)
    assert isinstance(answer, UnknownOutcome) and "keeps the SQLite file locked" in str(answer.cause)


def test_the_last_commit_is_read_from_the_file_as_it_is_now(line: Line) -> None:
    """Not from a transaction that a failed rollback has left open."""
    owner = line.stores[0]
    owner._writer.execute("BEGIN")
    assert owner._writer.execute("SELECT count(*) FROM segment").fetchone()
    line.gate.acquire(PATIENCE_SECONDS)
    calls = [line.call(store.append, "s", b".") for store in line.stores[1:3]]
    until(lambda: line.waiting(2))
    line.gate.release()
    assert [call.result(PATIENCE_SECONDS) for call in calls]
    assert owner._last_shared_commit() == line.stores[1]._last_shared_commit() > 0


def test_a_process_that_has_got_the_gate_waits_for_no_other(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the one that already waits for the next place."""
    line.gate.acquire(PATIENCE_SECONDS)
    owner, third = line.stores[0], Gate(f"{line.path}.lock", line.path)
    calls = []
    withdraw = owner._slots.withdraw

    def withdraw_when_another_waits() -> bool:
        if not calls:
            calls.append(line.call(third.acquire, PATIENCE_SECONDS))
            until(lambda: is_locked(f"{line.path}.lock.next"))
        return withdraw()

    monkeypatch.setattr(owner._slots, "withdraw", withdraw_when_another_waits)
    monkeypatch.setattr(owner._gate, "_wait", lambda *_: pytest.fail("it waits for what it has"))
    append = line.call(owner.append, "s", b"1")
    until(line.waiting)
    line.gate.release()
    assert append.result(PATIENCE_SECONDS) == Appended(0, 1)
    calls[0].result(PATIENCE_SECONDS)
    third.release()
    third.close()


def test_a_process_that_hands_over_and_gets_the_gate_withdraws_before_it_releases_it(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that comes between would commit the request a second time."""
    owner, other = line.stores[:2]
    release, came = owner._gate.release, []

    def release_and_let_another_append() -> None:
        release()
        if not came:
            came.append(other.append("s", b"."))

    monkeypatch.setattr(owner._gate, "release", release_and_let_another_append)
    owner._others.is_answered = True
    assert owner.append("s", b"once") == Appended(1, 5)
    assert owner.read("s", 0, 100) == b".once"


def test_a_process_that_hands_over_releases_the_gate_however_often_it_is_interrupted(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = line.stores[:2]

    def interrupted() -> bool:
        raise KeyboardInterrupt

    owner._others.is_answered = True
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner._slots, "withdraw", interrupted)
        owner.append("s", b"1")
    assert not is_locked(f"{line.path}.lock")
    assert isinstance(other.append("s", b"2"), Appended)


@pytest.mark.parametrize("was_answered", [False, True], ids=["waits", "hands over"])
def test_an_append_that_was_not_withdrawn_because_the_file_was_cut_off_is_run_once(
    was_answered: bool, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is whole again, with the request in it, when the next process commits."""
    owner, other = line.stores[:2]
    with monkeypatch.context() as patch:
        patch.setattr(owner._slots, "withdraw", lambda: withdraw_while_the_file_is_cut_off(line, owner._slots))
        owner._others.is_answered = was_answered
        with held(line.gate, PATIENCE_SECONDS):
            append = line.call(owner.append, "s", b"once")
            until(line.waiting)
        assert append.result(PATIENCE_SECONDS) == Appended(0, 4)
    assert other.append("s", b".") == Appended(4, 5)
    line.let_wait_once(owner)
    assert owner.read("s", 0, 100) == b"once."


def test_an_append_whose_answer_was_cut_off_with_the_file_may_be_stored(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, leader = line.stores[:2]
    monkeypatch.setattr(owner._gate, "try_to_acquire", lambda: False)
    with monkeypatch.context() as patch, held(line.gate, PATIENCE_SECONDS):
        patch.setattr(owner._slots, "withdraw", lambda: withdraw_while_the_file_is_cut_off(line, owner._slots))
        append = line.call(owner.append, "s", b"once")
        until(line.waiting)
        lead = line.call(leader.append, "s", b".")
        until(lambda: line.waiting(2))
        line.gate.release()
        assert isinstance(append.result(PATIENCE_SECONDS), UnknownOutcome)
    assert lead.result(PATIENCE_SECONDS) == Appended(0, 1)
    assert leader.read("s", 0, 100) == b".once"


def test_an_append_that_waits_too_long_when_the_file_is_cut_off_may_be_stored(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = line.stores[0]
    monkeypatch.setattr(owner._slots, "withdraw", lambda: withdraw_while_the_file_is_cut_off(line, owner._slots))
    monkeypatch.setattr(shared_commit, "_PATIENCE_SECONDS", 0.0)
    with held(line.gate, PATIENCE_SECONDS):
        assert isinstance(owner.append("s", b"never"), UnknownOutcome)
        assert line.take() == []


def withdraw_while_the_file_is_cut_off(line: Line, slots: CommitSlots) -> bool:
    """The file is whole again afterwards, with all that was posted."""
    path = f"{line.path}.requests"
    os.truncate(path, commit_slots._SIZE - 1)
    try:
        return CommitSlots.withdraw(slots)
    finally:
        os.truncate(path, commit_slots._SIZE)


def test_an_append_that_is_refused_is_handed_over_once(line: Line) -> None:
    owner, leader = line.stores[:2]
    owner._others.is_answered = True
    with held(line.gate, PATIENCE_SECONDS):
        refused = line.call(owner.append, "nowhere", b"1")
        until(line.waiting)
        lead = line.call(leader.append, "s", b"1")
        until(lambda: line.waiting(2))
    with pytest.raises(NotFoundError):
        refused.result(PATIENCE_SECONDS)
    assert lead.result(PATIENCE_SECONDS) == Appended(0, 1)
    assert not owner._others.is_answered


def test_a_process_that_hands_over_waits_for_a_stopped_one_in_the_usual_way(
    impatient_line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = impatient_line.stores[0]
    owner._others.is_answered = True
    waits = []
    acquire = owner._gate.acquire

    def count(*args: Any, **named: Any) -> None:
        waits.append(args)
        acquire(*args, **named)

    monkeypatch.setattr(owner._gate, "acquire", count)
    with held(impatient_line.gate, PATIENCE_SECONDS), pytest.raises(StoreUnavailableError, match="does not release it"):
        owner.append("s", b"1")
    assert len(waits) == 1
    assert owner.append("s", b"2") == Appended(0, 1)


def test_a_process_that_stopped_in_the_next_place_holds_up_a_write_once_for_a_moment(impatient_line: Line) -> None:
    with open(f"{impatient_line.path}.lock.next") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        took = []
        for store in impatient_line.stores:
            begun = time.monotonic()
            store.append("s", b"1")
            took.append(time.monotonic() - begun)
    assert 0.25 <= min(took) < 0.5 * busyness()


def test_what_was_committed_stays_so_if_the_rest_fails(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = line.stores[0]
    steps = committed_by_another_but_one(line, monkeypatch)
    assert steps[0].outcome() == Appended(1, 4)
    with pytest.raises(CorruptStoreError, match="deleted or replaced"):
        steps[1].outcome()
    assert owner.read("s", 0, 100) == b".own"


def test_what_was_committed_is_unknown_if_the_file_is_gone(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_gone() -> None:
        raise CorruptStoreError("a file of the store was deleted or replaced while in use")

    monkeypatch.setattr(line.stores[0]._file, "check", is_gone)
    for step in committed_by_another_but_one(line, monkeypatch):
        with pytest.raises(OutcomeUnknownError, match="may be lost"):
            step.outcome()


def committed_by_another_but_one(line: Line, monkeypatch: pytest.MonkeyPatch) -> list[Step[sqlite3.Connection]]:
    """Steps of the first store: another one commits the first; then this store finds that the file is not in place."""
    owner, leader = line.stores[:2]
    requests = [Request((Append(name, b"own"),), is_together=False) for name in ("s", "nowhere")]
    steps: list[Step[sqlite3.Connection]] = [Step(request.run, request=request) for request in requests]
    line.gate.acquire(PATIENCE_SECONDS)
    lead = line.call(leader.append, "s", b".")
    monkeypatch.setattr(owner._gate, "try_to_acquire", lambda: False)

    def is_gone() -> None:
        raise CorruptStoreError("a file of the store was deleted or replaced while in use")

    monkeypatch.setattr(owner._file, "check_to_write", is_gone)
    call = line.call(owner._execute, StepBatch(steps[0], lambda place: steps[place:]))
    until(lambda: line.waiting(2))
    line.gate.release()
    assert lead.result(PATIENCE_SECONDS) == Appended(0, 1)
    call.result(PATIENCE_SECONDS)
    return steps


def test_a_step_whose_thread_was_interrupted_is_not_handed_over(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, leader = line.stores[:2]
    requests = [Request((Append("s", b"%d" % number),), is_together=False) for number in range(3)]
    steps: list[Step[sqlite3.Connection]] = [Step(request.run, request=request) for request in requests]
    steps[1].is_given_up = True
    line.gate.acquire(PATIENCE_SECONDS)
    lead = line.call(leader.append, "s", b".")
    monkeypatch.setattr(owner._gate, "try_to_acquire", lambda: False)
    call = line.call(owner._execute, StepBatch(steps[0], lambda place: steps[place:]))
    until(lambda: line.waiting(2))
    line.gate.release()
    lead.result(PATIENCE_SECONDS)
    call.result(PATIENCE_SECONDS)
    assert leader.read("s", 0, 10) == b".02"
    assert all(step.is_settled for step in steps)


def test_a_request_is_withdrawn_at_the_deadline(impatient_line: Line) -> None:
    impatient_line.gate.acquire(PATIENCE_SECONDS)
    with pytest.raises(StoreUnavailableError, match="suspended process"):
        impatient_line.stores[0].append("s", b"never")
    assert impatient_line.take() == []
    impatient_line.gate.release()
    assert impatient_line.stores[0].append("s", b"now") == Appended(0, 3)


def test_a_leader_that_stops_leaves_an_unknown_outcome(impatient_line: Line) -> None:
    impatient_line.gate.acquire(PATIENCE_SECONDS)
    with patient_processes():  # it waits for its leader until its write timeout
        call = impatient_line.call(impatient_line.stores[0].append, "s", b"perhaps", expected_offset=0)
        until(impatient_line.waiting)
        assert impatient_line.take()
        answer = call.result(PATIENCE_SECONDS)
    assert isinstance(answer, UnknownOutcome) and "suspended process" in str(answer.cause)
    impatient_line.gate.release()
    assert impatient_line.stores[0].append("s", b"perhaps", expected_offset=0) == Appended(0, 7)


def test_a_request_that_is_withdrawn_while_it_is_taken_is_not_run(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.gate.acquire(PATIENCE_SECONDS)
    owner = CommitSlots(f"{line.path}.requests", line.path)
    owner.claim()
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


def test_what_a_killed_process_posted_is_not_taken(line: Line) -> None:
    line.gate.acquire(PATIENCE_SECONDS)
    owner = CommitSlots(f"{line.path}.requests", line.path)
    owner.claim()
    owner.post(b"request")
    assert owner._file is not None
    owner._file.close()  # as the system does, when it has stopped the process for good
    assert line.slots.are_posted()
    assert line.take() == []
    line.gate.release()


def test_what_a_process_posted_that_waits_no_longer_is_not_taken(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.gate.acquire(PATIENCE_SECONDS)
    owner = CommitSlots(f"{line.path}.requests", line.path)
    owner.claim()
    now = commit_slots._now_ms()
    monkeypatch.setattr(commit_slots, "_now_ms", lambda: now)
    owner.post(b"request")
    monkeypatch.setattr(commit_slots, "_now_ms", lambda: now + commit_slots._STALE_MS + 1)
    assert line.take() == []
    monkeypatch.setattr(commit_slots, "_now_ms", lambda: now + commit_slots._STALE_MS)
    assert [taken.request for taken in line.take()] == [b"request"]
    owner.close()
    line.gate.release()


def test_a_damaged_request_is_run_by_its_owner(line: Line) -> None:
    line.gate.acquire(PATIENCE_SECONDS)
    call = line.call(line.stores[0].append, "s", b"1234")
    until(line.waiting)
    ((slot, *_),) = line.slots._posted()
    line.slots._memory[line.slots._at(slot) + commit_slots._REQUEST_AT + 6] ^= 1
    assert line.take() == []
    line.slots.wake()
    line.gate.release()
    assert call.result(PATIENCE_SECONDS) == Appended(0, 4)


def test_a_request_that_was_lost_with_its_file_may_have_been_taken(line: Line) -> None:
    file, slots = f"{line.path}.requests", line.slots
    slots.claim()
    slots.post(b"request")
    assert slots.reply is Reply.NONE
    size = os.path.getsize(file)
    os.truncate(file, 0)
    os.truncate(file, size)
    assert not slots.withdraw()
    assert slots.reply is Reply.UNKNOWN


def test_a_flipped_bit_lets_no_leader_take_a_request_that_its_owner_runs(line: Line) -> None:
    """Whichever word of a request is damaged, and whenever: its owner knows nothing, and no leader takes it."""
    owner = line.slots
    owner.claim()
    with closing(CommitSlots(f"{line.path}.requests", line.path)) as leader:

        def take() -> list[Taken]:
            return leader.take(line.last_commit(), commit_after(line.last_commit()))

        def settle(reply: Reply) -> None:
            leader.settle(take(), reply)

        happened: Sequence[Callable[[], object]] = (
            lambda: None,
            owner.withdraw,
            take,
            *(lambda reply=reply: settle(reply) for reply in (Reply.COMMITTED, Reply.DECLINED, Reply.UNKNOWN)),
        )
        for happen, word, bit in product(happened, (commit_slots._REQUEST, commit_slots._REPLY), range(64)):
            owner.post(b"request")
            happen()
            owner._words[owner._own_base + word] ^= 1 << bit
            assert owner.reply is Reply.UNKNOWN
            assert take() == []
            assert not owner.withdraw()
            assert not owner.can_post
            owner.claim()
            assert owner.can_post


def test_damage_of_a_reply_is_undone_when_its_leader_settles(line: Line) -> None:
    owner = line.slots
    owner.claim()
    with closing(CommitSlots(f"{line.path}.requests", line.path)) as leader:
        owner.post(b"request")
        taken = leader.take(line.last_commit(), commit_after(line.last_commit()))
        owner._words[owner._own_base + commit_slots._REPLY] = 0
        leader.prepare(taken[0], b"answers")
        leader.settle(taken, Reply.COMMITTED)
        assert owner.reply is Reply.COMMITTED
        assert owner.answers() == b"answers"


def test_numbers_of_requests_repeat(line: Line) -> None:
    owner = line.slots
    owner._number = commit_slots._MAX_NUMBER - 1
    owner.claim()
    with closing(CommitSlots(f"{line.path}.requests", line.path)) as leader:
        for _ in range(3):
            owner.post(b"request")
            taken = leader.take(line.last_commit(), commit_after(line.last_commit()))
            assert [each.request for each in taken] == [b"request"]
            leader.settle(taken, Reply.DECLINED)
            assert owner.reply is Reply.DECLINED


def test_requests_for_another_database_are_not_taken(line: Line, tmp_path: Path) -> None:
    line.gate.acquire(PATIENCE_SECONDS)
    call = line.call(line.stores[0].append, "s", b"1234")
    until(line.waiting)
    other = tmp_path / "other.db"
    other.touch()
    slots = CommitSlots(f"{line.path}.requests", str(other))
    assert slots.are_posted()
    assert slots.take(0, 1) == []
    commit = commit_after(line.last_commit())
    assert line.slots.take(line.last_commit(), commit)
    slots.take(commit, commit_after(commit))  # there is a commit of this id
    slots.close()
    line.gate.release()
    assert call.result(PATIENCE_SECONDS) == Appended(0, 4)


def test_a_slot_is_free_when_its_process_closes_or_ends_though_its_child_lives(impatient_line: Line) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(0)
    try:
        impatient_line.gate.acquire(PATIENCE_SECONDS)
        held = {store._slots._own for store in impatient_line.stores}
        impatient_line.stores[-1].close()
        owner = CommitSlots(f"{impatient_line.path}.requests", impatient_line.path)
        owner.claim()
        assert owner._own in held
        owner.close()
        impatient_line.gate.release()
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
    line.gate.acquire(PATIENCE_SECONDS)
    own, other = line.call(leader.append, "s", b"1"), line.call(waiting.append, "s", b"2")
    until(lambda: line.waiting(2))
    run = leader._others.run_requests

    def interrupted(connection: sqlite3.Connection) -> list[Request]:
        run(connection)
        monkeypatch.undo()
        monkeypatch.setattr(waiting._gate, "try_to_acquire", lambda: False)
        raise KeyboardInterrupt

    tries = []

    def in_vain() -> bool:
        tries.append(1)
        return False

    monkeypatch.setattr(leader._others, "run_requests", interrupted)
    monkeypatch.setattr(waiting._gate, "try_to_acquire", in_vain)
    until(lambda: tries)  # no earlier try is under way
    line.gate.release()
    assert isinstance(own.exception(PATIENCE_SECONDS), KeyboardInterrupt)
    assert leader.append_unread("s", b"3") == Appended(0, 1)
    assert not other.done()
    monkeypatch.undo()
    assert other.result(PATIENCE_SECONDS) == Appended(1, 2)


def call_in_the_first_commit(
    line: Line, leader: SqliteStore, monkeypatch: pytest.MonkeyPatch, calls: int, *, last: bytes = b"2"
) -> list[Future[Any]]:
    """Append with the other stores while the leader commits its own append; the leader's is the first returned."""
    monkeypatch.setattr(shared_commit, "_SEVERAL", STORES - 1)
    made: list[Future[Any]] = []
    run = leader._others.run_requests

    def run_before_they_call(connection: sqlite3.Connection) -> list[Request]:
        requests = run(connection)
        if len(made) == 1:
            made.extend(line.call(store.append, "s", b"2") for store in line.stores[1:calls])
            made.append(line.call(line.stores[calls].append, "s", last))
            until(lambda: line.waiting(calls))
        return requests

    monkeypatch.setattr(leader._others, "run_requests", run_before_they_call)
    with held(line.gate, PATIENCE_SECONDS):
        made.append(line.call(leader.append, "s", b"1"))
        until(line.waiting)
    until(lambda: len(made) == 1 + calls)
    return made


def test_a_leader_commits_again_while_several_processes_wait(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_commit, "_SLICE_SECONDS", PATIENCE_SECONDS)
    for store in line.stores[1:]:
        monkeypatch.setattr(store, "_commit", lambda batch: pytest.fail("it commits itself"))
    calls = call_in_the_first_commit(line, line.stores[0], monkeypatch, 3)
    assert sorted(call.result(PATIENCE_SECONDS).offset for call in calls) == [0, 1, 2, 3]
    assert line.stores[1].read("s", 0, 10) == b"1222"


def test_a_leader_waits_a_moment_for_the_next_requests(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_commit, "_SEVERAL", 1)  # the others may come one by one
    monkeypatch.setattr(shared_commit, "_SLICE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(shared_commit, "_LINGER_SECONDS", PATIENCE_SECONDS)
    leader, *others = line.stores
    committed_by: list[SqliteStore] = []
    for store in line.stores:

        def commit(*args: Any, store: SqliteStore = store, commit: Any = store._try_to_commit, **named: Any) -> object:
            committed_by.append(store)
            return commit(*args, **named)

        monkeypatch.setattr(store, "_try_to_commit", commit)
    with held(line.gate, PATIENCE_SECONDS):
        own = line.call(leader.append, "s", b"1")
        until(line.waiting)
        for store in others:  # the leader is to be the first through the gate
            monkeypatch.setattr(store._gate, "try_to_acquire", lambda: False)
        calls = [line.call(lambda store=store: [store.append("s", b"2") for _ in range(3)]) for store in others]
        until(lambda: line.waiting(4))
    assert all(isinstance(each, Appended) for call in calls for each in call.result(PATIENCE_SECONDS))
    monkeypatch.setattr(others[0]._gate, "try_to_acquire", Gate.try_to_acquire.__get__(others[0]._gate))
    last = line.call(others[0].append, "s", bytes(TOO_LARGE))
    assert own.result(PATIENCE_SECONDS) == Appended(0, 1)
    assert last.result(PATIENCE_SECONDS) == Appended(10, 10 + TOO_LARGE)
    assert {*committed_by[:-1]} == {leader} and committed_by[-1] is others[0]


@pytest.mark.parametrize(
    ("slice_seconds", "calls", "last"),
    [(0.0, 3, b"2"), (PATIENCE_SECONDS, 1, b"2"), (PATIENCE_SECONDS, 3, bytes(TOO_LARGE))],
    ids=["after its time slice", "for one process", "while one must have the gate itself"],
)
def test_a_leader_does_not_commit_again(
    slice_seconds: float, calls: int, last: bytes, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_commit, "_SLICE_SECONDS", slice_seconds)
    leader, commits = line.stores[0], []
    try_to_commit = leader._try_to_commit
    monkeypatch.setattr(leader, "_try_to_commit", lambda *a, **named: commits.append(1) or try_to_commit(*a, **named))
    made = call_in_the_first_commit(line, leader, monkeypatch, calls, last=last)
    assert len({call.result(PATIENCE_SECONDS).offset for call in made}) == 1 + calls
    assert len(commits) == 1


def test_a_leader_does_not_go_on_for_requests_that_cannot_be_taken(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_commit, "_SLICE_SECONDS", PATIENCE_SECONDS)
    leader = line.stores[0]
    monkeypatch.setattr(leader._slots, "_can_be_taken", lambda *_: False)
    calls = call_in_the_first_commit(line, leader, monkeypatch, 3)
    assert sorted(call.result(PATIENCE_SECONDS).offset for call in calls) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, TOO_LARGE])
def test_a_process_whose_file_shrinks_lets_others_in(size: int, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_steps, "_MANY_PAGES", 100)
    monkeypatch.setattr(sqlite_steps, "_SPARE_PAGES", 0)
    shrinks, other = line.stores[:2]
    done: list[str] = []
    shrink = sqlite_steps.shrink

    def shrink_and_note(connection: sqlite3.Connection) -> int:
        if not done:
            calls.append(line.call(other.append, "s", bytes(size)))
            until(line.waiting)
        done.append("a step")
        return shrink(connection)

    def pause(*_: object) -> bool:
        pauses.set()
        assert isinstance(calls[0].result(PATIENCE_SECONDS), Appended)
        done.append("an append")
        return False

    calls: list[Future[Any]] = []
    pauses = threading.Event()  # until then, the other process is too slow for the gate
    take = other._gate.try_to_acquire
    monkeypatch.setattr(other._gate, "try_to_acquire", lambda: pauses.is_set() and take())
    monkeypatch.setattr(sqlite_steps, "shrink", shrink_and_note)
    monkeypatch.setattr(shared_commit, "_CLOCK", SimpleNamespace(wait=pause))
    shrinks.create("old")
    shrinks.append("old", bytes(4 * 1024 * 1024))
    shrinks.delete("old")
    assert done[:3] == ["a step", "an append", "a step"]


@pytest.mark.parametrize("arriving", [0, 1])
def test_a_leader_does_not_let_other_threads_wait(arriving: int, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, commits = line.stores[0], []
    queue: list[Step[sqlite3.Connection]] = [Step(lambda connection: None)]
    try_to_commit = leader._try_to_commit

    def commit(*args: Any, **named: Any) -> object:
        failure = try_to_commit(*args, **named)
        commits.append(failure)
        queue.extend(Step(lambda connection: None) for _ in range(arriving))
        return failure

    monkeypatch.setattr(leader, "_try_to_commit", commit)
    monkeypatch.setattr(CommitSlots, "are_used", True)
    monkeypatch.setattr(leader._others, "further_commits", lambda: iter([None]))
    leader._execute(StepBatch(queue[0], lambda place: queue[place:]))
    assert commits == [None] * (2 - arriving)


def test_if_a_further_commit_fails_the_processes_commit_themselves(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_commit, "_SLICE_SECONDS", PATIENCE_SECONDS)
    leader, taken = line.stores[0], []
    set_last = sqlite_rows.set_last_shared_commit

    def fail_once(connection: sqlite3.Connection, commit: int) -> None:
        set_last(connection, commit)
        taken.append(commit)
        if len(taken) == 1:
            raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite_rows, "set_last_shared_commit", fail_once)
    calls = call_in_the_first_commit(line, leader, monkeypatch, 3)
    assert calls[0].result(PATIENCE_SECONDS) == Appended(0, 1)
    assert sorted(call.result(PATIENCE_SECONDS).offset for call in calls[1:]) == [1, 2, 3]


def test_a_further_commit_whose_outcome_is_unknown_leaves_the_first_one_stored(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_commit, "_SLICE_SECONDS", PATIENCE_SECONDS)
    leader, replies = line.stores[0], []

    def check_once() -> None:
        replies.append(1)
        if len(replies) > 1:
            raise OutcomeUnknownError("the write may be lost")

    monkeypatch.setattr(leader, "_check_committed", check_once)
    own, *others = call_in_the_first_commit(line, leader, monkeypatch, 3)
    assert own.result(PATIENCE_SECONDS) == Appended(0, 1)
    assert all(isinstance(call.result(PATIENCE_SECONDS), UnknownOutcome) for call in others)


def test_an_interrupt_of_a_further_commit_leaves_each_append_one_outcome(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_commit, "_SLICE_SECONDS", PATIENCE_SECONDS)
    leader, taken = line.stores[0], []
    set_last = sqlite_rows.set_last_shared_commit

    def interrupt_once(connection: sqlite3.Connection, commit: int) -> None:
        set_last(connection, commit)
        taken.append(commit)
        if len(taken) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(sqlite_rows, "set_last_shared_commit", interrupt_once)
    calls = call_in_the_first_commit(line, leader, monkeypatch, 3)
    assert isinstance(calls[0].exception(PATIENCE_SECONDS), KeyboardInterrupt)
    assert sorted(call.result(PATIENCE_SECONDS).offset for call in calls[1:]) == [1, 2, 3]
    assert leader.append("s", b"3") == Appended(4, 5)


def test_an_append_that_was_offered_together_with_an_unflushed_one_is_flushed(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = line.stores[0]
    flushed = []

    def offer_in_vain(batch: StepBatch[sqlite3.Connection]) -> bool:
        until(lambda: len(store._commits._queue) == 2)
        batch.admit_while(lambda step: True)
        store._gate.acquire(PATIENCE_SECONDS)
        return False

    def writer_of_unread() -> sqlite3.Connection:
        flushed.append(False)
        return store._writer

    monkeypatch.setattr(store, "_is_committed_by_another", offer_in_vain)
    monkeypatch.setattr(store, "_writer_of_unread", writer_of_unread)
    line.gate.acquire(1.0)
    first = line.call(lambda: store.append_unflushed("s", b"1"))
    until(lambda: len(store._commits._queue) == 1)
    second = line.call(lambda: store.append("s", b"2"))
    line.gate.release()
    assert {first.result(PATIENCE_SECONDS), second.result(PATIENCE_SECONDS)} == {Appended(0, 1), Appended(1, 2)}
    assert not flushed


def overwrite_a_part(file: int, chance: random.Random) -> None:
    os.pwrite(file, chance.randbytes(chance.choice((64, 4096, 8192))), chance.randrange(65) * 4096)


def flip_a_bit(file: int, chance: random.Random) -> None:
    at = CommitSlots._at(chance.randrange(STORES)) + chance.randrange(commit_slots._REQUEST_AT)
    os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 1 << chance.randrange(8)]), at)


@pytest.mark.parametrize("damage_once", [overwrite_a_part, flip_a_bit])
def test_whatever_happens_to_the_file_each_append_has_one_outcome(
    damage_once: Callable[[int, random.Random], None], impatient_line: Line
) -> None:
    """Another program changes it, while four stores append."""
    chance = random.Random(1)
    ended = threading.Event()

    def damage() -> None:
        with open(f"{impatient_line.path}.requests", "r+b", buffering=0) as file:
            while not ended.wait(0.001):
                damage_once(file.fileno(), chance)

    damaging = impatient_line.call(damage)

    def append(number: int, record: bytes) -> object:
        try:
            return impatient_line.stores[number].append("s", record)
        except StoreUnavailableError as error:  # on a busy machine one may hold the lock for too long
            return error

    def append_all(number: int) -> dict[bytes, object]:
        return {record: append(number, record) for record in (b"%d:%05d;" % (number, n) for n in range(200))}

    outcomes: dict[bytes, object] = {}
    for call in [impatient_line.call(append_all, number) for number in range(STORES)]:
        outcomes |= call.result(PATIENCE_SECONDS)
    ended.set()
    damaging.result(PATIENCE_SECONDS)
    data = impatient_line.stores[0].read("s", 0, 1 << 20)
    for record, outcome in outcomes.items():
        if isinstance(outcome, Appended):
            assert data[outcome.offset : outcome.length] == record
        else:
            assert isinstance(outcome, UnknownOutcome | StoreUnavailableError)
        assert data.count(record) <= (0 if isinstance(outcome, StoreUnavailableError) else 1)


def test_a_file_that_is_cut_off_ends_no_process(tmp_path: Path) -> None:
    process = CLEAN.Process(target=go_on_after_the_cut, args=(tmp_path,), daemon=True)
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0


def go_on_after_the_cut(path: Path) -> None:
    with patient_processes():
        cut_off(Line(path))


def cut_off(line: Line) -> None:
    """The file is cut off while no thread touches it: in the middle of an access it ends the process, as in SQLite."""
    os.truncate(f"{line.path}.requests", 0)
    line.stores[0]._slots.wait(0, 0.0)  # after a look that came before the cut
    assert all(isinstance(store.append("s", b"1"), Appended) for store in line.stores)
    for store in line.stores:
        line.let_wait_once(store)
    is_waiting, is_cut_off = threading.Semaphore(0), threading.Event()

    def wait(address: int, value: int, seconds: float) -> None:
        is_waiting.release()
        is_cut_off.wait(PATIENCE_SECONDS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(futex, "wait", wait)
        line.gate.acquire(PATIENCE_SECONDS)
        calls = [line.call(store.append, "s", b"1") for store in line.stores]
        for _ in calls:
            assert is_waiting.acquire(timeout=PATIENCE_SECONDS)
        assert line.waiting(STORES)  # they share it again
        os.truncate(f"{line.path}.requests", 100)
        is_cut_off.set()
        assert all(isinstance(call.result(PATIENCE_SECONDS), UnknownOutcome) for call in calls)
    line.gate.release()
    assert line.stores[0].append("s", b"1") == Appended(4, 5)
    line.close()
