"""How ranges are put together for tasks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import readergroup as rg
from readergroup import SegmentRange
from readergroup.spark.options import read_options
from readergroup.spark.planning import Ranges, default_partitions, packed, planned
from tests.readergroup.spark.streams import STREAM, write


def ranges(sizes: Sequence[int]) -> list[SegmentRange]:
    return [
        SegmentRange(segment=f"a/b/{number}", incarnation="i", start=5, end=5 + size)  # type: ignore[arg-type]
        for number, size in enumerate(sizes)
    ]


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 120), st.integers(1, 50))
def test_groups_hold_each_range_once_in_order_and_are_of_about_one_size(
    sizes: list[int], max_bytes: int, at_least: int
) -> None:
    parts = ranges(sizes)
    groups = packed(parts, max_bytes, at_least)
    assert [each for group in groups for each in group] == parts
    assert all(group for group in groups)
    assert all(len(group) == 1 or sum(each.size for each in group) <= max_bytes for group in groups)
    assert len(groups) >= min(at_least, len(parts))
    # No more tasks than these need: two groups beside one another do not fit into one.
    if len(groups) > at_least:
        for left, right in zip(groups, groups[1:], strict=False):
            assert sum(each.size for each in left) + right[0].size > max_bytes


def test_many_small_ranges_are_one_task() -> None:
    assert len(packed(ranges([10] * 1000), 64 * 1024 * 1024, 1)) == 1


def test_by_default_there_is_a_task_for_each_core_if_the_data_is_large() -> None:
    megabyte = 1024 * 1024
    assert [default_partitions(size * megabyte, 4) for size in (0, 1, 63, 64, 100, 128, 10_000)] == [
        1,
        1,
        1,
        2,
        3,
        4,
        4,
    ]


@pytest.mark.parametrize("block", [50, 100, 333, 3000])
def test_there_are_as_many_tasks_as_are_asked_for_where_there_are_as_many_blocks(
    block: int, client: rg.Client, url: str
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(40))
    write(client, range(3000), block=block, padding=1000)
    whole = client.batch.segment_ranges(STREAM)
    total = sum(each.size for each in whole)
    for asked_for in (1, 50, 60, 100):
        # A writer makes smaller blocks where it is slow, and those of less than an eighth of a part do not count.
        eighth = max(1, -(-total // asked_for) // 8)
        blocks = sum(1 for each in whole for _ in client.batch.divide(each, eighth))
        options = read_options({"url": url, "stream": STREAM, "minPartitions": str(asked_for)})
        tasks = [task.ranges for task in planned(client, whole, options) if isinstance(task, Ranges)]
        assert len(tasks) >= min(asked_for, blocks)
        assert len(tasks) <= 2 * asked_for
        assert sum(each.size for task in tasks for each in task) == total


def test_tasks_are_of_about_one_size_and_as_many_for_each_core(client: rg.Client, url: str) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(3))
    write(client, range(3000), block=20, padding=1000)
    whole = client.batch.segment_ranges(STREAM)
    total = sum(each.size for each in whole)
    for cores, parts, expected in ((1, 5, 5), (2, 5, 6), (4, 5, 8)):
        options = read_options(
            {"url": url, "stream": STREAM, "minPartitions": str(cores), "maxBytesPerPartition": str(-(-total // parts))}
        )
        tasks = [task.ranges for task in planned(client, whole, options) if isinstance(task, Ranges)]
        sizes = [sum(each.size for each in task) for task in tasks]
        assert len(sizes) == expected
        assert max(sizes) < 1.3 * total / expected
