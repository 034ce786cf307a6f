"""Divides the work among Spark tasks: ranges of about one size, small ones together, since each task costs time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from pyspark.sql.datasource import InputPartition

from ..batch.ranges import SegmentRange
from ..client import Client
from .options import ReadOptions

#: How many sizes to try until there are enough parts: the full size, then halves down to an eighth.
_TRIES: Final = 4


class Ranges(InputPartition):
    """Ranges that one task reads one after another."""

    def __init__(self, ranges: Sequence[SegmentRange]) -> None:
        super().__init__(ranges)
        self.ranges = tuple(ranges)


def planned(client: Client, ranges: Sequence[SegmentRange], options: ReadOptions) -> list[InputPartition]:
    """Return the ranges, divided and grouped into tasks. Ranges of one segment keep their order.

    Each of ``min_partitions`` cores gets the same number of tasks, and each task about the same number of bytes.
    """
    total = sum(each.size for each in ranges)
    rounds = max(1, -(-total // (options.max_bytes_per_partition * options.min_partitions)))
    size = max(1, -(-total // (rounds * options.min_partitions)))
    for _ in range(_TRIES):
        parts = _divided(client, ranges, size)
        if len(parts) >= options.min_partitions:
            break
        size = max(1, size // 2)  # a part ends with a block, so it may be much longer than asked
    return [Ranges(each) for each in packed(parts, size + size // 8, options.min_partitions)]


def _divided(client: Client, ranges: Sequence[SegmentRange], size: int) -> list[SegmentRange]:
    """Return the ranges, divided wherever ``size`` bytes are full, or nearly so."""
    parts: list[SegmentRange] = []
    room, little = size, size // 8
    for each in ranges:
        while each.size > room + little:
            part = next(client.batch.divide(each, room))
            parts.append(part)
            each, room = each.model_copy(update={"start": part.end}), size
        if each.size:
            parts.append(each)
            room = room - each.size if room - each.size > little else size
    return parts


class _HasSize(Protocol):
    @property
    def size(self) -> int: ...


R = TypeVar("R", bound=_HasSize)


def packed(ranges: Sequence[R], max_bytes: int, at_least: int) -> list[list[R]]:
    """Return the ranges in groups of at most ``max_bytes``, or of one range; ``at_least`` this many if possible."""
    groups: list[list[R]] = []
    room = 0
    for each in ranges:
        if not groups or each.size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(each)
        room -= each.size
    while len(groups) < min(at_least, len(ranges)):
        longest = max(groups, key=len)
        middle = len(longest) // 2
        at = groups.index(longest)
        groups[at : at + 1] = [longest[:middle], longest[middle:]]
    return groups
