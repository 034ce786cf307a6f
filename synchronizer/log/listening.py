"""Calls a listener with every update of a state, usually in a thread that follows the log for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic

from ..callables import check_returned
from ..clock import Deadline, growing_pause
from ..errors import ClosedError, ReaderGroupError
from ..loggers import get_logger
from ..state import S
from ..threads.background import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, BackgroundThread, raise_interrupt
from ..threads.flag import Flag
from .entries import Revision
from .follower import LogFollower
from .replica import AppliedUpdate, Transition

#: A wait of the store cannot be cancelled, so the thread checks this often whether to end.
_WAIT_SECONDS: Final = 0.1

_logger = get_logger(__name__)


class UpdateListening(Generic[S]):
    """Calls ``listener`` with the updates after ``after``, by default the current revision, until `stop`.

    Without a ``thread`` it calls the listener in `tell` only.
    """

    def __init__(
        self,
        follower: LogFollower[S],
        listener: Callable[[AppliedUpdate[S]], object],
        *,
        after: Revision | None,
        timeout: float,
        thread: bool,
    ) -> None:
        self._follower = follower
        self._listener = listener
        self._timeout = timeout
        self._feed = follower.transitions()
        present = follower.replica.revision
        self._heard = present if after is None else after
        self._has_gap = self._heard < present
        self._stopping = Flag()
        if thread:
            try:
                BackgroundThread(
                    self._run, name=f"updates of {follower.log.segment}", clock=follower.clock, stopping=self._stopping
                ).start()
            except BaseException:
                self._feed.close()
                raise

    def stop(self) -> None:
        """Stop calling the listener. A call in progress runs to its end."""
        self._stopping.set()
        self._feed.close()

    def tell(self) -> int:
        """Call the listener with the updates applied since the last call; return the length of the log up to them."""
        with self._follower.lock:
            length = self._follower.replica.next_offset
            transitions: Sequence[Transition[S]] = self._feed.drain()
        if self._has_gap or any(each.gap for each in transitions):
            self._has_gap = True
            transitions = self._follower.history(self._heard, self._deadline())
            self._has_gap = False
        try:
            for transition in transitions:
                for applied in transition.one_by_one():
                    self._call(applied)
        except BaseException:
            self._has_gap = True  # the next call reads the remaining ones again
            raise
        return length

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                length = self.tell()
                if self._follower.replica.next_offset > length:
                    continue  # this process has applied more meanwhile
                if self._follower.retry(self._deadline(), partial(self._grew, length)):
                    self._follower.fetch(self._deadline())
                failures = 0
            except ClosedError:
                return
            except ReaderGroupError as error:
                if self._follower.is_stopped:
                    _logger.error("a listener gets no further updates: %s", error, exc_info=error)
                    return
                failures += 1
                if failures.bit_count() == 1:  # the 1st, 2nd, 4th and so on
                    _logger.warning("updates for a listener are delayed: %s", error)
                pause = growing_pause(failures, first=FIRST_PAUSE_SECONDS, most=MAX_PAUSE_SECONDS)
                self._follower.clock.wait(self._stopping, pause)

    def _call(self, applied: AppliedUpdate[S]) -> None:
        if applied.revision <= self._heard or self._stopping.is_set():
            return
        self._heard = applied.revision
        try:
            check_returned(self._listener(applied), "a listener")
        except BaseException as error:
            raise_interrupt(error, of_listener=True)
            _logger.error("a listener raised at revision %s: %r", applied.revision, self._listener, exc_info=error)

    def _grew(self, length: int) -> bool:
        self._follower.check_usable()
        return bool(self._follower.log.store.wait({self._follower.log.segment: length}, _WAIT_SECONDS))

    def _deadline(self) -> Deadline:
        return Deadline(self._follower.clock, self._timeout)
