"""``python -m tests.chaos --sink``: processes that store events by a `SqlSink`, killed and stopped at random moments.

Their connections are ended by the server, or break before or after a commit, or another process holds up the database.
At the end each event has exactly one effect, and the effects of each key are in the order of writing.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

import psycopg

import readergroup as rg
from readergroup.sinks import SqlSink
from tests.servers.fresh import fresh_database
from tests.servers.postgres import PostgresServer

Kind = Literal["sqlite", "postgresql"]
KINDS: Final[Sequence[Kind]] = ("sqlite", "postgresql")
#: How a process reads and stores.
MODES: Final = ("events", "concurrent", "batches", "by hand", "batches by hand", "async")

STREAM: Final = "shop/orders"
GROUP: Final = "billing"
_KEYS: Final = 6
_READER_TIMEOUT_SECONDS: Final = 1.0
#: Longer than a lease, some until others have read everything.
_STOPPED_SECONDS: Final = ((1.2, 2.2), (1.2, 2.2), (3.0, 4.0))
_FAULTS: Final = (6, 14)
_PEACE_SECONDS: Final = (0.05, 0.4)
_PROCESSES: Final = 3
#: A process lives no longer. A schedule goes on as long as handlers are called.
_LONGEST_SECONDS: Final = 1200.0
_PATIENCE_SECONDS: Final = 120.0
#: How often a connection breaks before or after its commit, and how often a handler fails.
_BROKEN_COMMITS: Final = 0.02
_FAILURES: Final = 0.03

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.chaos.sinks", "readergroup.client", "readergroup.scaling.pool"])


# ---------------------------------------------------------------------- the database, and how it fails

#: Processes die here, and machines do not.
_NO_SYNC: Final = {"options": "-c synchronous_commit=off"}


class Application(NamedTuple):
    """Where the effects are."""

    kind: Kind
    #: A path or an address.
    where: str

    def connect(self, **options: Any) -> Any:
        if self.kind == "sqlite":
            connection = sqlite3.connect(self.where, timeout=2.0, **options)
            connection.execute("PRAGMA synchronous=OFF")
            return connection
        return psycopg.connect(self.where, **_NO_SYNC, **options)

    def execute(self, sql: str) -> list[Any]:
        with closing(self.connect()) as connection:
            cursor = connection.execute(sql)
            rows = cursor.fetchall() if cursor.description else []
            connection.commit()
            return rows


class _Breaking:
    """Mixed into a connection: its commit fails at times, with or without its effect."""

    rng = random.Random()

    def commit(self) -> Any:
        chance = self.rng.random()
        if chance > _BROKEN_COMMITS:
            return super().commit()  # type: ignore[misc]
        if chance < _BROKEN_COMMITS / 2:
            super().commit()  # type: ignore[misc]
        self.breaks()
        return None

    def breaks(self) -> None:
        raise NotImplementedError


class _BreakingSqlite(_Breaking, sqlite3.Connection):
    def breaks(self) -> None:
        error = sqlite3.OperationalError("the answer was lost")
        error.sqlite_errorcode = 5  # type: ignore[misc]
        raise error


class _BreakingPsycopg(_Breaking, psycopg.Connection[Any]):
    def breaks(self) -> None:
        self.close()
        raise psycopg.OperationalError("the answer was lost")


class _BreakingAsyncPsycopg(psycopg.AsyncConnection[Any]):
    rng = random.Random()

    async def commit(self) -> None:
        chance = self.rng.random()
        if chance > _BROKEN_COMMITS:
            return await super().commit()
        if chance < _BROKEN_COMMITS / 2:
            await super().commit()
        await self.close()
        raise psycopg.OperationalError("the answer was lost")


# ---------------------------------------------------------------------- a process


@dataclass(frozen=True)
class Life:
    name: str
    mode: str
    seed: int
    url: str
    application: Application
    folder: Path


class _Handler:
    """Notes each call in a file, has its effect, and fails at times."""

    def __init__(self, life: Life, rng: random.Random) -> None:
        self._rng = rng
        self._is_sqlite = life.application.kind == "sqlite"
        self._diary = (life.folder / f"{life.name}.calls").open("a", buffering=1)
        self._pause = rng.choice((0.0, 0.0, 0.001, 0.003))

    def event(self, event: rg.Event[bytes], connection: Any) -> None:
        connection.execute(*self._statement(event))
        self._work()

    def batch(self, batch: rg.EventBatch[bytes], connection: Any) -> None:
        for event in batch:
            connection.execute(*self._statement(event))
        self._work()

    async def event_async(self, event: rg.Event[bytes], connection: Any) -> None:
        await connection.execute(*self._statement(event))
        await asyncio.sleep(self._pause)
        self._fail()

    def _statement(self, event: rg.Event[bytes]) -> tuple[str, tuple[Any, ...]]:
        key, number = event.raw.decode().split(":")
        self._diary.write(f"{event.pointer}\n")
        places = "?, ?, ?" if self._is_sqlite else "%s, %s, %s"
        return f"INSERT INTO effects (key, number, pointer) VALUES ({places})", (key, int(number), str(event.pointer))

    def _work(self) -> None:
        if self._pause:
            threading.Event().wait(self._pause)
        self._fail()

    def _fail(self) -> None:
        if self._rng.random() < _FAILURES:
            raise ZeroDivisionError("after the effect")


def live(life: Life) -> None:
    """Store events until the end of the data."""
    signal.alarm(int(_LONGEST_SECONDS))
    logging.basicConfig(filename=life.folder / f"{life.name}.log", level=logging.INFO, force=True)
    rng = random.Random(life.seed)
    _Breaking.rng = _BreakingAsyncPsycopg.rng = random.Random(life.seed + 1)
    try:
        with rg.connect(life.url) as client:
            group = client.groups.get(GROUP)
            handler = _Handler(life, rng)
            stop = _Stop()
            while not stop.asked and not group.synchronizer.fetch_updates().end_of_data:
                with suppress(rg.ReaderNotInGroupError):
                    _store(life, group, handler, rng, stop)
    except BaseException:
        (life.folder / f"{life.name}.error").write_text(traceback.format_exc())
        raise


class _Stop:
    """SIGTERM asks a process to leave."""

    def __init__(self) -> None:
        self.asked = False
        self.reader: rg.Reader[Any] | None = None
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        self.asked = True
        if self.reader is not None:
            self.reader.stop()


def _store(life: Life, group: rg.ReaderGroup, handler: _Handler, rng: random.Random, stop: _Stop) -> None:
    application = life.application
    factory: Any = _BreakingSqlite if application.kind == "sqlite" else None
    connect: Any = partial(application.connect, factory=factory) if factory else partial(
        _BreakingPsycopg.connect, application.where, **_NO_SYNC
    )  # fmt: skip
    retry = rg.RetryPolicy(attempts=50, first_delay_seconds=0.001, max_delay_seconds=0.01)
    if life.mode == "async":

        async def connect_async() -> Any:
            return await _BreakingAsyncPsycopg.connect(application.where, **_NO_SYNC)

        sink = SqlSink(connect_async, idle_timeout_seconds=1.0)
        pool = group.pool(handler.event_async, sink=sink, retry=retry, concurrency=rng.choice((1, 8)))
        pool.run()
        return
    sink = SqlSink(connect, idle_timeout_seconds=1.0)
    match life.mode:
        case "events":
            group.pool(handler.event, sink=sink, retry=retry, readers=rng.choice((1, 2))).run()
        case "concurrent":
            group.pool(handler.event, sink=sink, retry=retry, concurrency=8, readers=rng.choice((1, 2))).run()
        case "batches":
            group.pool(handle_batch=handler.batch, sink=sink, retry=retry).run()
        case _:
            with suppress(ZeroDivisionError, sqlite3.OperationalError, psycopg.Error):
                _store_by_hand(life.mode, group, sink, handler, stop)


def _store_by_hand(mode: str, group: rg.ReaderGroup, sink: SqlSink, handler: _Handler, stop: _Stop) -> None:
    with group.reader(sink=sink) as reader:
        stop.reader = reader
        if stop.asked:
            return
        if mode == "by hand":
            for event in reader:
                with suppress(rg.EventStoredError), sink.transaction(event) as connection:
                    handler.event(event, connection)
        else:
            for batch in reader.batches(20):
                with suppress(rg.EventStoredError), sink.transaction(batch) as connection:
                    handler.batch(batch, connection)


# ---------------------------------------------------------------------- a schedule


@dataclass
class Outcome:
    seed: int
    kind: Kind
    folder: Path
    seconds: float = 0.0
    events: int = 0
    #: How often a handler was called for an event, beyond once for each.
    repeated_calls: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {what}" for what, count in sorted(self.faults.items()))
        said = f"seed {self.seed} on {self.kind}: {self.events} events, {self.repeated_calls} calls again, {faults}, "
        said += f"{self.seconds:.1f} s"
        return said + "".join(f"\n- {each}" for each in self.violations)


class _Director:
    """Plays one schedule."""

    def __init__(self, seed: int, application: Application, folder: Path) -> None:
        self._rng = random.Random(seed)
        self._application = application
        self._folder = folder
        self._lives: dict[str, Any] = {}
        self._stopped: set[Any] = set()
        self.url = f"sqlite:///{folder / 'store.db'}"
        self.outcome = Outcome(seed, application.kind, folder)
        self.written: Counter[str] = Counter()

    def play(self) -> Outcome:
        begun = time.monotonic()
        serial = "integer PRIMARY KEY AUTOINCREMENT" if self._application.kind == "sqlite" else "bigserial PRIMARY KEY"
        if self._application.kind == "sqlite":
            self._application.execute("PRAGMA journal_mode=WAL")
        self._application.execute(f"CREATE TABLE effects (id {serial}, key text, number integer, pointer text)")
        try:
            with rg.connect(self.url) as client:
                client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(self._rng.randint(1, 4)))
                client.groups.create(
                    GROUP,
                    streams=[STREAM],
                    reader_timeout_seconds=_READER_TIMEOUT_SECONDS,
                    position_interval_seconds=self._rng.choice((0.1, 0.5, 5.0)),
                )
                self._write(client, self._rng.randint(20, 60))
                for _ in range(_PROCESSES):
                    self._start()
                self._fail(client)
                self._write(client, self._rng.randint(5, 20))
                client.streams.seal(STREAM)
                self._end(client)
        except BaseException:
            self.outcome.violations.append(f"the schedule could not be played:\n{traceback.format_exc()}")
        finally:
            for process in self._lives.values():
                process.kill()
                process.join()
        self._check()
        self.outcome.seconds = time.monotonic() - begun
        return self.outcome

    def _write(self, client: rg.Client, number: int) -> None:
        with client.writer(STREAM) as writer:
            for _ in range(number):
                for key in range(_KEYS):
                    writer.write(f"k{key}:{self.written[f'k{key}']}".encode(), routing_key=f"k{key}")
                    self.written[f"k{key}"] += 1

    def _start(self) -> None:
        modes = MODES if self._application.kind == "postgresql" else MODES[:-1]
        name = f"p{len(self._lives)}"
        life = Life(name, self._rng.choice(modes), self._rng.getrandbits(32), self.url, self._application, self._folder)
        process = _context.Process(target=live, args=(life,), name=name)
        process.start()
        self._lives[name] = process

    def _fail(self, client: rg.Client) -> None:
        """Send signals and break connections."""
        rng, never = self._rng, threading.Event()
        faults = ["kill", "kill", "stop", "stop", "leave", "write", "scale"]
        faults += ["end connections"] * 3 if self._application.kind == "postgresql" else ["hold up the database"]
        for _ in range(rng.randint(*_FAULTS)):
            never.wait(rng.uniform(*_PEACE_SECONDS))
            running = [each for each in self._lives.values() if each.is_alive() and each not in self._stopped]
            fault = rng.choice(faults)
            if fault in ("kill", "stop", "leave"):
                if not running:
                    continue
                process = rng.choice(running)
                if fault == "stop":
                    self._stop(process, rng.uniform(*rng.choice(_STOPPED_SECONDS)))
                else:
                    process.kill() if fault == "kill" else process.terminate()
                self._start()
            elif fault == "write":
                self._write(client, rng.randint(2, 15))
            elif fault == "scale":
                segments = sorted(client.streams.info(STREAM).segments)
                if len(segments) > 5:
                    continue
                client.streams.scale(STREAM, split=[int(rng.choice(segments).rpartition("/")[2])])
            elif fault == "end connections":
                self._application.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < 0.5"
                )
            else:
                with closing(self._application.connect(isolation_level=None)) as connection:
                    with suppress(sqlite3.OperationalError):
                        connection.execute("BEGIN IMMEDIATE")
                        never.wait(rng.uniform(0.1, 0.6))
                        connection.execute("ROLLBACK")
            self.outcome.faults[fault] += 1

    def _stop(self, process: Any, seconds: float) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        self._stopped.add(process)

        def go_on() -> None:  # by a thread: the process may hold what the director waits for
            self._stopped.discard(process)
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)

        timer = threading.Timer(seconds, go_on)
        timer.daemon = True
        timer.start()

    def _end(self, client: rg.Client) -> None:
        """Wait until all is read and all processes have ended."""
        group = client.groups.get(GROUP)
        self._start()
        calls, moved_at = 0, time.monotonic()
        while not group.synchronizer.fetch_updates().end_of_data:
            if (now := self._calls()) != calls:
                calls, moved_at = now, time.monotonic()
            if time.monotonic() > moved_at + _PATIENCE_SECONDS:
                raise TimeoutError(f"the data is not read; lag: {group.lag()!r}")
            if not any(each.is_alive() for each in self._lives.values() if each not in self._stopped):
                self._start()
            threading.Event().wait(0.05)
        for process in self._lives.values():
            process.join(_PATIENCE_SECONDS)
            if process.is_alive():
                raise TimeoutError(f"{process.name} does not end")

    def _calls(self) -> int:
        """How often handlers were called, in bytes."""
        return sum(diary.stat().st_size for diary in self._folder.glob("*.calls"))

    def _check(self) -> None:
        violations = self.outcome.violations
        for error in sorted(self._folder.glob("*.error")):
            violations.append(f"{error.name}:\n{error.read_text()}")
        rows = self._application.execute("SELECT key, number, pointer FROM effects ORDER BY id")
        effects: dict[str, list[int]] = defaultdict(list)
        for key, number, _ in rows:
            effects[key].append(number)
        violations += _compared(effects, self.written)
        if double := [pointer for pointer, count in Counter(row[2] for row in rows).items() if count > 1]:
            violations.append(f"{len(double)} pointers have several effects: {double[:3]}")
        calls = sum(len(diary.read_text().splitlines()) for diary in self._folder.glob("*.calls"))
        self.outcome.events = sum(self.written.values())
        self.outcome.repeated_calls = calls - self.outcome.events


def _compared(effects: Mapping[str, list[int]], written: Mapping[str, int]) -> Iterator[str]:
    for key, count in written.items():
        found, expected = effects.get(key, []), list(range(count))
        if lost := sorted(set(expected) - set(found)):
            yield f"{key}: {len(lost)} events have no effect: {lost[:5]}"
        if double := [number for number, times in Counter(found).items() if times > 1]:
            yield f"{key}: {len(double)} events have several effects: {double[:5]}"
        if not lost and not double and found != expected:
            yield f"{key}: the effects are not in the order of writing: {found}"


# ---------------------------------------------------------------------- many schedules


def run(
    seeds: Iterable[int], folder: Path, *, kinds: Sequence[Kind] = KINDS, jobs: int = 2, keep: bool = False
) -> Iterator[Outcome]:
    """The outcomes, as the schedules end: the seeds take turns on the databases."""
    with ExitStack() as ending:
        server: PostgresServer | None = None
        if "postgresql" in kinds:
            server = ending.enter_context(closing(PostgresServer()))
            server.start()
        pool = ThreadPoolExecutor(jobs)
        ending.callback(pool.shutdown, cancel_futures=True)
        each = [(seed, kinds[number % len(kinds)]) for number, seed in enumerate(seeds)]
        for future in as_completed([pool.submit(_play, seed, kind, folder, server) for seed, kind in each]):
            outcome = future.result()
            if not outcome.violations and not keep:
                for file in outcome.folder.iterdir():
                    file.unlink()
                outcome.folder.rmdir()
            yield outcome


def _play(seed: int, kind: Kind, folder: Path, server: PostgresServer | None) -> Outcome:
    own = folder / f"{kind}-{seed}"
    own.mkdir(parents=True)
    if kind == "sqlite":
        return _Director(seed, Application(kind, str(own / "application.db")), own).play()
    assert server is not None
    with fresh_database(server.url) as address:
        return _Director(seed, Application(kind, address), own).play()


def summary(outcomes: Sequence[Outcome]) -> str:
    faults: Counter[str] = sum((each.faults for each in outcomes), Counter())
    failed = sum(bool(each.violations) for each in outcomes)
    kinds = Counter(each.kind for each in outcomes)
    return "\n".join([
        f"{len(outcomes)} schedules ({', '.join(f'{count} on {kind}' for kind, count in sorted(kinds.items()))}), "
        f"{failed} failed",
        f"{sum(each.events for each in outcomes)} events, "
        f"{sum(each.repeated_calls for each in outcomes)} times a handler was called again",
        ", ".join(f"{count} {what}" for what, count in sorted(faults.items())),
    ])  # fmt: skip


def main(seeds: Iterable[int], folder: Path, *, kinds: Sequence[Kind], jobs: int, keep: bool) -> int:
    outcomes = []
    try:
        for outcome in run(seeds, folder, kinds=kinds, jobs=jobs, keep=keep):
            outcomes.append(outcome)
            print(outcome, flush=True)
            if outcome.violations or keep:
                print(f"diaries and logs: {outcome.folder}", flush=True)
    finally:
        print(summary(outcomes), flush=True)
    return any(outcome.violations for outcome in outcomes)
