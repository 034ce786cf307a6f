"""Handlers that pools in other processes import, and what the tests of pools share."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow

from readergroup import Client, DeadLetter, Event, EventBatch, PydanticSerializer
from readergroup.scaling.worker_process import Deaths, _Parent
from tests.waiting import PATIENCE_SECONDS, until


class InThread:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for it to return, and raise what it raised."""
        self._thread.join(seconds)
        assert not self.running, "the call did not return in time"
        if self.error is not None:
            raise self.error


class Fault(Exception):
    """What handlers here fail with."""


@dataclass(frozen=True)
class Diary:
    """What handlers have seen, in a folder that processes share: a line per event, one file per process."""

    folder: Path

    def note(self, event: Event[bytes]) -> None:
        self.line(event.fencing_token, event.segment, event.routing_key, event.raw)

    def line(self, token: int, segment: object, key: str | None, event: bytes) -> None:
        with open(self.folder / f"{os.getpid()}.txt", "a") as file:
            file.write(f"{token} {segment} {key} {event.decode()}\n")

    @property
    def lines(self) -> list[tuple[int, str, str, str]]:
        """Token, segment, key and text of the events seen, those of each process in order."""
        found = []
        for file in sorted(self.folder.glob("*.txt")):
            for line in file.read_text().splitlines():
                token, segment, key, text = line.split(" ")
                found.append((int(token), segment, key, text))
        return found

    @property
    def texts(self) -> list[str]:
        return [text for _, _, _, text in self.lines]

    @property
    def pids(self) -> set[int]:
        return {int(file.stem) for file in self.folder.glob("*.txt")}


@dataclass(frozen=True)
class Note:
    """Notes events, and batches."""

    diary: Diary

    def __call__(self, event: Event[bytes]) -> None:
        self.diary.note(event)

    def batch(self, batch: EventBatch[bytes]) -> None:
        for event in batch:
            self.diary.note(event)

    def arrow(self, batch: pyarrow.RecordBatch) -> None:
        for row in batch.to_pylist():
            self.diary.line(0, row["segment_id"], row["routing_key"], row["event"])


@dataclass(frozen=True)
class NoteRows:
    """Handles Arrow by writing its rows into a file."""

    path: Path

    def __call__(self, batch: pyarrow.RecordBatch) -> None:
        with self.path.open("a") as file:
            for row in batch.to_pylist():
                print({column: str(value) for column, value in row.items()}, file=file)


@dataclass(frozen=True)
class HoldAt:
    """Notes events, and at one of them says so and waits until it is let go; if stubborn, whatever happens."""

    diary: Diary
    text: str
    stubborn: bool = False

    def __call__(self, event: Event[bytes]) -> None:
        if event.raw.decode() == self.text:
            (self.diary.folder / "holding").touch()
            try:
                self._wait()
            except SystemExit:
                if not self.stubborn:
                    raise
                self._wait()
        self.diary.note(event)

    def _wait(self) -> None:
        until(lambda: (self.diary.folder / "let go").exists(), seconds=120)

    @property
    def holding(self) -> bool:
        return (self.diary.folder / "holding").exists()

    def let_go(self) -> None:
        (self.diary.folder / "let go").touch()


@dataclass(frozen=True)
class DeafAt:
    """Notes events, and at one of them says so and computes for long, where no signal reaches Python."""

    diary: Diary
    text: str

    def __call__(self, event: Event[bytes]) -> None:
        if event.raw.decode() == self.text:
            (self.diary.folder / "holding").touch()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
        self.diary.note(event)


@dataclass(frozen=True)
class FailAt:
    """Notes events, and fails at those with one of the texts."""

    diary: Diary
    texts: tuple[str, ...]

    def __call__(self, event: Event[bytes]) -> None:
        if event.raw.decode() in self.texts:
            raise Fault(f"cannot handle {event.raw.decode()}")
        self.diary.note(event)

    def batch(self, batch: EventBatch[bytes]) -> None:
        for event in batch:
            self(event)


class FaultOfOneProcess(Exception):
    """Can be unpickled only in the process that raised it, as if its module were imported there only."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _fault_of, (os.getpid(), str(self))


def _fault_of(pid: int, text: str) -> FaultOfOneProcess:
    if pid != os.getpid():
        raise EOFError("no such class here")
    return FaultOfOneProcess(text)


class FailForItself(FailAt):
    def __call__(self, event: Event[bytes]) -> None:
        try:
            super().__call__(event)
        except Fault as fault:
            raise FaultOfOneProcess(*fault.args) from None


@dataclass(frozen=True)
class DieAt:
    """Notes events; the first process that comes to a text ends there, in one of several ways."""

    diary: Diary
    text: str
    how: str

    def __call__(self, event: Event[bytes]) -> None:
        mark = self.diary.folder / "died"
        if event.raw.decode() == self.text and not mark.exists():
            mark.touch()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "exit":
                os._exit(3)
            raise SystemExit("enough")
        self.diary.note(event)


@dataclass(frozen=True)
class ForkAt:
    """Notes events; at a text it forks, and the child leaves the handler in one of several ways."""

    diary: Diary
    text: str
    how: str

    def __call__(self, event: Event[bytes]) -> None:
        self.diary.note(event)
        if event.raw.decode() != self.text:
            return
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        elif self.how == "raise":
            raise Fault
        elif self.how == "exit":
            sys.exit(3)


@dataclass(frozen=True)
class LeaveThreadAt:
    """Notes events; at a text it starts a thread that does not end, and that no interpreter leaves behind."""

    diary: Diary
    text: str

    def __call__(self, event: Event[bytes]) -> None:
        self.diary.note(event)
        if event.raw.decode() == self.text:
            threading.Thread(target=time.sleep, args=(3600,), name="left behind").start()


@dataclass(frozen=True)
class DieAlwaysAt:
    """Notes events; each process that comes to one of the texts is killed."""

    diary: Diary
    texts: tuple[str, ...]

    def __call__(self, event: Event[bytes]) -> None:
        if event.raw.decode() in self.texts:
            os.kill(os.getpid(), signal.SIGKILL)
        self.diary.note(event)

    def batch(self, batch: EventBatch[bytes]) -> None:
        for event in batch:
            self(event)


@dataclass(frozen=True)
class DieAlwaysAtAndHearLate(DieAlwaysAt):
    """Also, its process receives from its parent late which events others died over."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        note = _Parent._note

        def late(parent: _Parent, deaths: Deaths) -> None:
            time.sleep(0.5)
            note(parent, deaths)

        _Parent._note = late  # type: ignore[method-assign]


def write(client: Client, stream: str, texts: Sequence[str], *, keys: int = 7) -> None:
    """Write the texts, under keys in turn."""
    with client.writer(stream, timeout=PATIENCE_SECONDS) as writer:  # that of the client may be short
        for number, text in enumerate(texts):
            writer.write(text.encode(), routing_key=f"k{number % keys}")


def dead_letters(client: Client, stream: str) -> Iterator[Event[DeadLetter]]:
    """All dead letters in the stream, which is sealed."""
    client.streams.seal(stream)
    group = client.groups.create("undertaker", streams=[stream])
    with group.reader(serializer=PydanticSerializer(DeadLetter)) as reader:
        yield from reader
