"""Readers in processes of their own that add up in memory: killed, and their group goes back to a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import readergroup as rg
from tests.readergroup.reader_processes import GROUP, STREAM, kill, receive, running
from tests.waiting import PATIENCE_SECONDS, until

KEYS = 12
#: The lease of readers while all live, though a busy machine may hold them up, and when one of them is killed.
LONG_LEASE, SHORT_LEASE = 60.0, 2.0


def add_up(connection: Connection, url: str, reader_id: str, folder: Path, pause: float) -> None:
    """Remember every event, in memory alone, and write that down at checkpoints and at the end."""
    events: list[str] = []

    def keep(name: str) -> None:
        (folder / f"{name}.{reader_id}").write_text(json.dumps(events))

    with rg.connect(url) as client:
        with client.groups.get(GROUP).reader(reader_id, on_checkpoint=keep) as reader:
            connection.send("ready")
            for event in reader:
                events.append(event.raw.decode())
    keep("end")
    connection.send("done")


class Ledger:
    """A stream, a group that reads it, and what readers have kept of it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.client = rg.connect(url)
        self.client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(3))
        self.group = self.client.groups.create(GROUP, streams=[STREAM], reader_timeout_seconds=LONG_LEASE)
        self.written: list[str] = []

    def write(self, count: int) -> None:
        with self.client.writer(STREAM) as writer:
            for _ in range(count):
                number = len(self.written)
                self.written.append(f"event {number}")
                writer.write(self.written[-1].encode(), routing_key=f"k{number % KEYS}")

    def kept(self, name: str) -> list[str]:
        return [event for file in self.folder.glob(f"{name}.*") for event in json.loads(file.read_text())]


@pytest.fixture
def ledger(shared_store_url: str, tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(shared_store_url, tmp_path)
    try:
        yield ledger
    finally:
        ledger.client.close()


def readers(ledger: Ledger, life: int, stack: ExitStack) -> list[tuple[BaseProcess, Connection]]:
    """Three of them, which are in the group."""
    started = [
        stack.enter_context(running(add_up, ledger.url, f"r{number}-{life}", ledger.folder)) for number in range(3)
    ]
    for _, connection in started:
        receive(connection)
    return started


def test_killed_readers_that_add_up_have_each_event_once_after_going_back(ledger: Ledger) -> None:
    kept: dict[str, list[str]] = {}  # by checkpoint, with what those of former lives had kept
    before: list[str] = []
    for life, scale in enumerate(({"split": [0]}, {"merge": [3, 4]})):
        with ExitStack() as stack:
            processes = readers(ledger, life, stack)
            ledger.write(300)
            ledger.group.checkpoint(f"first-{life}", timeout=PATIENCE_SECONDS)
            ledger.write(100)
            ledger.client.streams.scale(STREAM, **scale)
            ledger.write(100)
            ledger.group.checkpoint(f"second-{life}", timeout=PATIENCE_SECONDS)
            ledger.write(200)
            ledger.group.configure(reader_timeout_seconds=SHORT_LEASE)
            kill(processes[life][0])
            assert ledger.group.checkpoint(f"third-{life}", timeout=PATIENCE_SECONDS).lost, (
                "what one of them had is gone"
            )
            ledger.write(100)
            for process, _ in processes:
                kill(process)
        for reader_id in ledger.group.online_readers():
            ledger.group.remove_reader(reader_id)
        ledger.group.configure(reader_timeout_seconds=LONG_LEASE)
        kept |= {name: before + ledger.kept(name) for name in (f"first-{life}", f"second-{life}")}
        # Mostly the second. Where the machine is very busy, others were taken for dead before.
        *_, last = (each for each in ledger.group.checkpoints.values() if not each.lost)
        before = kept[last.name]
        ledger.group.reset(last)
    ledger.client.streams.seal(STREAM)
    with ExitStack() as stack:
        for _, connection in readers(ledger, 2, stack):
            assert receive(connection) == "done"
    until(lambda: ledger.group.synchronizer.fetch_updates().end_of_data, "the end of the data")
    counted = Counter(before + ledger.kept("end"))
    assert counted == Counter(ledger.written)
