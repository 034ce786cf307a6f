"""Keys lie where Pravega puts them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readergroup.streams.config import even_ranges
from readergroup.streams.routing import Routes, key_position
from tests.waiting import PATIENCE_SECONDS


@pytest.mark.parametrize(("key", "position"), [("0", 0.8056), ("2", 0.2800), ("Foo", 0.0494)])
def test_a_key_lies_where_pravega_puts_it(key: str, position: float) -> None:
    assert round(key_position(key), 4) == position


@given(st.text())
def test_every_key_lies_in_the_key_range_also_one_that_is_no_valid_unicode(key: str) -> None:
    assert 0.0 <= key_position(key) < 1.0
    assert 0.0 <= key_position(key + "\ud800") < 1.0


@given(st.integers(1, 40), st.floats(0, 1, exclude_max=True))
def test_a_position_belongs_to_the_segment_whose_range_holds_it(count: int, position: float) -> None:
    ranges = even_ranges(count)
    routes = Routes(range(10, 10 + count), [each.low for each in ranges])
    holding = ranges[routes.segment_at(position) - 10]
    assert holding.low <= position < holding.high


def test_many_keys_are_spread_evenly() -> None:
    routes = Routes([0, 1, 2, 3], [0.0, 0.25, 0.5, 0.75])
    counts = [0] * 4
    for index in range(10_000):
        counts[routes.segment_of(f"key-{index}")] += 1
    assert min(counts) > 2300


@pytest.mark.parametrize(("segments", "lows"), [([], []), ([1], [0.5]), ([1, 2], [0.0])])
def test_ranges_that_do_not_cover_the_key_range_are_refused(segments: list[int], lows: list[float]) -> None:
    with pytest.raises(ValueError):
        Routes(segments, lows)


def test_a_process_without_a_file_descriptor_left_finds_the_place_of_a_key() -> None:
    program = """
import os, resource
from readergroup.streams.routing import key_position
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), 100))
print(round(key_position("0"), 4))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.stdout == "0.8056\n", done.stderr
