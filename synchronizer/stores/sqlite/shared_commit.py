"""Processes that write at the same moment share one commit: the process with the gate commits for those that wait."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from typing import Final

from synchronizer.clock import SystemClock
from synchronizer.errors import OutcomeUnknownError, ReaderGroupError
from synchronizer.threads.flag import Flag

from . import requests as sqlite_requests
from . import rows as sqlite_rows
from .commit_slots import MAX_ANSWERS_BYTES, MAX_REQUEST_BYTES, CommitSlots, Reply, Taken, commit_after
from .file_lock import Gate
from .group_commit import Step, StepBatch
from .requests import Request, Result

#: After this time the holder of the gate is stopped, or takes no requests: it may be of an older release.
_PATIENCE_SECONDS: Final = 0.25
#: So often this process then waits for the gate itself.
_WAITS_WITHOUT_REQUEST: Final = 50

#: A leader goes on for this time while so many other processes append. Its own caller waits meanwhile.
_SLICE_SECONDS: Final = 0.004
_SEVERAL: Final = 5
#: How long it waits for the next request. It takes less time than another process takes to wake up and lead.
_LINGER_SECONDS: Final = 0.0002

#: In this time, a process that waits wakes up and takes the gate.
_WAKE_SECONDS: Final = 0.001

# These waits are for other processes, which a test's clock cannot move.
_CLOCK: Final = SystemClock()
_NEVER: Final = Flag()
_monotonic: Final = _CLOCK.monotonic


class SharedCommit:
    """This process's part in the commits of all processes that have the file open. One thread at a time uses it.

    ``last_commit`` reads the id of the last commit with requests from the file. ``announce`` wakes the threads and
    processes that wait for a change.
    """

    def __init__(
        self,
        slots: CommitSlots,
        gate: Gate,
        last_commit: Callable[[], int],
        announce: Callable[[], None],
        timeout: float,
    ) -> None:
        self._slots = slots
        self._gate = gate
        self._last_commit = last_commit
        self._announce = announce
        self._timeout = timeout
        self._taken: list[Taken] = []
        self._waits_without_request = 0
        #: Whether other processes may wait for this one. The first wait on a file is not noticed: it looks by itself.
        self.may_wait = False
        #: Whether another process has committed the last steps of this one. It probably commits the next as well.
        self.is_answered = False

    def close(self) -> None:
        self._slots.close()

    # The process that waits

    def is_answered_by_another(self, batch: StepBatch[sqlite3.Connection]) -> bool:
        """Wait for the gate; return True if another process has committed steps meanwhile, which are settled then.

        Otherwise this process holds the gate, and no step is settled. Release the gate in either case.

        Raises:
            StoreUnavailableError: The gate did not become free in time. No step is written.
            OutcomeUnknownError: The other process failed or stopped during its commit.
        """
        self.is_answered = False
        self._waits_without_request -= 1
        # A request of an earlier wait is still taken if that wait was interrupted.
        if self._waits_without_request > 0 or not self._slots.can_post:
            self._gate.acquire(self._timeout)
            self._slots.claim()
            return False
        steps, request = _requests(batch)
        try:
            batch.may_be_stored = bool(steps)
            self._slots.post(request)
            reply = self._wait()
        finally:
            try:
                self._withdraw(batch)
            except BaseException:  # interrupted
                self._withdraw(batch)
                raise
        if reply is Reply.DECLINED:
            self._gate.acquire(self._timeout)
        if reply in (Reply.NONE, Reply.DECLINED):
            return False
        for step, result in zip(steps, self._results(reply), strict=True):
            if result is not None:
                step.settle_with(result)
        return True

    def hand_over(self, request: Request) -> Result | None:
        """Return the result of a request that another process has committed; None if this process must run it.

        The same as `is_answered_by_another` for one step, in half of the processor time.

        Raises:
            OutcomeUnknownError: The other process failed or stopped during its commit.
        """
        self.is_answered = False
        encoded = sqlite_requests.encode(request)
        if self._waits_without_request > 0 or not self._slots.can_post or len(encoded) > MAX_REQUEST_BYTES:
            return None
        try:
            self._slots.post(encoded)
            reply = self._wait(is_patient=False)
        finally:
            try:
                try:
                    self._slots.withdraw()
                except BaseException:  # interrupted
                    self._slots.withdraw()
                    raise
            finally:
                self._gate.release()  # after that, another process could take the request
        return None if reply in (Reply.NONE, Reply.DECLINED) else self._results(reply)[0]

    def _results(self, reply: Reply) -> list[Result | None]:
        """Return the results of the posted steps; None for one that this process must run."""
        answers = self._slots.answers() if reply in (Reply.COMMITTED, Reply.RECOVERED) else None
        if answers is None:
            raise OutcomeUnknownError("the commit of another process failed and may be stored; repeat the call")
        if reply is Reply.RECOVERED:
            self._announce()
        results = sqlite_requests.decode_answers(answers)
        self.is_answered = all(each is not None for each in results)
        return results

    def _withdraw(self, batch: StepBatch[sqlite3.Connection]) -> None:
        if self._slots.withdraw():
            batch.may_be_stored = False

    def _wait(self, *, is_patient: bool = True) -> Reply:
        """Return the reply to the request; NONE if this process holds the gate and must run the request.

        If no leader takes the request for a while, it is withdrawn. Then wait for the gate, or without ``is_patient``
        return NONE without it.
        """
        slots, began = self._slots, _monotonic()
        while True:
            wake_ups, reply = slots.look()
            if reply not in (Reply.NONE, Reply.TAKEN):
                return reply
            if self._gate.try_to_acquire():
                reply = self._reply_under_the_gate()
                if reply is not Reply.NONE:
                    self._gate.release()
                    self._slots.wake()
                return reply
            waited = _monotonic() - began
            if waited > min(_PATIENCE_SECONDS, self._timeout) and slots.withdraw():
                self._waits_without_request = _WAITS_WITHOUT_REQUEST
                if not is_patient:
                    return Reply.NONE
                self._gate.acquire(max(0.0, self._timeout - waited), has_waited=True)
                return Reply.NONE
            if waited > self._timeout:
                raise OutcomeUnknownError(
                    "another process has stopped while it committed this write; look for a suspended process, and "
                    "repeat the call to see whether it is stored",
                    timeout=self._timeout,
                )
            slots.wait(wake_ups, waited)

    def _reply_under_the_gate(self) -> Reply:
        if self._slots.reply is Reply.TAKEN:  # by a process that was killed or interrupted
            try:
                self._slots.resolve(self._last_commit())
            except ReaderGroupError as error:
                raise OutcomeUnknownError(
                    f"another process ended while it committed this write, and its commit cannot be read: "
                    f"{error.message}",
                    **error.facts,
                ) from error
        return self._slots.reply

    # The process that commits

    def begin(self) -> None:
        """Look whether others may wait, and forget what an interrupted commit had taken.

        The next process through the gate resolves that.
        """
        self._taken = []
        self.may_wait = self._slots.are_used

    @property
    def has_taken(self) -> bool:
        return bool(self._taken)

    def run_requests(self, connection: sqlite3.Connection) -> list[Request]:
        """Run the requests of waiting processes in the transaction of the caller, which holds the gate; return them.

        Call `begin` before it, and `settle` after it.
        """
        if not self.may_wait or not self._slots.are_posted():
            return []
        last_commit = sqlite_rows.last_shared_commit(connection)
        commit = commit_after(last_commit)
        self._taken = self._slots.take(last_commit, commit)
        requests: list[Request] = []
        for taken in self._taken:
            those = sqlite_requests.decode(taken.request)
            self._slots.prepare(taken, sqlite_requests.answer(connection, those, MAX_ANSWERS_BYTES))
            requests += those
        if requests:
            sqlite_rows.set_last_shared_commit(connection, commit)
        return requests

    def further_commits(self) -> Iterator[None]:
        """Yield when there are further requests, as long as several processes append, for a time slice."""
        end = _monotonic() + _SLICE_SECONDS
        while True:
            answered = self._slots.wake_settled()
            if answered + len(self._slots.waiting()) < _SEVERAL or not self._gets_requests(end):
                return
            self.begin()
            yield

    def _gets_requests(self, end: float) -> bool:
        """Wait a moment for requests; return False if there are none, or a process must have the gate itself."""
        linger = min(end, _monotonic() + _LINGER_SECONDS)
        while not (waiting := self._slots.waiting()) and _monotonic() < linger:
            os.sched_yield()
        return bool(waiting) and all(waiting) and _monotonic() < end

    @property
    def is_awaited(self) -> bool:
        """Whether another process waits, and this one, which holds the gate, has not taken its request."""
        return bool(self._slots.waiting())

    @staticmethod
    def let_in() -> None:
        """Give the gate to a process that waits. Call it without the gate, between many short commits."""
        _CLOCK.wait(_NEVER, _WAKE_SECONDS)

    def settle(self, reply: Reply) -> None:
        """Write for the waiting processes what became of their requests."""
        if self._taken:
            self._slots.settle(self._taken, reply)
            self._taken = []

    def wake(self) -> None:
        """Wake the processes whose requests are settled, and the next to commit. Call it after releasing the gate."""
        if self.may_wait:
            self._slots.wake()


def _requests(batch: StepBatch[sqlite3.Connection]) -> tuple[list[Step[sqlite3.Connection]], bytes]:
    """Admit the steps that another process can run and that have room in a slot; return them and their requests."""
    handed_over: list[Step[sqlite3.Connection]] = []
    encoded: list[bytes] = []
    bytes_left, appends_left = MAX_REQUEST_BYTES, sqlite_requests.MAX_APPENDS

    def fits(step: Step[sqlite3.Connection]) -> bool:
        nonlocal bytes_left, appends_left
        if step.is_given_up:
            step.settle()
            return True
        if not isinstance(step.request, Request):
            return False
        data = sqlite_requests.encode(step.request)
        bytes_left -= len(data)
        appends_left -= max(1, len(step.request.appends))
        if bytes_left < 0 or appends_left < 0:
            return False
        handed_over.append(step)
        encoded.append(data)
        return True

    batch.admit_while(fits)
    return handed_over, b"".join(encoded)
