"""A bounded number of threads for any number of tasks, such as the writers of a client.

A task is a step that is due now and then. A thread takes the task that is due first, and calls its step. No thread
waits for a task: a step that has to wait, such as for the next attempt after a failed one, returns when it is due
again. So only a call that blocks, such as an append, occupies a thread.

One thread stays while there are tasks; the others end when they were idle for a second. Before a thread runs a step, it
makes sure that another one waits for the other tasks, and starts it if there are fewer than `MAX_THREADS`. So a call
that hangs delays no other task, as long as fewer than `MAX_THREADS` calls hang.

A step may ask for helpers, which make a call at the same time. Helpers occupy at most half of the threads, so that
tasks with many calls leave threads to the others.
"""

from __future__ import annotations

import heapq
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final, NamedTuple

from ..clock import Clock, Deadline, SystemClock
from ..errors import StoreUnavailableError
from .background import BackgroundThread, survive
from .flag import Flag

#: How many threads the tasks of one `TaskThreads` share.
MAX_THREADS: Final = 32
#: How many of them may help at the same time.
MAX_HELPERS: Final = MAX_THREADS // 2
#: How long a thread that has nothing to do stays. Keeping it is cheaper than starting it.
LINGER_SECONDS: Final = 1.0
#: When a step that raised an unexpected error is repeated.
_PAUSE_SECONDS: Final = 0.5
_NEVER: Final = math.inf

#: Returns when, on the clock, the task is due again; None: when another call schedules it.
Step = Callable[[], float | None]


class Task:
    """A step, which the threads call when it is due."""

    def __init__(self, threads: TaskThreads, step: Step) -> None:
        self.step: Final = step
        self._threads = threads

    def begin(self) -> None:
        """Let the task be scheduled. Raise `StoreUnavailableError` if the system has no thread for it."""
        self._threads.begin(self)

    def schedule(self, at: float) -> None:
        """Call the step at this time of the clock. An earlier time stays. An interrupted call can be repeated."""
        self._threads.schedule(self, at)

    def help(self, call: Step, helpers: int) -> None:
        """Make ``call`` in up to so many other threads, in fewer if they are occupied. Call it from a step."""
        self._threads.help(self, call, helpers)

    def end(self, wait_seconds: float) -> None:
        """Schedule the task no more. The last task ends the threads and waits this long for them."""
        self._threads.end(self, wait_seconds)


class _Work(NamedTuple):
    task: Task
    call: Step
    is_help: bool


class TaskThreads:
    """The threads of the tasks that begin here. They are started when they are needed."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._forget_all()
        _all.add(self)

    def _forget_all(self) -> None:
        """Forget the tasks and threads, as in a forked child, which has none of these threads."""
        self._lock = threading.Lock()  # guards what follows
        self._threads: set[threading.Thread] = set()
        self._starting: list[threading.Thread] = []  # each moves to `_threads` by itself
        self._tasks: set[Task] = set()
        self._due: list[tuple[float, int, Task]] = []  # a heap. An entry counts if `_due_of` has the same time
        self._due_of: dict[Task, float] = {}
        self._numbers = count()
        self._help: deque[_Work] = deque()
        self._helping = 0
        self._idle: list[Flag] = []  # of the threads that wait; those that came last are woken first
        self._watching: Flag | None = None  # of the idle thread that waits for the next task to become due
        self._watching_until = _NEVER

    # ------------------------------------------------------------------ for tasks

    def begin(self, task: Task) -> None:
        with self._lock:
            self._tasks.add(task)
            is_served = bool(self._idle)
        if not is_served:
            try:
                self._start_thread()
            except StoreUnavailableError:
                if not self._threads:
                    raise

    def schedule(self, task: Task, at: float) -> None:
        with self._lock:
            self._add(task, at)
            if self._idle and (self._watching is None or at < self._watching_until):
                self._idle[-1].set()

    def help(self, task: Task, call: Step, helpers: int) -> None:
        with self._lock:
            helpers = min(helpers, MAX_HELPERS - self._helping - len(self._help))
            self._help.extend([_Work(task, call, is_help=True)] * helpers)
            for idle in self._idle[-helpers:] if helpers > 0 else ():
                idle.set()
            is_short = helpers > len(self._idle)
        if is_short:
            self._try_to_start_thread()  # which starts the next one

    def end(self, task: Task, wait_seconds: float) -> None:
        with self._lock:
            self._tasks.discard(task)
            self._due_of.pop(task, None)
            threads = [] if self._tasks else [*self._threads]
            if not self._tasks:
                self._due.clear()
                for idle in self._idle:
                    idle.set()
        deadline = Deadline(SystemClock(), wait_seconds)
        for thread in threads:
            thread.join(deadline.remaining())

    # ------------------------------------------------------------------ the threads

    def _start_thread(self) -> None:
        """Start a thread if there are fewer than `MAX_THREADS`. An interrupt may end it anywhere."""
        thread = BackgroundThread(self._run, name=self._name, clock=self._clock)
        try:
            with self._lock:
                if len(self._threads) + len(self._starting) >= MAX_THREADS:
                    return
                self._starting.append(thread)
            thread.start()
        except BaseException:
            with self._lock:
                self._is_started(thread)
            raise

    def _is_started(self, thread: threading.Thread) -> None:
        """Note that the thread begins, or never will. Lock held."""
        if thread in self._starting:
            self._starting.remove(thread)

    def _try_to_start_thread(self) -> None:
        try:
            self._start_thread()
        except StoreUnavailableError:
            pass  # the present threads do it
        except Exception as error:
            survive(error, self._name)

    def _run(self) -> None:
        with self._lock:
            self._is_started(threading.current_thread())
            self._threads.add(threading.current_thread())
        due = work = None
        while work := self._next(work, due):
            try:
                due = work.call()
            except Exception as error:
                survive(error, self._name)
                due = self._clock.monotonic() + _PAUSE_SECONDS

    def _next(self, done: _Work | None, due: float | None) -> _Work | None:
        """Return what this thread does next, after ``done``; None if it ends."""
        is_rested = False  # it has waited for long, with nothing to do
        while True:
            with self._lock:
                if done is not None:
                    self._helping -= done.is_help
                    if due is not None:
                        self._add(done.task, due)
                    done = None
                work = self._take()
                if work is not None:
                    needs_thread = self._leave_to_others()
                    break
                if not self._tasks or (is_rested and self._idle):
                    self._threads.discard(threading.current_thread())
                    return None
                woken, seconds = Flag(), self._wait_seconds()
                self._idle.append(woken)
                if seconds is not None:
                    self._watching, self._watching_until = woken, self._due[0][0]
                elif len(self._idle) > 1:
                    seconds = LINGER_SECONDS
                is_rested, is_watching = False, self._watching is woken
            try:
                if is_watching and seconds is not None:
                    self._clock.wait(woken, seconds)
                else:
                    is_rested = not woken.wait(seconds)
            finally:
                with self._lock:
                    self._idle.remove(woken)
                    if self._watching is woken:
                        self._watching, self._watching_until = None, _NEVER
        if needs_thread:
            self._try_to_start_thread()
        return work

    def _add(self, task: Task, at: float) -> None:
        """Note when a task is due. Lock held."""
        if task in self._tasks and at < self._due_of.get(task, _NEVER):
            heapq.heappush(self._due, (at, next(self._numbers), task))  # first: an interrupt may follow
            self._due_of[task] = at

    def _take(self) -> _Work | None:
        """Remove and return what is to be done now. Lock held."""
        if self._help:
            self._helping += 1
            return self._help.popleft()
        if self._is_due() and self._due[0][0] <= self._clock.monotonic():
            _, _, task = heapq.heappop(self._due)
            del self._due_of[task]
            return _Work(task, task.step, is_help=False)
        return None

    def _is_due(self) -> bool:
        """Return whether a task is due at some time, which is that of the first entry then. Lock held."""
        while self._due and self._due_of.get(self._due[0][2]) != self._due[0][0]:
            heapq.heappop(self._due)
        return bool(self._due)

    def _wait_seconds(self) -> float | None:
        """Return how long to wait for the next task; None if none is due, or another thread waits for it. Lock held."""
        if not self._is_due() or self._due[0][0] >= self._watching_until:
            return None
        return max(0.0, self._due[0][0] - self._clock.monotonic())

    def _leave_to_others(self) -> bool:
        """Wake a thread for what is left; return whether another one is to be started for it. Lock held."""
        is_left = bool(self._help) or self._is_due()
        if self._idle:
            if self._help or (is_left and self._due[0][0] < self._watching_until):
                self._idle[-1].set()
            return False
        return is_left or len(self._tasks) > 1


_all: Final[weakref.WeakSet[TaskThreads]] = weakref.WeakSet()


def _forget_in_child() -> None:
    for threads in list(_all):
        threads._forget_all()


os.register_at_fork(after_in_child=_forget_in_child)
