"""What a change of a group costs, and what rest costs, does not grow with the number of readers."""

from __future__ import annotations

import pytest

from tests.simulation.scaled_group import Rest, Scaled, group_of

#: Readers and segments.
SIZES = [(10, 100), (20, 200), pytest.param(50, 500, marks=pytest.mark.broad)]


def names(readers: int) -> list[str]:
    return [f"reader-{number:04d}" for number in range(readers)]


@pytest.mark.parametrize(("readers", "segments"), SIZES)
def test_a_change_costs_as_many_entries_in_a_large_group_as_in_a_small_one(readers: int, segments: int) -> None:
    with group_of(segments) as group:
        group.start(names(readers))
        joined = group.join("newcomer")
        share = segments // (readers + 1)
        # One entry of who joins, and one of each owner that gives up something.
        assert joined.entries["join"] == 1
        assert 0 < joined.entries["release"] <= share
        assert joined.entries.total() == 1 + joined.entries["release"]
        assert joined.updates["reassign"] == joined.updates["release"] == share
        for change in (group.leave("reader-0000"), group.kill("reader-0001")):
            assert change.entries == {"leave": 1}
            assert change.updates["reassign"] <= share + 2
        assert group.split(0).entries.total() == 2  # the new segments, and the end of the old one
        assert group.rest(5.0).entries == 0


def test_a_reader_at_rest_costs_as_much_among_sixty_as_among_twenty() -> None:
    few, many = _at_rest(20), _at_rest(60)
    assert few.entries == many.entries == 0
    assert few.calls.keys() == many.calls.keys() == {"append", "attributes", "read", "wait"}
    for verb, calls in few.calls.items():
        assert many.calls[verb] == pytest.approx(calls, rel=0.1)
    assert many.bytes_a_minute == pytest.approx(few.bytes_a_minute, rel=0.1)


def _at_rest(readers: int) -> Rest:
    with group_of(2 * readers) as group:
        group.start(names(readers))
        return group.rest(10.0)


@pytest.mark.parametrize(
    ("readers", "segments", "within"),
    [
        (10, 100, 1.0),
        (20, 200, 1.0),
        *(pytest.param(50, 500, within, marks=pytest.mark.broad) for within in (1.0, 0.02)),
    ],
)
def test_all_start_again_and_are_balanced_soon_and_with_few_conflicts(
    readers: int, segments: int, within: float
) -> None:
    with group_of(segments) as group:
        changes = [
            group.start(names(readers), within=within),
            group.restart_closed(within=within),
            group.restart_killed(same_ids=True, within=within),
        ]
        for change in changes:
            assert change.entries["join"] == readers
            assert change.since_last_join < 10
            assert change.conflicts_per_success < 2
            assert change.entries["plan"] <= 3
            # Of the store, however many entries there are: what comes fast is looked at together.
            assert change.calls / readers < 350
        assert _shares(group) == {segments // readers}


def test_who_was_killed_and_started_under_another_id_is_replaced_within_the_timeout_and_two_seconds() -> None:
    with group_of(60) as group:
        group.start(names(20))
        change = group.restart_killed(same_ids=False)
        assert change.seconds < group.state.config.reader_timeout_seconds + 2
        assert change.entries["leave"] <= 2  # of twenty
        assert _shares(group) == {3}


def _shares(group: Scaled) -> set[int]:
    """How many segments readers have."""
    return {len(held) for held in group.state.owned.values()}
