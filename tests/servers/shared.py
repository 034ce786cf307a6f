"""One server of a kind for all processes of a test run: the first that needs it starts it, and stops it at the end."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from tests.servers.unavailable import ServerUnavailable

_UNAVAILABLE = "unavailable: "


class Server(Protocol):
    @property
    def url(self) -> str: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *exc_info: object) -> None: ...


class SharedServers:
    """The processes find each other's servers in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._urls: dict[str, str] = {}
        self._borrowed = ExitStack()
        self._own = ExitStack()

    def url(self, name: str, start: Callable[[], Server]) -> str:
        """The address of the server called ``name``, which runs until `close`. It may be unavailable."""
        if name not in self._urls:
            with ExitStack() as borrowing:
                # Its owner stops the server when nobody has this lock any more, also if somebody was killed.
                users = borrowing.enter_context(_locked(self._folder / f"{name}.users", fcntl.LOCK_SH))
                with _locked(self._folder / f"{name}.start", fcntl.LOCK_EX):
                    found = self._found(name)
                    self._urls[name] = found or self._started(name, start)
                if found:
                    self._borrowed.push(borrowing.pop_all())
                else:
                    self._own.push(borrowing.pop_all())
                    self._own.callback(fcntl.flock, users, fcntl.LOCK_EX)
        return self._urls[name]

    def close(self) -> None:
        """Let go of all servers, and stop those that this process started when the others have let go of them."""
        self._borrowed.close()  # first: two that wait for each other would wait for ever
        self._own.close()

    def _found(self, name: str) -> str:
        """What another process has noted; nothing if none has."""
        noted = self._folder / name
        text = noted.read_text() if noted.exists() else ""
        if text.startswith(_UNAVAILABLE):
            raise ServerUnavailable(text.removeprefix(_UNAVAILABLE))
        return text

    def _started(self, name: str, start: Callable[[], Server]) -> str:
        noted = self._folder / name
        try:
            server = start()
            server.__enter__()
        except ServerUnavailable as reason:
            noted.write_text(f"{_UNAVAILABLE}{reason}")
            raise
        self._own.push(server)
        self._own.callback(noted.unlink)
        noted.write_text(server.url)
        return server.url


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    lock = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, how)
        yield lock
    finally:
        os.close(lock)
