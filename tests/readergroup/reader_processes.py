"""What the reader processes of these tests do, and the diaries they keep: one file each, outside of the product."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import readergroup as rg
from tests.clean_processes import CLEAN
from tests.waiting import PATIENCE_SECONDS

LONG = PATIENCE_SECONDS
STREAM = "shop/orders"
GROUP = "billing"


class Delivery(NamedTuple):
    """One event, as a process got it. Times are of the machine's monotonic clock, which its processes share."""

    key: str
    number: int
    segment: str
    offset: int
    token: int
    at: float


def read_all(connection: Connection, url: str, reader_id: str, diary: Path, pause: float) -> None:
    """Read to the end of the data and write down each event before it counts as processed."""
    with rg.connect(url) as client, diary.open("a", buffering=1) as file:
        with client.groups.get(GROUP).reader(reader_id) as reader:
            connection.send("ready")
            never = threading.Event()
            for event in reader:
                key, number = event.raw.decode().split(":")
                row = (key, int(number), event.segment, event.offset, event.fencing_token, time.monotonic())
                file.write(json.dumps(row) + "\n")
                if pause:
                    never.wait(pause)
    connection.send("done")


def hold_and_commit(connection: Connection, url: str, reader_id: str, _: Path, __: float) -> None:
    """Read ten events without committing, say so, and commit when told; answers with what came of it."""
    with rg.connect(url) as client:
        reader = client.groups.get(GROUP).reader(reader_id, auto_commit=False)
        events = []
        while len(events) < 10:
            event = reader.read(timeout=LONG)
            assert event is not None
            events.append(event)
        connection.send([(event.raw.decode(), event.segment, event.offset, event.fencing_token) for event in events])
        connection.recv()
        try:
            reader.commit()
        except rg.ReaderNotInGroupError as error:
            connection.send(f"refused: {error}")
        else:
            connection.send("committed")
        connection.recv()


@contextmanager
def running(
    work: Callable[..., None], url: str, reader_id: str, diary: Path, pause: float = 0.0
) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that is killed at the end of the block if it still runs."""
    here, there = CLEAN.Pipe()
    process = CLEAN.Process(target=work, args=(there, url, reader_id, diary, pause), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        kill(process)


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join(LONG)


def receive(connection: Connection) -> object:
    assert connection.poll(LONG), "the other process does not answer"
    return connection.recv()


def deliveries(diary: Path) -> list[Delivery]:
    """What the diary says. The last line of a process that was killed may be half written."""
    if not diary.exists():
        return []
    lines = diary.read_text().split("\n")[:-1]
    return [Delivery(*json.loads(line)) for line in lines]
