"""Processes that are there within milliseconds: forked from one that has imported everything and opened nothing.

The zygote has a single thread and no store, so that what it forks begins clean. It keeps the bodies of its children
until they are asked for, so that a process id means the same process as long as somebody may signal it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

from tests.waiting import PATIENCE_SECONDS

LONG = PATIENCE_SECONDS


class Failure(NamedTuple):
    """A child says that it raised something."""

    traceback: str


class Ended(NamedTuple):
    """There is nothing more to hear from a child."""


ENDED = Ended()


class Child:
    """A forked process, as its parent sees it."""

    def __init__(self, pid: int, connection: Connection, reap: Callable[[int], int]) -> None:
        self.pid = pid
        self.connection = connection
        self._reap = reap
        self._status: int | None = None

    def receive(self) -> Any:
        """What it says next, or `ENDED`. What it raised fails the test."""
        assert self.connection.poll(LONG), f"process {self.pid} neither says anything nor ends"
        try:
            said = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return ENDED
        if isinstance(said, Failure):
            raise AssertionError(f"a child raised:\n{said.traceback}")
        return said

    def send(self, said: Any) -> None:
        self.connection.send(said)

    def kill(self) -> int:
        """Kill it if it still runs; its exit status as `os.waitpid` has it. Twice is no error."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._status = self._reap(self.pid)
            self.connection.close()
        return self._status

    @property
    def was_killed(self) -> bool:
        """Whether it died of SIGKILL, by its own hand or another's. It has to have ended."""
        if self._status is None:
            self._status = self._reap(self.pid)
            self.connection.close()
        return os.WIFSIGNALED(self._status) and os.WTERMSIG(self._status) == signal.SIGKILL


class Zygote:
    """Forks children that run a function of a module: ``work(connection, *arguments)``. A context manager.

    ``modules`` are imported before the first fork.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, list(modules)), daemon=True)
        self._process.start()
        there.close()

    def start(self, work: Callable[..., None], *arguments: Any) -> Child:
        here, there = multiprocessing.Pipe()
        self._control.send((work, arguments))
        assert self._process.pid is not None
        send_handle(self._control, there.fileno(), self._process.pid)
        there.close()
        return Child(self._answer(), here, self._reap)

    def _reap(self, pid: int) -> int:
        self._control.send(pid)
        return self._answer()

    def _answer(self) -> int:
        assert self._control.poll(LONG), "the zygote does not answer"
        answer = self._control.recv()
        assert isinstance(answer, int)
        return answer

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._control.close()
        self._process.join(LONG)
        assert self._process.exitcode == 0


def _serve(control: Connection, modules: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when it is over
    for module in modules:
        importlib.import_module(module)
    while True:
        try:
            order = control.recv()
        except EOFError:
            return
        if isinstance(order, int):
            control.send(os.waitpid(order, 0)[1])
            continue
        handle = recv_handle(control)
        assert threading.active_count() == 1, "forking would leave threads behind"
        pid = os.fork()
        if pid == 0:
            control.close()
            _live(Connection(handle), *order)
        os.close(handle)
        control.send(pid)


def _live(connection: Connection, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    try:
        work(connection, *arguments)
    except BaseException:
        connection.send(Failure(traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing of the parent's is to be torn down here
