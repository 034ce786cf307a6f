"""A PgBouncer of the tests' own, before a PostgreSQL server of theirs. It comes from the machine, if it has one."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.servers.guard import Guard
from tests.servers.ports import free_port
from tests.servers.unavailable import ServerUnavailable

_START_SECONDS = 120.0


class PgBouncer:
    """Runs from the first moment to `close`, in its transaction mode."""

    def __init__(self, server_url: str) -> None:
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if program is None:
            raise ServerUnavailable("there is no PgBouncer here: install it as the system does")
        self._server_url = urlsplit(server_url)
        self._port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="readergroup-pgbouncer-"))
        self._log = self._folder / "pgbouncer.log"
        settings = self._folder / "pgbouncer.ini"
        settings.write_text(
            # "auth_type = any" logs everybody in as the user that the database's line names.
            f"[databases]\n* = host=127.0.0.1 port={self._server_url.port} user=postgres\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self._port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = transaction\ndefault_pool_size = 4\n"
        )
        # PgBouncer refuses to run as root, as the server does.
        user = {"user": pwd.getpwnam("nobody").pw_uid} if os.geteuid() == 0 else {}
        os.chmod(self._folder, 0o755)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [program, settings], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **user
            )
        self._guard = Guard(self._process.pid)
        self._wait_until_it_listens()

    @property
    def url(self) -> str:
        """The address of the server's store, by way of the pooler."""
        query = f"{self._server_url.query}&pooler=transaction"
        return self._server_url._replace(netloc=f"postgres@127.0.0.1:{self._port}", query=query).geturl()

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._guard.dismiss()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> PgBouncer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            time.sleep(0.01)
        log = self._log.read_text(errors="replace")
        self.close()
        raise ServerUnavailable(f"PgBouncer does not start: {log[-300:]}")
