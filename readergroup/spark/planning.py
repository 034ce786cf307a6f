"""Divides the work among Spark tasks: ranges of about one size, small ones together, since each task costs time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from pyspark.sql.datasource import InputPartition

from ..batch.ranges import SegmentRange
from ..client import Client
from .options import ReadOptions

#: A task takes some ten milliseconds more than reading its data, and reading this much takes longer.
_WORTH_A_TASK_BYTES: Final = 32 * 1024 * 1024
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
    at_least = options.min_partitions or default_partitions(total, os.cpu_count() or 1)
    rounds = max(1, -(-total // (options.max_bytes_per_partition * at_least)))
    size = max(1, -(-total // (rounds * at_least)))
    for _ in range(_TRIES):
        parts = _divided(client, ranges, size)
        if len(parts) >= at_least:
            break
        size = max(1, size // 2)  # a part ends with a block, so it may be much longer than asked
    return [Ranges(each) for each in packed(parts, size + size // 8, at_least)]


def default_partitions(total: int, cores: int) -> int:
    """Return how many tasks to make of ``total`` bytes at least: one per core, if it is worth its cost.

    The planner cannot ask Spark for its cores. In local mode they are those of this machine.
    """
    return max(1, min(cores, total // _WORTH_A_TASK_BYTES))


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
