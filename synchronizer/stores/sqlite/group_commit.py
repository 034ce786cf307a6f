"""Threads that write at the same moment share one commit.

A signal handler that raises may interrupt the main thread between any two calls. All cleanup is idempotent, so that a
second attempt completes what an interrupt has cut off. If that is interrupted too, a thread that waits completes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any, Final, Generic, TypeVar

from synchronizer.errors import ClosedError, OutcomeUnknownError, ReaderGroupError
from synchronizer.threads.flag import Flag

C = TypeVar("C")
R = TypeVar("R")

#: How often a thread that waits checks whether an interrupt has kept another one from waking it.
_CHECK_SECONDS: Final = 0.5


class Step(Generic[C]):
    """One thread's part of a commit. ``run`` checks before it writes: a `ReaderGroupError` means that it wrote nothing.

    ``wakes``: a thread or process may be waiting for the change. ``alone``: a commit that begins with this step admits
    no other, and is not flushed. ``essential``: the step must succeed on a full disk. ``request``: the same as data,
    for another process; None if this process must run it.
    """

    def __init__(
        self,
        run: Callable[[C], object],
        *,
        weight: int = 0,
        wakes: bool = True,
        alone: bool = False,
        essential: bool = False,
        request: object = None,
    ) -> None:
        self.weight = weight
        self.wakes = wakes
        self.alone = alone
        self.essential = essential
        self.request = request
        self.is_settled = False  # by its leader, which may still revoke it
        self.is_done = False
        self.is_given_up = False  # by its thread, which was interrupted
        self.batch: StepBatch[C] | None = None  # that its thread leads
        self.has_left = False  # its thread waits for it no longer, and may have been unable to say so
        self._run = run
        self._result: object = None
        self._error: ReaderGroupError | None = None
        self._woken = Flag()

    def try_to_run(self, connection: C) -> None:
        """Run, perhaps not for the first time; the result counts once `settle` is called.

        Raises errors other than `ReaderGroupError`: the step may have written, so the transaction must not be
        committed.
        """
        if self.is_given_up:
            return
        self._result = self._error = None
        try:
            self._result = self._run(connection)
        except ReaderGroupError as error:
            self._error = error

    def settle(self) -> None:
        self.is_settled = True

    def settle_with(self, result: object) -> None:
        """The result of another process that ran the step."""
        self._result, self._error = result, None
        self.is_settled = True

    def fail(self, error: ReaderGroupError) -> None:
        self._error = error
        self.is_settled = True

    def outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def sleep(self) -> None:
        """Return after `wake`, which may be spurious, or at the next check."""
        self._woken.wait(_CHECK_SECONDS)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()


class _Place(Step[C]):
    """Is first in the queue in place of a step, so that no step leads."""

    is_done = is_given_up = has_left = False
    batch = None

    def __init__(self) -> None:
        pass

    def wake(self) -> None:
        pass


class StepBatch(Generic[C]):
    """The steps of one commit. Further steps may join until the commit.

    ``may_be_stored`` is set before the commit: if its thread is interrupted between then and ``is_complete``, the
    outcome is unknown.
    """

    def __init__(self, first: Step[C], admit: Callable[[int], list[Step[C]]]) -> None:
        self.steps = [first]
        self.may_be_stored = False
        self.is_complete = False
        self._admit = admit

    @property
    def open_steps(self) -> list[Step[C]]:
        """The steps that are not settled."""
        return [step for step in self.steps if not step.is_settled]

    @property
    def is_for_one_thread(self) -> bool:
        """Whether no other thread waits for this commit or the next."""
        return len(self.steps) == 1 and not self._admit(1)

    def admit_while(self, fits: Callable[[Step[C]], bool]) -> None:
        """Admit steps that have arrived since, up to the first that does not fit; none if the first step does not."""
        if fits(self.steps[0]):
            self.steps += takewhile(fits, self._admit(1))

    def newcomers(self) -> Iterator[Step[C]]:
        """Yield the open steps, then those that arrive, until no more arrive."""
        place = 0
        while True:
            for step in self.steps[place:]:
                if not step.is_settled:
                    yield step
            place = len(self.steps)
            if self.steps[0].alone or not (admitted := self._admit(place)):
                return
            self.steps += admitted


class GroupCommit(Generic[C]):
    """Runs steps in batches, each batch in the thread of one of its steps.

    All pending steps are in one queue. The thread of the first step is the leader: it commits its own step and those
    that have arrived since, and removes them from the queue. The thread of the step that is first then leads the next
    batch. ``execute`` settles every step of its batch.
    """

    def __init__(self, execute: Callable[[StepBatch[C]], None]) -> None:
        self._execute = execute
        self._lock = threading.Lock()
        self._queue: list[Step[C]] = []  # replaced and appended to with the lock held
        self._is_closed = False
        self._closing: list[Flag] = []  # woken when the queue is empty

    def run(
        self,
        run: Callable[[C], R],
        *,
        weight: int = 0,
        wakes: bool = True,
        alone: bool = False,
        essential: bool = False,
        request: object = None,
    ) -> R:
        """Run ``run`` in a commit; return or raise its outcome once it is committed."""
        step: Step[C] = Step(run, weight=weight, wakes=wakes, alone=alone, essential=essential, request=request)
        try:
            self._join(step)
            while not step.is_done and not self._leads(step):
                if not self._completes_leaving():
                    step.sleep()
            if not step.is_done:
                step.batch = batch = StepBatch(step, self._after)
                self._execute(batch)
                batch.is_complete = True
        finally:
            # There is no call between the end of the block above and here, so no interrupt can come between.
            step.has_left = True
            if not step.is_done:
                try:
                    self._leave(step)
                except BaseException:
                    self._leave(step)
                    raise
            step.batch = None  # each refers to the other, and would wait for the garbage collector
        outcome: R = step.outcome()
        return outcome

    def try_without(self, attempt: Callable[[], R | None]) -> R | None:
        """Return the result of ``attempt``, which needs no commit; None if it has none, or while steps are pending.

        Steps that arrive meanwhile wait until it has ended.
        """
        if self._queue:
            return None
        place = _Place[C]()
        try:
            with self._lock:
                if self._queue or self._is_closed:
                    return None
                self._queue.append(place)
            return attempt()
        finally:
            place.has_left = True
            try:
                self._leave(place)
            except BaseException:
                self._leave(place)
                raise

    def close(self) -> None:
        """Refuse further steps, and return when all accepted steps are settled."""
        all_gone = Flag()
        with self._lock:
            self._is_closed = True
            self._closing.append(all_gone)
        while self._queue:
            if not self._completes_leaving():
                all_gone.wait(_CHECK_SECONDS)
                all_gone.clear()

    def _join(self, step: Step[C]) -> None:
        with self._lock:
            if self._is_closed:
                raise ClosedError("the store is closed; open another")
            self._queue.append(step)

    def _leads(self, step: Step[C]) -> bool:
        queue = self._queue
        return bool(queue) and queue[0] is step

    def _after(self, place: int) -> list[Step[C]]:
        with self._lock:
            return self._queue[place:]

    def _completes_leaving(self) -> bool:
        """Let the first step leave if its thread has left; return whether it did."""
        queue = self._queue
        if not queue or not queue[0].has_left:
            return False
        self._leave(queue[0])
        return True

    def _leave(self, step: Step[C]) -> None:
        """Hand leadership to the next step, if ``step`` led. Calling it twice is harmless, also in two threads.

        Steps whose leader was interrupted before its commit stay in the queue. Steps that were given up are skipped.
        """
        batch = step.batch
        with self._lock:
            step.is_given_up = batch is None or not batch.is_complete
            if batch is not None:
                _end(batch)
            if self._leads(step):
                self._queue = [each for each in self._queue if not (each.is_done or each.is_given_up)]
            successor = self._queue[0] if self._queue else None
        for other in batch.steps[1:] if batch is not None else ():
            other.wake()
        if successor is not None:
            successor.wake()
        else:
            for all_gone in self._closing:
                all_gone.set()


def _end(batch: StepBatch[C]) -> None:
    for step in batch.steps:
        if batch.is_complete:
            step.is_done = step.is_settled
        elif batch.may_be_stored:
            step.fail(
                OutcomeUnknownError(
                    "the thread that commits the write was interrupted; read the segment to see whether it is stored"
                )
            )
            step.is_done = True
