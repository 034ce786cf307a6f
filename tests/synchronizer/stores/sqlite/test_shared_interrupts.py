"""Ctrl-C anywhere in an append that another process commits, or that commits for others: each has one outcome.

The stores of these tests are in one process, and share no more than the stores of several processes do.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from synchronizer.store import Append, Appended, UnknownOutcome
from synchronizer.stores.sqlite.commit_slots import CommitSlots
from synchronizer.stores.sqlite.store import SqliteStore
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.waiting import PATIENCE_SECONDS, until

from .gates import give_slot, is_posted, patient_processes

pytestmark = pytest.mark.skipif(not CommitSlots.is_available(), reason="no shared commits on this system")


class Line:
    """Stores with a slot each. The first one is interrupted."""

    def __init__(self, path: str) -> None:
        self.threads = ThreadPoolExecutor()
        self.stores = [SqliteStore(path, write_timeout=PATIENCE_SECONDS) for _ in range(3)]
        self.one, self.other, self.third = self.stores
        for segment in ("s", "t"):
            self.one.create(segment)
        self._numbers = itertools.count()
        self._outcomes: dict[bytes, object] = {}
        self._interrupted: list[bytes] = []  # since the last append that was acknowledged
        self._before: dict[bytes, int] = {}  # where an interrupted append may be stored at most
        for store in self.stores:
            self._let_wait_once(store)

    def _let_wait_once(self, store: SqliteStore) -> None:
        holder = next(each for each in self.stores if each is not store)
        give_slot(store, holder._gate, lambda: self.threads.submit(self.append, store))

    def append(self, store: SqliteStore) -> None:
        record = b"%08d;" % next(self._numbers)
        try:
            outcome = store.append("s", record)
        except KeyboardInterrupt:
            self._interrupted.append(record)
            raise
        assert isinstance(outcome, Appended | UnknownOutcome)
        self._outcomes[record] = outcome

    def append_together(self, store: SqliteStore) -> None:
        record = b"%08d;" % next(self._numbers)
        try:
            answers = store.append_together([Append("s", record), Append("t", record)])
        except KeyboardInterrupt:
            self._interrupted.append(record)
            raise
        assert isinstance(answers, tuple)
        self._outcomes[record] = answers[0]

    def go_on(self) -> None:
        """All can write, and what was interrupted is not stored later."""
        assert not is_posted(self.one)
        for store in (self.other, self.one, self.third):
            call: Future[Any] = self.threads.submit(store.append, "s", b".")
            answer = call.result(PATIENCE_SECONDS)
            assert isinstance(answer, Appended)
            self._before |= dict.fromkeys(self._interrupted, answer.offset)
            self._interrupted = []

    def check(self) -> None:
        data = self.one.read("s", 0, 1 << 24)
        for record, outcome in self._outcomes.items():
            if isinstance(outcome, Appended):
                assert data[outcome.offset : outcome.offset + len(record)] == record
            assert data.count(record) <= 1
        for record, limit in self._before.items():
            assert data.count(record) <= 1
            assert data.find(record) < limit, "it was stored after a later append"
        together = self.one.read("t", 0, 1 << 24)
        assert all(data.count(record + b";") == 1 for record in together.split(b";") if record)


@pytest.fixture
def line() -> Iterator[Line]:
    with ExitStack() as opened:
        opened.enter_context(patient_processes())
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        folder = opened.enter_context(tempfile.TemporaryDirectory(dir=memory))
        line = Line(f"{folder}/store.db")
        for store in line.stores:
            opened.callback(store.close)
        yield line


class Helper:
    """What other threads do in each run."""

    def __init__(self, line: Line, work: Callable[[threading.Event], None]) -> None:
        self._line = line
        self._work = work
        self._is_over = threading.Event()
        self._call: Future[None] | None = None

    def begin(self) -> None:
        self.end()
        self._is_over.clear()
        self._call = self._line.threads.submit(self._work, self._is_over)

    def end(self) -> None:
        """When the call in the main thread has ended, however it has."""
        self._is_over.set()
        if self._call is not None:
            call, self._call = self._call, None
            call.result(PATIENCE_SECONDS)


@FEW_OR_MORE
@pytest.mark.parametrize("was_answered", [False, True], ids=["", "again"])
@pytest.mark.parametrize("together", [False, True], ids=["append", "append_together"])
def test_an_interrupted_append_that_another_process_commits(
    together: bool, was_answered: bool, sparsely: int, line: Line
) -> None:
    def lead(is_over: threading.Event) -> None:
        until(lambda: is_posted(line.one) or is_over.is_set())
        line.append(line.other)

    helper = Helper(line, lead)

    def before() -> None:
        helper.end()
        line.one._others.is_answered = was_answered
        line.other._gate.acquire(PATIENCE_SECONDS)
        helper.begin()

    append = line.append_together if together else line.append
    count = 0
    for run in interrupts(lambda: append(line.one), one_in=sparsely, before=before, seed=together):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        helper.end()
        line.go_on()
        count += 1
    helper.end()
    line.check()
    assert count > 60 // sparsely


@FEW_OR_MORE
def test_an_interrupted_append_that_commits_for_other_processes(sparsely: int, line: Line) -> None:
    waiting: list[Future[None]] = []

    def end() -> None:
        while waiting:
            waiting.pop().result(PATIENCE_SECONDS)

    def before() -> None:
        end()
        line.one._gate.acquire(PATIENCE_SECONDS)
        waiting.extend(line.threads.submit(line.append, store) for store in (line.other, line.third))
        until(lambda: is_posted(line.other) and is_posted(line.third))

    count = 0
    for run in interrupts(lambda: line.append(line.one), one_in=sparsely, before=before):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        line.one._gate.release()  # if the interrupt came before the append had anything to do with it
        end()
        line.go_on()
        count += 1
    end()
    line.check()
    assert count > 60 // sparsely


@FEW_OR_MORE
@pytest.mark.parametrize("was_answered", [False, True], ids=["", "again"])
def test_an_interrupted_append_that_was_handed_over_with_one_of_another_thread(
    was_answered: bool, sparsely: int, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread learns what became of its append, or that nobody knows, and its append is not done twice."""
    try_to_acquire, has_come = line.one._gate.try_to_acquire, threading.Lock()

    def try_when_another_has_come() -> bool:
        with has_come:
            pass
        return try_to_acquire()

    monkeypatch.setattr(line.one._gate, "try_to_acquire", try_when_another_has_come)

    def follow_and_lead(is_over: threading.Event) -> None:
        queue = line.one._commits
        until(lambda: queue._queue or is_over.is_set())
        follower = line.threads.submit(line.append, line.one)
        until(lambda: len(queue._queue) > 1 or is_over.is_set())
        has_come.release()
        until(lambda: is_posted(line.one) or is_over.is_set())
        line.append(line.other)
        follower.result(PATIENCE_SECONDS)

    helper = Helper(line, follow_and_lead)

    def before() -> None:
        helper.end()
        line.one._others.is_answered = was_answered
        line.other._gate.acquire(PATIENCE_SECONDS)
        has_come.acquire()
        helper.begin()

    for run in interrupts(lambda: line.append(line.one), one_in=sparsely, before=before):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        helper.end()
        line.go_on()
    helper.end()
    line.check()
