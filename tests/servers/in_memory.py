"""Where servers of tests have their data: syncing it costs a disk most of the time of a test."""

from __future__ import annotations

import os
import shutil
from typing import Final

_FOLDER: Final = "/dev/shm"


def folder_in_memory(room: int = 0) -> str | None:
    """The system's folder in memory if it has one with so many bytes of room.

    What was written there outlives a kill of all processes of a server, as it does on a disk.
    """
    if not os.access(_FOLDER, os.W_OK) or shutil.disk_usage(_FOLDER).free < room:
        return None
    return _FOLDER
