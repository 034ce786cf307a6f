"""How ranges are put together for tasks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from readergroup import SegmentRange
from readergroup.spark.planning import packed


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
