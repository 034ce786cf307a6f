"""Threads that write at the same moment share one commit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from ..errors import ClosedError, OutcomeUnknownError, ReaderGroupError

C = TypeVar("C")
R = TypeVar("R")


class Step(Generic[C]):
    """One thread's part of a commit. ``run`` checks before it writes: if it raises, it has written nothing.

    ``wakes`` says that somebody may wait for what it does. With ``alone``, a commit that begins with it admits no
    other.
    """

    def __init__(self, run: Callable[[C], object], *, weight: int = 0, wakes: bool = True, alone: bool = False) -> None:
        self.weight = weight
        self.wakes = wakes
        self.alone = alone
        self.leads = False
        self.is_settled = False
        self._run = run
        self._result: object = None
        self._error: ReaderGroupError | None = None
        self._turn = threading.Lock()
        self._turn.acquire()

    def try_to_run(self, connection: C) -> None:
        """Run, perhaps not for the first time; what comes of it counts when `settle` is called."""
        self._result = self._error = None
        try:
            self._result = self._run(connection)
        except ReaderGroupError as error:
            self._error = error

    def settle(self) -> None:
        self.is_settled = True

    def fail(self, error: ReaderGroupError) -> None:
        self._error = error
        self.is_settled = True

    def outcome(self) -> object:
        if self._error is not None:
            raise self._error
        return self._result

    def await_turn(self) -> None:
        self._turn.acquire()

    def give_turn(self) -> None:
        self._turn.release()


class Batch(Generic[C]):
    """The steps of one commit. More may be admitted until it is made."""

    def __init__(self, first: Step[C], admit: Callable[[], list[Step[C]]]) -> None:
        self.steps = [first]
        self._admit = admit

    def newcomers(self) -> Iterator[Step[C]]:
        """The steps not yet run: the first one, then those that have come meanwhile, until nobody has."""
        yield self.steps[0]
        while not self.steps[0].alone and (admitted := self._admit()):
            self.steps += admitted
            yield from admitted


class GroupCommit(Generic[C]):
    """Runs steps in batches, each batch in the thread of one of its steps.

    A thread that finds nobody committing does so at once, itself. Those that come meanwhile queue up, to be admitted
    to the batch at hand or to the next, which is then the turn of the first of them. ``execute`` settles every step of
    its batch.
    """

    def __init__(self, execute: Callable[[Batch[C]], None]) -> None:
        self._execute = execute
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._is_led = False
        self._is_closed = False
        self._queue: deque[Step[C]] = deque()

    def run(self, run: Callable[[C], R], *, weight: int = 0, wakes: bool = True, alone: bool = False) -> R:
        """What ``run`` returns or raises, when it is committed."""
        step: Step[C] = Step(run, weight=weight, wakes=wakes, alone=alone)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the store is closed")
            if self._is_led:
                self._queue.append(step)
            else:
                self._is_led = step.leads = True
        if not step.leads:
            self._await_turn(step)
        if not step.is_settled:
            self._lead(step)
        return cast(R, step.outcome())

    def close(self) -> None:
        """Take no further steps, and return when those that were taken are settled."""
        with self._idle:
            self._is_closed = True
            self._idle.wait_for(lambda: not self._is_led)

    def _await_turn(self, step: Step[C]) -> None:
        try:
            step.await_turn()
        except BaseException:  # KeyboardInterrupt: the place in the queue must not be left behind
            with self._lock:
                if step in self._queue:
                    self._queue.remove(step)
                must_pass_on = step.leads
            if must_pass_on:
                self._pass_on()
            raise

    def _lead(self, step: Step[C]) -> None:
        batch = Batch(step, self._admit)
        try:
            self._execute(batch)
        finally:
            for other in batch.steps:
                if not other.is_settled:
                    other.fail(OutcomeUnknownError("the thread that stored this was interrupted; read what is there"))
            for other in batch.steps[1:]:
                other.give_turn()
            self._pass_on()

    def _admit(self) -> list[Step[C]]:
        with self._lock:
            admitted = list(self._queue)
            self._queue.clear()
        return admitted

    def _pass_on(self) -> None:
        with self._idle:
            if self._queue:
                successor = self._queue.popleft()
                successor.leads = True
                successor.give_turn()
            else:
                self._is_led = False
                self._idle.notify_all()
