"""What processes do that share a lock, and the diary that each keeps of when it held it."""

from __future__ import annotations

import json
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import readergroup as rg

NAME = "door"


class Stay(NamedTuple):
    """The lock was held at these two times, and between. Of the machine's monotonic clock, which processes share."""

    owner: str
    token: int
    from_time: float
    to_time: float


def come_and_go(connection: Connection, url: str, owner: str, diary: Path, timeout_seconds: float) -> None:
    """Take the lock again and again, and write down how long it was held for certain, until told to end."""
    never = threading.Event()
    with rg.connect(url) as client, diary.open("a", buffering=1) as file:
        connection.send("ready")
        while not connection.poll():
            with client.lock(NAME, timeout=60, member_timeout_seconds=timeout_seconds) as held:
                from_time = time.monotonic()
                never.wait(0.02)
                to_time = time.monotonic()
                try:
                    held.check()
                except rg.LeaseLostError:
                    continue
                file.write(json.dumps(Stay(owner, held.fencing_token, from_time, to_time)) + "\n")


def stays(folder: Path) -> list[Stay]:
    """Of all diaries. The last line of a process that was killed may be half written."""
    lines = [line for diary in folder.glob("*.jsonl") for line in diary.read_text().split("\n")[:-1]]
    return [Stay(*json.loads(line)) for line in lines]
