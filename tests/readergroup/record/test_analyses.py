"""The analyses of hand-made histories with known answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow
import pytest

from readergroup.record import analyses
from readergroup.record.arrow import SCHEMA
from synchronizer import InvalidArgumentError

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class History:
    """Rows of a record, each at some seconds after `START`."""

    def __init__(self, group: str = "billing") -> None:
        self.group = group
        self.rows: list[dict[str, Any]] = []
        self._segments = self._readers = 0

    def segments(self, at: float, number: int, cause: str = "add_epoch", *, gap: bool = False) -> None:
        self._segments = number
        self._row(at, "segments", cause, gap, number_of_segments=number, number_of_readers=self._readers)

    def readers(
        self, at: float, number: int, cause: str = "add_reader, reassign", *, gap: bool = False, restarted: bool = False
    ) -> None:
        joined = [f"r{each}" for each in range(self._readers, number)] + ["r0"] * restarted
        left = [f"r{each}" for each in range(number, self._readers)] + ["r0"] * restarted
        self._readers = number
        self._row(at, "readers", cause, gap, number_of_readers=number, joined=joined, left=left, dead=[])

    def lag(self, at: float, number_of_bytes: int, events: int = 0) -> None:
        sizes = {"number_of_segments": self._segments, "number_of_readers": self._readers}
        self._row(at, "lag", "sample", False, **sizes, backlog_bytes=number_of_bytes, backlog_events=events)

    def _row(self, at: float, kind: str, cause: str, gap: bool, **columns: Any) -> None:
        offset = 100 * len(self.rows)
        place = {"group": self.group, "revision": 50 * len(self.rows), "index": 0, "offset": offset}
        self.rows.append(
            {"seen_at": START + timedelta(seconds=at), **place, "kind": kind, "cause": cause, "gap": gap, **columns}
        )


def table(*histories: History) -> Any:
    rows = [row for history in histories for row in history.rows]
    return pyarrow.Table.from_pylist(rows, schema=SCHEMA)


def seconds_after(at: datetime) -> float:
    return (at - START).total_seconds()


def rows(found: Any, *names: str) -> list[tuple[Any, ...]]:
    """What these columns say, times as seconds after `START`."""

    def values(row: Mapping[str, Any]) -> Iterator[Any]:
        for name in names:
            yield seconds_after(row[name]) if isinstance(row[name], datetime) else row[name]

    return [tuple(values(row)) for row in found.to_pylist()]


def begun(group: str = "billing", segments: int = 2, readers: int = 1) -> History:
    history = History(group)
    history.segments(0, segments, "present value")
    history.readers(0, readers, "present value")
    return history


# ---------------------------------------------------------------------- how often it scaled


def test_scales_and_changes_of_readers_are_counted_per_window() -> None:
    history = begun()
    history.segments(10, 3)
    history.readers(20, 2)
    history.segments(3000, 4, "release, add_epoch, reassign")
    history.segments(3599, 3, "complete")  # it was read to its end: nobody scaled
    history.readers(3600, 2, "remove_reader, add_reader", restarted=True)
    history.segments(8000, 2)
    found = analyses.scaling_frequency(table(history))
    assert found.schema == analyses.SCALING_FREQUENCY
    assert rows(found, "group", "start", "scales", "reader_changes", "gaps") == [
        ("billing", 0, 2, 1, 0),
        ("billing", 3600, 0, 1, 0),
        ("billing", 7200, 1, 0, 0),
    ]
    per_day = analyses.scaling_frequency(table(history), window_seconds=analyses.DAY_SECONDS)
    assert rows(per_day, "start", "scales", "reader_changes") == [(-12 * 3600, 3, 2)]


def test_a_gap_is_counted_apart_from_what_was_seen_one_by_one() -> None:
    history = begun()
    history.segments(10, 5, "several changes", gap=True)
    history.readers(10, 4, "several changes", gap=True)
    assert rows(analyses.scaling_frequency(table(history)), "scales", "reader_changes", "gaps") == [(0, 0, 1)]


def test_each_group_is_counted_for_itself() -> None:
    one, other = begun("one"), begun("other")
    one.segments(5, 3)
    other.segments(6, 4)
    other.segments(7, 5)
    assert rows(analyses.scaling_frequency(table(other, one)), "group", "scales") == [("one", 1), ("other", 2)]


# ---------------------------------------------------------------------- how soon the readers followed


def reactions(*histories: History) -> Sequence[tuple[Any, ...]]:
    found = analyses.reaction_times(table(*histories))
    assert found.schema == analyses.REACTION_TIMES
    return rows(found, "changed_at", "segments_before", "segments_after", "readers_before", "readers_after", "seconds")


def test_a_change_of_segments_is_answered_by_the_first_change_of_readers_in_its_direction() -> None:
    history = begun()
    history.segments(10, 3)
    history.readers(12, 0, "remove_reader")  # one died: that is no answer
    history.readers(14.5, 1)
    history.readers(20, 2)
    history.segments(100, 2)
    history.readers(103, 1, "remove_reader")
    assert reactions(history) == [(10, 2, 3, 1, 1, 4.5), (100, 3, 2, 2, 1, 3.0)]


def test_several_changes_in_one_direction_have_one_answer() -> None:
    history = begun()
    history.segments(10, 3)
    history.segments(11, 4)
    history.readers(15, 3)
    assert reactions(history) == [(10, 2, 3, 1, 3, 5.0), (11, 3, 4, 1, 3, 4.0)]


def test_a_change_back_takes_the_question_back() -> None:
    history = begun()
    history.segments(10, 3)
    history.segments(20, 2)
    history.readers(30, 2)
    assert reactions(history) == [(10, 2, 3, 1, None, None), (20, 3, 2, 1, None, None)]


def test_other_groups_answer_nothing_and_the_order_of_rows_does_not_matter() -> None:
    one, other = begun("one"), begun("other")
    one.segments(10, 3)
    other.readers(11, 2)
    found = table(one, other)
    turned = found.take(list(reversed(range(found.num_rows))))
    assert analyses.reaction_times(found).equals(analyses.reaction_times(turned))
    assert rows(analyses.reaction_times(turned), "group", "seconds") == [("one", None)]


# ---------------------------------------------------------------------- the trend of the backlog


def test_the_trend_is_the_slope_through_the_samples_of_a_window() -> None:
    history = begun()
    for minute in range(60):
        history.lag(60 * minute, 1000 + 120 * minute, events=100 - minute)
    for minute in range(60, 120):
        history.lag(60 * minute, 500)
    found = analyses.backlog_trend(table(history))
    assert found.schema == analyses.BACKLOG_TREND
    grows, rests = found.to_pylist()
    assert [seconds_after(each["start"]) for each in (grows, rests)] == [0, 3600]
    assert grows["samples"] == rests["samples"] == 60
    assert grows["bytes"] == pytest.approx(1000 + 120 * 29.5)
    assert grows["bytes_per_second"] == pytest.approx(2.0)
    assert grows["events_per_second"] == pytest.approx(-1 / 60)
    assert (rests["bytes"], rests["bytes_per_second"]) == (500.0, pytest.approx(0.0))


def test_the_slope_of_scattered_samples_is_that_of_least_squares() -> None:
    history = begun()
    for at, size in ((0, 0), (10, 30), (20, 10), (30, 60)):
        history.lag(at, size)
    (found,) = analyses.backlog_trend(table(history)).to_pylist()
    assert found["bytes_per_second"] == pytest.approx(1.6)


def test_samples_of_one_moment_have_no_slope() -> None:
    history = begun()
    for size in (100, 200):
        history.lag(86_399.123456, size)
    found = analyses.backlog_trend(table(history), window_seconds=30 * analyses.DAY_SECONDS)
    assert rows(found, "samples", "bytes", "bytes_per_second") == [(2, 150.0, None)]


# ---------------------------------------------------------------------- all of them


def test_a_record_without_rows_has_nothing_to_say() -> None:
    empty = SCHEMA.empty_table()
    for analysis, schema in (
        (analyses.scaling_frequency, analyses.SCALING_FREQUENCY),
        (analyses.reaction_times, analyses.REACTION_TIMES),
        (analyses.backlog_trend, analyses.BACKLOG_TREND),
    ):
        found = analysis(empty)
        assert (found.num_rows, found.schema) == (0, schema)


def test_a_window_without_a_width_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="window_seconds must be >= 1"):
        analyses.backlog_trend(table(begun()), window_seconds=0)
