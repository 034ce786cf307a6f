"""What a scaling policy decides: a pure function of the metadata of a stream, the measured rates and the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import readergroup as rg
from readergroup.streams.config import LoadTarget, StreamConfig
from readergroup.streams.scaling.decision import Decision, decide, rates_of
from readergroup.streams.scaling.rates import RateHistory, Sample
from readergroup.streams.state import AnnounceSeal, PublishScale, SealStream, StreamState, new_stream
from synchronizer import Revision

STEP = 30.0
AT = Revision(0, 0)


def policy(least: int = 1, most: int = 16, factor: int = 2) -> LoadTarget:
    load = rg.ScalingPolicy.by_event_rate(100, min_segments=least, max_segments=most, scale_factor=factor).load
    assert load is not None
    return load


def stream(segments: int) -> StreamState:
    return new_stream("shop/orders", "a1", StreamConfig(scaling=rg.ScalingPolicy.fixed(segments)))


class Simulated:
    """A stream whose segments take events at rates that a test sets, measured and scaled every 30 seconds."""

    def __init__(self, state: StreamState, policy: LoadTarget) -> None:
        self.state, self.policy = state, policy
        self.history = RateHistory("a1", "events", (Sample(0.0, dict.fromkeys(state.current, 0)),), {})
        self.decisions: list[tuple[float, Decision]] = []

    @property
    def now(self) -> float:
        return self.history.newest.at

    def decide(self) -> Decision:
        return decide(self.policy, self.state, self.history, self.now)

    def run(self, seconds: float, load: Callable[[StreamState, int], float], *, scale: bool = True) -> None:
        for _ in range(round(seconds / STEP)):
            before = self.history.newest.counts
            counts = {
                n: before[n] + round(STEP * load(self.state, n)) if n in before else 0 for n in self.state.current
            }
            self.history = self.history.with_sample(Sample(self.now + STEP, counts), {}, 0.0, self.policy.windows[-1])
            decision = self.decide()
            if decision.scale is not None:
                self.decisions.append((self.now, decision))
                if scale:
                    epoch = self.state.epoch + 1
                    self.state = PublishScale(epoch=epoch).apply_to(decision.scale.apply_to(self.state, AT), AT)


def even(total: float) -> Callable[[StreamState, int], float]:
    """A load that is spread evenly over the keys."""

    def load(state: StreamState, number: int) -> float:
        keys = state.segments[number].keys
        return total * (keys.high - keys.low)

    return load


def at_places(rates: Mapping[float, float]) -> Callable[[StreamState, int], float]:
    """A load of a few keys at these places of the key range."""

    def load(state: StreamState, number: int) -> float:
        keys = state.segments[number].keys
        return sum(rate for place, rate in rates.items() if keys.low <= place < keys.high)

    return load


def fixed(rates: Mapping[int, float]) -> Callable[[StreamState, int], float]:
    return lambda state, number: rates[number]


@pytest.mark.parametrize(
    ("rate", "minutes"),
    [(501.0, 2.0), (499.0, 5.0), (201.0, 5.0), (199.0, 10.0), (101.0, 10.0), (100.0, None), (50.0, None)],
)
def test_a_segment_is_split_when_it_is_hot_for_long_enough(rate: float, minutes: float | None) -> None:
    simulated = Simulated(stream(1), policy())
    simulated.run(3600, fixed({0: rate}), scale=False)
    first = simulated.decisions[0] if simulated.decisions else None
    if minutes is None:
        assert first is None
    else:
        assert first is not None and first[0] == minutes * 60 and first[1].action == "split"
        assert f"segment 0 takes {rate:g} events/s over {minutes:g} min" in first[1].reason


@pytest.mark.parametrize(
    ("rate", "merged"), [(49.0, True), (51.0, False), (99.0, False)], ids=["cold", "lukewarm", "warm"]
)
def test_neighbours_are_merged_when_both_are_cold_for_twenty_minutes(rate: float, merged: bool) -> None:
    simulated = Simulated(stream(2), policy())
    simulated.run(3600, fixed({0: rate, 1: 1.0}), scale=False)
    assert bool(simulated.decisions) is merged
    if merged:
        at, decision = simulated.decisions[0]
        assert at == 1200 and decision.action == "merge" and decision.scale is not None
        assert decision.scale.predecessors == (0, 1)


def test_a_cold_segment_between_warm_ones_is_left_alone() -> None:
    simulated = Simulated(stream(3), policy())
    simulated.run(3600, fixed({0: 90.0, 1: 1.0, 2: 90.0}))
    assert simulated.decisions == []


def test_cold_segments_that_are_not_neighbours_are_left_alone() -> None:
    simulated = Simulated(stream(3), policy())
    simulated.run(3600, fixed({0: 1.0, 1: 90.0, 2: 1.0}))
    assert simulated.decisions == []


def test_a_segment_that_was_hot_a_short_while_ago_is_not_merged() -> None:
    simulated = Simulated(stream(2), policy(least=1, most=2))
    simulated.run(900, fixed({0: 400.0, 1: 1.0}))
    simulated.run(900, fixed({0: 0.0, 1: 1.0}))
    assert simulated.decisions == []
    simulated.run(1200, fixed({0: 0.0, 1: 1.0}), scale=False)
    assert simulated.decisions[0][1].action == "merge"


def test_cold_neighbours_that_are_hot_together_are_left_alone() -> None:
    simulated = Simulated(stream(2), policy())
    simulated.run(1200, fixed({0: 40.0, 1: 40.0}), scale=False)
    simulated.decisions.clear()
    simulated.run(600, fixed({0: 0.0, 1: 0.0}), scale=False)
    simulated.decisions.clear()
    simulated.run(600, fixed({0: 90.0, 1: 90.0}), scale=False)
    assert all(
        rate is not None for rate in rates_of(simulated.policy, simulated.state, simulated.history, simulated.now)[0]
    )
    assert simulated.decide().action is None


def test_a_segment_is_split_into_as_many_parts_as_its_rate_needs() -> None:
    for factor, parts in ((2, 2), (4, 4), (8, 7)):
        simulated = Simulated(stream(1), policy(factor=factor))
        simulated.run(120, fixed({0: 710.0}))
        assert len(simulated.state.current) == parts


def test_the_hottest_segments_are_split_first_within_the_bound() -> None:
    simulated = Simulated(stream(3), policy(most=4))
    simulated.run(120, fixed({0: 600.0, 1: 900.0, 2: 700.0}), scale=False)
    _, decision = simulated.decisions[0]
    assert (
        decision.scale is not None and decision.scale.predecessors == (1,) and "segment 1 takes 900" in decision.reason
    )


def test_all_hot_segments_are_split_in_one_step() -> None:
    simulated = Simulated(stream(3), policy())
    simulated.run(120, fixed({0: 600.0, 1: 10.0, 2: 700.0}))
    assert [set(each.scale.predecessors) for _, each in simulated.decisions if each.scale] == [{0, 2}]
    assert len(simulated.state.current) == 5


def test_the_successors_of_a_scale_are_left_alone_for_the_cooldown() -> None:
    simulated = Simulated(stream(1), policy())
    simulated.run(3600, even(1600))
    times = [at for at, _ in simulated.decisions]
    assert times[0] == 120 and all(later - at >= 600 for at, later in zip(times, times[1:], strict=False))
    assert len(simulated.state.current) == 16


def test_the_bounds_are_reached_at_once_when_they_change() -> None:
    few = Simulated(stream(2), policy(least=8))
    few.run(2 * STEP, even(0))
    assert len(few.state.current) == 8
    many = Simulated(stream(7), policy(most=2))
    many.run(3 * STEP, even(1000))
    assert len(many.state.current) == 2
    assert [each.reason for _, each in many.decisions] == ["more than max_segments"] * 2


def test_a_stream_at_its_most_segments_says_why_it_does_not_grow() -> None:
    simulated = Simulated(stream(2), policy(most=2))
    simulated.run(300, fixed({0: 900.0, 1: 1.0}))
    assert simulated.decisions == [] and "as many segments as max_segments allows" in simulated.decide().reason


def test_nothing_is_decided_for_a_stream_that_is_sealed_or_about_to_change() -> None:
    simulated = Simulated(stream(1), policy())
    simulated.run(120, fixed({0: 900.0}), scale=False)
    decision = simulated.decide()
    assert decision.scale is not None
    state = simulated.state
    simulated.state = decision.scale.apply_to(state, AT)
    assert simulated.decide() == Decision("another change of the stream is not complete")
    sealing = AnnounceSeal().apply_to(state, AT)
    for simulated.state in (sealing, SealStream().apply_to(sealing, AT)):
        assert simulated.decide() == Decision("the stream is sealed")


def test_rates_of_another_stream_or_unit_or_of_long_ago_decide_nothing() -> None:
    simulated = Simulated(stream(1), policy())
    simulated.run(120, fixed({0: 900.0}), scale=False)
    state, history = simulated.state, simulated.history
    assert decide(simulated.policy, state, history, simulated.now).action == "split"
    for found in (None, history._replace(incarnation="b2"), history._replace(unit="bytes")):
        assert "not measured yet" in decide(simulated.policy, state, found, simulated.now).reason
    assert "not measured yet" in decide(simulated.policy, state, history, simulated.now + 121).reason


@pytest.mark.parametrize("most", [4, 16, 64])
def test_one_hot_key_is_not_split_for_ever(most: int) -> None:
    simulated = Simulated(stream(1), policy(most=most))
    simulated.run(24 * 3600, at_places({0.2053: 600.0}))
    simulated.decisions.clear()
    simulated.run(24 * 3600, at_places({0.2053: 600.0}))
    assert simulated.decisions == [] and len(simulated.state.current) == 3
    (hot,) = (n for n in simulated.state.current if at_places({0.2053: 600.0})(simulated.state, n))
    keys = simulated.state.segments[hot].keys
    assert 1 / 128 / most <= keys.high - keys.low < 1 / 64 / most
    assert simulated.decide().reason == (
        f"segment {hot} takes 600 events/s over 2 min, more than 5 times the target of 100; its range is too narrow to "
        "split, so its load is probably that of one routing key"
    )


def test_two_hot_keys_close_to_each_other_get_a_segment_each() -> None:
    simulated = Simulated(stream(1), policy(most=4))
    simulated.run(24 * 3600, at_places({0.703: 600.0, 0.7089: 600.0}))
    segments = simulated.state.segments
    assert sum(segments[n].keys.low <= 0.703 < 0.7089 < segments[n].keys.high for n in simulated.state.current) == 0


def test_a_hot_segment_that_is_new_says_that_it_is_left_alone_for_a_while() -> None:
    simulated = Simulated(stream(1), policy())
    simulated.run(120, even(2000))
    simulated.run(300, even(2000))
    assert len(simulated.decisions) == 1
    assert "left alone until it is measured for 10 min; segment 1 takes 1,000" in simulated.decide().reason


def test_a_cold_stream_at_its_fewest_segments_says_why_it_does_not_shrink() -> None:
    simulated = Simulated(stream(2), policy(least=2))
    simulated.run(3600, fixed({0: 1.0, 1: 1.0}))
    assert simulated.decide() == Decision("the stream has as few segments as min_segments allows")


def test_a_segment_too_narrow_to_split_does_not_keep_others_from_it() -> None:
    simulated = Simulated(stream(2), policy())
    keys = simulated.state.segments[0].keys
    narrow = keys.model_copy(update={"low": 0.0, "high": 5e-324})
    segment = simulated.state.segments[0].model_copy(update={"keys": narrow})
    simulated.state = simulated.state.replace(segments=simulated.state.segments.set(0, segment))
    simulated.run(120, fixed({0: 900.0, 1: 600.0}), scale=False)
    _, decision = simulated.decisions[0]
    assert decision.scale is not None and decision.scale.predecessors == (1,)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0, 5_000), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(4, 24),
    st.integers(2, 8),
    st.integers(1, 30),
)
def test_every_scale_is_valid_and_within_the_bounds(
    phases: list[tuple[float, int]], least: int, most: int, factor: int, segments: int
) -> None:
    simulated = Simulated(stream(segments), policy(least, most, factor))
    for total, times in phases:
        simulated.run(300 * times, even(total))  # raises if an update refuses what was decided
    if sum(times for _, times in phases) * 300 >= 10 * STEP:
        assert least <= len(simulated.state.current) <= most


@settings(max_examples=15)
@given(st.floats(0, 1_500), st.integers(2, 8))
def test_a_steady_load_scales_to_a_number_that_stays(total: float, factor: int) -> None:
    simulated = Simulated(stream(1), policy(most=32, factor=factor))
    simulated.run(2 * 3600, even(total))
    settled = len(simulated.state.current)
    simulated.decisions.clear()
    simulated.run(3600, even(total))
    assert simulated.decisions == [] and len(simulated.state.current) == settled
    assert all(even(total)(simulated.state, n) <= 101 for n in simulated.state.current)
