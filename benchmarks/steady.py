"""A process that writes to all segments of a stream at a steady pace while something else is measured."""

from __future__ import annotations

import time
from multiprocessing.synchronize import Event

import readergroup as rg

from .measuring import PAYLOAD

STREAM = "bench/events"
_PAUSE_SECONDS = 0.01


def write_steadily(client: rg.Client, keys: int, started: Event) -> None:
    """Write one event for each of so many routing keys every 10 ms, until killed."""
    with client.writer(STREAM) as writer:
        due = time.monotonic()
        while True:
            for number in range(keys):
                writer.write(PAYLOAD, routing_key=f"key-{number}")
            started.set()
            due = max(due + _PAUSE_SECONDS, time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))
