"""What the other processes of the PostgreSQL tests do. They are spawned, so that they share nothing but the server."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

from synchronizer.stores import open_store


def append_when_told(connection: Connection, url: str) -> None:
    """One append per message, after so many seconds; answers with the time at which it was acknowledged."""
    with open_store(url) as store:
        connection.send("ready")
        while delay := connection.recv():
            time.sleep(delay)  # meanwhile the other one begins to wait
            store.append("s", b"x")
            connection.send(time.monotonic())


def fork_while_holding_a_fair_lock(connection: Connection, url: str) -> None:
    """Answers with the child, which lives on."""
    with open_store(url) as store, store.fair_lock("s", 60):
        child = os.fork()
        if child:
            connection.send(child)
        signal.pause()


def open_at_once(connection: Connection, url: str, name: str) -> None:
    """Open the store for the first time, as soon as told, and create a segment."""
    connection.send("ready")
    connection.recv()
    with open_store(url) as store:
        connection.send(store.create(name))
