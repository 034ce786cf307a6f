from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from synchronizer.errors import ClosedError, NotFoundError, OutcomeUnknownError, ReaderGroupError, StoreFullError
from synchronizer.store import Appended, Conflict
from synchronizer.stores.sqlite.file_lock import Gate
from synchronizer.stores.sqlite.group_commit import GroupCommit, Step, StepBatch
from synchronizer.stores.sqlite.store import SqliteStore
from tests.interrupts import interrupts
from tests.synchronizer.stores.sqlite.gates import held
from tests.waiting import PATIENCE_SECONDS, until

LONG = PATIENCE_SECONDS


class Commits:
    """A group commit that records its batches, and can be held up while it commits."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []  # the thread that committed, the number of steps
        self.is_committing = threading.Event()
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.failure: BaseException | None = None
        self.group: GroupCommit[list[object]] = GroupCommit(self._execute)
        self.stored: list[object] = []

    def _execute(self, batch: StepBatch[list[object]]) -> None:
        for step in batch.newcomers():
            step.try_to_run(self.stored)
        self.is_committing.set()
        assert self.may_commit.wait(LONG)
        if self.failure:
            failure, self.failure = self.failure, None
            raise failure
        self.batches.append((threading.get_ident(), len(batch.steps)))
        for step in batch.steps:
            step.settle()

    def queue_up(self, threads: ThreadPoolExecutor, numbers: range) -> list[object]:
        futures = []
        for number in numbers:
            before = len(self.group._queue)
            futures.append(threads.submit(self.add, number))
            until(lambda before=before: len(self.group._queue) > before)
        return futures

    def add(self, number: int, *, alone: bool = False) -> int:
        def run(stored: list[object]) -> int:
            if number < 0:
                raise NotFoundError("a step that fails")
            stored.append(number)
            return number * 10

        return self.group.run(run, alone=alone)


@pytest.fixture
def commits() -> Iterator[Commits]:
    commits = Commits()
    yield commits
    commits.may_commit.set()


def test_a_lone_thread_commits_itself(commits: Commits) -> None:
    assert commits.add(1) == 10
    assert commits.batches == [(threading.get_ident(), 1)]


def test_threads_that_come_during_a_commit_share_the_next_one(commits: Commits) -> None:
    commits.may_commit.clear()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(commits.add, 0)
        assert commits.is_committing.wait(LONG)
        queued = commits.queue_up(threads, range(1, 5))
        commits.may_commit.set()
        assert [future.result(LONG) for future in [first, *queued]] == [0, 10, 20, 30, 40]
    assert [count for _, count in commits.batches] == [1, 4]
    assert commits.stored == [0, 1, 2, 3, 4]


def test_a_commit_of_a_step_that_is_alone_admits_no_other(commits: Commits) -> None:
    commits.may_commit.clear()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(commits.add, 0)
        assert commits.is_committing.wait(LONG)
        alone = threads.submit(commits.add, 1, alone=True)
        until(lambda: len(commits.group._queue) == 2)
        others = commits.queue_up(threads, range(2, 4))
        commits.may_commit.set()
        assert [future.result(LONG) for future in [first, alone, *others]] == [0, 10, 20, 30]
    assert [count for _, count in commits.batches] == [1, 1, 2]


def test_a_step_that_fails_does_not_fail_the_others(commits: Commits) -> None:
    commits.may_commit.clear()
    with ThreadPoolExecutor() as threads:
        threads.submit(commits.add, 0)
        assert commits.is_committing.wait(LONG)
        bad, good = commits.queue_up(threads, range(-1, 1))
        commits.may_commit.set()
        assert good.result(LONG) == 0
        with pytest.raises(NotFoundError):
            bad.result(LONG)


def test_an_interrupted_commit_leaves_nobody_waiting(commits: Commits) -> None:
    commits.may_commit.clear()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(commits.add, 0)
        assert commits.is_committing.wait(LONG)
        commits.failure = KeyboardInterrupt()
        queued = commits.queue_up(threads, range(1, 3))
        commits.may_commit.set()
        with pytest.raises(KeyboardInterrupt):
            first.result(LONG)
        assert [future.result(LONG) for future in queued] == [10, 20]


@pytest.mark.parametrize("is_committing", [False, True])
def test_the_companions_of_an_interrupted_thread_go_on_or_learn_that_the_outcome_is_unknown(
    commits: Commits, is_committing: bool
) -> None:
    commits.may_commit.clear()
    with ThreadPoolExecutor() as threads:
        threads.submit(commits.add, 0)
        assert commits.is_committing.wait(LONG)
        leader, companion = commits.queue_up(threads, range(1, 3))

        def fail_the_second(batch: StepBatch[list[object]]) -> None:
            assert len(list(batch.newcomers())) == 2
            batch.may_be_stored = is_committing
            commits.group._execute = commits._execute
            raise KeyboardInterrupt

        commits.group._execute = fail_the_second
        commits.may_commit.set()
        with pytest.raises(KeyboardInterrupt):
            leader.result(LONG)
        if is_committing:
            with pytest.raises(OutcomeUnknownError):
                companion.result(LONG)
        else:
            assert companion.result(LONG) == 20


def test_closing_lets_finish_what_was_begun_and_refuses_more(commits: Commits) -> None:
    commits.may_commit.clear()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(commits.add, 0)
        assert commits.is_committing.wait(LONG)
        queued = commits.queue_up(threads, range(1, 3))
        closing = threads.submit(commits.group.close)
        with pytest.raises(TimeoutError):
            closing.result(0.2)
        commits.may_commit.set()
        closing.result(LONG)
        assert [future.result(LONG) for future in [first, *queued]] == [0, 10, 20]
    with pytest.raises(ClosedError):
        commits.add(3)
    assert commits.stored == [0, 1, 2]


def test_steps_that_come_during_an_attempt_without_a_commit_are_committed_after_it(commits: Commits) -> None:
    with ThreadPoolExecutor() as threads:
        ends = threading.Event()
        attempt = threads.submit(commits.group.try_without, lambda: ends.wait(LONG) and "done")
        until(lambda: commits.group._queue)
        queued = commits.queue_up(threads, range(2))
        given_up = Step[list[object]](lambda stored: pytest.fail("its thread was interrupted"))
        given_up.is_given_up = True
        commits.group._queue.insert(1, given_up)
        assert commits.group.try_without(lambda: pytest.fail("steps are pending")) is None
        assert not any(future.done() for future in queued)
        ends.set()
        assert attempt.result(LONG) == "done"
        assert [future.result(LONG) for future in queued] == [0, 10]
    assert [count for _, count in commits.batches] == [2]
    assert not commits.group._queue


def test_closing_waits_for_an_attempt_without_a_commit_and_refuses_more(commits: Commits) -> None:
    with ThreadPoolExecutor() as threads:
        ends = threading.Event()
        attempt = threads.submit(commits.group.try_without, lambda: ends.wait(LONG) and "done")
        until(lambda: commits.group._queue)
        closing = threads.submit(commits.group.close)
        until(lambda: commits.group._closing)
        assert not closing.done()
        ends.set()
        closing.result(LONG)
        assert attempt.result(LONG) == "done"
    assert commits.group.try_without(lambda: pytest.fail("it is closed")) is None


def test_an_interrupted_attempt_without_a_commit_leaves_nobody_waiting(commits: Commits) -> None:
    count = 0
    with ThreadPoolExecutor() as threads:
        for run in interrupts(lambda: commits.group.try_without(lambda: threading.get_ident())):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            assert threads.submit(commits.add, 1).result(LONG) == 10, run.place
            count += 1
    assert count > 10


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_leader_that_is_interrupted_twice_while_it_leaves_leaves_nobody_waiting(
    commits: Commits, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    futures: list[object] = []

    def lead(batch: StepBatch[list[object]]) -> None:
        commits.group._execute = commits._execute
        futures.extend(commits.queue_up(threads, range(1, 3)))
        if is_stored:
            commits._execute(batch)
        futures.extend(commits.queue_up(threads, range(3, 4)))
        if not is_stored:
            raise KeyboardInterrupt

    commits.group._execute = lead
    with ThreadPoolExecutor() as threads, let_nobody_leave(commits, monkeypatch):
        with pytest.raises(KeyboardInterrupt):
            commits.add(0)
        assert [future.result(30) for future in futures] == [10, 20, 30]  # type: ignore[attr-defined]
    assert commits.stored == ([0, 1, 2, 3] if is_stored else [1, 2, 3])


@pytest.mark.parametrize("is_closing", [False, True])
def test_an_attempt_without_a_commit_that_is_interrupted_twice_leaves_nobody_waiting(
    commits: Commits, monkeypatch: pytest.MonkeyPatch, is_closing: bool
) -> None:
    with ThreadPoolExecutor() as threads, let_nobody_leave(commits, monkeypatch):
        with pytest.raises(KeyboardInterrupt):
            commits.group.try_without(lambda: "done")
        call = threads.submit(commits.group.close) if is_closing else threads.submit(commits.add, 1)
        assert call.result(30) == (None if is_closing else 10)


@contextmanager
def let_nobody_leave(commits: Commits, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupt the main thread whenever it leaves the queue."""
    leave, in_vain = commits.group._leave, []

    def interrupted(*arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            in_vain.append(arguments)
            raise KeyboardInterrupt
        leave(*arguments)

    monkeypatch.setattr(commits.group, "_leave", interrupted)
    try:
        yield
    finally:
        assert len(in_vain) == 2
        leave(*in_vain[0])  # so that a test that fails ends


def test_threads_of_a_store_need_fewer_commits_than_appends(tmp_path: Path) -> None:
    with SqliteStore(str(tmp_path / "store.db")) as store:
        store.create("s")
        commits = count_commits(store)
        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(lambda _: store.append("s", b"x"), range(800)))
        assert sorted(result.offset for result in results if isinstance(result, Appended)) == list(range(800))
        assert len(commits) < 600


def test_a_conflict_and_a_failure_do_not_disturb_appends_of_the_same_commit(tmp_path: Path) -> None:
    with SqliteStore(str(tmp_path / "store.db"), write_timeout=LONG) as store, ThreadPoolExecutor() as threads:
        store.create("s")
        store.append("s", b"first")
        commits = count_commits(store)
        with held_by_another(tmp_path):  # meanwhile the calls gather
            calls = [
                threads.submit(store.append, "s", b"good"),
                threads.submit(store.append, "s", b"late", expected_offset=0),
                threads.submit(store.append, "unknown", b"x"),
            ]
            until(lambda: len(store._commits._queue) == 3)
        outcomes = [call.exception(LONG) or call.result() for call in calls]
    good, late, unknown = outcomes
    assert good == Appended(5, 9)
    assert isinstance(late, Conflict) and late.delta.startswith(b"first")
    assert isinstance(unknown, NotFoundError)
    assert len(commits) == 1


def test_an_append_that_does_not_fit_does_not_fail_the_others(tmp_path: Path) -> None:
    with SqliteStore(str(tmp_path / "store.db"), write_timeout=LONG) as store, ThreadPoolExecutor() as threads:
        store.create("s")
        store._writer.execute("PRAGMA max_page_count = 20")
        with held_by_another(tmp_path):
            small = [threads.submit(store.append, "s", b"small") for _ in range(3)]
            large = threads.submit(store.append, "s", bytes(1 << 20))
            until(lambda: len(store._commits._queue) == 4)
        with pytest.raises(StoreFullError):
            large.result(LONG)
        assert all(isinstance(call.result(LONG), Appended) for call in small)
        assert store.read("s", 0, 100) == b"small" * 3


@pytest.mark.unexpected_errors
@pytest.mark.parametrize(
    "error", [TypeError("a damaged row"), sqlite3.OperationalError("no such table: x"), MemoryError()]
)
def test_the_error_of_a_step_is_its_own_whatever_it_is(tmp_path: Path, error: Exception) -> None:
    def write_and_fail(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE segment SET length = 1000000")
        raise error

    with SqliteStore(str(tmp_path / "store.db"), write_timeout=LONG) as store, ThreadPoolExecutor() as threads:
        store.create("s")
        with held_by_another(tmp_path):
            before = [threads.submit(store.append, "s", b"good") for _ in range(2)]
            until(lambda: len(store._commits._queue) == 2)
            bad = threads.submit(store._write, write_and_fail)
            until(lambda: len(store._commits._queue) == 3)
            after = [threads.submit(store.append, "s", b"good") for _ in range(2)]
            until(lambda: len(store._commits._queue) == 5)
        with pytest.raises(ReaderGroupError):
            bad.result(LONG)
        assert {call.result(LONG) for call in before + after} == {Appended(4 * n, 4 * n + 4) for n in range(4)}
        assert store.read("s", 0, 100) == b"good" * 4


def held_by_another(directory: Path) -> AbstractContextManager[None]:
    """As while another process writes."""
    return held(Gate(str(directory / "store.db.lock")), LONG)


def count_commits(store: SqliteStore) -> list[None]:
    commits: list[None] = []
    execute = store._commits._execute

    def counting(batch: StepBatch[object]) -> None:
        commits.append(None)
        execute(batch)

    store._commits._execute = counting
    return commits
