"""One APScheduler for all notifiers of a process. The first one starts it, and it stops with the last one."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from apscheduler.executors.base import BaseExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import BaseScheduler
from apscheduler.triggers.interval import IntervalTrigger

from synchronizer import InvalidArgumentError
from synchronizer.clock import SystemClock
from synchronizer.loggers import get_logger
from synchronizer.threads.background import starting

#: APScheduler logs every added job, and every run that it skips while the previous one still runs. Both are normal.
_quiet = get_logger(f"{__name__}.apscheduler")
_quiet.setLevel(logging.ERROR)
#: The clock that APScheduler asks. No other one moves its jobs.
_clock: Final = SystemClock()


class _ThreadPerRun(BaseExecutor):  # type: ignore[misc]  # APScheduler 3 has no types
    """Runs each job in a new daemon thread, so that a hanging store delays neither other jobs nor the exit."""

    def _do_submit_job(self, job: Any, run_times: Any) -> None:
        def run() -> None:
            try:
                job.func()
            finally:
                self._run_job_success(job.id, [])

        threading.Thread(target=run, name=job.name, daemon=True).start()


class _Interval(IntervalTrigger):  # type: ignore[misc]
    """Counts no runs that were missed: after a clock was set forward by years, that would take hours."""

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime:
        first: datetime = self.start_date
        if previous is None:
            return first
        return datetime.fromtimestamp(now.timestamp() + self.interval_length, self.timezone)


class _Scheduler(BackgroundScheduler):  # type: ignore[misc]
    """Goes on when the clock of the system is set back."""

    def _process_jobs(self) -> float | None:
        jobs, longest = self.get_jobs(), timedelta()
        now = datetime.fromtimestamp(_clock.time(), self.timezone)
        for job in jobs:
            longest = max(longest, job.trigger.interval)
            if job.next_run_time - now > job.trigger.interval:
                with suppress(JobLookupError):  # it was removed meanwhile
                    job.modify(next_run_time=now)
        seconds: float | None = super()._process_jobs()
        return None if seconds is None else min(seconds, longest.total_seconds())  # it may be set at any time


class SharedScheduler:
    """Runs functions at intervals. Its threads live from the first `add` to the last ``remove``."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._scheduler: BaseScheduler | None = None
        self._users = 0

    def add(self, run: Callable[[], None], *, interval_seconds: float, name: str) -> Callable[[], None]:
        """Call ``run`` every ``interval_seconds``, never twice at a time; return a function that ends it."""
        with self._lock:
            scheduler: BaseScheduler = self._scheduler or _started_scheduler()
            self._scheduler = scheduler
            self._users += 1
            remove_job = add_job(scheduler, run, interval_seconds=interval_seconds, name=name)

        def remove() -> None:
            with self._lock:
                if self._scheduler is None or self._scheduler is not scheduler:
                    return  # a forked child has nothing to end
                remove_job()
                self._users -= 1
                if self._users == 0:
                    self._scheduler.shutdown()
                    self._scheduler = None

        return remove


def _started_scheduler() -> BaseScheduler:
    scheduler = _Scheduler(timezone=UTC, logger=_quiet, executors={"default": _ThreadPerRun()})
    with starting("the scheduler of all notifiers"):
        scheduler.start()
    return scheduler


def add_job(
    scheduler: BaseScheduler, run: Callable[[], None], *, interval_seconds: float, name: str
) -> Callable[[], None]:
    """Add a job to the scheduler and return what removes it. Late runs are merged into one, and none is dropped.

    Raises:
        InvalidArgumentError: The scheduler's job store pickles its jobs.
    """
    try:
        job = scheduler.add_job(
            run,
            # The time of the next run must be a date, of the year 9999 at most.
            _Interval(seconds=min(interval_seconds, threading.TIMEOUT_MAX), timezone=scheduler.timezone),
            name=name,
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,
        )
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise InvalidArgumentError(
            "the scheduler does not take the polls; its default job store must keep jobs in memory", cause=repr(error)
        ) from error

    def remove() -> None:
        with suppress(JobLookupError):  # whose scheduler it is has removed the job, or shut the scheduler down
            job.remove()

    return remove


SHARED: Final = SharedScheduler()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SHARED._forget)  # the child has no such thread
