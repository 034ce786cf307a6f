"""``python -m tests.chaos.outbox``: applications write events in transactions, and die; so do relays and connections.

The application's own table says what was committed, and in which order: SQLite by its ids, because it has one writer at
a time, and PostgreSQL by the times of the commits, which this server keeps. Each of these events has to be in the
stream once, those of a key in this order, and no other one.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import sqlite3
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import psycopg

import readergroup as rg
from tests.chaos.connecting import connected
from tests.servers.fresh import fresh_database
from tests.servers.postgres import PostgresServer
from tests.waiting import PATIENCE_SECONDS, until

STREAM: Final = "shop/orders"
# Forked by a process that has imported everything and opened nothing.
_context: Final = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "readergroup.outbox.outbox",
        "synchronizer.recipes.coordination.election",
        "synchronizer.stores.postgres.store",
        "synchronizer.stores.sqlite.store",
        "tests.servers.postgres",
    ]
)
DATABASES: Final = ("sqlite", "postgresql")
#: The table of the application, and the statement that tells the order of the commits.
_TABLES: Final = {
    "sqlite": "CREATE TABLE written (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT, event TEXT)",
    "postgresql": "CREATE TABLE written (id bigserial PRIMARY KEY, key text, event text)",
}
_COMMITTED: Final = {
    "sqlite": "SELECT key, event FROM written ORDER BY id",
    "postgresql": "SELECT key, event FROM written ORDER BY pg_xact_commit_timestamp(xmin), id",
}
_KEYS: Final = ("ann", "bob", "cid", "dee", "eve", None)
_LEASE_SECONDS: Final = 1.0
_WRITERS: Final = 3
_RELAYS: Final = 2
_HAPPENINGS: Final = 12
_MOST_SEGMENTS: Final = 6


@dataclass
class Report:
    """What came of a schedule."""

    seed: int
    database: str
    store: str
    seconds: float = 0.0
    committed: int = 0
    rolled_back: int = 0
    #: What was done to whom, as "kill relay".
    happened: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        happened = ", ".join(f"{count} × {what}" for what, count in sorted(self.happened.items()))
        outcome = "; ".join(self.violations) or "each event once, in order"
        return (
            f"seed {self.seed} on {self.database}, stream in {self.store}: {self.committed} events committed, "
            f"{self.rolled_back} transactions given up; {happened}; {self.seconds:.1f} s: {outcome}"
        )


# ---------------------------------------------------------------------- the processes


def connect_to(database: str, place: str) -> Any:
    if database == "sqlite":
        connection = sqlite3.connect(place, timeout=30)
        connection.execute("PRAGMA journal_mode = WAL")
        return connection
    return psycopg.connect(place, connect_timeout=60)  # longer than a busy machine takes to accept


def write(number: int, seed: int, database: str, place: str, url: str, given_up: Any) -> None:
    """Be an application: one transaction after the other, until SIGTERM."""
    rng = random.Random(seed)
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    insert = "INSERT INTO written (key, event) VALUES (?, ?)"
    insert = insert if database == "sqlite" else insert.replace("?", "%s")
    with connected(url, seconds=PATIENCE_SECONDS) as client:
        outbox = rg.Outbox(client, lambda: connect_to(database, place))
        names = (f"{number}-{each}" for each in itertools.count())
        while not ending:
            with suppress(sqlite3.OperationalError, psycopg.OperationalError):  # such as a lost connection
                with closing(connect_to(database, place)) as connection:
                    for _ in range(rng.randrange(1, 30)):
                        if ending:
                            break
                        _transact(rng, connection, outbox, insert, names, given_up)


def _transact(
    rng: random.Random, connection: Any, outbox: rg.Outbox[bytes], insert: str, names: Iterator[str], given_up: Any
) -> None:
    # In one order, so that no two transactions wait for each other.
    for key in sorted(rng.choices(_KEYS, k=rng.randrange(1, 5)), key=str):
        event = next(names)
        outbox.write(connection, STREAM, event.encode(), routing_key=key)
        connection.cursor().execute(insert, (key, event))
        if rng.random() < 0.1:
            time.sleep(rng.uniform(0, 0.05))
    if rng.random() < 0.2:
        connection.rollback()
        given_up.value += 1
    else:
        connection.commit()


def relay(database: str, place: str, url: str) -> None:
    """Be a process with a relay, until it is killed."""
    with connected(url, seconds=PATIENCE_SECONDS) as client:
        outbox = rg.Outbox(client, lambda: connect_to(database, place))
        while True:
            with suppress(rg.StoreUnavailableError):
                with outbox.relay(lease_seconds=_LEASE_SECONDS):
                    signal.pause()


# ---------------------------------------------------------------------- the schedule


class Play:
    """A schedule while it runs."""

    def __init__(self, report: Report, place: str, url: str) -> None:
        self.report = report
        self._rng = random.Random(report.seed)
        self._place = place
        self._url = url
        self._numbers = itertools.count()
        self._given_up: list[Any] = []  # a counter of each writer, without a lock that it could die with
        self.writers = [self._start_writer() for _ in range(_WRITERS)]
        self.relays = [self._start_relay() for _ in range(_RELAYS)]
        self._stopped: set[BaseProcess] = set()
        self._lock = threading.Lock()  # guards `_stopped`: only a process that is there is sent a signal

    def _start(self, work: Callable[..., None], *arguments: object) -> BaseProcess:
        process = _context.Process(target=work, args=arguments, daemon=True)
        process.start()
        return process

    def _start_writer(self) -> BaseProcess:
        number = next(self._numbers)
        given_up = _context.Value("i", 0, lock=False)
        self._given_up.append(given_up)
        arguments = self.report.database, self._place, self._url, given_up
        return self._start(write, number, 1000 * self.report.seed + number, *arguments)

    def _start_relay(self) -> BaseProcess:
        return self._start(relay, self.report.database, self._place, self._url)

    def run(self, client: rg.Client, happenings: int) -> None:
        """Let things happen, then let everything that was committed come into the stream."""
        possible = [self._kill_writer, self._kill_relay, self._kill_relay, self._stop_relay, self._scale]
        if self.report.database == "postgresql":
            possible += [self._cut_a_connection, self._cut_a_connection]
        for _ in range(happenings):
            goal = self._committed() + self._rng.randrange(1, 40)
            until(lambda: self._committed() >= goal, "more commits")  # noqa: B023
            self._rng.choice(possible)(client)
        for writer in self.writers:
            os.kill(writer.pid or 0, signal.SIGTERM)
        for writer in self.writers:
            writer.join(PATIENCE_SECONDS)
            if writer.exitcode not in (0, -signal.SIGTERM):  # the latter before it has begun
                self.report.violations.append(f"an application ended with {writer.exitcode}")
        for process in list(self._stopped):
            self._resume(process)
        outbox = rg.Outbox(client, lambda: connect_to(self.report.database, self._place))
        until(lambda: outbox.lag().events == 0, "an empty outbox")
        self.report.rolled_back = sum(each.value for each in self._given_up)

    def _committed(self) -> int:
        with closing(connect_to(self.report.database, self._place)) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT count(*) FROM written")
            return int(cursor.fetchone()[0])

    def _kill(self, processes: list[BaseProcess], start: Callable[[], BaseProcess]) -> None:
        process = self._rng.choice(processes)
        with self._lock:
            self._stopped.discard(process)
            process.kill()
        process.join()
        processes[processes.index(process)] = start()

    def _kill_writer(self, _: rg.Client) -> None:
        self.report.happened["kill application"] += 1
        self._kill(self.writers, self._start_writer)

    def _kill_relay(self, _: rg.Client) -> None:
        self.report.happened["kill relay"] += 1
        self._kill(self.relays, self._start_relay)

    def _stop_relay(self, _: rg.Client) -> None:
        """Stop it for longer than its lease, so that another takes over."""
        process = self._rng.choice(self.relays)
        if process not in self._stopped:
            self.report.happened["stop relay"] += 1
            os.kill(process.pid or 0, signal.SIGSTOP)
            self._stopped.add(process)
            # It may hold the lock of a file that everything else waits for.
            timer = threading.Timer(self._rng.uniform(0.5, 2.5) * _LEASE_SECONDS, self._resume, [process])
            timer.daemon = True
            timer.start()

    def _resume(self, process: BaseProcess) -> None:
        with self._lock:
            if process in self._stopped:
                self._stopped.discard(process)
                os.kill(process.pid or 0, signal.SIGCONT)

    def _scale(self, client: rg.Client) -> None:
        self.report.happened["scale"] += 1
        current = client.streams.fetch_state(STREAM).current
        if len(current) < _MOST_SEGMENTS and self._rng.random() < 0.6:
            client.streams.scale(STREAM, split=[self._rng.choice(current)])
        elif len(current) > 1:
            client.streams.scale(STREAM, merge=current[:2])

    def _cut_a_connection(self, _: rg.Client) -> None:
        with suppress(psycopg.OperationalError), psycopg.connect(self._place, autocommit=True) as connection:
            pids = [
                pid
                for (pid,) in connection.execute(
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
                    "AND backend_type = 'client backend' ORDER BY pid"
                )
            ]
            for pid in self._rng.sample(pids, min(2, len(pids))):
                self.report.happened["cut connection"] += 1
                connection.execute("SELECT pg_terminate_backend(%s)", (pid,))

    def close(self) -> None:
        with self._lock:
            self._stopped.clear()
        for process in (*self.writers, *self.relays):
            process.kill()
            process.join()


def check(committed: Sequence[tuple[str | None, str]], stored: Sequence[tuple[str | None, str]]) -> list[str]:
    """Return what is wrong with the stored events. Both are keys and events, in order."""
    wrong = []
    counts = Counter(event for _, event in stored)
    known = {event for _, event in committed}
    if lost := known - set(counts):
        wrong.append(f"{len(lost)} committed events are not in the stream, such as {min(lost)}")
    if extra := set(counts) - known:
        wrong.append(f"{len(extra)} events in the stream were never committed, such as {min(extra)}")
    if twice := [event for event, count in counts.items() if count > 1]:
        wrong.append(f"{len(twice)} events are in the stream more than once, such as {min(twice)}")
    in_stream = _by_key(stored)
    for key, events in _by_key(committed).items():
        if key is not None and not wrong and in_stream[key] != events:
            place = next(n for n, pair in enumerate(zip(events, in_stream[key], strict=True)) if len(set(pair)) > 1)
            wrong.append(f"events of {key} are out of order from {events[place]} on")
    return wrong


def _by_key(events: Iterable[tuple[str | None, str]]) -> Mapping[str | None, list[str]]:
    found = defaultdict(list)
    for key, event in events:
        found[key].append(event)
    return found


def play(seed: int, database: str, place: str, url: str, happenings: int) -> Report:
    """Play one schedule, on an empty database and an empty store."""
    began = time.monotonic()
    report = Report(seed, database, url.partition(":")[0])
    with rg.connect(url) as client, closing(connect_to(database, place)) as connection:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        connection.cursor().execute(_TABLES[database])
        connection.commit()
        rg.Outbox(client, lambda: connect_to(database, place)).create_table()
        with closing(Play(report, place, url)) as playing:
            playing.run(client, happenings)
        with closing(connect_to(database, place)) as after:
            cursor = after.cursor()
            cursor.execute(_COMMITTED[database])
            committed = [(key, event) for key, event in cursor.fetchall()]
        ranges = client.batch.segment_ranges(STREAM)
        stored = [(event.routing_key, event.data.decode()) for part in ranges for event in client.batch.read(part)]
        report.violations += check(committed, stored)
        report.committed = len(committed)
    report.seconds = time.monotonic() - began
    return report


def schedules(
    seeds: Iterable[int],
    databases: Sequence[str],
    folder: Path,
    server: Callable[[], str],
    *,
    happenings: int = _HAPPENINGS,
) -> Iterator[Report]:
    """Play the schedules, on the databases in turn. On PostgreSQL, every other stream is in the same database."""
    for seed, database in zip(seeds, itertools.cycle(databases), strict=False):
        own = folder / f"outbox-{seed}"
        own.mkdir(parents=True)
        file = f"sqlite:///{own}/store.db"
        if database == "sqlite":
            yield play(seed, database, f"{own}/app.db", file, happenings)
        else:
            with fresh_database(server()) as place:
                url = place if seed // len(databases) % 2 else file
                yield play(seed, database, place, url, happenings)


def summary(reports: Sequence[Report]) -> str:
    happened: Counter[str] = sum((report.happened for report in reports), Counter())
    failed = sum(bool(report.violations) for report in reports)
    return (
        f"{len(reports)} schedules, {failed} failed: {sum(report.committed for report in reports)} events committed, "
        f"{sum(report.rolled_back for report in reports)} transactions given up, "
        + ", ".join(f"{count} × {what}" for what, count in sorted(happened.items()))
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.outbox", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, default=20, help="how many, the databases in turn")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the seed of the first")
    parser.add_argument("--database", action="append", choices=DATABASES, help="all without this option")
    parser.add_argument("--folder", type=Path, help="where files go, instead of a new folder")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-outbox-"))
    reports = []
    seeds = range(arguments.first, arguments.first + arguments.schedules)
    with ExitStack() as running:

        @cache
        def server() -> str:
            return running.enter_context(PostgresServer()).url

        for report in schedules(seeds, arguments.database or DATABASES, folder, server):
            reports.append(report)
            print(report, flush=True)
    print(summary(reports))
    return any(report.violations for report in reports)


if __name__ == "__main__":
    raise SystemExit(main())
