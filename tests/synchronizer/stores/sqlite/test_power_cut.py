"""The power fails: what was acknowledged is on the disk, also if another process has committed it.

An unflushed append may be lost, but not if the same process has had a later one acknowledged.

Processes that append record in one file what they write and flush, and what is acknowledged. The state of the disk
after a power cut is made from that: what was flushed by then, and of the rest nothing, or any part.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from synchronizer.store import Appended
from synchronizer.stores.sqlite import commit_slots
from synchronizer.stores.sqlite import rows as sqlite_rows
from synchronizer.stores.sqlite.store import SqliteStore
from tests.places import ROOT
from tests.waiting import PATIENCE_SECONDS, CallInThread

SHIM: Final = ROOT / "tests" / "servers" / "recorded_writes.c"
#: Kind, file, thread, offset, and the length of the data that follow.
ENTRY: Final = struct.Struct("<cc2xIQQ")
WRITERS: Final = 4
#: The numbers of writers that also append in another way.
UNREAD_WRITER, UNFLUSHED_WRITER = 0, 2
#: By the file that an acknowledgement names.
SEGMENTS: Final = {b"s": "s", b"u": "unread", b"f": "unflushed"}
DATABASE, LOG = b"d", b"w"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("recording what a process writes takes Linux and a C compiler")
    library = tmp_path_factory.mktemp("library") / "recorded_writes.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM], check=True)
    return library


class Entry(NamedTuple):
    """``kind``: w(rite), t(runcation), b(egin) and e(nd) of a flush, a(cknowledgement), or s(een) length.

    ``thread``: of an acknowledgement, the number of the writer.
    """

    kind: bytes
    file: bytes
    thread: int
    offset: int
    data: bytes


def read_entries(path: Path) -> Iterator[Entry]:
    recorded = path.read_bytes()
    at = 0
    while at < len(recorded):
        kind, file, thread, offset, length = ENTRY.unpack_from(recorded, at)
        at += ENTRY.size
        yield Entry(kind, file, thread, offset, recorded[at : at + length])
        at += length


@pytest.mark.parametrize(
    ("appends", "cuts"), [(60, 40), pytest.param(1000, 300, marks=pytest.mark.broad)], ids=["few", "many"]
)
def test_what_was_acknowledged_survives_a_power_cut(appends: int, cuts: int, library: Path, tmp_path: Path) -> None:
    path, recorded = tmp_path / "store.db", tmp_path / "recorded"
    with SqliteStore(str(path)) as store:
        for segment in SEGMENTS.values():
            store.create(segment)
    empty = path.read_bytes()
    with SqliteStore(str(path)) as store:
        reading = Reading(store, recorded)
        write(range(WRITERS), appends, library, path, recorded)
        reading.end()
        assert sqlite_rows.last_shared_commit(store._writer) >> commit_slots._RANDOM_BITS > appends // 10
    entries = list(read_entries(recorded))
    assert sum(entry.kind == b"a" for entry in entries) == WRITERS * appends
    assert any(entry.kind == b"e" and entry.file == DATABASE for entry in entries), "there was a checkpoint"
    check_cuts(entries, empty, cuts, tmp_path / "after")


def test_an_unflushed_append_does_not_wait_for_the_disk_and_the_next_append_flushes_both(
    library: Path, tmp_path: Path
) -> None:
    path, recorded = tmp_path / "store.db", tmp_path / "recorded"
    with SqliteStore(str(path)) as store:
        for segment in SEGMENTS.values():
            store.create(segment)
    empty = path.read_bytes()
    write([UNFLUSHED_WRITER], 40, library, path, recorded)
    entries = list(read_entries(recorded))
    flushes = 0
    per_kind: dict[bytes, list[int]] = defaultdict(list)
    for entry in entries:
        flushes += entry.kind == b"b" and entry.file == LOG
        if entry.kind == b"a":
            per_kind[entry.file].append(flushes)
            flushes = 0
    assert per_kind[b"s"] == [1] * 20
    assert per_kind[b"f"][1:] == [0] * 19  # before the first one the file was opened
    check_cuts(entries, empty, 40, tmp_path / "after")


def write(numbers: Iterable[int], appends: int, library: Path, path: Path, recorded: Path) -> None:
    """Run a process for each number, all at the same time, which appends and records what it does."""
    environment = {**os.environ, "LD_PRELOAD": str(library), "RECORDED_WRITES": str(recorded)}
    module = "tests.synchronizer.stores.sqlite.test_power_cut"
    with ExitStack() as processes:
        writers = [
            processes.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, str(path), str(recorded), str(number), str(appends)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for number in numbers
        ]
        for writer in writers:
            assert writer.stdout
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers:
            assert writer.stdin
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
        assert [writer.wait(PATIENCE_SECONDS) for writer in writers] == [0] * len(writers)


class Reading:
    """A thread that records the length that it sees, again and again."""

    def __init__(self, store: SqliteStore, recorded: Path) -> None:
        self._store = store
        self._recorded = recorded
        self._ended = threading.Event()
        self._call = CallInThread(self._run)

    def _run(self) -> bool:
        recorded = os.open(self._recorded, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        while not self._ended.wait(0.0005):
            length = self._store.info("s").length
            os.write(recorded, ENTRY.pack(b"s", b"-", 0, length, 0))
        os.close(recorded)
        return True

    def end(self) -> None:
        self._ended.set()
        assert self._call.ended() is True


def check_cuts(entries: list[Entry], empty: bytes, cuts: int, folder: Path) -> None:
    """Cut the power after acknowledgements, chosen by chance, and after the last one."""
    chance = random.Random(1)
    places = [place for place, entry in enumerate(entries) if entry.kind in (b"a", b"s")]
    chosen = {*chance.sample(places, min(cuts, len(places))), places[-1]}
    disk = Disk({DATABASE: bytearray(empty), LOG: bytearray()})
    promised = Promised()
    for place, entry in enumerate(entries):
        disk.apply(entry)
        promised.add(entry)
        if place in chosen:
            for part in (0.0, 0.5):
                folder.mkdir()
                for file, name in ((DATABASE, "store.db"), (LOG, "store.db-wal")):
                    (folder / name).write_bytes(disk.after_a_cut(file, part, chance))
                with SqliteStore(str(folder / "store.db")) as store:
                    promised.check(store)
                shutil.rmtree(folder)


class Disk:
    """The files on a disk, and what was written to them since and may be lost."""

    def __init__(self, files: dict[bytes, bytearray]) -> None:
        self._files = files
        self._unflushed: dict[bytes, list[Entry]] = defaultdict(list)
        #: For each thread that flushes a file, how many of these writes it covers.
        self._covered: dict[bytes, dict[int, int]] = defaultdict(dict)

    def apply(self, entry: Entry) -> None:
        unflushed, covered = self._unflushed[entry.file], self._covered[entry.file]
        if entry.kind in (b"w", b"t"):
            unflushed.append(entry)
        elif entry.kind == b"b":
            covered[entry.thread] = len(unflushed)
        elif entry.kind == b"e":
            count = covered.pop(entry.thread)
            for write in unflushed[:count]:
                self._write(self._files[entry.file], write)
            del unflushed[:count]
            for thread in covered:
                covered[thread] = max(0, covered[thread] - count)

    def after_a_cut(self, file: bytes, part: float, chance: random.Random) -> bytes:
        """The file, with about this part of what was not flushed."""
        content = bytearray(self._files[file])
        for write in self._unflushed[file]:
            if chance.random() < part:
                self._write(content, write)
        return bytes(content)

    @staticmethod
    def _write(content: bytearray, write: Entry) -> None:
        if write.kind == b"t":
            del content[write.offset :]
            content.extend(bytes(write.offset - len(content)))
        else:
            content.extend(bytes(max(0, write.offset - len(content))))
            content[write.offset : write.offset + len(write.data)] = write.data


class Promised:
    """What appends have answered so far."""

    def __init__(self) -> None:
        self._records: dict[str, dict[int, bytes]] = {segment: {} for segment in SEGMENTS.values()}
        self._unflushed: dict[int, dict[int, bytes]] = defaultdict(dict)  # by the number of the writer
        self._seen = 0

    def add(self, entry: Entry) -> None:
        if entry.kind == b"a" and entry.file == b"f":
            self._unflushed[entry.thread][entry.offset] = entry.data
        elif entry.kind == b"a":
            self._records[SEGMENTS[entry.file]][entry.offset] = entry.data
            self._records["unflushed"] |= self._unflushed.pop(entry.thread, {})
        elif entry.kind == b"s":
            self._seen = max(self._seen, entry.offset)

    def check(self, store: SqliteStore) -> None:
        assert store.info("s").length >= self._seen, "somebody has read what is lost"
        for segment, records in self._records.items():
            data = store.read(segment, 0, 1 << 24)
            for offset, record in records.items():
                assert data[offset : offset + len(record)] == record, "an acknowledged append is lost"
                assert data.count(record) == 1


def main(path: str, recorded: str, number: int, appends: int) -> None:
    """Append, and record what is acknowledged."""
    log = os.open(recorded, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with SqliteStore(path, write_timeout=PATIENCE_SECONDS) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        for count in range(appends):
            record = b"%03d:%07d;" % (number, count)
            if number == 1 and count % 20 == 10:
                store._log._since_checkpoint = 1 << 40  # a checkpoint is due
            if number == UNREAD_WRITER and count % 3 == 0:
                kind, answer = b"u", store.append_unread("unread", record)
            elif number == UNFLUSHED_WRITER and count % 2 == 0:
                kind, answer = b"f", store.append_unflushed("unflushed", record)
            else:
                kind, answer = b"s", store.append("s", record)
            assert isinstance(answer, Appended)
            os.write(log, ENTRY.pack(b"a", kind, number, answer.offset, len(record)) + record)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
