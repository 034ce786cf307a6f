"""What a store lives on: a file, or servers of its own with proxies before them; and what may befall these."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Literal, LiteralString, Protocol, Self, get_args

import psycopg

from tests.servers.fresh import fresh_store
from tests.servers.nats import NatsCluster, NatsServer
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import TcpProxy
from tests.waiting import PATIENCE_SECONDS

#: "url" is a store at an address that is given, whose servers are left alone.
StoreKind = Literal["sqlite", "postgresql", "nats", "nats-cluster", "url"]
#: Those that can be had without an address.
KINDS: Final[Sequence[StoreKind]] = get_args(StoreKind)[:-1]

#: What befalls those that come through a proxy.
NetworkFault = Literal["cut", "silence", "requests held back", "answers held back", "slow", "answers lost"]
#: What befalls the servers, and so everybody. "frozen" is SIGSTOP and SIGCONT, "killed" SIGKILL.
ServerFault = Literal[
    "restarted", "killed", "frozen", "leader killed", "leader frozen", "rolling restart", "all nodes killed"
]
Fault = NetworkFault | ServerFault
NETWORK_FAULTS: Final[Sequence[NetworkFault]] = get_args(NetworkFault)

SLOW_SECONDS: Final = 0.15
_ANSWERS_TO_LOSE: Final = 3
_LONG: Final = PATIENCE_SECONDS
#: Of a store at an address that says nothing else.
_DEFAULT_STREAM: Final = "readergroup"


class Host(Protocol):
    """A context manager: it takes everything down at the end."""

    kind: StoreKind
    #: The address of a store, straight to it.
    url: str
    #: What it can `suffer`.
    faults: Sequence[Fault]

    def fresh_store(self, folder: Path) -> AbstractContextManager[str]:
        """The address of a store that is empty; a file goes into the folder."""
        ...

    def through_proxy(self, url: str) -> str:
        """The same store, by a way that network faults befall."""
        ...

    def suffer(self, fault: Fault) -> AbstractContextManager[None]:
        """The fault is there inside the block, and is gone when the block is left."""
        ...

    def number_of_connections(self) -> int:
        """How many clients the servers have now."""
        ...

    def figures(self) -> Mapping[str, float]:
        """What may grow in the servers, by name; `ConnectionError` if they do not answer now."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


def kind_of(store: str) -> StoreKind:
    """``store`` is one of `KINDS`, or an address."""
    return next((kind for kind in KINDS if kind == store), "url")


def host(store: str, folder: Path) -> Host:
    """A host of this kind; a file goes into the folder. `ServerUnavailable` where there is no such server."""
    match kind_of(store):
        case "sqlite":
            return FileHost(folder)
        case "postgresql":
            return PostgresHost()
        case "nats":
            return NatsHost()
        case "nats-cluster":
            return ClusterHost()
        case "url":
            return GivenHost(store)


class _Unharmed:
    """Nothing befalls this store but what befalls the processes that use it."""

    faults: Sequence[Fault] = ()

    def through_proxy(self, url: str) -> str:
        return url

    def suffer(self, fault: Fault) -> AbstractContextManager[None]:
        raise AssertionError(f"this is not made to happen here: {fault}")

    def number_of_connections(self) -> int:
        return 0

    def figures(self) -> Mapping[str, float]:
        return {}


class FileHost(_Unharmed):
    kind: StoreKind = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.path = f"{folder}/chaos.db"
        self.url = f"sqlite:///{self.path}"

    def fresh_store(self, folder: Path) -> AbstractContextManager[str]:
        return nullcontext(f"sqlite:///{folder}/store.db")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class GivenHost(_Unharmed):
    """A store of its own at somebody's address."""

    kind: StoreKind = "url"

    def __init__(self, url: str) -> None:
        self._fresh = fresh_store(url)
        self._given = url

    def fresh_store(self, folder: Path) -> AbstractContextManager[str]:
        return fresh_store(self._given)

    def __enter__(self) -> Self:
        self.url = self._fresh.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._fresh.__exit__(None, None, None)


class ServerHost:
    """Servers, each with a proxy before it."""

    kind: StoreKind
    url: str

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._proxies: Sequence[TcpProxy] = ()
        #: That the faults of one node are about, on NATS: of the store that was made last.
        self.stream = _DEFAULT_STREAM
        self._running = ExitStack()

    @property
    def faults(self) -> Sequence[Fault]:
        return (*NETWORK_FAULTS, *self._server_faults())

    @contextmanager
    def fresh_store(self, folder: Path) -> Iterator[str]:
        with fresh_store(self.url) as url:
            self.stream = url.partition("stream=")[2]
            yield url

    def through_proxy(self, url: str) -> str:
        for port, proxy in zip(self._ports, self._proxies, strict=True):
            url = url.replace(f":{port}", f":{proxy.port}", 1)
        return url

    @contextmanager
    def suffer(self, fault: Fault) -> Iterator[None]:
        befall = self._network_faults().get(fault)
        if befall is None:
            with self._server_faults()[fault]():
                yield
            return
        for proxy in self._proxies:
            befall(proxy)
        try:
            yield
        finally:
            for proxy in self._proxies:
                proxy.heal()

    @contextmanager
    def losing_answers(self, count: int, *, to: bytes = b"") -> Iterator[None]:
        """The next answers are lost, in sum over all servers, to what is asked for through the proxy.

        With ``to`` only those to requests that hold these bytes.
        """
        lost = sum(proxy.lost_answers for proxy in self._proxies)
        for proxy in self._proxies:
            proxy.lose_answers(count, to=to or self._append_marker())
        try:
            yield
            assert sum(proxy.lost_answers for proxy in self._proxies) == lost + count
        finally:
            for proxy in self._proxies:
                proxy.heal()

    def _network_faults(self) -> Mapping[Fault, Callable[[TcpProxy], object]]:
        return {
            "cut": TcpProxy.cut,
            "silence": TcpProxy.silence,
            "requests held back": TcpProxy.cut_upstream,
            "answers held back": TcpProxy.cut_downstream,
            "slow": lambda proxy: proxy.delay(SLOW_SECONDS),
            "answers lost": lambda proxy: proxy.lose_answers(_ANSWERS_TO_LOSE, to=self._append_marker()),
        }

    def _append_marker(self) -> bytes:
        """What is in the request of every append."""
        raise NotImplementedError

    def _server_faults(self) -> Mapping[Fault, Callable[[], AbstractContextManager[None]]]:
        raise NotImplementedError

    def _servers(self) -> AbstractContextManager[object]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        with self._running as running:
            running.enter_context(self._servers())
            self._proxies = [running.enter_context(TcpProxy(port)) for port in self._ports]
            self._running = running.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()


class PostgresHost(ServerHost):
    kind: StoreKind = "postgresql"

    def __init__(self) -> None:
        self.server = PostgresServer()
        self.url = self.server.url
        super().__init__([self.server.port])

    def number_of_connections(self) -> int:
        return self._ask("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'") - 1

    def figures(self) -> Mapping[str, float]:
        try:
            return {
                "connections": self.number_of_connections(),
                "database, bytes": self._ask("SELECT pg_database_size(current_database())"),
            }
        except psycopg.OperationalError as error:
            raise ConnectionError("PostgreSQL does not answer now") from error

    def _ask(self, query: LiteralString) -> int:
        with psycopg.connect(self.server.url, autocommit=True, connect_timeout=5) as connection:
            row = connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def _append_marker(self) -> bytes:
        return b""

    def _servers(self) -> AbstractContextManager[object]:
        return self.server

    def _server_faults(self) -> Mapping[Fault, Callable[[], AbstractContextManager[None]]]:
        server = self.server
        return {
            "restarted": lambda: _gone(server.stop, server.start),
            "killed": lambda: _gone(server.kill, server.start),
            "frozen": lambda: _gone(server.pause, server.resume),
        }


class NatsHost(ServerHost):
    kind: StoreKind = "nats"

    def __init__(self) -> None:
        self.server = NatsServer(options={"durable": "always"})
        self.url = self.server.url
        super().__init__([self.server.port])

    def number_of_connections(self) -> int:
        return _connections(self.server)

    def figures(self) -> Mapping[str, float]:
        return _figures([self.server])

    def _append_marker(self) -> bytes:
        return b"HPUB "

    def _servers(self) -> AbstractContextManager[object]:
        return self.server

    def _server_faults(self) -> Mapping[Fault, Callable[[], AbstractContextManager[None]]]:
        server = self.server
        return {
            "restarted": lambda: _gone(server.shut_down, server.start),
            "killed": lambda: _gone(server.kill, server.start),
            "frozen": lambda: _gone(server.pause, server.resume),
        }


class ClusterHost(ServerHost):
    """Three nodes. Where it matters which, a fault befalls the one that leads the stream."""

    kind: StoreKind = "nats-cluster"

    def __init__(self) -> None:
        self.cluster = NatsCluster(options={"durable": "always"}, jetstream=["sync_interval: always"])
        self.url = self.cluster.url
        self._next = 0
        super().__init__([node.port for node in self.cluster.nodes])

    def number_of_connections(self) -> int:
        return sum(map(_connections, self.cluster.nodes))

    def figures(self) -> Mapping[str, float]:
        return _figures(self.cluster.nodes)

    def _append_marker(self) -> bytes:
        return b"HPUB "

    def _servers(self) -> AbstractContextManager[object]:
        return self.cluster

    def _server_faults(self) -> Mapping[Fault, Callable[[], AbstractContextManager[None]]]:
        return {
            "restarted": lambda: self._node(NatsServer.shut_down),
            "killed": lambda: self._node(NatsServer.kill),
            "leader killed": self._leader_killed,
            "leader frozen": self._leader_frozen,
            "rolling restart": lambda: _gone(self.cluster.rolling_restart, lambda: None),
            "all nodes killed": lambda: _gone(self.cluster.kill, self.cluster.restart),
        }

    @contextmanager
    def _node(self, end: Callable[[NatsServer], object]) -> Iterator[None]:
        """The nodes in turn."""
        node = self.cluster.nodes[self._next % len(self.cluster.nodes)]
        self._next += 1
        end(node)
        try:
            yield
        finally:
            node.start()

    @contextmanager
    def _leader_killed(self) -> Iterator[None]:
        leader = self.cluster.kill_leader_of(self.stream)
        try:
            yield
        finally:
            leader.start()

    @contextmanager
    def _leader_frozen(self) -> Iterator[None]:
        leader = self.cluster.leader_of(self.stream)
        leader.pause()
        try:
            yield
        finally:
            leader.resume()


@contextmanager
def _gone(take: Callable[[], object], bring_back: Callable[[], object]) -> Iterator[None]:
    take()
    try:
        yield
    finally:
        bring_back()


def _connections(node: NatsServer) -> int:
    number = node.monitoring("connz")["num_connections"]
    assert isinstance(number, int)
    return number


def _figures(nodes: Sequence[NatsServer]) -> Mapping[str, float]:
    try:
        stored = [node.monitoring("jsz") for node in nodes]
        connections = sum(map(_connections, nodes))
    except OSError as error:
        raise ConnectionError("NATS does not answer now") from error
    # Of a node that has all: one that was down may still catch up.
    return {
        "connections": connections,
        **{f"stream, {what}": max(int(str(node[what])) for node in stored) for what in ("bytes", "messages")},
    }


def left_over(host: Host, seconds: float = _LONG) -> int:
    """How many connections the servers still have, when those that had them were given some time to end."""
    deadline = time.monotonic() + seconds
    while (left := host.number_of_connections()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def open_sockets() -> int:
    """How many this process has."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        except FileNotFoundError:
            continue  # that of the folder itself
    return found
