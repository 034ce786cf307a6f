"""Leader and followers: one call appends for all, and each ends by its own deadline."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from contextlib import suppress

import pytest

from synchronizer import DeadlineExceededError, OutcomeUnknownError, ReaderGroupError, StoreFullError
from synchronizer.clock import Deadline, SystemClock
from synchronizer.threads.batching import Batch, Batcher, Call, Status
from synchronizer.threads.flag import Bell, Flag
from tests.interrupts import interrupts
from tests.synchronizer.accounts import answer, threads
from tests.waiting import until


class Parts(Batch):
    def __init__(self, *, shrinks: bool) -> None:
        super().__init__()
        self.parts: dict[Call[Parts], str] = {}
        self._shrinks = shrinks

    def withdraw(self, call: Call[Parts]) -> bool:
        self.parts.pop(call, None)
        return self._shrinks


class Appender(Batcher[Parts]):
    """Appends to a list, when it is let. An answer that is lost is noticed by the next append, as in a store."""

    def __init__(self, *, shrinks: bool = True) -> None:
        super().__init__("s", threading.RLock(), Bell())
        self.stored: list[str] = []
        self.appends = 0
        self.let_go = Flag()
        self.let_go.set()
        self.errors: list[BaseException] = []  # raised by the next appends, before anything is stored
        self.lost_answers = 0
        self._last: Parts | None = None  # stored
        self._shrinks = shrinks

    def append(self, batch: Parts, deadline: Deadline) -> None:
        self.appends += 1
        if not self.let_go.wait(deadline.remaining()):
            raise DeadlineExceededError("not let go")
        if self.errors:
            error = self.errors.pop(0)
            if isinstance(error, StoreFullError):
                return batch.end(Status.FAILED, error)
            raise error
        parts = list(batch.parts.values())
        if self._last is not batch:
            self._last = batch
            self.stored += parts
        if self.lost_answers:
            self.lost_answers -= 1
            batch.lost_answer = OSError("no answer")
            raise DeadlineExceededError("no answer")
        batch.end(Status.STORED)

    def add(self, part: str, seconds: float = 20.0) -> None:
        call, deadline = Call[Parts](), Deadline(SystemClock(), seconds)
        try:
            while True:
                with self.lock:
                    batch = self.open or Parts(shrinks=self._shrinks)
                    self.wait_with(call, batch)
                    batch.parts[call] = part
                    self.open = batch
                status = self.outcome(batch, call, deadline)
                if status is Status.STORED:
                    return
                if status is Status.FAILED:
                    assert batch.error is not None
                    raise batch.error
        finally:
            try:
                self.leave(call)
            except BaseException:
                self.leave(call)
                raise

    def gathered(self, number: int) -> None:
        """Wait until ``number`` calls are in the open batch."""
        until(lambda: self.open is not None and len(self.open.parts) == number, f"{number} calls in the open batch")


def one_and_two(batcher: Appender, pool: Executor) -> list[Future[None]]:
    """Begin three calls: the first is in flight until it is let go, the other two share the open batch."""
    batcher.let_go.clear()
    first = pool.submit(batcher.add, "first")
    until(lambda: batcher.appends == 1, "the first is in flight")
    both = [pool.submit(batcher.add, name) for name in ("a", "b")]
    batcher.gathered(2)
    return [first, *both]


def test_calls_gather_while_one_is_in_flight_and_one_of_them_appends_for_all() -> None:
    batcher = Appender()
    batcher.let_go.clear()
    with threads(9) as pool:
        calls = [pool.submit(batcher.add, "first")]
        until(lambda: batcher.appends == 1, "the first is in flight")
        calls += [pool.submit(batcher.add, str(number)) for number in range(8)]
        batcher.gathered(8)
        batcher.let_go.set()
        for call in calls:
            answer(call)
    assert batcher.appends == 2
    assert batcher.stored[0] == "first"
    assert sorted(batcher.stored[1:]) == [str(number) for number in range(8)]


@pytest.mark.parametrize("shrinks", [True, False], ids=["its data is removed", "the others join again"])
def test_a_call_that_gives_up_while_others_wait_stores_nothing(shrinks: bool) -> None:
    batcher = Appender(shrinks=shrinks)
    batcher.let_go.clear()
    with threads(3) as pool:
        first = pool.submit(batcher.add, "first")
        until(lambda: batcher.appends == 1, "the first is in flight")
        patient = pool.submit(batcher.add, "patient")
        batcher.gathered(1)
        hasty = pool.submit(batcher.add, "hasty", 0.1)
        with pytest.raises(DeadlineExceededError):
            answer(hasty)
        batcher.let_go.set()
        answer(first)
        answer(patient)
    assert batcher.stored == ["first", "patient"]


def test_another_call_finds_out_the_outcome_when_the_leader_gives_up_without_an_answer() -> None:
    batcher = Appender()
    with threads(3) as pool:
        first, *both = one_and_two(batcher, pool)
        batcher.lost_answers = 2  # of the first, and of the leader of both
        batcher.let_go.set()
        assert isinstance(first.exception(20), OutcomeUnknownError)
        errors = [each.exception(20) for each in both]
    assert [type(error) for error in errors if error is not None] == [OutcomeUnknownError]
    assert sorted(batcher.stored) == ["a", "b", "first"]


def test_the_error_of_one_leader_is_not_that_of_the_others() -> None:
    batcher = Appender()
    with threads(3) as pool:
        first, *both = one_and_two(batcher, pool)
        batcher.errors = [DeadlineExceededError("of the first"), DeadlineExceededError("of a leader")]
        batcher.let_go.set()
        with pytest.raises(DeadlineExceededError, match="of the first"):
            answer(first)
        errors = [each.exception(20) for each in both]
    assert [str(error) for error in errors if error is not None] == ["of a leader"]
    assert len(batcher.stored) == 1


def test_a_batch_that_the_store_refuses_fails_all_its_calls() -> None:
    batcher = Appender()
    with threads(3) as pool:
        first, *both = one_and_two(batcher, pool)
        batcher.errors = [DeadlineExceededError("of the first"), StoreFullError("full")]
        batcher.let_go.set()
        assert isinstance(first.exception(20), DeadlineExceededError)
        assert [type(each.exception(20)) for each in both] == [StoreFullError, StoreFullError]
    batcher.add("next")
    assert batcher.stored == ["next"]


@pytest.mark.parametrize("shrinks", [True, False])
@pytest.mark.parametrize("loses", [0, 1])
def test_an_interrupt_anywhere_leaves_no_leader_and_the_next_call_goes_on(shrinks: bool, loses: int) -> None:
    opened: list[Appender] = []

    def fresh() -> None:
        opened.append(Appender(shrinks=shrinks))
        opened[-1].lost_answers = loses

    def add() -> None:
        with suppress(OutcomeUnknownError):
            opened[-1].add("x")

    for run in interrupts(add, before=fresh):
        batcher = opened[-1]
        batcher.lost_answers = 0
        assert batcher.leader is None, run.place
        with threads(1) as pool:
            answer(pool.submit(batcher.add, "y", 5.0))
        assert batcher.stored in (["y"], ["x", "y"]), run.place
        assert batcher.in_flight is None, run.place


def test_an_error_of_the_library_is_raised_as_it_is() -> None:
    batcher = Appender()
    batcher.errors = [ReaderGroupError("as it is")]
    with pytest.raises(ReaderGroupError, match="as it is"):
        batcher.add("x")
    batcher.add("y")
    assert batcher.stored == ["y"]
