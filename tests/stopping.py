"""Processes that are stopped by SIGSTOP for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Final

from synchronizer import Appended, StoreUnavailableError, open_store
from synchronizer.store import SegmentStore
from tests.waiting import until

_PROBE: Final = "probe"


@contextmanager
def stopped(process: BaseProcess, url: str) -> Iterator[None]:
    """The process, a child of this one, does nothing inside the block. It is stopped where others can write.

    In the middle of a write to a SQLite file it would stop the file for all; then it goes on for a moment.
    """
    assert process.pid is not None
    with open_store(url) as store:
        store.create(_PROBE)
        try:
            while True:
                os.kill(process.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                if _takes_appends(store):
                    break
                os.kill(process.pid, signal.SIGCONT)
                until(lambda: _takes_appends(store), "the others can write again")
            yield
        finally:
            os.kill(process.pid, signal.SIGCONT)


def _takes_appends(store: SegmentStore) -> bool:
    try:
        return isinstance(store.append(_PROBE, b"."), Appended)
    except StoreUnavailableError:
        return False
