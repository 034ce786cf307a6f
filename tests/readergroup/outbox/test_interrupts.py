"""Ctrl-C anywhere while a relay starts and closes: no thread goes on, and another relay moves the events."""

from __future__ import annotations

import sqlite3
import threading
import uuid
from pathlib import Path

import readergroup as rg
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.waiting import until


@FEW_OR_MORE
def test_an_interrupted_relay_ends(tmp_path: Path, sparsely: int) -> None:
    database = tmp_path / "application.db"
    with rg.connect(f"memory://{uuid.uuid4()}") as client:
        client.streams.create("shop/orders")
        outbox = rg.Outbox(client, lambda: sqlite3.connect(database))
        outbox.create_table()
        outbox.relay().close()
        for run in interrupts(lambda: start_and_close(outbox), one_in=4 * sparsely):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            until(lambda: not relays(), f"the thread ends, interrupted at {run.place}", seconds=30)
        with sqlite3.connect(database) as connection:
            outbox.write(connection, "shop/orders", b"event")
        with outbox.relay():
            until(lambda: outbox.lag().events == 0, "the event is moved", seconds=30)


def start_and_close(outbox: rg.Outbox[bytes]) -> None:
    relay = outbox.relay()
    try:
        relay.close()
    except BaseException:
        relay.close()
        raise


def relays() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("relay of") and each.is_alive()]
