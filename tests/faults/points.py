"""Faults below the stores: each call to a driver or to the operating system is a point that can be made to fail once.

`install` puts the points under one backend. What is injected there is raised where the driver or the system would
raise it, below all that the backend does about errors.
"""

from __future__ import annotations

import errno
import fcntl
import inspect
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple

import pytest

from synchronizer.stores import memory
from synchronizer.stores.nats import connection as nats_connection

#: The calls of these modules are points, for all modules of the stores.
SYSTEM_CALLS: Final = {
    # Not fdatasync: after that has failed nothing goes on before the store is opened anew.
    "os": {"open", "close", "read", "write", "pread", "pwrite", "stat", "fstat", "lseek", "pipe"},
    "fcntl": {"flock", "fcntl"},
    "select": {"poll"},
}
#: Anything may come from anywhere: a bug of a driver, a signal handler of the program, too little memory.
ANYTHING: Final[Sequence[Callable[[], Exception]]] = (
    lambda: RuntimeError("injected"),
    lambda: ValueError("too many values to unpack"),
    MemoryError,
)
OF_THE_SYSTEM: Final[Sequence[Callable[[], Exception]]] = (
    *(partial(OSError, code, "injected") for code in (errno.EMFILE, errno.EIO, errno.ENOSPC, errno.ENOMEM)),
    *ANYTHING,
)


class Fault(NamedTuple):
    """The next call of ``point`` raises what ``error`` makes, instead of being made or ``afterwards``."""

    point: str
    error: Callable[[], Exception]
    afterwards: bool = False


class Points:
    """All points of a process. Threads share them."""

    def __init__(self) -> None:
        #: How often each point was reached.
        self.reached: Counter[str] = Counter()
        #: What may go wrong at the points that have errors of their own, before and after the call.
        self.errors: dict[str, tuple[Sequence[Callable[[], Exception]], Sequence[Callable[[], Exception]]]] = {}
        self.fired = threading.Event()
        self._lock = threading.Lock()
        self._armed: Fault | None = None
        self._countdown: int | None = None
        self._seen_at: str | None = None

    def arm(self, fault: Fault | None) -> None:
        with self._lock:
            self._armed = fault
            self.fired.clear()

    def fail_nth(self, number: int) -> None:
        """Of all calls from now on, this one is the next to fail, counted from 1."""
        with self._lock:
            self._countdown = number
            self.fired.clear()

    def faults_of(self, point: str) -> Sequence[Fault]:
        before, after = self.errors[point]
        return [Fault(point, error) for error in before] + [Fault(point, error, afterwards=True) for error in after]

    def call(self, point: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if point == "fcntl.flock" and args[1] == fcntl.LOCK_UN:
            return real(*args)  # nothing can go wrong with it
        fault = self._take(point)
        if fault is not None and not fault.afterwards:
            raise fault.error()
        result = real(*args, **kwargs)
        if fault is not None:
            raise fault.error()
        return result

    async def await_call(self, point: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same for what is awaited."""
        fault = self._take(point)
        if fault is not None and not fault.afterwards:
            raise fault.error()
        result = await real(*args, **kwargs)
        if fault is not None:
            raise fault.error()
        return result

    def _take(self, point: str) -> Fault | None:
        with self._lock:
            self.reached[point] += 1
            fault = None
            if self._armed is not None and self._armed.point == point:
                fault, self._armed = self._armed, None
            elif self._countdown is not None:
                self._countdown -= 1
                if self._countdown == 0:
                    self._countdown = None
                    before, _ = self.errors[point]
                    fault = Fault(point, before[self.reached[point] % len(before)])
            if fault is not None:
                self.fired.set()
            return fault


class _Module:
    """A module of which some calls are points."""

    def __init__(self, module: ModuleType, names: set[str], points: Points) -> None:
        self._module = module
        for name in names & set(dir(module)):
            point = f"{module.__name__}.{name}"
            # What is closed with an error is closed nevertheless.
            points.errors[point] = ((), OF_THE_SYSTEM) if name == "close" else (OF_THE_SYSTEM, ANYTHING[:1])
            setattr(self, name, partial(points.call, point, getattr(module, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def install(points: Points, backend: str, patch: pytest.MonkeyPatch) -> None:
    """Put the points under this backend, for what is opened from now on."""
    _install_system_calls(points, patch)
    _INSTALL[backend](points, patch)


def _install_system_calls(points: Points, patch: pytest.MonkeyPatch) -> None:
    for module_name, calls in SYSTEM_CALLS.items():
        proxy = _Module(sys.modules[module_name], calls, points)
        for name, module in list(sys.modules.items()):
            if name.startswith("synchronizer.stores.") and getattr(module, module_name, None) is not None:
                patch.setattr(module, module_name, proxy)


# ---------------------------------------------------------------------- SQLite


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("injected")
    error.sqlite_errorcode = code
    error.sqlite_errorname = "INJECTED"
    return error


def _install_sqlite(points: Points, patch: pytest.MonkeyPatch) -> None:
    codes = (
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_CANTOPEN,
    )
    before = (
        *(partial(sqlite_error, code) for code in codes),
        partial(sqlite3.ProgrammingError, "Cannot operate on a closed database."),
        partial(sqlite3.InterfaceError, "injected"),
        *ANYTHING,
    )

    def reached(point: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        points.errors.setdefault(point, (before, ANYTHING))
        return points.call(point, real, *args, **kwargs)

    class FaultyCursor(sqlite3.Cursor):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            self._reached(_kind_of(sql), super().execute, sql, *args)
            return self

        def fetchone(self) -> Any:
            return self._reached("fetchone", super().fetchone)

        def fetchall(self) -> Any:
            return self._reached("fetchall", super().fetchall)

        def _reached(self, point: str, real: Callable[..., Any], *args: Any) -> Any:
            try:
                return reached(f"sqlite3 {point}", real, *args)
            except BaseException:
                self.close()  # as SQLite does: a statement that failed is over
                raise

    class FaultyConnection(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            return FaultyCursor(self).execute(sql, *args)

        def rollback(self) -> None:
            reached("sqlite3 rollback", super().rollback)

    proxy = _Module(sqlite3, set(), points)
    proxy.connect = partial(reached, "sqlite3.connect", partial(sqlite3.connect, factory=FaultyConnection))  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("synchronizer.stores.") and getattr(module, "sqlite3", None) is not None:
            patch.setattr(module, "sqlite3", proxy)


def _kind_of(sql: str) -> str:
    words = sql.split()
    return " ".join(words[:2] if words[0] in ("PRAGMA", "BEGIN") else words[:1])


# ---------------------------------------------------------------------- PostgreSQL


def _install_postgresql(points: Points, patch: pytest.MonkeyPatch) -> None:
    import psycopg

    lost = (
        partial(psycopg.OperationalError, "the connection is lost"),
        partial(psycopg.InterfaceError, "injected"),
        partial(psycopg.InternalError, "injected"),
        *OF_THE_SYSTEM,
    )
    for owner, name in (
        (psycopg.Connection, "wait"),
        (psycopg.Connection, "cursor"),
        (psycopg.Cursor, "fetchall"),
        (psycopg.Cursor, "fetchone"),
        (psycopg.Cursor, "execute"),
    ):
        point = f"psycopg.{owner.__name__}.{name}"
        points.errors[point] = (lost, lost)
        patch.setattr(owner, name, _method(points, point, getattr(owner, name)))
    points.errors["psycopg.Connection.connect"] = (lost, lost)
    connect = psycopg.Connection.connect.__func__
    patch.setattr(
        psycopg.Connection,
        "connect",
        classmethod(
            lambda cls, *args, **kwargs: points.call("psycopg.Connection.connect", connect, cls, *args, **kwargs)
        ),
    )


def _method(points: Points, point: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return points.call(point, real, self, *args, **kwargs)

    return call


# ---------------------------------------------------------------------- NATS


def _install_nats(points: Points, patch: pytest.MonkeyPatch) -> None:
    """The points are in the event loop: what is raised there is raised below nats-py, or by it."""
    import nats.errors
    from nats.aio.client import Client
    from nats.aio.subscription import Subscription
    from nats.aio.transport import TcpTransport

    lost = (
        partial(ConnectionResetError, errno.ECONNRESET, "injected"),
        partial(nats.errors.Error, "nats: injected"),
        nats.errors.ConnectionClosedError,
        nats.errors.TimeoutError,
        nats.errors.UnexpectedEOF,
        *OF_THE_SYSTEM,
    )
    for owner, names in (
        (TcpTransport, ("connect", "write", "writelines", "read", "readline", "drain", "at_eof")),
        (Client, ("subscribe", "flush")),
        (Subscription, ("unsubscribe",)),
    ):
        for name in names:
            point = f"nats.{owner.__name__}.{name}"
            points.errors[point] = (lost, lost)
            real = getattr(owner, name)
            method = _coroutine if inspect.iscoroutinefunction(real) else _method
            patch.setattr(owner, name, method(points, point, real))
    point = "asyncio.open_connection"
    points.errors[point] = (OF_THE_SYSTEM, OF_THE_SYSTEM)
    opened = nats_connection.asyncio.open_connection

    async def open_connection(*args: Any, **kwargs: Any) -> Any:
        return await points.await_call(point, opened, *args, **kwargs)

    proxy = _Module(nats_connection.asyncio, set(), points)
    proxy.open_connection = open_connection  # type: ignore[attr-defined]
    patch.setattr(nats_connection, "asyncio", proxy)


def _coroutine(points: Points, point: str, real: Callable[..., Any]) -> Callable[..., Any]:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await points.await_call(point, real, self, *args, **kwargs)

    return call


# ---------------------------------------------------------------------- memory


def _install_memory(points: Points, patch: pytest.MonkeyPatch) -> None:
    """There is no driver: what may fail are the steps of the store itself, for want of memory or by a bug."""
    for name in ("segment", "conflict", "append", "wake"):
        point = f"memory {name}"
        # A step that is half done is no fault of a driver.
        points.errors[point] = (ANYTHING, ()) if name == "wake" else (ANYTHING, ANYTHING[:1])
        patch.setattr(memory.Memory, name, _method(points, point, getattr(memory.Memory, name)))


_INSTALL: Final[Mapping[str, Callable[[Points, pytest.MonkeyPatch], None]]] = {
    "sqlite": _install_sqlite,
    "postgresql": _install_postgresql,
    "nats": _install_nats,
    "memory": _install_memory,
}
