"""Memory that processes share through a file: words, and waits for their change."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

from synchronizer.errors import ReaderGroupError

from ..forking import close_own
from . import futex
from .side_file import open_side_file

_WORD_BYTES: Final = 4


class SharedMemory:
    """The first ``size`` bytes of a file. It must not be used after `close`."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    @classmethod
    def of(cls, path: str, database: str | None, size: int) -> SharedMemory | None:
        """Return the memory; None if the system has no futexes, or there is no descriptor, room or right."""
        if not futex.is_available():
            return None
        try:
            # From another open file than that of the locks: `mmap` duplicates its descriptor, and a child keeps it.
            file = open_side_file(path, database)
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # a write to memory without disk space ends the process
                return cls(mmap.mmap(file.fileno(), size))
            finally:
                close_own(file)
        except (OSError, ReaderGroupError):
            return None

    def wait(self, word: int, seen: int, seconds: float) -> None:
        """Wait for `wake` up to this time, unless the word is no longer what was ``seen``."""
        futex.wait(self._address + word * _WORD_BYTES, seen, seconds)

    def wake(self, word: int, value: int) -> None:
        """Set the word, and wake one thread that waits for it to change."""
        self.words[word] = value
        futex.wake(self._address + word * _WORD_BYTES)

    def barrier(self) -> None:
        """Make all writes of this thread visible before its later reads."""
        futex.wake(self._address)

    def close(self) -> None:
        self.words.release()
        self.memory.close()
