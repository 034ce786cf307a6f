"""Compares the records of the workers with the truth, which is computed directly from the files."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import lt
from typing import Final

from .counting import UNSIGNED, BatchRecord, number_of_words

_MAX_DIFFERENCES: Final = 20


class FileTruth:
    """The truth about a file: the number of words and the checksum of each line."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.words = array(UNSIGNED)
        self.checksums = array(UNSIGNED)
        for line in lines:
            self.words.append(number_of_words(line))
            self.checksums.append(zlib.crc32(line))

    def __len__(self) -> int:
        return len(self.words)


@dataclass
class _Read:
    """The part of a file that was read so far."""

    #: The line that the present owner must read next, and the first line that no owner has read.
    next: int = 0
    new: int = 0
    token: int = -1
    words: int = 0
    offsets: array[int] = field(default_factory=lambda: array(UNSIGNED))
    segments: list[tuple[int, str]] = field(default_factory=list)  # from which line on

    def segment_of(self, number: int) -> str:
        return next(segment for start, segment in reversed(self.segments) if start <= number)


@dataclass
class Verdict:
    """The result of the comparison. ``differences`` holds the first differences as sentences."""

    lines: int = 0
    words: int = 0
    #: Lines that were read again after their reader had died.
    repeated: int = 0
    missing: int = 0
    number_of_differences: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.number_of_differences

    def differ(self, sentence: str) -> None:
        self.number_of_differences += 1
        if len(self.differences) < _MAX_DIFFERENCES:
            self.differences.append(sentence)


def check(truth: Mapping[str, FileTruth], records: Iterable[BatchRecord], died: Collection[int]) -> Verdict:
    """Compare the records with the truth.

    ``records`` with one fencing token are in the order of writing. ``died`` holds the tokens of assignments whose
    reader was declared dead. Fencing tokens order the owners of a line's key, across splits too. Each owner must start
    right after the last line of the owner before; only after a death may it start earlier, and repeat.
    """
    verdict = Verdict(lines=sum(map(len, truth.values())))
    files = {name: _Read() for name in truth}
    last_offsets: dict[tuple[int, str], int] = {}
    for record in sorted(records, key=lambda record: record.fencing_token):
        _check_offsets(record, last_offsets, verdict)
        start = 0
        for name, count in record.files:
            run = slice(start, start + count)
            start += count
            if name in truth:
                _check_run(name, truth[name], files[name], record, run, died, verdict)
            else:
                verdict.differ(f"{name}: there is no such file, but {count} lines of it were read")
    for name, read in files.items():
        _check_whole(name, truth[name], read, verdict)
    return verdict


def _check_offsets(record: BatchRecord, last_offsets: dict[tuple[int, str], int], verdict: Verdict) -> None:
    """Check that each owner read the events of a segment in the order of their offsets."""
    owner = (record.fencing_token, record.segment)
    offsets = [last_offsets.get(owner, -1), *record.offsets]
    if not all(map(lt, offsets, offsets[1:])):
        verdict.differ(f"{record.segment}: events were read out of order under token {record.fencing_token}")
    last_offsets[owner] = offsets[-1]


def _check_run(
    name: str, truth: FileTruth, read: _Read, record: BatchRecord, run: slice, died: Collection[int], verdict: Verdict
) -> None:
    """Check lines of one file that were read one after another."""
    numbers = record.numbers[run]
    first, end = numbers[0], numbers[0] + len(numbers)
    if numbers != array(UNSIGNED, range(first, end)):
        verdict.differ(f"{name}: lines {_few(numbers)} were read in this order")
        return
    if first != read.next:
        _judge_jump(name, first, read, record, died, verdict)
    if end > len(truth):
        verdict.differ(f"{name}: line {end - 1} was read, but there are {len(truth)} lines")
        return
    for what, found, wanted in (
        ("words", record.words[run], truth.words[first:end]),
        ("text", record.checksums[run], truth.checksums[first:end]),
    ):
        if found != wanted:
            wrong = next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True), first) if a != b)
            verdict.differ(f"{name}: line {wrong} has wrong {what}")
    _take_in(name, read, record, run, first, end, verdict)


def _judge_jump(
    name: str, first: int, read: _Read, record: BatchRecord, died: Collection[int], verdict: Verdict
) -> None:
    if first > read.next:
        verdict.differ(f"{name}: line {first} was read when line {read.next} was due: lines were skipped")
    elif record.fencing_token == read.token:
        verdict.differ(f"{name}: line {first} was read again by the same owner, when line {read.next} was due")
    elif read.token not in died:
        verdict.differ(
            f"{name}: line {first} was read again, when line {read.next} was due, after a hand-over without a death"
        )


def _take_in(name: str, read: _Read, record: BatchRecord, run: slice, first: int, end: int, verdict: Verdict) -> None:
    offsets = record.offsets[run]
    repeated = max(0, min(end, read.new) - first)
    if repeated:
        verdict.repeated += repeated
        same = offsets[:repeated] == read.offsets[first : first + repeated]
        if not same or read.segment_of(first) != record.segment:
            verdict.differ(f"{name}: lines from {first} on had another pointer when they were read again")
    if end > read.new and first <= read.new:
        if not read.segments or read.segments[-1][1] != record.segment:
            read.segments.append((read.new, record.segment))
        read.offsets.extend(offsets[repeated:])
        read.words += sum(record.words[run][repeated:])
        read.new = end
    read.next, read.token = end, record.fencing_token


def _check_whole(name: str, truth: FileTruth, read: _Read, verdict: Verdict) -> None:
    if read.new < len(truth):
        verdict.missing += len(truth) - read.new
        verdict.differ(f"{name}: lines from {read.new} on, of {len(truth)}, were never read in order")
    words = sum(truth.words)
    verdict.words += read.words
    if read.words != words:
        verdict.differ(f"{name}: {read.words} words were counted, and there are {words}")


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
