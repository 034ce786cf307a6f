"""The event loop that all NATS connections of this process run in, in one hidden thread.

The thread is there while a connection is. It survives whatever a callback raises; if it ends all the same, as after
somebody has closed its descriptors, it says so to those that use it, and they begin anew in another one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from ..background import BackgroundThread, survive
from ..errors import StoreUnavailableError

_logger = logging.getLogger(__name__)

#: What raises more often is not the fault of a callback: the loop itself is broken.
_MOST_FAILURES: Final = 100
#: What the thread does in any case within a moment, and may take on a busy machine.
_PATIENCE_SECONDS: Final = 10.0


class LoopEndedError(Exception):
    """The loop runs nothing any more."""


class User(Protocol):
    def loop_ended(self) -> None:
        """Called by the thread when it ends, whatever the reason."""


class HiddenLoop:
    """One loop, and the thread that runs it."""

    def __init__(self) -> None:
        self.users: set[User] = set()
        self.has_ended = False
        try:
            self.loop = asyncio.new_event_loop()
        except OSError as error:
            raise StoreUnavailableError(
                "no event loop can be made; raise the limit of open files, or close some", error=str(error)
            ) from error
        self._thread = BackgroundThread(self._run, name="nats-event-loop")
        try:
            self._thread.start()
        except StoreUnavailableError:
            self.loop.close()
            raise
        except BaseException:  # an interrupt: it may run
            self.stop()
            raise

    def call(self, callback: Callable[..., object], *arguments: object) -> None:
        """Have the thread call it."""
        if self.has_ended:
            raise LoopEndedError
        try:
            self.loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError as error:
            raise LoopEndedError from error

    def run(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        """Have the thread run it, and wait until it is done, for ``seconds`` and what a busy thread may take more."""
        if self.has_ended:
            work.close()
            raise LoopEndedError
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:
            work.close()
            raise LoopEndedError from error
        try:
            future.result(seconds + _PATIENCE_SECONDS)
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            raise LoopEndedError from error

    def stop(self) -> None:
        with contextlib.suppress(LoopEndedError):
            self.call(self.loop.stop)

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_SECONDS)

    def _run(self) -> None:
        try:
            self._run_until_stopped()
        finally:
            for user in list(self.users):
                user.loop_ended()
            self.has_ended = True
            self.loop.close()

    def _run_until_stopped(self) -> None:
        """Ends with `stop`, or when the loop itself is broken: even `SystemExit` in a callback is only an error."""
        for failures in range(_MOST_FAILURES):
            try:
                self.loop.run_forever()
                tasks = asyncio.all_tasks(self.loop)
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(_all(tasks))
            except Exception as error:
                survive(error, "the event loop of NATS", log=not failures)
            except BaseException as error:
                _logger.error("the event loop of NATS goes on after %r", error)
            else:
                return
        _logger.error("the event loop of NATS is broken, and was given up")
        _abandoned.extend(asyncio.all_tasks(self.loop))


async def _all(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


_lock = threading.Lock()
_current: HiddenLoop | None = None
#: What a forked child inherited, and tasks of a broken loop, kept so that nobody tears them down.
_abandoned: list[object] = []


def acquire(user: User) -> HiddenLoop:
    """The loop of this process, until `release`. Called again by a user whose loop has ended."""
    global _current
    with _lock:
        if _current is None or _current.has_ended:
            _current = HiddenLoop()
        _current.users.add(user)
        return _current


def release(user: User) -> None:
    """Give the loop up; the last one ends it. May be called repeatedly, and without having acquired it."""
    global _current
    with _lock:
        ending = _current
        if ending is None or user not in ending.users:
            return
        if len(ending.users) == 1:
            ending.stop()
            _current = None
        ending.users.discard(user)
        if ending.users:
            return
    ending.join()


def _abandon_in_child() -> None:
    global _current, _lock
    _abandoned.append(_current)
    _current, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
