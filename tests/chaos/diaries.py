"""What the processes of a schedule write down themselves: one file each, a line for each thing, outside of the product.

A line is in the file when the call returns, so that it survives the process. Times are of the machine's monotonic
clock, which its processes share.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.readergroup.reader_processes import Delivery

#: A process looks at the clock this often, and writes it down when it came so much later.
PULSE_SECONDS: Final = 0.05
STALL_SECONDS: Final = 0.15


class Interval(NamedTuple):
    start: float
    end: float


class DiaryFile:
    """Where a process writes. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def delivered(self, delivery: Delivery) -> None:
        self._write(delivery)

    def begun(self, delivery: Delivery) -> None:
        """Of a reader that handles many events at once, which is `delivered` when it is processed."""
        self._write(["begun", *delivery])

    def note(self, what: str, **facts: Any) -> None:
        self._write({"note": what, "at": time.monotonic(), **facts})

    def _write(self, row: object) -> None:
        os.write(self._file, json.dumps(row).encode() + b"\n")


@contextmanager
def pulse(diary: DiaryFile) -> Iterator[None]:
    """Note each time at which this process stood still."""
    end = threading.Event()

    def beat() -> None:
        before = time.monotonic()
        while not end.wait(PULSE_SECONDS):
            now = time.monotonic()
            if now - before > STALL_SECONDS:
                diary.note("stall", since=before)
            before = now

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@dataclass
class Diary:
    """What one process wrote down."""

    name: str
    deliveries: list[Delivery] = field(default_factory=list)
    #: What a reader that handles many events at once began, each attempt.
    begun: list[Delivery] = field(default_factory=list)
    #: What a writer was about to write, and what it was told is stored: how many events of each key.
    intended: dict[str, int] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    scales: int = 0
    #: When a reader was first known to be in the group, and under which incarnations it was.
    joined_at: float | None = None
    incarnations: set[int] = field(default_factory=set)
    #: How often a reader joined once more, because it was not told whether it had, or was interrupted.
    joins_again: int = 0
    #: The last delivery before each interrupt: the reader may not have heard that it was processed.
    in_hand: list[Delivery] = field(default_factory=list)
    stalls: list[Interval] = field(default_factory=list)
    #: How often it did what the plan has beside its work.
    beside: Counter[str] = field(default_factory=Counter)
    #: Why it ended, where it ended by itself.
    ended: str | None = None
    ended_at: float | None = None
    errors: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Diary:
        diary = cls(path.stem)
        for line in path.read_bytes().split(b"\n")[:-1]:
            row = json.loads(line)
            if isinstance(row, list) and row[0] == "begun":
                diary.begun.append(Delivery(*row[1:]))
            elif isinstance(row, list):
                diary.deliveries.append(Delivery(*row))
            else:
                diary._take(row)
        return diary

    def _take(self, row: Mapping[str, Any]) -> None:
        match row["note"]:
            case "intend":
                self.intended[row["key"]] = row["count"]
            case "acknowledged":
                self.acknowledged |= row["counts"]
            case "scaled":
                self.scales += 1
            case "joined" | "assigned":
                if self.joined_at is None:
                    self.joined_at = row["at"]
                if row["incarnation"] is not None:
                    self.incarnations.add(row["incarnation"])
            case "joins again":
                self.joins_again += 1
            case "interrupted":
                self.joins_again += 1
                self.in_hand += self.deliveries[-1:]
            case "stall":
                self.stalls.append(Interval(row["since"], row["at"]))
            case "beside":
                self.beside[row["kind"]] += 1
            case "error":
                self.errors.append(row["error"])
            case "end":
                self.ended, self.ended_at = row["why"], row["at"]
