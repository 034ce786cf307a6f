"""What a policy deletes: the decision alone, with the time and all positions as arguments."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from readergroup.streams.config import RetentionPolicy, ScalingPolicy, StreamConfig
from readergroup.streams.retention.decision import decide, gap
from readergroup.streams.retention.history import History, Sample
from readergroup.streams.state import PublishScale, StreamState, TruncateStream, new_stream
from synchronizer import InvalidArgumentError, Map, Revision

AT = Revision(0, 0)
#: A day, in seconds.
DAY = 86_400.0


def stream(segments: int = 1) -> StreamState:
    return new_stream("shop/orders", "a1", StreamConfig(scaling=ScalingPolicy.fixed(segments)))


def history(*samples: tuple[float, int]) -> History:
    """A history of one segment: times and offsets."""
    return History("a1", tuple(Sample(at, offset, Map({0: offset})) for at, offset in samples))


DAILY = history(*((day * DAY, day * 100) for day in range(11)))


def head(policy: RetentionPolicy, now: float = 10 * DAY, **consumed: int) -> int | None:
    """Return where the data of a stream with 1,000 bytes of ten days begins then; None if nothing is deleted."""
    decision = decide(policy, stream(), DAILY, now, {group: {0: offset} for group, offset in consumed.items()})
    return None if decision is None else decision.head[0]


def test_events_beyond_the_age_are_deleted() -> None:
    assert head(RetentionPolicy(max_age=timedelta(days=7))) == 300
    assert head(RetentionPolicy(max_age=timedelta(days=6.5))) == 300
    assert head(RetentionPolicy(max_age=timedelta(days=11))) is None


def test_the_oldest_events_beyond_the_size_are_deleted() -> None:
    assert head(RetentionPolicy(max_bytes=300)) == 700
    assert head(RetentionPolicy(max_bytes=350)) == 700
    assert head(RetentionPolicy(max_bytes=1000)) is None


def test_of_two_limits_the_stricter_one_holds() -> None:
    assert head(RetentionPolicy(max_bytes=300, max_age=timedelta(days=7))) == 700
    assert head(RetentionPolicy(max_bytes=900, max_age=timedelta(days=7))) == 300


def test_what_all_subscribers_have_consumed_is_deleted() -> None:
    policy = RetentionPolicy(consumed_by="subscribers")
    assert head(policy, billing=450, audit=620) == 450
    assert head(policy, billing=450, audit=0) is None


def test_nothing_is_consumed_without_subscribers() -> None:
    assert head(RetentionPolicy(consumed_by="subscribers")) is None


def test_consumed_events_that_are_young_or_few_are_kept() -> None:
    assert head(RetentionPolicy(consumed_by="subscribers", min_age=timedelta(days=8)), billing=450) == 200
    assert head(RetentionPolicy(consumed_by="subscribers", min_bytes=800), billing=450) == 200
    assert (
        head(RetentionPolicy(consumed_by="subscribers", min_bytes=800, min_age=timedelta(days=9)), billing=450) == 100
    )
    assert head(RetentionPolicy(consumed_by="subscribers", min_bytes=2000), billing=450) is None
    assert head(RetentionPolicy(consumed_by="subscribers", min_age=timedelta(days=20)), billing=450) is None


def test_a_limit_does_not_wait_for_a_group_that_is_behind_and_names_it() -> None:
    policy = RetentionPolicy(consumed_by="subscribers", max_bytes=300)
    decision = decide(policy, stream(), DAILY, 10 * DAY, {"slow": {0: 100}, "quick": {0: 900}, "there": {0: 700}})
    assert decision is not None
    assert (decision.head[0], decision.reason, decision.skipped) == (700, "max_bytes", ("slow",))


def test_a_group_that_was_behind_before_is_not_named_again() -> None:
    state = TruncateStream(head=Map({0: 700}), at=0.0).apply_to(stream(), AT)
    policy = RetentionPolicy(consumed_by="subscribers", max_bytes=300)
    assert decide(policy, state, DAILY, 10 * DAY, {"slow": {0: 100}}) is None


def test_the_head_does_not_move_back() -> None:
    state = TruncateStream(head=Map({0: 500}), at=0.0).apply_to(stream(), AT)
    assert decide(RetentionPolicy(max_age=timedelta(days=7)), state, DAILY, 10 * DAY, {}) is None


def test_groups_in_different_epochs_keep_what_either_needs() -> None:
    state = stream(2)
    state = state.merge([0, 1]).apply_to(state, AT)
    state = PublishScale(epoch=1).apply_to(state, AT)
    policy = RetentionPolicy(consumed_by="subscribers")
    merged: Mapping[str, Mapping[int, int]] = {"old": {0: 50, 1: 100}, "new": {2: 30}}
    samples = History("a1", (Sample(0, 0, state.head), Sample(1, 300, Map({2: 100}))))
    decision = decide(policy, state, samples, 1, merged)
    assert decision is not None and dict(decision.head) == {0: 50, 1: 100}


def test_gaps_are_where_a_limit_would_miss_by_much() -> None:
    coarse = history((float("-inf"), 0), (100 * DAY, 10_000))
    found = gap(RetentionPolicy(max_bytes=1000), coarse, 100 * DAY)
    assert found is not None and found.written == 9000
    fast = history((float("-inf"), 0), (100 * DAY, 9_200), (100.01 * DAY, 10_000))
    assert gap(RetentionPolicy(max_bytes=1000), fast, 100.01 * DAY) is None  # keeps 800
    fast = history((float("-inf"), 0), (100 * DAY, 9_300), (100.01 * DAY, 10_000))
    assert gap(RetentionPolicy(max_bytes=1000), fast, 100.01 * DAY) is not None  # would keep 700
    found = gap(RetentionPolicy(max_age=timedelta(days=7)), coarse, 100 * DAY)
    assert found is not None and found.at == 93 * DAY
    assert gap(RetentionPolicy(max_bytes=1000, max_age=timedelta(days=7)), DAILY, 10 * DAY) is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"min_age": 3},
        {"min_bytes": 3, "max_bytes": 5},
        {"min_age": 3, "max_age": 2, "consumed_by": "subscribers"},
        {"min_bytes": 3, "max_bytes": 2, "consumed_by": "subscribers"},
        {"max_age": float("nan")},
        {"max_age": float("inf")},
        {"max_age": -1},
        {"max_age": timedelta(days=-1)},
        {"max_age": timedelta()},
        {"max_age": True},
        {"max_age": "7d"},
        {"max_age": timedelta.max},
        {"max_bytes": 0},
        {"max_bytes": -1},
        {"max_bytes": True},
        {"max_bytes": 1.5},
        {"max_bytes": float("nan")},
        {"consumed_by": "everybody"},
        {"max_bites": 5},
    ],
)
def test_policies_that_contradict_themselves_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match="RetentionPolicy"):
        RetentionPolicy(**fields)  # type: ignore[arg-type]


def test_an_age_that_is_refused_is_shown_as_a_time() -> None:
    with pytest.raises(InvalidArgumentError, match=r"max_age: .* not -1 day, 23:00:00$"):
        RetentionPolicy(max_age=timedelta(hours=-1))


# ---------------------------------------------------------------------- any load

STEPS = st.lists(st.tuples(st.floats(0.1, 5 * DAY), st.integers(0, 10_000)), min_size=1, max_size=100)
POLICIES = st.builds(
    RetentionPolicy,
    max_age=st.one_of(st.none(), st.integers(1, 30).map(lambda days: timedelta(days=days))),
    max_bytes=st.integers(1, 100_000),
)


@example([(1.0, 1), (DAY, 0)], RetentionPolicy(max_age=timedelta(days=1), max_bytes=2), 0)
@given(STEPS, POLICIES, st.integers(0, 1_000_000))
def test_a_policy_is_met_by_any_load_and_never_deletes_too_much(
    steps: list[tuple[float, int]], policy: RetentionPolicy, consumed: int
) -> None:
    """The history stays small, and what it makes of the limits is never early, and late by its precision only."""
    assert policy.max_bytes is not None
    state, now, end = stream(), 0.0, 0
    kept = History("a1", (Sample(float("-inf"), 0, state.head),))
    written_at: list[tuple[float, int]] = []  # (time, end)
    longest, largest = max(step[0] for step in steps), max(step[1] for step in steps)
    for seconds, size in steps:
        now, end = now + seconds, end + size
        if size:
            written_at.append((now, end))
        kept = kept.with_sample(Sample(now, end, Map({0: end})))
        decision = decide(policy, state, kept, now, {})
        kept = kept.thinned(now)
        if decision is None:
            continue
        at = decision.head[0]
        state = TruncateStream(head=Map({0: at}), at=now).apply_to(state, AT)
        is_old = policy.max_age is not None and all(
            time <= now - policy.max_age.total_seconds() for time, to in written_at if to <= at
        )
        assert is_old or end - at >= policy.max_bytes * (1 - 1 / 8) - largest, "deleted too much"
    assert end - state.head[0] <= policy.max_bytes
    if policy.max_age is not None:
        left = [time for time, to in written_at if to > state.head[0]]
        assert all(time > now - policy.max_age.total_seconds() * (1 + 1 / 8) - longest for time in left), (
            "kept too long"
        )
    assert len(kept.samples) < 500


@given(STEPS)
def test_a_history_is_as_exact_as_it_says(steps: list[tuple[float, int]]) -> None:
    times = list(accumulate(seconds for seconds, _ in steps))
    ends = list(accumulate(size for _, size in steps))
    whole = History("a1", (Sample(float("-inf"), 0, Map({0: 0})),))
    thin = whole
    for time, to in zip(times, ends, strict=True):
        whole = whole.with_sample(Sample(time, to, Map({0: to})))
        thin = thin.with_sample(Sample(time, to, Map({0: to}))).thinned(time)
    now, end = times[-1], ends[-1]
    assert set(thin.samples) <= set(whole.samples)
    assert thin.newest == whole.newest
    for before, after in zip(thin.samples, thin.samples[1:], strict=False):
        dropped = [each for each in whole.samples if before.written < each.written < after.written]
        if dropped:
            assert after.at - before.at <= (now - before.at) / 8
            assert after.written - before.written <= (end - before.written) / 8


@pytest.mark.parametrize("segments", [1000, 10_000])
def test_a_history_of_many_segments_stays_small_with_little_work(
    segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encoded = History.encode, list[int]()

    def count(kept: History) -> bytes:
        encoded.append(len(kept.samples))
        return encode(kept)

    monkeypatch.setattr(History, "encode", count)
    kept = History("a1", (Sample(float("-inf"), 0, Map(dict.fromkeys(range(segments), 0))),))
    for minute in range(1, 16):
        ends = Map(dict.fromkeys(range(segments), 200 * minute))
        kept = kept.with_sample(Sample(minute * 60.0, 200 * segments * minute, ends))
        encoded.clear()
        kept = kept.thinned(minute * 60.0)
        assert len(encoded) <= 5
        assert len(kept.samples) == 2 or len(encode(kept)) <= 64 * 1024
        assert kept.newest.offsets == ends


def test_a_clock_that_was_ahead_does_not_keep_events() -> None:
    kept = history((0.0, 0), (1000 * DAY, 100)).with_sample(Sample(DAY, 200, Map({0: 200})))
    assert [each.at for each in kept.samples] == [0.0, DAY, DAY]
