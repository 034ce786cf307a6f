"""Keeps one client per process and address, because a worker of Spark runs many tasks."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import stat
import sys
from collections.abc import Iterator
from functools import cache
from typing import Final, TypeVar

from synchronizer import (
    Deadline,
    SystemClock,
    open_store,
)
from synchronizer.backoff import Backoff

from ..client import Client
from .address import StoreAddress

T = TypeVar("T")

#: Space for two batches. Linux may limit it by ``net.core.wmem_max``.
_PIPE_BYTES: Final = 2 * 1024 * 1024

_clients: Final[dict[tuple[int, str], Client]] = {}


def client_of(address: StoreAddress) -> Client:
    """Return this process's client of the address. It stays open as long as the process runs."""
    key = os.getpid(), address.usable()
    if key not in _clients:
        clock = SystemClock()
        _clients[key] = Client(open_store(key[1], clock=clock, must_exist=True), clock=clock)
        exempt_from_collections("the client")
    return _clients[key]


def backoff_of(client: Client) -> Backoff:
    """Return the backoff of one call with an unavailable store: an error in planning would end a streaming query."""
    return Backoff(client.clock, Deadline(client.clock, client.timeout))


@cache
def exempt_from_collections(loaded: str) -> None:
    """Exempt what a worker has loaded so far from its collections of garbage: it makes one after each task.

    To look through all modules takes up to 80 ms. Call this once for each thing that is ``loaded``, because what is
    exempt is never collected. Arrow is one: it loads Pandas, where it is installed, for the first array.
    """
    if _is_worker():
        gc.freeze()


def quiet(batches: Iterator[T]) -> Iterator[T]:
    """Iterate in a task, and keep it quiet if Spark needs no more rows, as after ``limit``.

    Spark then hangs up, and a worker of PySpark prints that its pipe is broken. It writes to nowhere instead. Where
    PySpark keeps this iterator until its last flush, or is only about to flush, what it prints is left out.
    """
    if _is_worker():
        _leave_out_hang_ups()
    try:
        yield from batches
    except GeneratorExit:
        _discard_what_nobody_reads()
        raise


def _is_worker() -> bool:
    return getattr(sys.modules["__main__"].__spec__, "name", None) == "pyspark.daemon"


@cache
def _leave_out_hang_ups() -> None:
    """Let this process not print that the last flush of a worker has found its pipe broken."""
    write, was_left_out = sys.stderr.write, False

    def write_other(text: str) -> int:
        nonlocal was_left_out
        is_end_of_it = was_left_out and text == "\n"
        was_left_out = text.startswith("PySpark daemon failed to flush") and "BrokenPipeError" in text
        return len(text) if was_left_out or is_end_of_it else write(text)

    sys.stderr.write = write_other  # type: ignore[method-assign]


def _discard_what_nobody_reads() -> None:
    with open(os.devnull, "r+b") as nowhere:
        for file in map(int, os.listdir("/dev/fd")):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(file).st_mode) and _hung_up(file):
                    os.dup2(nowhere.fileno(), file)


def _hung_up(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)  # waits for a hang-up or an error only
    return bool(poll.poll(0))


@cache
def widen_pipe() -> None:
    """Widen a worker's pipe to Java to hold a whole batch, so that it can make the next one while Java reads."""
    for file in map(int, os.listdir("/dev/fd")):
        # Files that are no connected sockets raise.
        with contextlib.suppress(OSError), socket.fromfd(file, socket.AF_UNIX, socket.SOCK_STREAM) as pipe:
            if not isinstance(pipe.getpeername(), tuple):  # TCP has a tuple and widens by itself
                pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIPE_BYTES)
