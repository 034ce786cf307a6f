"""The event loop that all NATS connections of this process run in, in one hidden thread.

The thread lives as long as there is a connection. It survives every exception of a callback. If it ends nevertheless,
as when the program closes its descriptors, it tells its users, and they start over in another loop.

A signal handler may raise anywhere in the main thread, or close a store there. So this module has no locks: a thread
changes shared state by single calls in C. The hidden thread does everything that takes several steps, because Python
runs no signal handlers in it: it makes the loop, shuts connections down, and decides when to end.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from synchronizer.clock import Deadline, SystemClock
from synchronizer.errors import StoreUnavailableError
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread, starting, survive
from synchronizer.threads.flag import Flag

_logger = get_logger(__name__)

_NAME: Final = "nats-event-loop"
#: More failures than this mean that the loop itself is broken, not a callback.
_MOST_FAILURES: Final = 100
#: The limit for an answer of the thread, which normally takes a moment and longer on a busy machine.
PATIENCE_SECONDS: Final = 10.0
#: A thread that has closed its loop ends at once.
_LAST_STEPS_SECONDS: Final = 1.0
#: How long a user may take to shut down.
_SHUT_SECONDS: Final = 6.0

_clock: Final = SystemClock()


class LoopEndedError(Exception):
    """The loop has ended."""


class User(Protocol):
    async def shut(self) -> None:
        """Shut the user down. Called by the thread when the user releases the loop."""

    def loop_ended(self) -> None:
        """Handle the end of the loop. Called by the thread when it ends, whatever the reason."""


class HiddenLoop:
    """One loop, and the thread that runs it."""

    def __init__(self) -> None:
        #: Each user with the flag that is set when it has left.
        self.users: dict[User, Flag] = {}
        #: A retired loop accepts no further users, and ends when the last one has left.
        self.is_retired = False
        self.has_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: BackgroundThread | None = None
        self._leaving: dict[User, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        self._has_begun = Flag()
        self._is_over = Flag()
        #: `next` of this starts the thread, once, in a single call in C: no interrupt comes between.
        self._starting: Iterator[object] = map(_thread.start_new_thread, (self._begin,), ((),))

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    # What threads call

    def start(self) -> None:
        """Start the thread unless it was started before, and wait until it runs."""
        try:
            with starting(_NAME):
                next(self._starting, None)
        except StoreUnavailableError as error:
            self._fail(error)
            raise
        if not self._has_begun.wait(PATIENCE_SECONDS):
            self.retire()
            raise StoreUnavailableError("the thread of the event loop does not start; try again")
        if self._failure is not None:
            self._join_thread()  # it may hold parts of the loop that could not be created
            raise self._failure

    def call(self, callback: Callable[..., object], *arguments: object) -> None:
        """Have the thread call ``callback``."""
        if self._loop is None or self.has_ended:
            raise LoopEndedError
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError as error:
            raise LoopEndedError from error

    def retire(self) -> None:
        """Accept no further users: the thread does not answer, and the next user needs another one."""
        self.is_retired = True

    def begin_release(self, user: User) -> None:
        """Have the thread shut the user down and let it leave."""
        if self._loop is None:
            self.forget(user)
            return
        with contextlib.suppress(LoopEndedError):
            self.call(self._let_go, user)

    def forget(self, user: User) -> None:
        """Remove a user that has not asked the loop for anything yet."""
        has_left = self.users.pop(user, None)
        if has_left is not None:
            has_left.set()
        with contextlib.suppress(LoopEndedError):  # a thread that has not started checks this at its start
            self.call(self._end_if_unused)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended. If it does not end in time, later callers do not wait for it again."""
        if self._loop is None or not self._is_over.wait(seconds):
            _loops.pop(self, None)
        else:
            self._join_thread()

    def _join_thread(self) -> None:
        """Wait for the last steps of a thread that has nothing more to do."""
        if self._thread is not None and self._thread.is_alive():
            # Not for long: in a signal handler, `Thread.join` blocks if it has interrupted another `join`.
            self._thread.join(_LAST_STEPS_SECONDS)

    @property
    def is_current_thread(self) -> bool:
        return self._thread is threading.current_thread()

    # What the thread does

    def _begin(self) -> None:
        """Start the thread from a second one: an interrupt in `Thread.start` could block the new thread for ever."""
        try:
            self._thread = BackgroundThread(self._run, name=_NAME)
            self._thread.start()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._end()

    def _run(self) -> None:
        try:
            loop = asyncio.new_event_loop()
        except Exception as error:
            failure = StoreUnavailableError(
                "the event loop cannot be created; close files, or raise the limit of open files", error=str(error)
            )
            # Without the frames, which would keep the parts of the loop and its descriptors alive.
            failure.__cause__ = error.with_traceback(None)
            self._fail(failure)
            return
        try:
            self._loop = loop
            loop.call_soon(self._end_if_unused)  # an interrupt may have removed the user
            self._has_begun.set()
            self._run_until_stopped()
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self.is_retired = True
            for user in list(self.users):
                user.loop_ended()
        finally:
            self.has_ended = True
            _loops.pop(self, None)
            while self.users:
                self.users.popitem()[1].set()
            if self._loop is not None:
                with contextlib.suppress(BaseException):  # run what other threads queued before they could see the end
                    self._loop.call_soon(self._loop.stop)
                    self._loop.run_forever()
                self._loop.close()
            self._has_begun.set()
            self._is_over.set()

    def _run_until_stopped(self) -> None:
        """Run until `stop`, or until the loop itself is broken. Even `SystemExit` in a callback is only an error."""
        for failures in range(_MOST_FAILURES):
            try:
                self.loop.run_forever()
                tasks = asyncio.all_tasks(self.loop)
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(_all(tasks))
            except Exception as error:
                survive(error, "the NATS event loop", log=not failures)
            except BaseException as error:
                _logger.error("the NATS event loop continues after %r", error)
            else:
                return
        _logger.error("the NATS event loop is broken and was abandoned")
        _abandoned.extend(asyncio.all_tasks(self.loop))

    def _let_go(self, user: User) -> None:
        if user in self.users and user not in self._leaving:
            self._leaving[user] = self.loop.create_task(self._shut(user))

    async def _shut(self, user: User) -> None:
        try:
            shutting = asyncio.ensure_future(user.shut())
            if (await asyncio.wait({shutting}, timeout=_SHUT_SECONDS))[0]:
                shutting.result()
            else:
                shutting.cancel()
        except Exception as error:
            survive(error, "the NATS event loop, which could not close a connection,")
        finally:
            self._leaving.pop(user, None)
            has_left = self.users.pop(user, None)
            self._end_if_unused()
            if has_left is not None:
                has_left.set()

    def _end_if_unused(self) -> None:
        if not self.users:
            # In this order: either the second check sees a user that comes now, or that user sees the retired loop.
            self.is_retired = True
            if not self.users:
                self.loop.stop()


async def _all(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait for cancelled tasks. One that missed its cancellation is abandoned, so that the thread ends."""
    if tasks:
        ended, missed = await asyncio.wait(tasks, timeout=_SHUT_SECONDS)
        _abandoned.extend(missed)
        for task in ended:
            if not task.cancelled():
                task.exception()  # else asyncio logs that it was never retrieved


#: The loops that have not ended. The first one that is not retired accepts further users.
_loops: dict[HiddenLoop, None] = {}
#: The loops that a forked child inherited, and tasks of a broken loop, kept so that they are never torn down.
_abandoned: list[object] = []


def acquire(user: User) -> HiddenLoop:
    """Return the loop of this process, for use until `release`.

    Call `release` also if this call is interrupted. A user whose loop has ended calls it again.
    """
    while True:
        hidden = next((each for each in list(_loops) if not each.is_retired), None)
        if hidden is None:
            _loops[HiddenLoop()] = None  # another thread may add one as well: all threads take the first one
            continue
        hidden.users.setdefault(user, Flag())
        if not hidden.is_retired:
            hidden.start()
            return hidden
        hidden.forget(user)


def release(user: User, *, waits: bool = True) -> None:
    """Release the loop; with ``waits``, wait until the user has shut down. The last user to leave ends the loop.

    It may be called repeatedly, by several threads at once, from a signal handler, and without `acquire`.
    """
    deadline = Deadline(_clock, _SHUT_SECONDS + PATIENCE_SECONDS)
    for hidden in list(_loops):
        has_left = hidden.users.get(user)
        if has_left is not None:
            hidden.begin_release(user)
        if waits and not hidden.is_current_thread:
            if has_left is not None and not has_left.wait(deadline.remaining()):
                hidden.retire()
            if hidden.is_retired and not hidden.users:
                hidden.join(deadline.remaining())


def _abandon_in_child() -> None:
    global _loops
    _abandoned.append(_loops)
    _loops = {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
