"""The policy by which the number of readers is decided: a function of what is seen and of the time, nothing else."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from readergroup import ReaderScalingPolicy, Revision, ScalingDecision
from readergroup.scaling.policy import GroupLoad, ScalingHistory, decide
from synchronizer import InvalidArgumentError

REVISION = Revision(120, 0)

policies = st.builds(
    lambda low, more, target, cooldown: ReaderScalingPolicy(
        min_readers=low, max_readers=low + more, target_lag_seconds=target, cooldown_seconds=cooldown
    ),
    st.integers(1, 8),
    st.integers(0, 16),
    st.floats(0.1, 60),
    st.floats(0.1, 60),
)
loads = st.builds(
    lambda segments, readers, events, seconds: load(segments, readers, behind=seconds if events else 0, events=events),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(0, 100),
    st.floats(0, 1000),
)


def load(segments: int, readers: int, *, behind: float = 0, events: int | None = None) -> GroupLoad:
    waiting = (1 if behind else 0) if events is None else events
    return GroupLoad(segments, readers, waiting, behind, REVISION)


class Decisions:
    """Decides again and again, each time with what it decided before."""

    def __init__(self, policy: ReaderScalingPolicy) -> None:
        self.policy = policy
        self.history: ScalingHistory | None = None
        self.now = 0.0
        self.last: ScalingDecision

    def at(self, now: float, segments: int, *, behind: float = 0, readers: int = 0) -> int:
        self.now = now
        self.last, self.history = decide(self.policy, load(segments, readers, behind=behind), self.history, now)
        return self.last.desired_readers


def some_decisions(*, low: int = 1, high: int = 8, target: float = 5, cooldown: float = 30) -> Decisions:
    return Decisions(
        ReaderScalingPolicy(min_readers=low, max_readers=high, target_lag_seconds=target, cooldown_seconds=cooldown)
    )


def test_more_lag_than_the_target_asks_for_readers_in_proportion() -> None:
    decisions = some_decisions()
    assert decisions.at(0, 8, behind=10, readers=2) == 4
    assert decisions.last.reason == "10.0 s behind, over 5 s"
    assert decisions.last.current_readers == 2
    assert decisions.last.revision == Revision(120, 0)


def test_a_little_more_lag_than_the_target_asks_for_one_reader_more() -> None:
    assert some_decisions().at(0, 8, behind=5.1, readers=3) == 4


def test_lag_is_given_the_cooldown_to_fall_before_it_asks_again() -> None:
    decisions = some_decisions()
    assert decisions.at(0, 8, behind=10) == 2
    assert decisions.at(29, 8, behind=50) == 2
    assert decisions.at(30, 8, behind=10) == 4


@pytest.mark.parametrize(("concurrency", "desired"), [(1, 8), (2, 4), (3, 3), (4, 2), (64, 2)])
def test_new_segments_add_readers_only_if_those_there_are_cannot_handle_all_at_once(
    concurrency: int, desired: int
) -> None:
    decisions = Decisions(ReaderScalingPolicy(min_readers=2, max_readers=8, concurrency=concurrency))
    assert decisions.at(0, 2, behind=0.1) == 2
    assert decisions.at(1, 8, behind=0.1) == desired
    assert decisions.at(2, 8, behind=0.1) == desired


def test_no_lag_asks_for_the_fewest() -> None:
    assert some_decisions(low=2).at(0, 8) == 2


def test_segments_that_come_while_events_wait_ask_for_as_many_readers_at_once() -> None:
    decisions = some_decisions()
    assert decisions.at(0, 2, behind=0.1, readers=2) == 2
    assert decisions.at(1, 4, behind=0.1, readers=2) == 4
    assert decisions.last.reason == "segments grew from 2 to 4"


def test_segments_that_come_while_nothing_waits_ask_for_readers_when_something_does() -> None:
    decisions = some_decisions()
    assert decisions.at(0, 2, readers=2) == 2
    assert decisions.at(1, 4, readers=2) == 2
    assert decisions.at(2, 4, behind=0.1, readers=2) == 4
    assert decisions.at(3, 4, behind=0.1, readers=4) == 4
    assert decisions.at(4, 6, readers=4) == 4
    assert decisions.at(5, 4, readers=4) == 4  # merged again
    assert decisions.at(6, 5, behind=0.1, readers=4) == 5


def test_readers_without_a_segment_are_given_up_at_once() -> None:
    decisions = some_decisions()
    assert decisions.at(0, 8, behind=100) == 8
    assert decisions.at(1, 3, behind=100) == 3
    assert decisions.last.reason == "3 segments to read"


def test_the_least_number_holds_even_without_segments() -> None:
    assert some_decisions(low=3).at(0, 1) == 3


def test_a_long_calm_takes_readers_away_one_by_one() -> None:
    decisions = some_decisions(cooldown=10)
    assert decisions.at(0, 8, behind=15) == 3
    assert decisions.at(1, 8) == 3
    assert decisions.at(10.9, 8) == 3
    assert decisions.at(11, 8) == 2
    assert decisions.last.reason == "under 2.5 s behind for 10 s"
    assert decisions.at(20.9, 8) == 2
    assert decisions.at(21, 8) == 1
    assert decisions.at(31, 8) == 1
    assert decisions.last.reason == "nothing to change"


def test_lag_between_half_the_target_and_the_target_changes_nothing_and_ends_the_calm() -> None:
    decisions = some_decisions(cooldown=10)
    assert decisions.at(0, 8, behind=10) == 2
    assert decisions.at(1, 8) == 2
    assert decisions.at(10, 8, behind=3) == 2
    assert decisions.at(11, 8) == 2
    assert decisions.at(20.9, 8) == 2
    assert decisions.at(21, 8) == 1


@given(policies, st.lists(st.tuples(loads, st.floats(0, 100))))
def test_every_decision_keeps_the_bounds(policy: ReaderScalingPolicy, looks: list[tuple[GroupLoad, float]]) -> None:
    history, now = None, 0.0
    for look, pause in looks:
        now += pause
        decision, history = decide(policy, look, history, now)
        assert policy.min_readers <= decision.desired_readers <= policy.max_readers
        assert decision.desired_readers <= max(policy.min_readers, look.number_of_segments)


@given(policies, st.lists(st.tuples(loads, st.floats(0, 100))), loads)
@example(ReaderScalingPolicy(min_readers=2, max_readers=3, target_lag_seconds=1), [], GroupLoad(3, 0, 1, 2.0, REVISION))
@example(
    ReaderScalingPolicy(max_readers=4, cooldown_seconds=1),
    [(load(0, 0), 0.0), (load(4, 0, events=1), 0.0), (load(3, 0), 1.0)],
    load(2, 0),
)
def test_a_decision_stands_if_it_is_asked_for_again(
    policy: ReaderScalingPolicy, looks: list[tuple[GroupLoad, float]], last: GroupLoad
) -> None:
    history, now = None, 0.0
    for look, pause in looks:
        now += pause
        _, history = decide(policy, look, history, now)
    first, history = decide(policy, last, history, now)
    again, _ = decide(policy, last, history, now)
    assert again.desired_readers == first.desired_readers


@given(policies, st.lists(st.tuples(loads, st.floats(0, 100))), st.floats(0.01, 1))
def test_lag_alone_never_changes_the_number_twice_within_the_cooldown(
    policy: ReaderScalingPolicy, looks: list[tuple[GroupLoad, float]], part: float
) -> None:
    history, now, changed_at = None, 0.0, float("-inf")
    for index, (look, pause) in enumerate(looks):
        now += pause * part
        before = history
        decision, history = decide(policy, look._replace(number_of_segments=20, number_of_readers=1), history, now)
        if index == 0 or before is None:
            changed_at = now if decision.desired_readers != policy.min_readers else changed_at
        elif decision.desired_readers != before.desired_readers:
            assert now - changed_at >= policy.cooldown_seconds
            changed_at = now


@given(policies, st.integers(0, 20), st.integers(0, 20))
def test_lasting_lag_ends_with_all_readers_that_are_of_use_and_a_lasting_calm_with_the_fewest(
    policy: ReaderScalingPolicy, segments: int, readers: int
) -> None:
    decisions = Decisions(policy)
    step = 2 * policy.cooldown_seconds
    for number in range(40):
        decisions.at(number * step, segments, behind=policy.target_lag_seconds * 1.5, readers=readers)
    most = max(policy.min_readers, min(policy.max_readers, segments))
    assert decisions.last.desired_readers == most
    for number in range(40, 80):
        decisions.at(number * step, segments, readers=readers)
    assert decisions.last.desired_readers == policy.min_readers


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"min_readers": 0, "max_readers": 1}, "min_readers"),
        ({"min_readers": 3, "max_readers": 2}, "min_readers must not exceed max_readers: min_readers=3 max_readers=2"),
        ({"max_readers": 1, "target_lag_seconds": 0}, "target_lag_seconds"),
        ({"max_readers": 1, "cooldown_seconds": -1}, "cooldown_seconds"),
        ({"max_readers": 1, "cooldown": 1}, "cooldown"),
    ],
)
def test_a_policy_that_cannot_be_right_is_refused(fields: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        ReaderScalingPolicy(**fields)  # type: ignore[arg-type]
