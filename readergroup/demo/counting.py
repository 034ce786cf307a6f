"""The work of the workers: they count the words of each line, and record it independently of the product.

Each worker process appends to a file of its own. It writes one record per batch before the batch counts as processed,
so a killed process has recorded all processed batches. If its last record is incomplete, that batch was not processed.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgpack

from ..streams.event import EventBatch
from .corpus import Line

#: The length of a record's body, and its number of lines.
_HEADER: Final = struct.Struct("<II")


#: The type code of arrays of unsigned integers, 8 bytes each.
UNSIGNED: Final = "Q"
_WORD: Final = re.compile(r"\w+")


class BatchRecord(NamedTuple):
    """A worker's account of one batch. The arrays have an item per line, ``files`` a pair per run of one file."""

    segment: str
    fencing_token: int
    files: Sequence[tuple[str, int]]
    numbers: array[int]
    offsets: array[int]
    words: array[int]
    checksums: array[int]


@dataclass
class CountWords:
    """Handles a batch of lines. Pickles, and opens its file in the worker's process."""

    folder: Path
    _file: BinaryIO | None = field(default=None, init=False)

    def __call__(self, batch: EventBatch[Line]) -> None:
        if self._file is None:
            # A worker has no screen. Notifications report the same as its warnings.
            logging.getLogger("readergroup").addHandler(logging.NullHandler())
            self._file = record_file(self.folder, os.getpid()).open("ab")
        self._file.write(encode(_record(batch)))
        self._file.flush()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_file": None}


def _record(batch: EventBatch[Line]) -> BatchRecord:
    lines = [line for _, line in batch.data]
    return BatchRecord(
        segment=batch.segment,
        fencing_token=batch.fencing_token,
        files=[(key or "", sum(1 for _ in run)) for key, run in groupby(batch.routing_keys)],
        numbers=array(UNSIGNED, [number for number, _ in batch.data]),
        offsets=array(UNSIGNED, batch.offsets),
        words=array(UNSIGNED, map(number_of_words, lines)),
        checksums=array(UNSIGNED, map(zlib.crc32, lines)),
    )


def number_of_words(line: bytes) -> int:
    """Return the number of words: runs of letters, digits and underscores. Invalid UTF-8 separates words."""
    return len(_WORD.findall(line.decode("utf-8", "replace")))


def record_file(folder: Path, pid: int) -> Path:
    return folder / f"worker-{pid}.records"


def record_files(folder: Path) -> Sequence[Path]:
    """Return the record files of all workers."""
    return sorted(folder.glob("worker-*.records"))


def encode(record: BatchRecord) -> bytes:
    segment, token, files, *columns = record
    body: bytes = msgpack.packb((segment, token, files, *(column.tobytes() for column in columns)))
    return _HEADER.pack(len(body), len(record.numbers)) + body


def read_records(path: Path) -> Iterator[BatchRecord]:
    """Iterate over the complete records of a file, without an incomplete last one."""
    data = memoryview(path.read_bytes())
    start = _HEADER.size
    while start <= len(data):
        length, _ = _HEADER.unpack_from(data, start - _HEADER.size)
        if start + length > len(data):
            return
        segment, token, files, *columns = msgpack.unpackb(data[start : start + length])
        yield BatchRecord(segment, token, files, *(array(UNSIGNED, column) for column in columns))
        start += length + _HEADER.size


class RecordedLines:
    """How many lines each worker process has recorded, by the headers of its records only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_up_to: dict[Path, int] = {}
        self.lines: dict[int, int] = {}  # by pid

    @property
    def total(self) -> int:
        return sum(self.lines.values())

    def look(self) -> None:
        for path in record_files(self._folder):
            pid = int(path.stem.partition("-")[2])
            self.lines[pid] = self.lines.get(pid, 0) + self._look_at(path)

    def _look_at(self, path: Path) -> int:
        """Return the number of lines in the records since the last look."""
        found, at, size = 0, self._read_up_to.get(path, 0), path.stat().st_size
        with path.open("rb") as file:
            while at + _HEADER.size <= size:
                file.seek(at)
                length, lines = _HEADER.unpack(file.read(_HEADER.size))
                if at + _HEADER.size + length > size:
                    break
                found += lines
                at += _HEADER.size + length
        self._read_up_to[path] = at
        return found
