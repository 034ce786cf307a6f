"""Blocks that a fork must not interrupt: a fork waits until the other threads of the process have left them.

A forked child has one thread, and the memory of all. A lock inside SQLite that another thread held at the fork is held
in the child forever: without this module, two of a hundred children of a busy process hung when they opened a file of
their own. And a file that the child inherits keeps its locks until the child ends, even if the parent was killed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from io import FileIO
from typing import Final, Protocol

from ..clock import Deadline, SystemClock
from ..threads.flag import Flag

# Forks wait for real threads, which no test clock can move.
_CLOCK: Final = SystemClock()
#: How long a fork waits. A commit may wait this long for another program that keeps the file locked.
_PATIENCE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.0002


class _ForksWait:
    """Inside ``with forks_wait:`` no other thread forks this process. Do not nest it, or wait in it without a limit.

    It has no lock: an interrupt at any point leaves at most the thread's id behind, which its next block removes.
    """

    def __init__(self) -> None:
        self._inside: set[int] = set()
        self._forking: set[int] = set()
        self._is_cut = False
        #: In a child: whether its fork, or that of an ancestor, happened while another thread was inside.
        self.was_cut = False

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._inside.add(thread)
        if self._forking:  # checked after the thread has registered; a fork also registers before it checks
            self._wait(thread)

    def __exit__(self, *error: object) -> None:
        self._inside.discard(threading.get_ident())

    def _wait(self, thread: int) -> None:
        while self._forking - {thread}:
            self._inside.discard(thread)
            _pause()
            self._inside.add(thread)

    def _before(self) -> None:
        self._forking.add(threading.get_ident())
        deadline = Deadline(_CLOCK, _PATIENCE_SECONDS)
        while self._others_are_inside() and not deadline.passed:
            _pause()
        self._is_cut = self._others_are_inside()

    def _others_are_inside(self) -> bool:
        others = self._inside - {threading.get_ident()}
        return bool(others) and not others.isdisjoint(sys._current_frames())  # a thread that ended inside is out

    def _after_in_parent(self) -> None:
        self._forking.discard(threading.get_ident())

    def _after_in_child(self) -> None:
        self._inside.clear()
        self._forking.clear()
        self.was_cut |= self._is_cut


class Descriptor(Protocol):
    """An object with a file or a socket."""

    @property
    def closed(self) -> bool: ...

    def fileno(self) -> int: ...


forks_wait: Final = _ForksWait()
_own: weakref.WeakSet[Descriptor] = weakref.WeakSet()
#: The null device. Opened with the first of these, because a child may have no descriptor left.
_null: int | None = None


def open_own(path: str, flags: int, mode: int = 0o600) -> FileIO:
    """Open a file that a forked child does not share: there its descriptor is that of the null device.

    So code of the child that still uses or closes it, such as the end of a block, does no harm. Close it with
    `close_own`.
    """
    with forks_wait:
        file = FileIO(path, "r+", opener=lambda path, _: os.open(path, flags | os.O_CLOEXEC, mode))
        own(file)
    return file


def own(opened: Descriptor) -> None:
    """Do not share this with forked children. The server would see a socket open until the last child closes it."""
    global _null
    if _null is None:
        _null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    _own.add(opened)


def close_own(file: FileIO) -> None:
    with forks_wait:  # a child forked before the system has closed the file would keep it, and its locks
        file.close()


def _lose_in_child() -> None:
    for opened in _own:
        if _null is not None and not opened.closed:
            os.dup2(_null, opened.fileno(), inheritable=False)
    _own.clear()


def never_free(inherited: object) -> None:
    """Never free this object of the parent in the child: freeing it would close resources of the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _pause() -> None:
    _CLOCK.wait(Flag(), _POLL_SECONDS)


def _after_in_child() -> None:
    forks_wait._after_in_child()
    _lose_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=forks_wait._before, after_in_parent=forks_wait._after_in_parent, after_in_child=_after_in_child
    )
