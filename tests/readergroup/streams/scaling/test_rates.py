"""The rates of segments: what a sparse history of counts shows, and that it stays small."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import readergroup as rg
from readergroup.streams.scaling.rates import MAX_BYTES, RateHistory, Sample
from tests.golden import golden

WINDOWS = (120.0, 300.0, 600.0, 1200.0)
LONGEST = WINDOWS[-1]


def history(*samples: tuple[float, dict[int, int]]) -> RateHistory:
    """A history to which these samples were added one by one."""
    found = RateHistory("a1", "events", (Sample(*samples[0]),), {0: 0})
    for sample in samples[1:]:
        found = found.with_sample(Sample(*sample), {0: 0}, 0.0, LONGEST)
    return found


def test_rates_are_written_and_read_as_in_the_first_release() -> None:
    rates = RateHistory("a1", "events", (Sample(1.5, {0: 0}), Sample(31.5, {0: 7, 3: 0})), {0: 500, 3: 9}, 0.25)
    stored = golden("scaling-rates-v1.msgpack", rates.encode())
    assert RateHistory.decode(stored) == rates and msgpack.unpackb(stored, strict_map_key=False)[0] == 1


def test_rates_of_a_newer_release_are_refused() -> None:
    with pytest.raises(rg.UnknownUpdateError, match="newer release"):
        RateHistory.decode(msgpack.packb([2, "a1"]))


def test_a_rate_is_the_growth_over_its_window() -> None:
    found = history(*((30.0 * i, {0: 30 * i if i <= 40 else 1200 + 300 * (i - 40)}) for i in range(45)))
    assert found.rate(0, 120) == 10
    assert found.rate(0, 1200) == pytest.approx(1 + 9 * 120 / 1200, rel=0.25)


def test_a_window_is_not_known_before_it_is_measured() -> None:
    found = history((0.0, {0: 0}), (60.0, {0: 60}), (150.0, {0: 150}))
    assert (found.rate(0, 120), found.rate(0, 300)) == (1, None)


def test_a_new_segment_has_no_rate_before_its_window() -> None:
    found = history((0.0, {0: 0}), (100.0, {0: 5, 1: 0}), (200.0, {0: 9, 1: 100}), (230.0, {0: 9, 1: 130}))
    assert (found.rate(1, 120), found.age(1)) == (1, 130)
    assert found.rate(1, 300) is None


def test_a_pause_in_measuring_makes_windows_unknown() -> None:
    found = history((0.0, {0: 0}), (30.0, {0: 30}), (700.0, {0: 700}))
    assert (found.rate(0, 120), found.rate(0, 300), found.rate(0, 600)) == (None, None, 1)


def test_a_time_that_does_not_grow_begins_the_measurement_anew() -> None:
    found = history((0.0, {0: 0}), (200.0, {0: 200}), (150.0, {0: 300}))
    assert found.samples == (Sample(150.0, {0: 300}),) and found.rate(0, 120) is None


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(20, 40), st.integers(0, 10_000)), min_size=60, max_size=150))
def test_a_rate_is_the_true_one_of_a_stretch_about_as_long_as_its_window(steps: list[tuple[float, int]]) -> None:
    at, count, truth = 0.0, 0, [(0.0, 0)]
    for seconds, grown in steps:
        at, count = at + seconds, count + grown
        truth.append((at, count))
    found = history(*((at, {0: count}) for at, count in truth))
    assert len(found.samples) <= 30
    for window in WINDOWS:
        rate = found.rate(0, window)
        assert rate is not None
        true = [(count - c) / (at - t) for t, c in truth if window <= at - t <= 1.25 * window + 45]
        assert any(rate == pytest.approx(each) for each in true)


def test_the_history_of_many_segments_is_made_less_exact() -> None:
    many = range(1000)  # the most
    found = RateHistory("a1", "events", (Sample(0.0, dict.fromkeys(many, 0)),), {})
    for step in range(1, 60):
        sample = Sample(30.0 * step, dict.fromkeys(many, 1_000_000 * step))
        found = found.with_sample(sample, dict.fromkeys(many, 10**9), 0.01, LONGEST)
    assert len(found.encode()) < 2 * MAX_BYTES
    for window in WINDOWS:
        assert found.rate(999, window) == pytest.approx(1_000_000 / 30)
