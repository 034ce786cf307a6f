"""Blocks that a fork must not interrupt: a fork waits until the other threads of the process have left them.

A forked child has one thread, and the memory of all. A lock that another thread held at the fork is held in the child
forever.
"""

from __future__ import annotations

import logging  # noqa: F401  first, so that its hook, which takes a lock, runs after ours: a thread inside may log
import os
import sys
import threading
from typing import Final

from ..clock import Deadline, SystemClock
from .flag import Flag

# Forks wait for real threads, which no test clock can move.
_CLOCK: Final = SystemClock()
#: How long a fork waits. A commit may wait this long for another program that keeps the file locked.
_PATIENCE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.0002


class ForksWait:
    """Inside ``with forks_wait:`` no other thread forks this process. Do not nest it, or wait in it without a limit.

    It has no lock: an interrupt at any point leaves at most the thread's id behind, which its next block removes.
    """

    def __init__(self) -> None:
        self._inside: set[int] = set()
        self._forking: set[int] = set()
        self._is_cut = False
        #: In a child: whether its fork, or that of an ancestor, happened while another thread was inside.
        self.was_cut = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
            )

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


def _pause() -> None:
    _CLOCK.wait(Flag(), _POLL_SECONDS)
