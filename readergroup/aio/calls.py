"""Runs blocking calls in threads, and brings their outcomes back to the event loop.

Four bounded pools for each client. Calls whose time the store's timeouts bound share the first one. Calls that wait
for other processes or tasks, such as a checkpoint for its readers, share the second one, so that they cannot keep the
others from running. Releases, for which others may wait, have the third one, and closing what may wait for a listener
has the fourth, for the listener may wait for a release. A call that has begun in a thread cannot be cancelled: it runs
to its end, and its result is dropped, or undone if something was opened.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import isnan
from typing import Any, Final, Generic, Protocol, TypeVar, cast
from weakref import WeakSet

from synchronizer import ClosedError, DeadlineExceededError, StoreUnavailableError
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread, waits_for_caller

R = TypeVar("R")

#: The number of threads for calls that the store's timeouts bound, for calls that wait for others, and for ends.
CALL_THREADS: Final = 16
WAIT_THREADS: Final = 64
END_THREADS: Final = 16
#: A thread without work ends after this time.
IDLE_SECONDS: Final = 5.0
#: How long closing waits for calls that run.
CLOSE_SECONDS: Final = 5.0

_logger = get_logger(__name__)


class NotBegunError(Exception):
    """No thread was free in time. The function was not called, and will not be."""


class _Call(Generic[R]):
    """One call, from the loop to a thread and back."""

    def __init__(
        self, function: Callable[[], R], threads: Threads, undo: Callable[[R], object] | None, *, is_certain: bool
    ) -> None:
        self._function = function
        self._threads = threads
        self._undo = undo
        #: Whether it runs though no task waits for it any more.
        self.is_certain = is_certain
        self._context = contextvars.copy_context()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the four that follow
        self._has_begun = False
        self._outcome: tuple[R | None, BaseException | None] | None = None
        self._is_given_up = False
        self._is_dropped = False
        self.future: asyncio.Future[R] = self._loop.create_future()

    def __call__(self) -> None:
        """Run in a thread. Raises nothing."""
        with self._lock:
            if (self._is_given_up or self.future.cancelled()) and not self.is_certain:
                return
            self._has_begun = True
        outcome = self._called()
        with self._lock:
            self._outcome = outcome
            is_given_up = self._is_given_up
        if is_given_up:
            self._drop()
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, *outcome)
        except RuntimeError:  # the loop is closed
            self._drop()

    def _called(self) -> tuple[R | None, BaseException | None]:
        try:
            return self._context.run(self._function), None
        except StopIteration as stopped:  # a future does not take it
            error = RuntimeError("the call raised StopIteration")
            error.__cause__ = stopped
            return None, error
        except BaseException as raised:
            return None, raised

    def give_up(self) -> None:
        """Undo the call, now or when it returns. Its task was cancelled, perhaps with the outcome on its way."""
        with self._lock:
            self._is_given_up = True
            has_run = self._outcome is not None
        if has_run and self._undo is not None:
            self._threads.run(self._drop)
        if self.future.done():
            retrieve(self.future)

    def end_wait(self, error: Exception) -> None:
        """Raise this in the task that waits, unless the call has begun: it begins no more, if it is not certain."""
        with self._lock:
            if self._has_begun or self._is_given_up:
                return
            self._is_given_up = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._deliver, None, error)

    def _deliver(self, result: R | None, error: BaseException | None) -> None:
        """Give the outcome to the task that waits. Runs on the loop."""
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)  # type: ignore[arg-type]

    def _drop(self) -> None:
        """Undo the call, once. Runs in a thread."""
        with self._lock:
            is_first, self._is_dropped = not self._is_dropped, True
        if self._outcome is None or self._undo is None or not is_first:
            return
        result, error = self._outcome
        if error is None:
            try:
                self._undo(result)  # type: ignore[arg-type]
            except Exception as failed:
                _logger.warning("what a cancelled call has opened could not be closed: %s", failed)


class Threads:
    """Up to ``most`` daemon threads that run calls in the order of their arrival. They start when they are needed.

    With one thread, calls run one after the other. With ``idle_seconds=inf`` it is always the same thread.
    """

    def __init__(self, name: str, most: int, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._name = name
        self._most = most
        self._idle_seconds = idle_seconds
        self._work = threading.Condition(threading.Lock())  # guards all that follows
        self._waiting: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._process_id = os.getpid()

    def start(self, function: Callable[[], R], *, is_certain: bool = False) -> asyncio.Future[R]:
        """Run ``function`` in a thread; return a future of the running loop, for tasks that come and go.

        Args:
            function: Takes no arguments.
            is_certain: Run ``function`` even if the future is cancelled before it begins.
        """
        call = _Call(function, self, None, is_certain=is_certain)
        self.submit(call)
        call.future.add_done_callback(retrieve)
        return call.future

    async def call(
        self, function: Callable[[], R], *, undo: Callable[[R], object] | None = None, is_certain: bool = False
    ) -> R:
        """Return what ``function`` returns in a thread.

        Args:
            function: Takes no arguments.
            undo: Called with the result, in a thread, if this task was cancelled meanwhile.
            is_certain: Run ``function`` even if this task is cancelled before it begins.
        """
        call = _Call(function, self, undo, is_certain=is_certain)
        self.submit(call)
        try:
            return await call.future
        except BaseException:
            call.give_up()
            raise

    async def call_until(self, deadline: float, function: Callable[[float], R], *, is_certain: bool = False) -> R:
        """Return what ``function(timeout)`` returns in a thread, with the seconds that are left when one is free.

        Args:
            deadline: On the loop's clock.
            function: Takes the time that it may use.
            is_certain: Run ``function`` even if this task is cancelled before it begins, or when a thread is free only
                after the deadline.

        Raises:
            NotBegunError: No thread was free until the deadline.
        """
        loop = asyncio.get_running_loop()
        if not self.is_busy or deadline == float("inf"):
            return await self.call(lambda: function(max(0.0, deadline - loop.time())), is_certain=is_certain)
        call = _Call(lambda: function(max(0.0, deadline - loop.time())), self, None, is_certain=is_certain)
        self.submit(call)
        timer = loop.call_at(deadline, call.end_wait, NotBegunError())
        try:
            return await call.future
        except BaseException:
            call.give_up()
            raise
        finally:
            timer.cancel()

    async def end(self, function: Callable[[], object]) -> None:
        """Run what closes or releases something, even if this task is cancelled before it begins.

        Does nothing if the client is closed, which closes all that it opened.
        """
        if not self._closed:
            await self.call(function, is_certain=True)

    async def end_by(self, deadline: float, function: Callable[[float], object]) -> None:
        """As `end`, for a function as of `call_until`, which raises `NotBegunError`."""
        if not self._closed:
            await self.call_until(deadline, function, is_certain=True)

    def run(self, function: Callable[[], object]) -> None:
        """Run ``function`` in a thread, and log its error. Does nothing if the client is closed."""

        def run() -> None:
            try:
                function()
            except Exception as error:
                _logger.warning("a call that no task waits for failed: %s", error)

        try:
            self.submit(run)
        except ClosedError:
            return
        except StoreUnavailableError as error:  # the caller ends with an error of its own
            _logger.warning("a call that no task waits for could not begin: %s", error)

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which raises nothing, in a thread.

        Raises:
            ClosedError: The client is closed, or belongs to the parent of this process.
            StoreUnavailableError: The system has no thread for the first call.
        """
        if os.getpid() != self._process_id:
            raise ClosedError("the client belongs to the parent process; open another in this process")
        with self._work:
            if self._closed:
                raise ClosedError("the client is closed; open another")
            self._waiting.append(job)
            if len(self._waiting) <= self._idle:
                self._work.notify()
                return
            if len(self._threads) == self._most:
                return
            thread = BackgroundThread(self._run, name=self._name)
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException:
                self._threads.discard(thread)
                if not self._threads:
                    self._waiting.remove(job)
                    raise

    def _run(self) -> None:
        me = threading.current_thread()
        try:
            while (job := self._next_job()) is not None:
                job()
                del job  # it may hold a large result
        finally:
            with self._work:
                self._threads.discard(me)

    def _next_job(self) -> Callable[[], None] | None:
        with self._work:
            self._idle += 1
            try:
                while not self._waiting:
                    is_woken = not self._closed and self._work.wait(min(self._idle_seconds, threading.TIMEOUT_MAX))
                    if not self._waiting and not is_woken:
                        # With the lock held, so that no job arrives for a thread that ends.
                        self._threads.discard(threading.current_thread())
                        return None
                return self._waiting.popleft()
            finally:
                self._idle -= 1

    def close(self) -> None:
        """Take no more calls. Those that arrived still run; then the threads end. Does not wait."""
        with self._work:
            self._closed = True
            self._work.notify_all()

    def end_waits(self) -> None:
        """Raise `ClosedError` in the tasks whose calls wait for a thread, unless the calls are certain."""
        with self._work:
            waiting = list(self._waiting)
        for job in waiting:
            if isinstance(job, _Call) and not job.is_certain:
                job.end_wait(ClosedError("the client is closed; open another"))

    @property
    def is_busy(self) -> bool:
        """Whether a call would wait for a thread."""
        return len(self._threads) == self._most and self._idle <= len(self._waiting)

    @property
    def running(self) -> int:
        """The number of threads that have not ended, and do not wait for the caller."""
        with self._work:
            threads = list(self._threads)
        return sum(not waits_for_caller(thread) for thread in threads)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Take the error of a future that perhaps no task asks for any more."""
    if not future.cancelled():
        future.exception()


class ClosedFirst(Protocol):
    async def close(self) -> None: ...


class Calls:
    """The threads of one client: pools for its calls, and own threads for readers, writers, queues and others."""

    def __init__(self) -> None:
        self._calls = Threads("readergroup.aio call", CALL_THREADS)
        self._waits = Threads("readergroup.aio wait", WAIT_THREADS)
        self._releases = Threads("readergroup.aio release", END_THREADS)
        self._ends = Threads("readergroup.aio end", END_THREADS)
        self._own: WeakSet[Threads] = WeakSet()
        self._news: WeakSet[News] = WeakSet()
        #: Seconds that a call of the store may take unless it, or its object, has its own ``timeout``.
        self.timeout = float("inf")
        #: What is closed while all else of the client still works.
        self.closed_first: set[ClosedFirst] = set()
        #: Whether the client is closed, so that tasks that wait for news end.
        self.closed = False

    async def run(
        self,
        function: Callable[[], R],
        *,
        undo: Callable[[R], object] | None = None,
        waits: bool = False,
        is_certain: bool = False,
    ) -> R:
        """Return what ``function`` returns in a thread. The other arguments are those of `Threads.call`.

        Args:
            function: Takes no arguments. A `partial` with a ``timeout``, and nothing to ``undo``, asks the store: its
                timeout begins now, and is replaced by what is left if it has to wait for a thread.
            undo: Called with the result if this task was cancelled meanwhile.
            waits: Whether the call waits for other processes or tasks.
            is_certain: Run ``function`` even if this task is cancelled before it begins.

        Raises:
            DeadlineExceededError: Other calls had all threads until the timeout.
        """
        is_limited = isinstance(function, partial) and "timeout" in function.keywords and undo is None
        if is_limited and not waits and not is_certain and self._calls.is_busy:
            return await self._run_in_turn(cast("partial[R]", function))
        threads = self._waits if waits else self._calls
        return await threads.call(function, undo=undo, is_certain=is_certain)

    async def _run_in_turn(self, function: partial[R]) -> R:
        """Return what ``function`` returns when a thread is free, in the time that it may take from now on."""
        timeout = function.keywords["timeout"]
        if timeout is None:
            timeout = getattr(getattr(function.func, "__self__", None), "timeout", self.timeout)
        if not isinstance(timeout, int | float) or isnan(timeout):
            return await self._calls.call(function)  # which refuses it

        try:
            return await self._calls.call_until(deadline_after(timeout), lambda left: function(timeout=left))
        except NotBegunError:
            raise DeadlineExceededError(
                "other calls of this client waited for the store; this one was not begun, repeat it", timeout=timeout
            ) from None

    async def end(self, function: Callable[[], object], *, waits: bool = False) -> None:
        """Run what closes or releases something, as `Threads.end`. Other calls do not keep it from running.

        What ``waits`` for listeners does not keep the rest from running.
        """
        threads = self._ends if waits else self._releases
        await threads.end(function)

    async def end_by(self, deadline: float, function: Callable[[float], object]) -> None:
        """As `end`, for a function that takes the seconds that it may use.

        Raises:
            DeadlineExceededError: Other closes had all threads until the deadline. It is called after them, with 0.
        """
        try:
            await self._releases.end_by(deadline, function)
        except NotBegunError:
            raise DeadlineExceededError(
                "other closes of this client take longer than the timeout; this one follows them, and gives up what is "
                "not stored by then"
            ) from None

    def begin(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Run ``function`` in a thread; return a future for tasks that come and go."""
        return self._calls.start(function)

    def start(self, function: Callable[[], object]) -> None:
        """Run what closes or releases something, and log its error. Does nothing if the client is closed."""
        self._releases.run(function)

    def single(self, name: str, *, is_same: bool = False) -> Threads:
        """Return one thread for calls that must not run at the same time; ``is_same``: always the same thread."""
        return self._new_threads(name, 1, float("inf") if is_same else IDLE_SECONDS)

    def several(self, name: str, most: int) -> Threads:
        """Return threads for calls that wait for each other, so that they keep no others from running."""
        return self._new_threads(name, most, IDLE_SECONDS)

    def _new_threads(self, name: str, most: int, idle_seconds: float) -> Threads:
        self.check_open()
        threads = Threads(f"readergroup.aio {name}", most, idle_seconds=idle_seconds)
        self._own.add(threads)
        return threads

    def news(self) -> News:
        """Return news for tasks of the running loop. Closing the client rings it."""
        self.check_open()
        news = News()
        self._news.add(news)
        return news

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError("the client is closed; open another")

    def end_waits(self) -> None:
        """End the tasks that wait for news."""
        self.closed = True
        for news in list(self._news):
            news.ring()

    @property
    def _all(self) -> list[Threads]:
        return [self._calls, self._waits, self._releases, self._ends, *self._own]

    def end_threads(self) -> None:
        """Take no more calls, and end the tasks that wait for a thread. Does not wait for the calls that run."""
        self.end_waits()
        for threads in self._all:
            threads.close()
            threads.end_waits()

    async def close(self) -> None:
        """Take no more calls, and wait up to 5 s until the running ones and the threads have ended."""
        self.end_threads()
        await close_threads(self._all)


async def close_threads(groups: list[Threads]) -> None:
    """Close these, and wait up to 5 s until their threads have ended."""
    for threads in groups:
        threads.close()
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + CLOSE_SECONDS, 0.0005
    while running := sum(threads.running for threads in groups):
        if loop.time() >= deadline:
            _logger.warning("%d calls still wait for the store; their threads end when it answers", running)
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.05)


class News:
    """Wakes tasks of the running loop when something may have changed. Any thread may `ring`.

    Take `next_ring` before you look, and await it after.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._limits: WeakSet[asyncio.Timeout] = WeakSet()
        self._is_ringing = False  # a ring is on its way to the loop

    def ring(self) -> None:
        if not self._is_ringing:
            self._is_ringing = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._is_ringing = False
        self._event.set()
        self._event = asyncio.Event()
        for limit in list(self._limits):
            with suppress(RuntimeError):  # its block has ended
                limit.reschedule(self._loop.time())

    def next_ring(self) -> asyncio.Event:
        return self._event

    def limit(self, deadline: float) -> asyncio.Timeout:
        """Return a timeout for a block that ends at the deadline, or at the next ring."""
        limit = timeout_at(deadline)
        self._limits.add(limit)
        return limit


def deadline_after(timeout: float | None) -> float:
    """Return the time on the loop's clock in ``timeout`` seconds; None is for ever."""
    return float("inf") if timeout is None else asyncio.get_running_loop().time() + timeout


def remaining(deadline: float) -> float:
    """Return the seconds until the deadline, at least 0."""
    return max(0.0, deadline - asyncio.get_running_loop().time())


def timeout_at(deadline: float) -> asyncio.Timeout:
    """Return ``asyncio.timeout_at`` for any deadline: not every loop takes a timer that never ends."""
    return asyncio.timeout(None if deadline == float("inf") else remaining(deadline))


async def wait_until_set(event: asyncio.Event, timeout: float | None) -> bool:
    """Return whether ``event`` was set within ``timeout`` seconds; None or infinity waits as long as it takes."""
    if timeout is None or timeout == float("inf"):
        await event.wait()
        return True
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
