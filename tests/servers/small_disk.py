"""A disk of a few megabytes, to fill it up."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.unavailable import ServerUnavailable

_BALLAST = "ballast"


class SmallDisk:
    """A file system in memory, of which ``ballast_bytes`` are taken until `make_room`."""

    def __init__(self, folder: Path, ballast_bytes: int) -> None:
        self.folder = folder
        (folder / _BALLAST).write_bytes(bytes(ballast_bytes))

    def fill(self) -> None:
        """Take all that is left."""
        with open(self.folder / _BALLAST, "ab", buffering=0) as ballast:
            for size in (65_536, 1):
                try:
                    while ballast.write(b"." * size):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def make_room(self) -> None:
        (self.folder / _BALLAST).unlink()


@contextmanager
def small_disk(megabytes: int, ballast_megabytes: int) -> Iterator[SmallDisk]:
    """`ServerUnavailable` where file systems cannot be mounted."""
    folder = tempfile.mkdtemp(prefix="readergroup-disk-")
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=777", "none", folder]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        mounted = subprocess.CompletedProcess(command, 1, stderr="there is no program 'mount'")
    if mounted.returncode:
        os.rmdir(folder)
        raise ServerUnavailable(f"no small disk can be mounted, which mostly takes root: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(Path(folder), ballast_megabytes << 20)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        os.rmdir(folder)
