"""The open writers of this process, and their end when it exits or forks.

A program may end without closing its writers. Then their events are stored first, for a limited time, and the number of
events that could not be stored is logged. `os._exit` and a killing signal leave no time for that.

In a forked child the parent's writers refuse every call; the child stores nothing that the parent wrote.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, Protocol

from synchronizer import Clock, Deadline, ReaderGroupError, SystemClock
from synchronizer.loggers import get_logger

from ...closable import close_each

#: How long the end of the process waits for unstored events, for all its writers together.
EXIT_SECONDS: Final = 10.0
#: How long closing waits for a running append, after the deadline.
APPEND_SECONDS: Final = 1.0

_logger = get_logger(__name__)


class OpenWriter(Protocol):
    timeout: float

    def _store_until(self, deadline: Deadline) -> None: ...

    def _close_until(self, deadline: Deadline, appends_end: Deadline = ...) -> None: ...

    def _abandon(self) -> None: ...


_writers: weakref.WeakSet[OpenWriter] = weakref.WeakSet()
_process: int | None = None


def opened(writer: OpenWriter) -> None:
    """Close this writer when the process ends."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        atexit.unregister(_close_all)  # a forked child may have inherited it
        atexit.register(_close_all)
        # A process of `multiprocessing` ends without `atexit`, and before its other threads have ended. It has loaded
        # this module before it runs anything.
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util.Finalize(None, _store_all, exitpriority=0)
    _writers.add(writer)


def closed(writer: OpenWriter) -> None:
    _writers.discard(writer)


def close_writers(writers: Collection[OpenWriter], clock: Clock) -> None:
    """Close the writers. Their timeouts begin now, and so does the time for appends that hang."""
    longest = max((writer.timeout for writer in writers), default=0.0)
    appends_end = Deadline(SystemClock(), longest + APPEND_SECONDS)
    closes = [partial(writer._close_until, Deadline(clock, writer.timeout), appends_end) for writer in writers]
    close_each(closes)


def _store_all() -> None:
    _finish(lambda writer, deadline: writer._store_until(deadline))


def _close_all() -> None:
    _finish(lambda writer, deadline: writer._close_until(deadline))


def _finish(way: Callable[[OpenWriter, Deadline], None]) -> None:
    deadline = Deadline(SystemClock(), EXIT_SECONDS)  # a manual clock would stand still now
    for writer in list(_writers):
        try:
            way(writer, deadline)
        except ReaderGroupError as error:
            _logger.error("the process ends before all written events are stored: %s", error)


def _abandon_all() -> None:
    for writer in list(_writers):
        writer._abandon()
    _writers.clear()


os.register_at_fork(after_in_child=_abandon_all)
