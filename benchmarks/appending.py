"""Durable appends of several processes at once, beside Valkey, PostgreSQL, ZooKeeper and etcd."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, NamedTuple

from synchronizer import open_store
from tests.servers.postgres import PostgresServer
from tests.servers.unavailable import ServerUnavailable

from . import etcd, postgres_peers, valkey, zookeeper
from .etcd import NoEtcd
from .figure import Figure, Result, Skipped
from .measuring import SPAWN, alternate, folder, percentile, process
from .stores import PostgresStore, SqliteStore, Store
from .valkey import NoValkey
from .zookeeper import NoZooKeeper

PROCESSES: Final = (1, 2, 8)
SECONDS: Final = 2.0
ROUNDS: Final = 3
DATA: Final = bytes(48)

#: Makes an append; what opens it is a context manager, and runs in the process that appends.
Append = Callable[[], object]


class Together(NamedTuple):
    """What the processes of one round did."""

    a_second: float
    slowest_share: float  # of the mean of all
    latencies: list[float]  # of all processes, in seconds


@dataclass(frozen=True, eq=False)
class Peer:
    """What makes an append durable before it answers: the store, or another server."""

    name: str
    open_append: Callable[..., AbstractContextManager[Append]]  # in each process, with its number and ``where``
    where: object
    processes: Sequence[int] = PROCESSES


def append_together(store: Store) -> Iterator[Result]:
    """1, 2 and 8 processes that append 48 bytes each, durably, to segments of their own; peers by turns with them."""
    with store.fresh() as url, ExitStack() as opened:
        peers = []
        for name, open_peer in _PEERS.items():
            try:
                peers.append(opened.enter_context(open_peer(store, url, opened.enter_context(folder()))))
            except (NoEtcd, NoValkey, NoZooKeeper, ServerUnavailable) as error:
                yield Skipped(f"durable appends compared with {name}", str(error))
        ours = Peer("", _on_store, url)
        runs = {
            (peer, processes): partial(_together, processes, peer.open_append, peer.where)
            for processes in PROCESSES
            for peer in (ours, *peers)
            if processes in peer.processes
        }
        rounds = dict(zip(runs, alternate(ROUNDS, *runs.values()), strict=True))
    for (peer, processes), rates in rounds.items():
        together = rounds[ours, processes]
        if peer is ours:
            yield from _figures(store, processes, together, rounds[ours, 1])
            continue
        yield Figure(
            what=f"durable appends of 48 bytes, {_written(processes)}, compared with {peer.name}",
            value=_ratio(together, rates),
            unit="×",
            target=1 if isinstance(store, SqliteStore) and processes == PROCESSES[-1] else None,
            beside=f"{_a_second(together):,.0f}/s, the other {_a_second(rates):,.0f}/s",
        )


def _figures(store: Store, processes: int, ours: Sequence[Together], alone: Sequence[Together]) -> Iterator[Figure]:
    latencies = [latency for each in ours for latency in each.latencies]
    yield Figure(
        what=f"durable appends of 48 bytes, {_written(processes)}",
        value=_a_second(ours),
        unit="/s",
        beside=f"median {median(latencies) * 1e3:.2f} ms, p99 {percentile(latencies, 99) * 1e3:.1f} ms; "
        f"the slowest {min(each.slowest_share for each in ours):.0%} of the mean",
    )
    if processes > 1:
        yield Figure(
            what=f"durable appends of 48 bytes, {_written(processes)} compared with one",
            value=_ratio(ours, alone),
            unit="×",
            target=2 if isinstance(store, SqliteStore) and processes == PROCESSES[-1] else None,
        )


def _written(processes: int) -> str:
    return f"{processes} process{'es' if processes > 1 else ''}"


def _a_second(rounds: Sequence[Together]) -> float:
    return median(each.a_second for each in rounds)


def _ratio(ours: Sequence[Together], theirs: Sequence[Together]) -> float:
    """The median of the ratios of each round."""
    return median(one.a_second / other.a_second for one, other in zip(ours, theirs, strict=True))


def _together(processes: int, open_append: Callable[..., AbstractContextManager[Append]], *where: Any) -> Together:
    start, results = SPAWN.Barrier(processes), SPAWN.Queue()
    with ExitStack() as running:
        for number in range(processes):
            running.enter_context(process(_appender, open_append, where, number, start, results))
        counted: list[list[float]] = [results.get(timeout=60) for _ in range(processes)]
    counts = [len(each) for each in counted]
    return Together(sum(counts) / SECONDS, min(counts) / mean(counts), [each for one in counted for each in one])


def _appender(
    open_append: Callable[..., AbstractContextManager[Append]],
    where: tuple[Any, ...],
    number: int,
    start: Barrier,
    results: Queue[Any],
) -> None:
    latencies: list[float] = []
    with open_append(number, *where) as append:
        for _ in range(20):
            append()
        start.wait(60)
        end = (begin := time.monotonic()) + SECONDS
        while begin < end:
            append()
            latencies.append((now := time.monotonic()) - begin)
            begin = now
        results.put(latencies)


@contextmanager
def _on_store(number: int, url: str) -> Iterator[Append]:
    with open_store(url) as store:
        segment = f"bench/{number}"
        store.create(segment)
        yield lambda: store.append(segment, DATA)


@contextmanager
def _on_valkey(number: int, connection: dict[str, Any]) -> Iterator[Append]:
    import redis

    with redis.Redis(**connection) as client:
        yield lambda: client.xadd(f"bench-{number}", {"data": DATA})


@contextmanager
def _on_postgres(number: int, url: str) -> Iterator[Append]:
    with postgres_peers.rows(url, number) as insert:
        yield lambda: insert(DATA)


@contextmanager
def _on_zookeeper(number: int, hosts: str) -> Iterator[Append]:
    from kazoo.client import KazooClient

    client = KazooClient(hosts=hosts)
    client.start(timeout=60)
    try:
        client.ensure_path(f"/bench-{number}")
        yield lambda: client.create(f"/bench-{number}/n", DATA, sequence=True)
    finally:
        client.stop()
        client.close()


@contextmanager
def _valkey(store: Store, url: str, place: Path) -> Iterator[Peer]:
    with valkey.server(place, "always") as client:
        options = client.connection_pool.connection_kwargs
        where = {name: options[name] for name in ("host", "port") if name in options}
        yield Peer("XADD on Valkey, appendfsync always", _on_valkey, where)


@contextmanager
def _zookeeper(store: Store, url: str, place: Path) -> Iterator[Peer]:
    with zookeeper.server(place) as client:
        host, port = client.hosts[0]
        yield Peer("create of a node of ZooKeeper", _on_zookeeper, f"{host}:{port}", processes=(1, PROCESSES[-1]))


@contextmanager
def _on_etcd(number: int, port: int) -> Iterator[Append]:
    with etcd.puts(port, f"bench-{number}") as put:
        yield lambda: put(DATA)


@contextmanager
def _etcd(store: Store, url: str, place: Path) -> Iterator[Peer]:
    with etcd.server(place) as port:
        yield Peer("put to etcd by HTTP", _on_etcd, port, processes=(1, PROCESSES[-1]))


@contextmanager
def _postgres(store: Store, url: str, place: Path) -> Iterator[Peer]:
    """A table on the server of the store; where the store has none, on one for this benchmark."""
    with ExitStack() as running:
        if not isinstance(store, PostgresStore):
            url = running.enter_context(PostgresServer(on_disk=True)).url
        yield Peer("INSERT into PostgreSQL", _on_postgres, url, processes=(1, PROCESSES[-1]))


#: In the order of the rows. Each is a server on the same disk, which syncs before it answers.
_PEERS: Final[Mapping[str, Callable[[Store, str, Path], AbstractContextManager[Peer]]]] = {
    "Valkey": _valkey,
    "PostgreSQL": _postgres,
    "ZooKeeper": _zookeeper,
    "etcd": _etcd,
}
