"""Everything at once, for a long time, at a steady pace: does anything grow that should not?

``python -m tests.chaos.soak --minutes 30 --store nats`` runs processes on one store: a writer at a fixed rate beside
writers that open and close; a reader that stays, readers that come and go, and one that is killed with its writer every
minute; an asyncio process with a concurrent pool, readers, writers, locks and notifiers; a stream that is split and
merged and truncated behind the group; listeners that register and unregister; autoscaling; a shared state that three
processes update. Memory, open files, threads, tasks, logs, segments and the size of the store are sampled meanwhile. It
ends with a table, and with status 1 if something grew, or an event was lost or out of order. A store on servers has one
of its faults every twenty seconds: servers are killed, stopped and restarted, and the network of the readers fails.

Two things are hastened, so that what takes a day happens within minutes: the clocks' time of day runs so fast that a
retired segment is kept for two minutes and not for 24 hours, and logs are compacted after 8 KiB and not after 512.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NamedTuple

import readergroup as rg
from synchronizer import SegmentStore

from .hosts import KINDS, FileHost, Host
from .hosts import host as host_of
from .mishaps import Mishaps
from .plan import MISHAPS, Mishap
from .soak_asyncio import work_on_a_loop
from .soak_growth import Allowance, Series, Verdict, table
from .soak_processes import (
    BLOCKS,
    COMPACTION_BYTES,
    GROUP,
    STREAM,
    Counting,
    Duties,
    Ledger,
    Pace,
    Setting,
    Speaker,
    broken_threads_told,
    connect,
    listen,
    memory_blocks,
    read,
    read_and_write_until_killed,
    write,
)

MIN_SEGMENTS: Final = 2
MAX_SEGMENTS: Final = 6
#: How often a process that has not been handed anything yet is left alone when it is to be killed.
PATIENCE_KILLS: Final = 10
END_SECONDS: Final = 120.0
LONGEST_SECONDS: Final = 24 * 3600.0
MIB: Final = 1024 * 1024
#: A log keeps what was added since the compaction before the last: twice what makes one due, which is up to 1.5 times
#: `COMPACTION_BYTES`. That of the stream takes minutes to get there.
LOG_BYTES: Final = 2 * 1.5 * COMPACTION_BYTES

#: By how much each measure may grow from the second quarter to the last, by how its name ends.
ALLOWANCES: Final[Mapping[str, Allowance | None]] = {
    "memory, MiB": Allowance(2.0, 0.02),
    BLOCKS: Allowance(2000, 0.01),
    # A store keeps up to eight idle connections, of two files each, and opens another when more threads read at once.
    "open files": Allowance(6),
    "threads": Allowance(2),
    "tasks": Allowance(2),
    "log of the group, bytes": Allowance(4096, 0.25, up_to=LOG_BYTES),
    "log of the stream, bytes": Allowance(4096, 0.25, up_to=LOG_BYTES),
    "log of the shared state, bytes": Allowance(4096, 0.25, up_to=LOG_BYTES),
    "events kept, bytes": Allowance(64 * 1024, 0.25),
    "events behind": Allowance(200, 0.25),
    "segments in the store": Allowance(4, 0.15),
    "segments in the stream's state": Allowance(4, 0.15),
    "segments of the newest epoch": Allowance(4),
    "readers": Allowance(1),
    "attributes of the group": Allowance(2),
    "attributes of the stream": Allowance(6, 0.25),
    "database in use, bytes": Allowance(128 * 1024, 0.15),
    "database file, bytes": Allowance(128 * 1024, 0.15),
    # A file that is written again from its beginning and never shrinks. Each process moves it into the database after
    # 8 MiB of its own, so several make it longer; from 64 MiB on the store waits for those who still read it.
    "write-ahead log, bytes": Allowance(0, up_to=64 * MIB),
    # Names of segments are never used again: a row stays of each, also of the snapshots that compactions replace.
    "names that were ever used": None,
}
#: The same for what servers have. Of each name that was ever used something stays there too.
SERVER_ALLOWANCES: Final[Mapping[str, Allowance | None]] = {
    "servers: connections": Allowance(6),
    "servers: database, bytes": Allowance(8 * MIB, 0.25),
    "servers: stream, bytes": Allowance(MIB, 0.25),
    "servers: stream, messages": None,
}


class Outcome(NamedTuple):
    """What came out of a soak."""

    ledger: Ledger
    series: Mapping[str, Series]
    seconds: float
    cpu_seconds: float
    done: Mapping[str, int]

    def verdicts(self) -> Mapping[str, Verdict]:
        return {measure: series.judge(_allowance(measure)) for measure, series in self.series.items()}


def soak(
    folder: Path, pace: Pace, until: Callable[[Soak], bool], *, seed: int = 0, host: Host | None = None
) -> Outcome:
    """Run on the host, whose store is empty, until it is to end, and then to the end of the data.

    Without a host it runs on a file in ``folder``, which is empty.
    """
    host = host or FileHost(folder)
    setting = Setting(folder, pace, time.time(), host.url, host.through_proxy(host.url))
    began = time.monotonic()
    mishaps = Mishaps(_mishaps(random.Random(seed), host, pace), host)
    with connect(setting) as client, _ledger(setting) as (ledger, measured):
        with Soak(client, setting, ledger, measured, random.Random(seed), host) as running:
            mishaps.start(began)
            try:
                running.run(until)
            finally:
                mishaps.stop()
            for trouble in mishaps.troubles:
                ledger.broken(trouble)
            for suffered in mishaps.suffered:
                running.done[f"times {suffered.fault!r}"] += 1
            running.end()
    # Of this process, and of all those that it has seen end.
    cpu_seconds = sum(os.times()[:4])
    return Outcome(ledger, running.series, time.monotonic() - began, cpu_seconds, dict(running.done))


def _mishaps(rng: random.Random, host: Host, pace: Pace) -> Iterator[Mishap]:
    """One after the other, for longer than any soak."""
    at = pace.mishap
    while host.faults and at < LONGEST_SECONDS:
        fault = rng.choice(host.faults)
        yield Mishap(at, fault, rng.uniform(*MISHAPS[host.kind][fault]))
        at += rng.uniform(0.5, 1.5) * pace.mishap


@contextmanager
def _ledger(setting: Setting) -> Iterator[tuple[Ledger, dict[str, int]]]:
    """A ledger of what the processes say, and what they measured last."""
    ledger, measured = Ledger(), dict[str, int]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(setting.ear)
        thread = threading.Thread(target=listen, args=(ear, ledger, measured), daemon=True)
        thread.start()
        speaker = Speaker(setting)
        try:
            with broken_threads_told(speaker, "main"):
                yield ledger, measured
        finally:
            speaker.say("end")
            thread.join()


class Soak:
    """The process that starts the others, changes the stream under them, and takes the samples."""

    def __init__(
        self,
        client: rg.Client,
        setting: Setting,
        ledger: Ledger,
        measured: Mapping[str, int],
        rng: random.Random,
        host: Host,
    ) -> None:
        self.ledger = ledger
        self.series: dict[str, Series] = defaultdict(Series)
        #: How often what was done.
        self.done: dict[str, int] = defaultdict(int)
        self._client = client
        self._setting = setting
        self._measured = measured
        self._rng = rng
        self._host = host
        self._began = time.monotonic()
        self._behind = 0
        self._handed_to_victims, self._patience = 0, PATIENCE_KILLS
        pace = setting.pace
        policy = rg.RetentionPolicy(max_bytes=pace.max_bytes) if pace.max_bytes else None
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(MIN_SEGMENTS), retention=policy)
        self._group = client.groups.create(
            GROUP, streams=[STREAM], reader_timeout_seconds=pace.reader_timeout_seconds, position_interval_seconds=0.5
        )
        self._counting = Counting(client, "main")
        self._unregister: Callable[[], object] | None = None
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Soak:
        self._writer = self._start(write)
        self._reader = self._start(read)
        self._victim = self._start(read_and_write_until_killed, 0)
        self._asyncio = self._start(work_on_a_loop)
        started = {"writer": self._writer, "reader": self._reader, "asyncio": self._asyncio}
        self._pids = {"main": os.getpid(), **{name: process.pid for name, (process, _) in started.items()}}
        self._group.reader_notifier.register_listener(lambda _: self._note("notifications"))
        policy = rg.ReaderScalingPolicy(max_readers=4, target_lag_seconds=60 * self._setting.haste)
        self._group.autoscale(policy)(lambda _: self._note("scaling decisions"))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            _kill(process)

    def _start(self, work: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, self._setting, *arguments), daemon=True)
        process.start()
        there.close()
        self._processes.append(process)
        return process, here

    # ------------------------------------------------------------------ while it runs

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self._began

    def run(self, until: Callable[[Soak], bool]) -> None:
        pace, duties = self._setting.pace, Duties()
        duties.every(pace.sample, self._unless_away(self._sample))
        if not pace.max_bytes:
            duties.every(pace.truncate, self._unless_away(self._truncate))
        duties.every(pace.scale, self._unless_away(self._scale))
        duties.every(pace.lag, self._unless_away(self._ask_for_lag))
        duties.every(pace.listen, self._unless_away(self._register_or_unregister))
        duties.every(pace.count, self._counting.count)
        duties.every(pace.kill, self._kill_and_replace)
        duties.run_while(lambda: self._all_is_well() and not until(self))

    def _all_is_well(self) -> bool:
        for process, _ in (self._writer, self._reader, self._victim, self._asyncio):
            if not process.is_alive():
                raise RuntimeError(f"a process of the soak ended: {process} {process.exitcode}")
        return not self.ledger.faults

    def _unless_away(self, duty: Callable[[], object]) -> Callable[[], None]:
        """The duty, left out where the servers have a fault."""

        def do() -> None:
            try:
                duty()
            except (ConnectionError, rg.DeadlineExceededError, rg.OutcomeUnknownError):
                if not self._host.faults:
                    raise
                self._note("duties left out")

        return do

    def _note(self, what: str) -> None:
        self.done[what] += 1

    def _truncate(self) -> None:
        self._client.streams.truncate(STREAM, self._group.stream_cuts()[STREAM])
        self._note("truncations")

    def _scale(self) -> None:
        current = self._client.streams.fetch_state(STREAM).current
        grows = len(current) < MAX_SEGMENTS and (len(current) <= MIN_SEGMENTS or self._rng.random() < 0.5)
        index = self._rng.randrange(len(current) - (not grows))
        if grows:
            self._client.streams.scale(STREAM, split=[current[index]])
        else:
            self._client.streams.scale(STREAM, merge=current[index : index + 2])
        self._note("splits" if grows else "merges")

    def _ask_for_lag(self) -> None:
        self._behind = self._group.lag().events

    def _register_or_unregister(self) -> None:
        """One that listens beside others, and one that is alone, so that its notifier starts and stops."""
        if self._unregister is None:
            unregister = self._group.reader_notifier.register_listener(lambda _: self._note("notifications"))
            alone = self._group.segment_notifier.register_listener(lambda _: self._note("notifications"))
            self._unregister = lambda: (unregister(), alone())
        else:
            self._unregister()
            self._unregister = None
        self._note("listeners")

    def _kill_and_replace(self) -> None:
        handed = self.ledger.handed["victim"]
        if handed == self._handed_to_victims and self._patience > 0:  # on a busy machine it has hardly started
            self._patience -= 1
            return
        self._handed_to_victims, self._patience = handed, PATIENCE_KILLS
        process, connection = self._victim
        _kill(process)
        self._processes.remove(process)
        connection.close()
        self._note("kills")
        self._victim = self._start(read_and_write_until_killed, self.done["kills"])

    # ------------------------------------------------------------------ the end

    def end(self) -> None:
        """Let the writers store all, seal the stream, and wait until the readers have read it."""
        for _, connection in (self._writer, self._victim, self._asyncio):
            connection.send("stop")
        self._join(self._writer)
        for process, connection in (self._victim, self._asyncio):
            if not connection.poll(END_SECONDS):
                raise RuntimeError(f"a process did not stop to write: {process}")
        self._client.streams.seal(STREAM)
        for each in (self._reader, self._victim, self._asyncio):
            self._join(each)
        self._counting.check()

    def _join(self, started: tuple[BaseProcess, Connection]) -> None:
        process, _ = started
        process.join(END_SECONDS)
        if process.exitcode != 0:
            raise RuntimeError(f"a process did not come to its end: {process} {process.exitcode}")

    # ------------------------------------------------------------------ samples

    def _sample(self) -> None:
        seconds = self.seconds
        for measure, value in {**self._of_processes(), **self._of_the_store()}.items():
            self.series[measure].add(seconds, value)

    def _of_processes(self) -> Mapping[str, float]:
        found: dict[str, float] = {**self._measured, f"main: {BLOCKS}": memory_blocks()}
        for name, pid in self._pids.items():
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found[f"{name}: memory, MiB"] = int(status["VmRSS"].split()[0]) / 1024
            found[f"{name}: open files"] = len(os.listdir(f"/proc/{pid}/fd"))
            found[f"{name}: threads"] = int(status["Threads"])
        return found

    def _of_the_store(self) -> Mapping[str, float]:
        store, stream = self._client.store, self._client.streams.fetch_state(STREAM)
        names = list(store.list())
        log_of_stream = self._client.streams.synchronizer(STREAM).segment
        data = [name for name in names if name.startswith(stream.data_prefix)]
        return {
            "log of the group, bytes": _kept(store, self._group.synchronizer.segment),
            "log of the stream, bytes": _kept(store, log_of_stream),
            "log of the shared state, bytes": _kept(store, self._counting.synchronizer.segment),
            "events kept, bytes": self._kept_events(data),
            "events behind": self._behind,
            "segments in the store": len(names),
            "segments in the stream's state": len(stream.segments),
            "segments of the newest epoch": len(stream.current),
            "readers": len(self._group.online_readers()),
            "attributes of the group": len(store.attributes(self._group.synchronizer.segment)),
            "attributes of the stream": sum(len(store.attributes(name)) for name in data),
            **{f"servers: {what}": value for what, value in self._host.figures().items()},
            **(_of_the_file(Path(self._host.path)) if isinstance(self._host, FileHost) else {}),
        }

    def _kept_events(self, data: Sequence[str]) -> int:
        kept, most = sum(_kept(self._client.store, name) for name in data), self._setting.pace.max_bytes
        # Beside a fifth, a writer may store a round before the policy is applied, on any machine.
        if most and kept > 1.2 * most + 2**20:
            self.ledger.broken(f"the stream has {kept:,} bytes, of {most:,} that its policy allows")
        return kept


def _kept(store: SegmentStore, segment: str) -> int:
    info = store.info(segment)
    return info.length - info.start_offset


def _of_the_file(path: Path) -> Mapping[str, float]:
    with closing(sqlite3.connect(path)) as connection:
        (pages,), (free,), (page_bytes,) = (
            connection.execute(f"PRAGMA {what}").fetchone() for what in ("page_count", "freelist_count", "page_size")
        )
        (names,) = connection.execute("SELECT count(*) FROM segment").fetchone()
    return {
        "database in use, bytes": (pages - free) * page_bytes,
        "database file, bytes": path.stat().st_size,
        "write-ahead log, bytes": Path(f"{path}-wal").stat().st_size,
        "names that were ever used": names,
    }


def _kill(process: BaseProcess) -> None:
    if process.pid and process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join(END_SECONDS)


def _allowance(measure: str) -> Allowance | None:
    allowances = {**SERVER_ALLOWANCES, **ALLOWANCES}
    return next(allowance for name, allowance in allowances.items() if measure.endswith(name))


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--store", default="sqlite", help=f"{', '.join(KINDS)} or an address")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-bytes", type=int, default=0, help="keep the stream at this size by a retention policy")
    parser.add_argument("--events-per-second", type=float, default=Pace().events_per_second)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)
    # In a shorter run what is slow has to be reached sooner. Under ten minutes it tells little.
    pace = Pace(
        events_per_second=options.events_per_second,
        sample=min(5.0, options.minutes),
        retention_seconds=min(120.0, 4 * options.minutes),
        max_bytes=options.max_bytes,
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        with host_of(options.store, folder) as host:
            outcome = soak(
                folder, pace, lambda running: running.seconds >= 60 * options.minutes, seed=options.seed, host=host
            )
    verdicts = outcome.verdicts()
    if options.json:
        options.json.write_text(json.dumps(_figures(outcome, verdicts, pace), indent=2) + "\n")
    return _report(outcome, verdicts, pace)


def _figures(outcome: Outcome, verdicts: Mapping[str, Verdict], pace: Pace) -> Mapping[str, object]:
    return {
        "seconds": outcome.seconds,
        "cpu_seconds": outcome.cpu_seconds,
        "pace": pace._asdict(),
        "done": outcome.done,
        "stored": outcome.ledger.number_stored,
        "delivered": outcome.ledger.delivered,
        "repeated": outcome.ledger.repeated,
        "faults": outcome.ledger.faults,
        "missing": outcome.ledger.missing(),
        "measures": {measure: verdict.as_json() for measure, verdict in verdicts.items()},
    }


def _report(outcome: Outcome, verdicts: Mapping[str, Verdict], pace: Pace) -> int:
    ledger = outcome.ledger
    print(f"{outcome.seconds / 60:.1f} minutes, {outcome.cpu_seconds / outcome.seconds:.0%} of one core.")
    print(f"Hastened: 24 hours of retention last {pace.retention_seconds:.0f} s, and logs are compacted at 8 KiB.")
    print(", ".join(f"{number} {what}" for what, number in sorted(outcome.done.items())) + ".")
    print(f"{ledger.number_stored} events stored, {ledger.delivered} delivered, {ledger.repeated} of them again.\n")
    print(table(verdicts))
    growing = [measure for measure, verdict in verdicts.items() if verdict.grows]
    wrong = [*ledger.faults, *(f"{key}: {got} of {of} delivered" for key, (got, of) in ledger.missing().items())]
    print("\n" + "\n".join([f"GROWS: {measure}" for measure in growing] + [f"WRONG: {what}" for what in wrong]))
    if not growing and not wrong:
        print("Nothing grows, and every event was delivered, those of each key in order.")
    return 1 if growing or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
