"""The soak in short, and whether its verdict would see what a long one is for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.soak import ALLOWANCES, Soak, soak
from tests.chaos.soak_growth import Allowance, Series, table
from tests.chaos.soak_processes import VICTIM_EVENTS, Ledger, Pace, runs
from tests.waiting import PATIENCE_SECONDS

HALF_AN_HOUR = 1800
QUICK = Pace(
    events_per_second=100.0,
    reader_timeout_seconds=2.0,
    retention_seconds=1.0,
    sample=0.25,
    truncate=0.5,
    scale=0.7,
    lag=0.5,
    listen=0.4,
    count=0.2,
    kill=2.0,
    guest=1.5,
    short_writer=0.5,
)


def has_done_everything(running: Soak) -> bool:
    did = {"splits": 1, "merges": 1, "truncations": 3, "kills": 2, "listeners": 4, "notifications": 1}
    return (
        running.ledger.delivered >= 500
        and running.ledger.handed.keys() >= {"steady", "guest", "victim", "pool", "asyncio"}
        and all(running.done[what] >= count for what, count in did.items())
        and all(any(measure.endswith(name) for measure in running.series) for name in ALLOWANCES)
        # Some of what was retired is forgotten already: more names were used than there are.
        and running.series["names that were ever used"].last > running.series["segments in the store"].last
    )


def test_a_short_soak_loses_nothing_and_keeps_the_order_of_each_key(tmp_path: Path) -> None:
    outcome = soak(tmp_path, QUICK, lambda running: has_done_everything(running) or running.seconds > PATIENCE_SECONDS)
    assert outcome.seconds < PATIENCE_SECONDS
    assert outcome.ledger.faults == []
    assert outcome.ledger.missing() == {}
    untold = outcome.ledger.delivered - outcome.ledger.repeated - outcome.ledger.number_stored
    assert 0 <= untold <= VICTIM_EVENTS * outcome.done["kills"]  # who is killed may have stored more than it said


# ---------------------------------------------------------------------- the verdict


def series_of(*values: float) -> Series:
    series = Series()
    for index, value in enumerate(values):
        series.add(index * HALF_AN_HOUR / len(values), value)
    return series


def grows(series: Series, allowance: Allowance) -> bool | None:
    return series.judge(allowance).grows


def test_slow_and_steady_growth_is_seen_through_noise() -> None:
    rng = random.Random(1)
    # Three open files in half an hour, where churn makes six more or less.
    series = series_of(*(30 + 6 * index / 360 + rng.randrange(-3, 4) for index in range(360)))
    assert grows(series, Allowance(2))


@pytest.mark.parametrize("at", [0.4, 0.5, 0.6, 0.7, 0.8])
def test_a_step_is_seen(at: float) -> None:
    assert grows(series_of(*(100.0 if index < at * 360 else 104.0 for index in range(360))), Allowance(3, 0.02))


def test_noise_that_stays_where_it_is_is_no_growth() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        assert not grows(series_of(*(100 + rng.gauss(0, 10) for _ in range(360))), Allowance(5))


def test_a_log_that_is_compacted_again_and_again_does_not_grow() -> None:
    for period in range(5, 40):
        assert not grows(series_of(*(8000 + 1000 * (index % period) / period for index in range(360))), Allowance(500))


def test_what_grows_while_it_warms_up_and_single_peaks_are_no_growth() -> None:
    warming = [min(index, 80) for index in range(360)]
    assert not grows(series_of(*warming), Allowance(2))
    assert not grows(series_of(*(5000 if index in (200, 300, 359) else 10 for index in range(360))), Allowance(2))


def test_what_shrinks_is_no_growth() -> None:
    assert not grows(series_of(*range(360, 0, -1)), Allowance(2))


def test_the_larger_of_the_two_allowances_counts() -> None:
    doubling = series_of(*(100.0 if index < 180 else 120.0 for index in range(360)))
    assert grows(doubling, Allowance(10))
    assert not grows(doubling, Allowance(10, 0.25))
    assert not grows(doubling, Allowance(25, 0.01))


def test_what_is_bounded_may_grow_up_to_its_bound() -> None:
    rising = series_of(*range(360))
    assert not grows(rising, Allowance(2, up_to=400))
    assert grows(rising, Allowance(2, up_to=300))


def test_a_measure_without_an_allowance_is_told_and_not_judged() -> None:
    verdict = series_of(*range(360)).judge(None)
    assert verdict.grows is None
    assert verdict.per_hour == pytest.approx(720)
    assert "not judged" in table({"names": verdict})


def test_too_few_samples_give_no_verdict() -> None:
    with pytest.raises(ValueError, match="16 samples"):
        series_of(*range(15)).judge(None)


# ---------------------------------------------------------------------- the ledger


def test_events_are_told_as_runs_of_numbers() -> None:
    assert runs([b"a:0:.", b"b:5:.", b"a:1:.", b"b:6:.", b"a:3:."]) == [("a", 0, 1), ("b", 5, 6), ("a", 3, 3)]


def test_the_ledger_counts_repetitions_and_knows_what_is_missing() -> None:
    ledger = Ledger()
    ledger.stored({"a": 20})
    ledger.read("steady", "s/0", 1, [("a", 0, 9)])
    ledger.read("guest", "s/0", 2, [("a", 5, 12)])
    assert (ledger.faults, ledger.repeated, ledger.delivered) == ([], 5, 18)
    assert ledger.missing() == {"a": (13, 20)}
    ledger.read("guest", "s/0", 2, [("a", 13, 19)])
    assert ledger.missing() == {}


def test_the_ledger_finds_what_was_skipped() -> None:
    ledger = Ledger()
    ledger.read("steady", "s/0", 1, [("a", 0, 9)])
    ledger.read("guest", "s/1", 2, [("a", 11, 12)])
    assert ledger.faults == ["a: 11 came and 10 did not, in s/1 to guest"]


def test_the_ledger_finds_a_repetition_within_one_assignment() -> None:
    ledger = Ledger()
    ledger.read("steady", "s/0", 1, [("a", 0, 9)])
    ledger.read("steady", "s/0", 1, [("a", 9, 12)])
    assert ledger.faults == ["a: 9 came after 9 within one assignment of s/0 to steady"]
