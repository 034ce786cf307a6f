"""The rules of marks and watermarks, without a store."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from readergroup.streams.data.block import NO_TIME
from readergroup.streams.event_time.marks import Mark, Watermark, WatermarkHistory, held_until, watermark_of
from synchronizer import UnknownUpdateError
from tests.golden import golden

MARK = Mark("abc", 1_767_225_600_000_000, 1_767_225_601.5, 60.0)
HISTORY = WatermarkHistory("abc", (Watermark(-5, 1.5, {0: 7}), Watermark(1_767_225_600_000_000, 2.25, {1: 0, 2: 9})))


def test_a_mark_is_written_and_read_as_in_the_release_that_added_it() -> None:
    stored = golden("event-time-mark-v1.msgpack", MARK.encode())
    assert stored == MARK.encode()
    assert Mark.decode(stored) == MARK


def test_watermarks_are_written_and_read_as_in_the_release_that_added_them() -> None:
    stored = golden("event-time-watermarks-v1.msgpack", HISTORY.encode())
    assert stored == HISTORY.encode()
    assert WatermarkHistory.decode(stored) == HISTORY


@pytest.mark.parametrize("kind", [Mark, WatermarkHistory])
def test_what_a_newer_release_wrote_is_an_error(kind: Any) -> None:
    with pytest.raises(UnknownUpdateError, match="newer release"):
        kind.decode(msgpack.packb([2, "something"]))


def test_silent_writers_and_those_of_an_earlier_stream_do_not_count() -> None:
    marks = [
        *(Mark("abc", 9, 100.0, 60.0), Mark("abc", 7, 100.0, 60.0)),
        *(Mark("abc", 1, 39.0, 60.0), Mark("abc", 2, 161.0, 60.0), Mark("old", 3, 100.0, 60.0)),
    ]
    assert watermark_of(marks, "abc", 100.0) == 7
    assert watermark_of(marks, "abc", 1000.0) is None
    assert watermark_of([], "abc", 100.0) is None


def test_the_earliest_mark_holds_the_watermark_until_it_ends() -> None:
    own = Mark("abc", 9, 100.0, 60.0)
    early, later = Mark("abc", 5, 90.0, 20.0), Mark("abc", 7, 80.0, 100.0)
    assert held_until(own, [own], 101.0) is None
    assert held_until(own, [own, early, later], 101.0) == 110.0
    assert held_until(own, [own, early, early._replace(stored_at=95.0)], 101.0) == 115.0
    # It ends after the own mark; has ended; belongs to an earlier stream.
    assert held_until(own, [own, later], 101.0) is None
    assert held_until(own, [own, early], 111.0) is None
    assert held_until(own, [own, early._replace(incarnation="old")], 101.0) is None


def test_a_group_stands_between_the_last_watermark_that_it_has_passed_and_the_next() -> None:
    history = WatermarkHistory("abc", (Watermark(1_000_000, 1.0, {0: 5}), Watermark(2_000_000, 2.0, {0: 9})))

    def bounds(offset: int) -> tuple[int | None, int | None]:
        return history.bounds(lambda each: each.offsets[0] <= offset)

    assert bounds(4) == (None, 1_000_000)
    assert bounds(5) == (1_000_000, 2_000_000)
    assert bounds(9) == (2_000_000, None)


@given(st.integers(1, 400), st.integers(1, 40))
def test_a_history_stays_small_and_keeps_the_newest_watermark(count: int, segments: int) -> None:
    history = WatermarkHistory("abc", ())
    for number in range(count):
        history = history.with_watermark(Watermark(number, float(number), dict.fromkeys(range(segments), number)))
        assert history.time == number
    times = [each.time for each in history.watermarks]
    assert times == sorted(times) and len(times) <= 100
    ages = [
        (after.at - each.at) / (count - each.at)
        for each, after in zip(history.watermarks, history.watermarks[1:], strict=False)
    ]
    assert all(age <= 1 / 2 for age in ages)


class Protocol(RuleBasedStateMachine):
    """Writers, a stream that is scaled, and processes that compute watermarks, in any order of their steps.

    Each step of the product that touches the store is one rule here, so that writers and watermarks interleave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epoch = [0]  # segments that take events
        self.successors: dict[int, list[int]] = {}
        self.stored: dict[int, list[int]] = {0: []}  # event times by segment
        self.pending: dict[int, list[int]] = {}  # by writer: event times in order, not stored
        self.noted: dict[int, int] = {}
        self.awaited: dict[int, tuple[int, int]] = {}  # by writer: the time, and how many events must be stored first
        self.done: dict[int, int] = {}
        self.marks: dict[int, Mark] = {}
        self.history = WatermarkHistory("abc", ())
        self.advancing: list[Any] = []  # (time, expected history, who counted), then also the epoch
        #: For each watermark: its time, its cut, and the writers that counted.
        self.made: list[tuple[int, dict[int, int], frozenset[int]]] = []
        self.events: list[tuple[int, int, int, int]] = []  # writer, time, segment, offset
        self.restart(0)
        self.restart(1)

    @rule(writer=st.integers(0, 1))
    def restart(self, writer: int) -> None:
        """A writer dies with what it has not stored. The next one has its name here, and another mark in the store."""
        number = writer + 2 * (1 + max([each // 2 for each in self.pending if each % 2 == writer], default=-1))
        for old in [each for each in self.pending if each % 2 == writer]:
            del self.pending[old]
            self.awaited.pop(old, None)
        self.pending[number], self.noted[number], self.done[number] = [], NO_TIME, 0

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), time=st.integers(0, 5))
    def write(self, data: st.DataObject, time: int) -> None:
        writer = data.draw(st.sampled_from(sorted(self.pending)))
        if time >= self.noted[writer]:  # else it is refused
            self.pending[writer].append(time)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(sorted(self.pending)))
        for time in self.pending[writer]:
            segment = data.draw(st.sampled_from(self.epoch))
            self.events.append((writer, time, segment, len(self.stored[segment])))
            self.stored[segment].append(time)
        self.done[writer] += len(self.pending[writer])
        self.pending[writer] = []

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), time=st.integers(0, 5))
    def note(self, data: st.DataObject, time: int) -> None:
        writer = data.draw(st.sampled_from(sorted(self.pending)))
        self.noted[writer] = max(time, self.noted[writer])
        self.awaited.setdefault(writer, (self.noted[writer], self.done[writer] + len(self.pending[writer])))

    @precondition(lambda self: self.awaited)
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(sorted(self.awaited)))
        time, after = self.awaited[writer]
        if self.done[writer] >= after:
            self.marks[writer] = Mark("abc", time, self.now, 10.0)
            del self.awaited[writer]

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(merge=st.booleans())
    def scale(self, merge: bool) -> None:
        first = max(self.stored) + 1
        new = [first] if merge else [first, first + 1]
        for segment in self.epoch:
            self.successors[segment] = new
        self.epoch = new
        self.stored.update({each: [] for each in new})

    @rule()
    def read_marks(self) -> None:
        counted = frozenset(writer for writer, mark in self.marks.items() if mark.counts_at(self.now))
        self.advancing.append([watermark_of(self.marks.values(), "abc", self.now), self.history, counted, self.now])

    @precondition(lambda self: self.advancing)
    @rule(data=st.data())
    def replace_history(self, data: st.DataObject) -> None:
        time, before, counted, now = self.advancing.pop(data.draw(st.integers(0, len(self.advancing) - 1)))
        if time is None or (before.time is not None and time <= before.time) or before != self.history:
            return
        cut = {segment: len(self.stored[segment]) for segment in self.epoch}
        self.history = before.with_watermark(Watermark(time, now, cut))
        self.made.append((time, cut, counted))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), time=st.integers(0, 5), again=st.booleans())
    def all_steps_of_a_note(self, data: st.DataObject, time: int, again: bool) -> None:
        self.note(data, time)
        if again:
            self.write(data, time)
        self.mark(data)
        self.read_marks()
        if again:
            self.store(data)
        self.replace_history(data)

    @invariant()
    def no_watermark_passes_an_event_of_a_writer_that_counted(self) -> None:
        for time, cut, counted in self.made:
            for writer, event_time, segment, offset in self.events:
                if writer in counted and event_time < time:
                    assert segment < min(cut) or (segment in cut and offset < cut[segment])

    @invariant()
    def watermarks_grow(self) -> None:
        times = [time for time, _, _ in self.made]
        assert times == sorted(set(times))


Protocol.TestCase.settings = settings(stateful_step_count=40)
TestProtocol = Protocol.TestCase
