"""A pipe that wakes a thread out of its ``poll``."""

from __future__ import annotations

import os
import threading
from io import FileIO


class WakePipe:
    """Poll its `fileno` for reading. Any thread may wake or close it at any time; a closed one wakes nobody."""

    def __init__(self) -> None:
        # A descriptor that is closed during a write may already belong to another file, which would get the byte.
        self._lock = threading.Lock()
        reader, writer = os.pipe()
        self._reader, self._writer = FileIO(reader), FileIO(writer, "w")
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        """Let `fileno` be readable, until `clear`."""
        with self._lock:
            if not self._writer.closed:
                self._writer.write(b"\n")  # a full pipe is readable as well

    def clear(self) -> None:
        self._reader.read(4096)

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._writer.close()
