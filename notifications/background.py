"""Runs a notifier's polls in the background: at intervals, and as soon as the store reports that a segment grew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from synchronizer import Clock, Deadline, ReaderGroupError, SegmentStore, StoreUnavailableError
from synchronizer.arguments import check_duration
from synchronizer.callables import check_callable
from synchronizer.clock import growing_pause
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread, raise_interrupt, survive
from synchronizer.threads.flag import Flag
from synchronizer.threads.loading import loading

if TYPE_CHECKING:
    from apscheduler.schedulers.base import BaseScheduler

MAX_BACKOFF_SECONDS: Final = 30.0
#: A wait of the store cannot be cancelled, so the waker checks this often whether it has to stop.
_WAIT_SECONDS: Final = 0.1
#: The pauses while the store is unavailable, and while polls do not read new data. They are short, so that listeners
#: hear of a change within a second after polls succeed again.
_FIRST_PAUSE_SECONDS: Final = 0.01
_MAX_PAUSE_SECONDS: Final = 0.5

_logger = get_logger(__name__)


class BackgroundPolling:
    """Calls ``poll`` at intervals, and as soon as a watched segment changes. One call at a time.

    A poll that raises is logged and retried with a backoff, which doubles up to `MAX_BACKOFF_SECONDS`, or up to half a
    second if the store or the state failed. Polling continues until `stop`, and may start again after it.

    Args:
        poll: Called without arguments.
        known: Returns the known length of each watched segment. Another length in the store causes a poll.
        name: Used in logs and thread names.
        store: Holds the watched segments.
        clock: Measures the pauses.
        interval_seconds: The time between polls; above 0.
        scheduler: An APScheduler that runs the polls at intervals; by default the one that all notifiers share.
    """

    def __init__(
        self,
        poll: Callable[[], None],
        known: Callable[[], Mapping[str, int]],
        *,
        name: str,
        store: SegmentStore,
        clock: Clock,
        interval_seconds: float,
        scheduler: BaseScheduler | None,
    ) -> None:
        check_duration(interval_seconds, "interval_seconds", above_zero=True, finite=True)
        check_callable(poll, "poll")
        check_callable(known, "known")
        self._poll = poll
        self._known = known
        self._name = name
        self._store = store
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._scheduler = scheduler
        self._polling = threading.Lock()
        self._poller: int | None = None  # the id of the thread that polls now
        self._failures = 0  # in a row
        self._not_before = 0.0
        self._stopping = Flag()
        self._wakers: list[threading.Thread] = []
        self._changing_job = threading.Lock()  # guards the attribute below
        self._remove_job: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin with a poll now. Call `stop` before you start again."""
        self._stopping = Flag()
        self._not_before = 0.0
        # Loads APScheduler, which a process without listeners does not need.
        with loading():
            from .scheduler import SHARED, add_job

        job, scheduler, name = self._poll_at_interval, self._scheduler, f"polls of {self._name}"

        def add() -> Callable[[], None]:
            if scheduler is None:
                return SHARED.add(job, interval_seconds=self._interval_seconds, name=name)
            return add_job(scheduler, job, interval_seconds=self._interval_seconds, name=name)

        waker = BackgroundThread(
            partial(self._wake, self._stopping),
            name=f"waker of {self._name}",
            clock=self._clock,
            stopping=self._stopping,
        )
        self._wakers = [each for each in self._wakers if each.is_alive()] + [waker]
        try:
            _uninterrupted(partial(self._add_job, add, self._stopping), self._name)
            waker.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop soon, without waiting for a running poll. Stopping twice is no error."""
        self._stopping.set()
        if self._wakers:  # it was started
            _uninterrupted(self._end_job, self._name)

    def _add_job(self, add: Callable[[], Callable[[], None]], stopping: threading.Event) -> None:
        with self._changing_job:
            if not stopping.is_set():  # otherwise the start was interrupted
                self._remove_job = add()

    def _end_job(self) -> None:
        with self._changing_job:
            if self._remove_job is not None:
                self._remove_job()
                self._remove_job = None

    def join(self, timeout: float) -> None:
        """After `stop`: wait up to ``timeout`` seconds for the threads and a running poll.

        Return at once if the caller is that poll.
        """
        check_duration(timeout, "timeout")
        if self._poller == threading.get_ident():
            return
        deadline = Deadline(self._clock, timeout)
        for waker in self._wakers:
            if waker.is_alive():
                waker.join(deadline.remaining())
        if self._polling.acquire(timeout=deadline.remaining()):
            self._polling.release()

    def _poll_at_interval(self) -> None:
        # A running poll makes this one unnecessary.
        if self._polling.acquire(blocking=False):
            self._poll_locked(self._stopping)

    def _wake(self, stopping: threading.Event) -> None:
        woken_at: Mapping[str, int] | None = None
        pause = _FIRST_PAUSE_SECONDS
        failures = 0  # in a row
        while not stopping.is_set():
            self._polling.acquire()
            self._poll_locked(stopping)
            try:
                known = self._known()
                if known != woken_at:
                    pause = _FIRST_PAUSE_SECONDS
                else:
                    # The poll did not read the new data, perhaps because it failed: do not spin.
                    self._clock.wait(stopping, pause)
                    pause = min(2 * pause, _MAX_PAUSE_SECONDS)
                if self._wait_for_growth(known, stopping):
                    woken_at = known
                failures = 0
            except Exception as error:
                failures += 1
                if not isinstance(error, ReaderGroupError):
                    survive(error, f"waker of {self._name}", log=False)
                if failures == 1 and not stopping.is_set():
                    _logger.warning(
                        "%s cannot wait for the store now and polls every %.3g s: %s",
                        self._name,
                        _MAX_PAUSE_SECONDS,
                        error,
                    )
                self._clock.wait(stopping, growing_pause(failures, first=_FIRST_PAUSE_SECONDS, most=_MAX_PAUSE_SECONDS))

    def _wait_for_growth(self, known: Mapping[str, int], stopping: threading.Event) -> bool:
        while not stopping.is_set():
            if self._store.wait(known, _WAIT_SECONDS):
                return True
        return False

    def _poll_locked(self, stopping: threading.Event) -> None:
        """Poll unless a backoff is under way, then release the lock."""
        self._poller = threading.get_ident()
        try:
            if not stopping.is_set() and self._clock.monotonic() >= self._not_before:
                self._poll()
                if self._failures:
                    _logger.info("polls of %s succeed again, after %d failures", self._name, self._failures)
                    self._failures = 0
        except BaseException as error:
            raise_interrupt(error)
            self._back_off(error, stopping)
        finally:
            self._poller = None
            self._polling.release()

    def _back_off(self, error: BaseException, stopping: threading.Event) -> None:
        if stopping.is_set():
            return  # the store or synchronizer is being closed
        self._failures += 1
        # A store or state may recover at any moment; an error in the code does not.
        passes = isinstance(error, ReaderGroupError)
        if not passes:
            survive(error, f"polls of {self._name}", log=False)
        first, most = (
            (_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS) if passes else (self._interval_seconds, MAX_BACKOFF_SECONDS)
        )
        pause = growing_pause(self._failures, first=first, most=most)
        self._not_before = self._clock.monotonic() + pause
        if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th and so on
            _logger.warning(
                "polls of %s fail (%d in a row); the next is in %.3g s: %s",
                self._name,
                self._failures,
                pause,
                error,
                exc_info=error if self._failures == 1 else None,
            )


def _uninterrupted(call: Callable[[], None], name: str) -> None:
    """Make the call where no signal handler interrupts it: APScheduler has locks that would stay locked.

    An interrupt ends the wait for the call, and not the call.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    done, errors = Flag(), list[BaseException]()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    try:
        BackgroundThread(run, name=f"job of {name}").start()
    except StoreUnavailableError:  # no thread is available now
        return call()
    done.wait()
    if errors:
        raise errors[0]
