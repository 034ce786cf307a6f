"""Processes that are stopped by SIGSTOP for a while."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from synchronizer import Appended, StoreUnavailableError, open_store
from synchronizer.store import SegmentStore
from tests.waiting import until

_PROBE: Final = "probe"


@contextmanager
def stopped(process: BaseProcess, url: str) -> Iterator[None]:
    """The process does nothing inside the block. It is stopped where others can write.

    In the middle of a write to a SQLite file it would stop the file for all; then it goes on for a moment.
    """
    assert process.pid is not None
    with open_store(url) as store:
        store.create(_PROBE)
        try:
            while True:
                os.kill(process.pid, signal.SIGSTOP)
                until_stopped(process.pid)
                if _takes_appends(store):
                    break
                os.kill(process.pid, signal.SIGCONT)
                until(lambda: _takes_appends(store), "the others can write again")
            yield
        finally:
            os.kill(process.pid, signal.SIGCONT)


def until_stopped(pid: int) -> None:
    """Wait until all threads of the process have stopped. It need not be a child of this one."""
    until(lambda: all(state in "Tt" for state in _states(pid)), "it stops")


def _states(pid: int) -> list[str]:
    """What its threads do, in the letters of `ps`; where there is no ``/proc``, what it does as a whole."""
    threads = Path(f"/proc/{pid}/task")
    if threads.is_dir():
        try:
            return [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads.iterdir()]
        except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            return ["?"]
    shown = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return [shown.stdout.strip()[0]]


def _takes_appends(store: SegmentStore) -> bool:
    try:
        return isinstance(store.append(_PROBE, b"."), Appended)
    except StoreUnavailableError:
        return False
