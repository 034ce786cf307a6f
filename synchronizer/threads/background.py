"""Background threads: how they start, and how they live through errors that nobody expected.

What a loop knows how to deal with, such as a store that is away, it handles itself. Any other `Exception` is logged
once per kind, counted, and the loop goes on after a pause. So no lease runs out, and nobody waits for a thread that is
gone, because of one error. A kind is a type of error and the line that it came from.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from ..clock import Clock, SystemClock, growing_pause
from ..errors import ClosedError, StoreUnavailableError
from .flag import Flag

FIRST_PAUSE_SECONDS: Final = 0.05
MAX_PAUSE_SECONDS: Final = 2.0
#: A loop that ran for this long without an error starts again with the shortest pause.
CALM_SECONDS: Final = 10.0

_logger = logging.getLogger(__name__)


class _Survived:
    """How often each kind of error came. There are as many kinds as lines that raise, so this stays small."""

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
    """How often background threads of this process met each kind of unexpected error, and went on.

    The keys are like ``"KeyError at synchronizer/liveness/exclusive_role.py:52"``. Empty is what it should be.
    """
    return _survived.counts()


def survive(error: Exception, loop: str, *, log: bool = True) -> None:
    """Count an unexpected error that ``loop`` goes on after, and log it: the first of its kind with its traceback."""
    with suppress(Exception):  # a handler or filter of the program's logging may raise
        kind = _kind_of(error)
        count = _survived.add(kind)
        if log and count.bit_count() == 1:  # the 1st, 2nd, 4th and so on
            _logger.error(
                "%s goes on after an unexpected error, %d of its kind so far: %s: %s",
                *(loop, count, kind, error),
                exc_info=error if count == 1 else None,
            )


def keep_running(
    loop: Callable[[], None],
    *,
    name: str,
    clock: Clock | None = None,
    stopping: threading.Event | None = None,
    most_seconds: float = MAX_PAUSE_SECONDS,
) -> None:
    """Run ``loop`` until it returns, or raises `ClosedError`. Where it raises another `Exception` it is run again.

    It is not run again when ``stopping`` is set. The pauses before it grow up to ``most_seconds``.
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
        except Exception as error:
            failures = 1 if clock.monotonic() - began >= CALM_SECONDS else failures + 1
            survive(error, name)
        if clock.wait(stopping, growing_pause(failures, first=FIRST_PAUSE_SECONDS, most=most_seconds)):
            return


class BackgroundThread(threading.Thread):
    """A daemon thread that does `keep_running`. Where the system has none, `start` raises `StoreUnavailableError`."""

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


@contextmanager
def starting(thread: str) -> Iterator[None]:
    """Where the system has no thread for what is started inside: `StoreUnavailableError`."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):  # an interrupt, behind the error of a lock that it cut off
            raise (error.__context__ or error) from None
        raise StoreUnavailableError(
            "the system has no thread left; end others, or raise the limit of this user", thread=thread
        ) from error


def _kind_of(error: BaseException) -> str:
    place, traceback = "an unknown place", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        place = f"{'/'.join(file.split(os.sep)[-2:])}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return f"{type(error).__name__} at {place}"
