"""Background threads: how they start, and how they survive unexpected errors.

A loop handles the errors that it expects, such as an unavailable store. Any other `Exception` is counted and logged,
and the loop continues after a pause. So one error lets no lease expire, and leaves no caller waiting for a dead thread.
The kind of an error is its type and the line that raised it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Final

from ..clock import Clock, SystemClock, growing_pause
from ..errors import ClosedError, StoreUnavailableError
from ..loggers import get_logger
from .flag import Flag

FIRST_PAUSE_SECONDS: Final = 0.05
MAX_PAUSE_SECONDS: Final = 2.0
#: A loop that ran for this long without an error starts again with the shortest pause.
CALM_SECONDS: Final = 10.0

_logger = get_logger(__name__)


class _Survived:
    """Counts the errors of each kind. There are as many kinds as lines that raise, so it stays small."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, kind: str) -> int:
        with self._lock:
            self._counts[kind] = count = self._counts.get(kind, 0) + 1
            return count

    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)


_survived: Final = _Survived()
os.register_at_fork(after_in_child=_survived._forget)


def background_errors() -> Mapping[str, int]:
    """Return how often a background thread or a store of this process met each kind of unexpected error.

    A key is like ``"KeyError at liveness/exclusive_role.py:52"``. The result should be empty.
    """
    return _survived.counts()


def survive(error: BaseException, loop: str, *, log: bool = True) -> None:
    """Count an unexpected error after which ``loop`` continues, and log it: the first of its kind with a traceback."""
    with suppress(Exception):  # a handler or filter of the program's logging may raise
        kind = _kind_of(error)
        count = _survived.add(kind)
        if log and count.bit_count() == 1:  # the 1st, 2nd, 4th and so on
            _logger.error(
                "%s continues after an unexpected error, %d of this kind so far: %s: %s",
                *(loop, count, kind, error),
                exc_info=error if count == 1 else None,
            )


def raise_interrupt(error: BaseException, *, of_listener: bool = False) -> None:
    """Raise ``error`` again if it may be an interrupt of the main thread, or ends this greenlet; otherwise return.

    What is no `Exception` would end a thread of the SDK for good, such as the `asyncio.CancelledError` of a task that a
    listener runs, or a `SystemExit`, of which nobody would hear. A listener's `SystemExit` ends no other thread either.
    """
    if isinstance(error, Exception) or (of_listener and isinstance(error, SystemExit)):
        return
    greenlet = sys.modules.get("greenlet")
    ends_greenlet = greenlet is not None and isinstance(error, greenlet.GreenletExit)
    if ends_greenlet or threading.current_thread() is threading.main_thread():
        raise error


def keep_running(
    loop: Callable[[], None],
    *,
    name: str,
    clock: Clock | None = None,
    stopping: threading.Event | None = None,
    most_seconds: float = MAX_PAUSE_SECONDS,
) -> None:
    """Run ``loop`` until it returns or raises `ClosedError`. Run it again after any other error.

    It is not run again when ``stopping`` is set. The pauses between runs grow up to ``most_seconds``.
    """
    clock, stopping = clock or SystemClock(), stopping or Flag()
    failures = 0
    while True:
        began = clock.monotonic()
        try:
            return loop()
        except ClosedError as error:
            _logger.debug("%s ends: %s", name, error)
            return
        except BaseException as error:
            raise_interrupt(error)
            failures = 1 if clock.monotonic() - began >= CALM_SECONDS else failures + 1
            survive(error, name)
        if clock.wait(stopping, growing_pause(failures, first=FIRST_PAUSE_SECONDS, most=most_seconds)):
            return


class BackgroundThread(threading.Thread):
    """A daemon thread that runs `keep_running`. `start` raises `StoreUnavailableError` if the system has no thread."""

    def __init__(
        self,
        loop: Callable[[], None],
        *,
        name: str,
        clock: Clock | None = None,
        stopping: threading.Event | None = None,
        most_seconds: float = MAX_PAUSE_SECONDS,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._keep_running = partial(
            keep_running, loop, name=name, clock=clock, stopping=stopping, most_seconds=most_seconds
        )

    def run(self) -> None:
        self._keep_running()

    def start(self) -> None:
        with starting(self.name):
            super().start()

    def join(self, timeout: float | None = None) -> None:
        # An infinite time is too long for the system.
        super().join(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))


class _Wait:
    """The wait of a thread for a call that it has sent elsewhere."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.is_over = False


#: The waits for the code that runs in this context.
_waits: ContextVar[tuple[_Wait, ...]] = ContextVar("waits", default=())


@contextmanager
def waiting_here() -> Iterator[None]:
    """This thread waits, until the end of the block, for what it sends elsewhere, such as to an event loop.

    What is sent must run in a copy of this context, as `asyncio` has it.
    """
    wait = _Wait()
    token = _waits.set((*_waits.get(), wait))
    try:
        yield
    finally:
        wait.is_over = True
        _waits.reset(token)


def waits_for_caller(thread: threading.Thread) -> bool:
    """Whether ``thread`` is this one, or waits for the code that calls this: then nothing here can wait for it."""
    if thread is threading.current_thread():
        return True
    return any(wait.thread is thread and not wait.is_over for wait in _waits.get())


@contextmanager
def starting(thread: str) -> Iterator[None]:
    """Raise `StoreUnavailableError` if the system has no thread for the one that is started inside."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):  # an interrupt made a lock raise: raise the interrupt
            raise (error.__context__ or error) from None
        raise StoreUnavailableError(
            "the system cannot start another thread; end other threads, or raise the thread limit of this user",
            thread=thread,
        ) from error


def _kind_of(error: BaseException) -> str:
    place, traceback = "an unknown place", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        place = f"{'/'.join(file.split(os.sep)[-2:])}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return f"{type(error).__name__} at {place}"
