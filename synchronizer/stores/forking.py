"""Blocks that a fork must not interrupt: a fork waits until the other threads of the process have left them.

A forked child has one thread, and the memory of all. A lock inside SQLite that another thread held at the fork is held
in the child forever: without this module, two of a hundred children of a busy process hung when they opened a file of
their own. And a file that the child inherits keeps its locks until the child ends, even if the parent was killed.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from io import FileIO
from typing import Final, Protocol

from ..threads.forks import ForksWait


class Descriptor(Protocol):
    """An object with a file or a socket."""

    @property
    def closed(self) -> bool: ...

    def fileno(self) -> int: ...


forks_wait: Final = ForksWait()
_own: weakref.WeakSet[Descriptor] = weakref.WeakSet()
#: The null device. Opened with the first of these, because a child may have no descriptor left.
_null: int | None = None


def open_own(path: str, flags: int) -> FileIO:
    """Open a file that a forked child does not share: there its descriptor is that of the null device.

    So code of the child that still uses or closes it, such as the end of a block, does no harm. Close it with
    `close_own`.
    """
    with forks_wait:
        file = FileIO(path, "r+", opener=lambda path, _: os.open(path, flags | os.O_CLOEXEC, 0o600))
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_in_child)
