"""What retention costs: a writer beside one without a policy, and the others while a million events are deleted."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import readergroup as rg

from .figure import Figure, Result
from .measuring import PAYLOAD, Rate, alternate, described, percentile, processor_ratio, rate
from .stores import Store

EVENTS = 500_000
DELETED = 1_000_000
ROUNDS = 7
#: A round writes 50 MB and applies the policy about ten times.
MAX_BYTES = 64 * 2**20


def retain(store: Store) -> Iterator[Result]:
    """Writing with and without a policy, in processor time; the pauses of a writer and a reader during a deletion."""
    policy = rg.RetentionPolicy(max_bytes=MAX_BYTES)
    with store.fresh() as url, rg.connect(url) as client:
        with_policy, without = _writes(client, "limited", policy), _writes(client, "unlimited", None)
        with_policy()
        with_policy()  # from here on each round deletes what it writes
        limited, unlimited = alternate(ROUNDS, with_policy, without)
    yield Figure(
        what="write with retention by size, beside a stream without it, by processor time",
        value=100 * processor_ratio(limited, unlimited),
        unit="%",
        target=97,
        beside=f"{described(limited)}, beside {described(unlimited)}",
        held_back_by="SQLite frees the pages of what is deleted, about a millisecond for each megabyte",
    )
    with store.fresh() as url, rg.connect(url) as client:
        client.streams.create("bench/old", scaling=rg.ScalingPolicy.fixed(4))
        with client.writer("bench/old") as writer:
            for number in range(DELETED):
                writer.write(PAYLOAD, routing_key=f"key-{number % 1000}")
        with _Busy(client) as busy:
            time.sleep(2.0)
            before = busy.take()
            client.streams.configure("bench/old", retention=rg.RetentionPolicy(max_bytes=1))
            begun = time.monotonic()
            subprocess.run([sys.executable, "-m", "readergroup.cli", "--url", url, "stream", "retain"], check=True)
            took = time.monotonic() - begun
            during = busy.take()
    for who, calm, pauses in zip(("a flush of a writer", "a read of a reader"), before, during, strict=True):
        yield Figure(
            what=f"{who}, 99 of 100, while a million events are deleted",
            value=1000 * percentile(pauses, 99),
            unit="ms",
            target=50,
            better="less",
            beside=f"before that {1000 * percentile(calm, 99):.1f} ms; deleted within {took:.1f} s",
            held_back_by="SQLite has one writer, which takes up to 20 ms to free 64 MB; compare with the time before",
        )


def _writes(client: rg.Client, name: str, policy: rg.RetentionPolicy | None) -> Callable[[], Rate]:
    client.streams.create(f"bench/{name}", scaling=rg.ScalingPolicy.fixed(4), retention=policy)

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
