"""Real load under a limit of size: does the store stay small, and does a reader that keeps up miss nothing?

``python -m tests.chaos.retention_soak --minutes 30 --store nats`` writes to a stream with ``max_bytes`` of 64 MiB at a
steady rate, in one process, and reads it in another. It samples the size of the store, the bytes of the stream, the log
of its metadata, and the memory of both processes. It ends with a table, and with status 1 if the store took more than
100 MiB, the reader missed an event, or something grew.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import readergroup as rg

from .hosts import KINDS, Host
from .hosts import host as host_of
from .soak_growth import MIN_SAMPLES, Allowance, Series, table
from .soak_processes import memory_blocks

STREAM: Final = "shop/orders"
GROUP: Final = "billing"
EVENT_BYTES: Final = 1024
MAX_BYTES: Final = 64 << 20
STORE_BYTES: Final = 100 << 20
KEYS: Final = 16
#: Retention deletes up to an eighth more than it has to, and a sixteenth comes before it is applied.
_STREAM_EXCESS: Final = 1.2
_ALLOWED: Final = {
    "stream, bytes": Allowance(0, up_to=_STREAM_EXCESS * MAX_BYTES),
    "store, bytes": Allowance(0, up_to=STORE_BYTES),
    "metadata log, bytes": Allowance(0, up_to=2 << 20),
    #: A copy of what was written since the last checkpoint of the file. SQLite only.
    "write-ahead log, bytes": Allowance(0, up_to=64 << 20),
    "writer, memory blocks": Allowance(40_000, relative=0.1),
    "reader, memory blocks": Allowance(40_000, relative=0.1),
}


def write(connection: Connection, url: str, bytes_per_second: float) -> None:
    """Write numbered events at this rate, until told to stop; tell how many, and the memory, when asked."""
    with rg.connect(url) as client, client.writer(STREAM) as writer:
        number, began = 0, time.monotonic()
        while True:
            if connection.poll(max(0.0, began + number * EVENT_BYTES / bytes_per_second - time.monotonic())):
                if connection.recv() == "stop":
                    writer.flush()
                    connection.send(number)
                    return
                connection.send((number, memory_blocks()))
            for _ in range(64):
                key = number % KEYS
                writer.write(f"{number // KEYS:012}".encode().ljust(EVENT_BYTES), routing_key=f"key-{key}")
                number += 1


def read(connection: Connection, url: str) -> None:
    """Read, until all is read after being told to stop; tell how many came, and what was missing."""
    count, missing, next_of = 0, 0, dict.fromkeys((f"key-{number}" for number in range(KEYS)), 0)
    with rg.connect(url) as client, client.groups.get(GROUP).reader() as reader:
        until: int | None = None
        while until is None or count + missing < until:
            if connection.poll(0):
                message = connection.recv()
                until = message if isinstance(message, int) else None
                if until is None:
                    connection.send((count, memory_blocks()))
            try:
                batch = reader.read_batch(1000, timeout=0.1)
            except rg.TruncatedError:
                continue  # what it has not read shows in the numbers
            for event in batch:
                number = int(event.data)
                assert event.routing_key is not None
                missing += max(0, number - next_of[event.routing_key])
                next_of[event.routing_key] = max(next_of[event.routing_key], number + 1)
            count += len(batch)
    connection.send((count, missing))


class RetentionSoak:
    """The two processes at work on one store, and what was measured."""

    def __init__(self, host: Host, url: str, minutes: float, bytes_per_second: float) -> None:
        self.series: dict[str, Series] = {name: Series() for name in _ALLOWED}
        self.failures: list[str] = []
        self.written = self.read = 0
        self._host = host
        self._url = url
        self._seconds = 60 * minutes
        self._bytes_per_second = bytes_per_second

    def run(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        with rg.connect(self._url) as client:
            client.streams.create(
                STREAM, scaling=rg.ScalingPolicy.fixed(2), retention=rg.RetentionPolicy(max_bytes=MAX_BYTES)
            )
            client.groups.create(GROUP, streams=[STREAM])
            (writer, writes), (reader, reads) = spawn.Pipe(), spawn.Pipe()
            processes = [
                spawn.Process(target=write, args=(writes, self._url, self._bytes_per_second)),
                spawn.Process(target=read, args=(reads, self._url)),
            ]
            for process in processes:
                process.start()
            try:
                began = time.monotonic()
                while (seconds := time.monotonic() - began) < self._seconds:
                    time.sleep(min(5.0, self._seconds / (2 * MIN_SAMPLES)))
                    self._sample(client, seconds, writer, reader)
                writer.send("stop")
                self.written = self._answer(writer)
                reader.send(self.written)
                self.read, missing = self._answer(reader)
                if missing or self.read < self.written:
                    self.failures.append(f"{missing} events were skipped: {self.read} of {self.written} were read")
                for process in processes:
                    process.join(30)
            finally:
                for process in processes:
                    process.kill()

    def _answer(self, connection: Connection) -> Any:
        if not connection.poll(120):
            raise TimeoutError("a process does not answer for two minutes")
        return connection.recv()

    def _sample(self, client: rg.Client, seconds: float, writer: Connection, reader: Connection) -> None:
        for connection in (writer, reader):
            connection.send("tell")
        (self.written, writes), (self.read, reads) = self._answer(writer), self._answer(reader)
        log = client.store.info(client.streams.synchronizer(STREAM).segment)
        state = client.streams.fetch_state(STREAM)
        lengths = client.streams.segment_lengths(state, state.current)
        found = {
            "stream, bytes": sum(lengths[number] - state.head.get(number, 0) for number in state.current),
            "metadata log, bytes": log.length - log.start_offset,
            "writer, memory blocks": writes,
            "reader, memory blocks": reads,
        }
        with suppress(ConnectionError):
            found.update(_store_bytes(self._host, self._url))
        for name, value in found.items():
            self.series[name].add(seconds, value)
        for name, most in (("stream, bytes", _STREAM_EXCESS * MAX_BYTES), ("store, bytes", STORE_BYTES)):
            if (value := found.get(name, 0)) > most:
                self.failures.append(f"{name}: {value:,.0f} after {seconds:.0f} s, at most {most:,.0f}")


def _store_bytes(host: Host, url: str) -> Mapping[str, int]:
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        return {
            "store, bytes": path.stat().st_size,
            "write-ahead log, bytes": Path(f"{path}-wal").stat().st_size,
        }
    figures = host.figures()
    return {"store, bytes": int(next(value for name, value in figures.items() if name.endswith(", bytes")))}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.retention_soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--store", default="sqlite", help=f"{', '.join(KINDS)}; default: sqlite")
    parser.add_argument("--rate", type=float, default=3.0, help="MiB per second; default: 3")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as folder,
        host_of(options.store, Path(folder)) as host,
        host.fresh_store(Path(folder)) as url,
    ):
        soak = RetentionSoak(host, url, options.minutes, options.rate * (1 << 20))
        soak.run()
    verdicts = {name: series.judge(_ALLOWED[name]) for name, series in soak.series.items() if len(series)}
    print(table(verdicts))
    failures = soak.failures + [f"{name} grows" for name, verdict in verdicts.items() if verdict.grows]
    if soak.written * EVENT_BYTES < 1.5 * MAX_BYTES:
        failures.append("too little was written to fill the stream: let it run for longer, or faster")
    print(f"{soak.written:,} events written, {soak.read:,} read; {', '.join(failures[:5]) or 'all is well'}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
