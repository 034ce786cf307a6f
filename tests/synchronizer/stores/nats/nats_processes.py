"""What the other processes of the tests on NATS do. They are spawned, so that they share nothing but the servers."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

from synchronizer.stores import open_store

RECORD = 12


def open_at_once(connection: Connection, url: str, number: int) -> None:
    """Open the store when told, which may not exist yet, and create a segment in it."""
    connection.send("ready")
    connection.recv()
    with open_store(url) as store:
        connection.send(store.create(f"segment-{number}"))


def append_when_told(connection: Connection, url: str) -> None:
    """One append per message; answers with the time at which it was acknowledged."""
    with open_store(url) as store:
        connection.send("ready")
        while connection.recv():
            store.append("s", b"x" * RECORD)
            connection.send(time.monotonic())
