"""What a group records of its load: weights that change rarely, and balance it with few moves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import product
from math import ceil, inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readergroup.group.model import balance, weights
from readergroup.group.model.updates import AddEpoch, NewSegment, RecordWeights
from readergroup.streams.config import SegmentId
from tests.readergroup.group.histories import STREAM, History, group_state, seg
from tests.readergroup.group.model.test_balance import balanced, hand_over, loads

Rates = Mapping[SegmentId, float]

some_rates = st.lists(
    st.one_of(st.just(0.0), st.floats(1, 100), st.floats(1_000, 1e6), st.floats(0, 1e12)), min_size=1, max_size=24
)


def rates_of(*rates: float) -> Rates:
    return {seg(number): rate for number, rate in enumerate(rates)}


def weighed(rates: Rates, previous: Mapping[SegmentId, int] | None = None, lags: Rates | None = None) -> list[int]:
    found = weights.weights(rates, lags or {}, previous or {})
    return [found[segment] for segment in rates]


def as_weights(*found: int) -> Mapping[SegmentId, int]:
    return {seg(number): weight for number, weight in enumerate(found)}


def a_group(segments: int, readers: int) -> History:
    history = History(group_state(segments))
    history.add(*(f"r{number}" for number in range(readers)))
    balanced(history)
    return history


def record(history: History, rates: Rates, lags: Rates | None = None) -> int:
    """Record, move and hand over as a group does; how many segments moved."""
    updates = weights.record(history.state, rates, lags or {})
    if not updates:
        return 0
    history.apply(*updates)
    moves = balanced(history)
    hand_over(history)
    assert balance.plan(history.state) == []
    return len(moves)


def settle(history: History, rates: Rates, lags: Rates | None = None) -> int:
    """Record until nothing is left to record; how often that was."""
    for number in range(60):
        if not weights.record(history.state, rates, lags or {}):
            return number
        record(history, rates, lags)
    raise AssertionError("it never rests")


# ---------------------------------------------------------------------- the weights


def test_equal_loads_weigh_nothing() -> None:
    assert weighed(rates_of(*[5_000.0] * 8)) == [0] * 8
    assert weighed(rates_of(5_000, 6_000, 9_000, 4_000)) == [0] * 4
    assert weighed(rates_of(1e9)) == [0]


def test_a_load_four_times_as_large_weighs_two_more() -> None:
    first, *others = weighed(rates_of(40_000, *[10_000.0] * 7))
    assert {first - other for other in others} == {2}


def test_a_lag_weighs_as_the_rate_that_works_it_off_in_a_minute() -> None:
    lags = rates_of(*[60 * 70_000.0], *[0.0] * 7)
    assert weighed(rates_of(*[10_000.0] * 8), lags=lags) == weighed(rates_of(80_000, *[10_000.0] * 7))


@pytest.mark.parametrize("total", [0.0, 1_000.0, inf, nan])
def test_the_weights_stay_where_nothing_can_be_said_of_the_loads(total: float) -> None:
    assert weighed(rates_of(total, 0, 0), as_weights(4, 1, 0)) == [4, 1, 0]


def test_negative_rates_and_lags_count_as_none() -> None:
    assert weighed(rates_of(-5.0, 10_000, 10_000), lags=rates_of(-5.0)) == weighed(rates_of(0, 10_000, 10_000))


def test_a_weight_stays_until_its_load_has_clearly_changed() -> None:
    before = weighed(rates_of(80_000, *[10_000.0] * 31))
    for factor in (0.6, 0.8, 1.0, 1.3, 1.9):
        assert weighed(rates_of(80_000 * factor, *[10_000.0] * 31), as_weights(*before)) == before
    for factor, difference in ((4.0, 1), (0.25, -2)):
        after = weighed(rates_of(80_000 * factor, *[10_000.0] * 31), as_weights(*before))
        assert after == [before[0] + difference, *before[1:]]


def test_a_hot_segment_that_gets_much_hotter_changes_no_other_weight() -> None:
    before = weighed(rates_of(40_000, *[10_000.0] * 15))
    after = weighed(rates_of(160_000, *[10_000.0] * 15), as_weights(*before))
    assert after[0] > before[0] and after[1:] == before[1:]


@given(some_rates, st.integers(-6, 6))
def test_a_change_of_all_loads_by_one_factor_changes_no_weight(found: list[float], exponent: int) -> None:
    rates, factor = rates_of(*found), 2.0**exponent
    if min(sum(found), sum(found) * factor) >= weights.LEAST_LOAD:
        before = weighed(rates)
        again = weighed({segment: rate * factor for segment, rate in rates.items()}, as_weights(*before))
        assert again == before


@given(some_rates, some_rates, st.lists(st.integers(0, 40), max_size=24))
def test_the_same_loads_change_nothing_a_second_time(found: list[float], lags: list[float], before: list[int]) -> None:
    rates, behind = rates_of(*found), rates_of(*lags)
    once = weighed(rates, as_weights(*before), behind)
    assert all(0 <= weight <= 40 for weight in once)
    assert weighed(rates, as_weights(*once), behind) == once


# ---------------------------------------------------------------------- what is recorded


def test_a_hot_segment_gets_a_reader_of_its_own() -> None:
    history = a_group(16, 4)
    assert settle(history, rates_of(300_000, *[20_000.0] * 15)) > 0
    owner = history.state.segments[seg(0)].owner
    assert owner is not None and set(history.state.segments_of(owner)) == {seg(0)}
    others = [len(history.state.segments_of(reader)) for reader in history.state.readers if reader != owner]
    assert others == [5, 5, 5]


def test_nothing_is_recorded_while_loads_are_alike() -> None:
    history = a_group(16, 3)
    assert settle(history, rates_of(*(10_000.0 + 300 * number for number in range(16)))) == 0


def test_nothing_is_recorded_while_segments_move_or_have_to() -> None:
    history = a_group(8, 2)
    hot = rates_of(300_000, *[1_000.0] * 7)
    history.add("new")
    assert weights.record(history.state, hot, {}) == []
    balanced(history)
    assert weights.record(history.state, hot, {}) == []
    hand_over(history)
    assert weights.record(history.state, hot, {}) != []


def test_segments_that_are_gone_or_were_not_measured_keep_their_weights() -> None:
    history = a_group(4, 2)
    history.apply(RecordWeights(weights={seg(3): 4}))
    balanced(history)
    hand_over(history)
    (update,) = weights.record(history.state, {seg(0): 90_000, seg(1): 1_000, seg(9): 5e6}, {})
    assert set(update.weights) <= {seg(0), seg(1)}


@given(some_rates, st.integers(1, 9))
def test_a_group_rests_at_once_if_its_loads_stay(found: list[float], readers: int) -> None:
    rates = rates_of(*found)
    history = a_group(len(found), readers)
    settle(history, rates)
    assert record(history, rates) == 0


@given(some_rates, some_rates, st.integers(1, 9))
def test_one_record_moves_a_bounded_number_of_segments(found: list[float], lags: list[float], readers: int) -> None:
    history = a_group(len(found), readers)
    for _ in range(4):
        (update, *_) = weights.record(history.state, rates_of(*found), rates_of(*lags)) or [None]
        if update is None:
            return
        steps = [abs(weight - history.state.segments[segment].weight) for segment, weight in update.weights.items()]
        assert all(steps)
        assert record(history, rates_of(*found), rates_of(*lags)) <= weights.most_moves(history.state) or steps == [1]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(1, 9))
def test_no_reader_has_twice_the_load_that_it_must_have(found: list[int], readers: int) -> None:
    """From any balanced group: within two of the optimum, which is at least an even share and the heaviest segment."""
    history = a_group(len(found), readers)
    history.apply(RecordWeights(weights=as_weights(*found)))
    balanced(history)
    after = loads(history.state)
    least = max(ceil(sum(1 << weight for weight in found) / readers), 1 << max(found))
    assert max(after.values()) <= (2 - 2 / (readers + 1)) * least
    for segment, state in history.state.segments.items():
        if 1 << state.weight > min(after.values()):
            owner = state.target or state.owner
            others = [each for each, other in history.state.segments.items() if (other.target or other.owner) == owner]
            assert others == [segment], "a segment that outweighs another reader has its reader alone"


@given(st.lists(st.integers(0, 6), min_size=1, max_size=7), st.integers(1, 3))
def test_segments_without_owners_are_shared_as_well_as_possible(found: list[int], readers: int) -> None:
    history = History(group_state(len(found)))
    history.apply(RecordWeights(weights=as_weights(*found)))
    history.add(*(f"r{number}" for number in range(readers)))
    balanced(history)
    best = min(
        max(sum(1 << weight for weight, at in zip(found, shares, strict=True) if at == reader) for reader in shares)
        for shares in product(range(readers), repeat=len(found))
    )
    assert max(loads(history.state).values()) == best  # powers of two, the largest first


# ---------------------------------------------------------------------- new segments


def split_in_two(*weights_before: int) -> Mapping[SegmentId, int]:
    history = a_group(len(weights_before), 1)
    history.apply(RecordWeights(weights=as_weights(*weights_before)))
    first = history.state.segments[seg(0)]
    middle = (first.low + first.high) / 2
    epoch = AddEpoch(
        stream=STREAM,
        epoch=1,
        segments={
            seg(8): NewSegment(low=first.low, high=middle, predecessors=(seg(0),)),
            seg(9): NewSegment(low=middle, high=first.high, predecessors=(seg(0),)),
        },
    )
    return next((each.weights for each in weights.inherited(history.state, epoch)), {})


def test_the_halves_of_a_hot_segment_share_its_weight() -> None:
    assert split_in_two(6, 3) == {seg(8): 5, seg(9): 5}


def test_the_segments_of_a_group_without_weights_inherit_none() -> None:
    assert split_in_two(0, 0) == {}


def test_a_merged_segment_is_as_heavy_as_its_predecessors_together() -> None:
    history = a_group(2, 1)
    merged = {seg(9): NewSegment(low=0.0, high=1.0, predecessors=(seg(0), seg(1)))}
    epoch = AddEpoch(stream=STREAM, epoch=1, segments=merged)
    assert weights.inherited(history.state, epoch) == []
    history.apply(RecordWeights(weights=as_weights(4, 4)))
    (update,) = weights.inherited(history.state, epoch)
    assert update.weights == {seg(9): 5}


def test_thousands_of_segments_are_weighed_in_time() -> None:
    history = a_group(3_000, 300)
    rates = {seg(number): 1e7 / (number + 1) for number in range(3_000)}
    began = time.process_time()
    updates = weights.record(history.state, rates, {})
    # 0.1 s where this was written, most of it to find a change with few moves; at most once in 30 s.
    assert updates and time.process_time() - began < 3
