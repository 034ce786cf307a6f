"""What the policies of streams cost: a writer beside one without any, and others while a million events are deleted."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import readergroup as rg

from .figure import Figure, Result
from .measuring import PAYLOAD, Rate, alternate, described, percentile, processor_ratio, rate
from .stores import Store

EVENTS = 500_000
DELETED = 1_000_000
ROUNDS = 7
SHORTEST_WINDOW_SECONDS = 1.0
#: What is written at full speed in some twelve seconds, and in less than one: that policy is applied all the time.
LIMITS = {"1 GiB": 2**30, "64 MiB": 2**26}
_DELETE = """
import sys, readergroup as rg
with rg.connect(sys.argv[1]) as client:
    client.streams.info("bench/old")
    print("ready", flush=True)
    sys.stdin.readline()
    client.streams.configure("bench/old", retention=rg.RetentionPolicy(max_bytes=1))
    print(client.streams.retain("bench/old").deleted_bytes)
"""


def retain(store: Store) -> Iterator[Result]:
    """Writing with and without policies, in processor time; the pauses of a writer and a reader during a deletion."""
    fixed = rg.ScalingPolicy.fixed(4)
    with store.fresh() as url, rg.connect(url) as client:
        write_plain = _writes(client, "plain", scaling=fixed)
        write_limited = [
            _writes(client, f"limited-{size}", scaling=fixed, retention=rg.RetentionPolicy(max_bytes=size))
            for size in LIMITS.values()
        ]
        write_measured = _writes(
            client,
            "measured",
            scaling=rg.ScalingPolicy.by_event_rate(1e9, min_segments=4, window_seconds=SHORTEST_WINDOW_SECONDS),
        )
        for size, write in zip(LIMITS.values(), write_limited, strict=True):
            for _ in range(size // (EVENTS * len(PAYLOAD)) + 1):
                write()  # from then on each round deletes what it writes
        *limited, measured, plain = alternate(ROUNDS, *write_limited, write_measured, write_plain)
    for limit, rates in zip(LIMITS, limited, strict=True):
        yield Figure(
            what=f"write with retention of {limit}, beside a stream without it, by processor time",
            value=100 * processor_ratio(rates, plain),
            unit="%",
            target=97,
            beside=f"{described(rates)}, beside {described(plain)}",
            held_back_by="each time takes some 17 round trips; SQLite needs a millisecond to free a megabyte",
        )
    yield Figure(
        what="write to a stream that scales by itself, beside one that does not, by processor time",
        value=100 * processor_ratio(measured, plain),
        unit="%",
        target=97,
        beside=f"{described(measured)}, beside {described(plain)}",
        held_back_by="with the shortest window, one second, the load is measured several times a second",
    )
    with store.fresh() as url, rg.connect(url) as client:
        client.streams.create("bench/old", scaling=rg.ScalingPolicy.fixed(4))
        with client.writer("bench/old") as writer:
            for number in range(DELETED):
                writer.write(PAYLOAD, routing_key=f"key-{number % 1000}")
        with _another_process(url) as process, _Busy(client) as busy:
            time.sleep(2.0)
            before = busy.take()
            begun = time.monotonic()
            deleted, _ = process.communicate("delete\n", timeout=60.0)
            took = time.monotonic() - begun
            during = busy.take()
            assert int(deleted) > 100 * DELETED, deleted
    for who, calm, pauses in zip(("a flush of a writer", "a read of a reader"), before, during, strict=True):
        yield Figure(
            what=f"{who}, 99 of 100, while a million events are deleted",
            value=1000 * percentile(pauses, 99),
            unit="ms",
            target=50,
            better="less",
            beside=f"before that {1000 * percentile(calm, 99):.1f} ms; deleted within {took:.1f} s",
            held_back_by="a NATS server pauses to rewrite a block that holds other data too; SQLite has one writer",
        )


@contextmanager
def _another_process(url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has connected, and applies a policy to the old events when it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", _DELETE, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def _writes(
    client: rg.Client, name: str, *, scaling: rg.ScalingPolicy, retention: rg.RetentionPolicy | None = None
) -> Callable[[], Rate]:
    client.streams.create(f"bench/{name}", scaling=scaling, retention=retention)

    def write() -> None:
        with client.writer(f"bench/{name}") as writer:
            for number in range(EVENTS):
                writer.write(PAYLOAD, routing_key=f"key-{number % 1000}")

    return lambda: rate(EVENTS, write)


class _Busy:
    """A thread that writes durably, one event at a time, and one that reads them, with the time of each call."""

    def __init__(self, client: rg.Client) -> None:
        client.streams.create("bench/steady")
        group = client.groups.create("steady", streams=["bench/steady"])
        self._writer, self._reader = client.writer("bench/steady"), group.reader()
        self._times: tuple[list[float], list[float]] = [], []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._write, self._read)]

    def _write(self) -> None:
        while not self._stop.wait(0.002):
            begun = time.monotonic()
            self._writer.write(PAYLOAD)
            self._writer.flush()
            self._times[0].append(time.monotonic() - begun)

    def _read(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            if self._reader.read(timeout=1.0) is not None:
                self._times[1].append(time.monotonic() - begun)

    def take(self) -> tuple[list[float], list[float]]:
        taken = list(self._times[0]), list(self._times[1])
        for times in self._times:
            times.clear()
        return taken

    def __enter__(self) -> _Busy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._reader.close()
        self._writer.close()
