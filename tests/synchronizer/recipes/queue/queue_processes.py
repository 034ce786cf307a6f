"""What the other processes of these tests do. What they handled they write into files of their own."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from synchronizer import EventProcessor, EventQueue, QueuedEvent, open_store
from tests.synchronizer.stores.processes import LONG

QUEUE = "jobs"
MAX_BATCH = 10
TIMEOUT_SECONDS = 1.0


def consume(connection: Connection, url: str, diary: Path, hold_at: int) -> None:
    """Handle events and write each down; hold the one of this number in hand until told, and go on."""

    def handle(event: QueuedEvent) -> None:
        file.write(f"{event.offset} {event.data.decode()}\n")
        if int(event.data) == hold_at:
            connection.send("in hand")
            assert connection.poll(LONG)
            connection.recv()

    with open_store(url) as store, diary.open("a", buffering=1) as file:
        with EventProcessor(
            store, QUEUE, handle, max_batch=MAX_BATCH, consumer_timeout_seconds=TIMEOUT_SECONDS
        ) as processor:
            processor.join(LONG)


def add_until_killed(connection: Connection, url: str, diary: Path) -> None:
    """Add numbers, and write each down when it is stored."""
    with open_store(url) as store, diary.open("a", buffering=1) as file, EventQueue(store, QUEUE) as jobs:
        number = 0
        while True:
            jobs.add(b"%d" % number)
            file.write(f"{number}\n")
            number += 1
            if number == 20:
                connection.send("some are stored")
