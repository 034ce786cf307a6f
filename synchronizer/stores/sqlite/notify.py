"""A file that is touched after a commit, so that waiting processes can sleep until there is a change.

Watching the database's own files does not work: their write events come before the commit is visible. The touch is a
read of one byte: a write would change the file's time, and the next sync of the database would have to write that as
well (measured: it costs 5 to 9 % of the appends per second).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
from typing import Final

from ..forking import close_own
from ..wake_pipe import WakePipe
from .side_file import open_side_file

_IN_ACCESS: Final = 0x1
_IN_NONBLOCK: Final = os.O_NONBLOCK
_IN_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)


def can_watch() -> bool:
    """Return whether this system reports touches of a file without polling (inotify)."""
    return sys.platform == "linux"


class NotifyFile:
    """The file at ``path``. Its content means nothing; the touch is the message."""

    def __init__(self, path: str, database: str | None = None) -> None:
        self._path = path
        self._file = open_side_file(path, database)
        self.announce()

    def announce(self) -> None:
        file = self._file.fileno()
        if not os.pread(file, 1, 0):  # reading an empty file triggers no event
            with contextlib.suppress(OSError):  # the disk is full: waiters are not woken, and poll again later
                os.pwrite(file, b"\n", 0)
                os.pread(file, 1, 0)

    def watch(self) -> FileWatch:
        """Return a watch that sees every announcement from now on, of all processes."""
        return FileWatch(self._path)

    def close(self) -> None:
        close_own(self._file)


class FileWatch:
    """Waits for touches of one file through inotify. Raises `OSError` if the system's limit is reached."""

    def __init__(self, path: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if self._inotify < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        if libc.inotify_add_watch(self._inotify, os.fsencode(path), _IN_ACCESS) < 0:
            error = ctypes.get_errno()
            os.close(self._inotify)
            raise OSError(error, "inotify_add_watch", path)
        try:
            self._wake_pipe = WakePipe()
        except BaseException:
            os.close(self._inotify)
            raise
        self._poll = select.poll()
        self._poll.register(self._inotify, select.POLLIN)
        self._poll.register(self._wake_pipe, select.POLLIN)

    def wait(self) -> None:
        self._poll.poll()
        with contextlib.suppress(BlockingIOError):
            while True:
                os.read(self._inotify, 4096)

    def wake(self) -> None:
        self._wake_pipe.wake()

    def close(self) -> None:
        self._wake_pipe.close()
        os.close(self._inotify)
