"""Which work may start, against a model that looks at everything each time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from readergroup.scaling.in_flight import InFlight, Item
from readergroup.streams.config import SegmentId

SEGMENTS = [SegmentId("shop/orders/0"), SegmentId("shop/orders/1")]
KEYS = st.sampled_from([None, "a", "b", "c"])


@dataclass(eq=False)
class Known:
    """A work as the model knows it."""

    segment: SegmentId
    token: int
    number: int
    key: str | None
    alone: bool
    #: "new", "running", "stuck" (ended, and not done), "waiting" (for a retry) or "done".
    now: str = "new"
    retry_at: float = 0.0
    dropped: bool = False


@dataclass
class KnownLane:
    token: int
    works: list[Known] = field(default_factory=list)
    frozen: bool = False
    line: int = -1

    @property
    def done(self) -> int:
        """How many are done without a gap."""
        return next((index for index, each in enumerate(self.works) if each.now != "done"), len(self.works))


class InFlightMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.flight: InFlight[Known] = InFlight()
        self.lanes: dict[SegmentId, KnownLane] = {}
        self.all: list[Known] = []
        self.items: dict[Known, Item[Known]] = {}
        self.positions: dict[tuple[SegmentId, int], int] = {}
        self.tokens = 0
        self.now = 0.0
        self.stopped = False

    def is_empty(self) -> bool:
        """Whether all that was added is done or dropped."""
        return not self.flight.running and not any(lane.items for lane in self.flight.lanes.values())

    # ------------------------------------------------------------------ the model

    def held(self) -> list[Known]:
        return [each for each in self.all if each.now in ("running", "stuck")]

    def running(self) -> list[Known]:
        return [each for each in self.all if each.now == "running"]

    def may_start(self, work: Known) -> bool:
        lane = self.lanes.get(work.segment)
        if lane is None or work.dropped or lane.token != work.token:
            return False
        if work.now == "waiting":
            return work.retry_at <= self.now
        if work.now != "new" or (lane.frozen and work.number > lane.line):
            return False
        if work.key is None:
            return True
        before = self.all[: self.all.index(work)]
        return not any(
            each.key == work.key and (each.now in ("running", "stuck") or (not each.dropped and each.now != "done"))
            for each in before
        )

    # ------------------------------------------------------------------ what happens

    @rule(segment=st.sampled_from(SEGMENTS), works=st.lists(st.tuples(KEYS, st.integers(0, 9)), max_size=6))
    def add(self, segment: SegmentId, works: list[tuple[str | None, int]]) -> None:
        lane = self.lanes.get(segment)
        if lane is None:
            self.tokens += 1
            lane = self.lanes[segment] = KnownLane(self.tokens, frozen=self.stopped)
        new = []
        for key, chance in works:
            known = Known(segment, lane.token, len(lane.works), key, alone=chance == 0)
            lane.works.append(known)
            self.all.append(known)
            new.append(Item(known, key, known.number + 1, 1, 10, known.alone))
        self.flight.add(segment, lane.token, new)

    @rule()
    def take(self) -> None:
        item = self.flight.take(self.now)
        startable = [each for each in self.all if self.may_start(each)]
        running = self.running()
        if item is None:
            if running and (running[0].alone or any(each.alone for each in startable)):
                return
            # Once stopped, a retry starts only if it was due before.
            assert [each for each in startable if not (self.stopped and each.now == "waiting")] == []
            return
        work = item.what
        assert work in startable
        assert not any(each.alone for each in running)
        assert not (work.alone and running)
        work.now = "running"
        self.items[work] = item
        lane = self.lanes[work.segment]
        lane.line = max(lane.line, work.number)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def end_well(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.running()))
        work.now = "done"
        self.flight.done(self.items[work])

    @precondition(lambda self: self.running())
    @rule(data=st.data(), delay=st.integers(0, 3))
    def fail(self, data: st.DataObject, delay: int) -> None:
        work = data.draw(st.sampled_from(self.running()))
        work.now, work.retry_at = ("done" if work.dropped else "waiting"), self.now + delay
        self.flight.failed(self.items[work], work.retry_at)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def fail_for_the_last_time(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.running()))
        work.now = "stuck"
        self.flight.suspend(self.items[work])

    @precondition(lambda self: any(each.now == "stuck" for each in self.all))
    @rule(data=st.data())
    def set_aside(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from([each for each in self.all if each.now == "stuck"]))
        work.now = "done"
        self.flight.done(self.items[work])

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(sorted(self.lanes)))
        lane = self.lanes.pop(segment)
        for each in lane.works:
            each.dropped = True
        if segment in self.flight.lanes:
            self.flight.drop(self.flight.lanes[segment])

    @precondition(lambda self: self.flight.lanes)
    @rule(data=st.data(), frozen=st.booleans())
    def freeze_or_thaw(self, data: st.DataObject, frozen: bool) -> None:
        segment = data.draw(st.sampled_from(sorted(self.flight.lanes)))
        (self.flight.freeze if frozen else self.flight.thaw)(self.flight.lanes[segment])
        self.lanes[segment].frozen = frozen or self.stopped

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.all) > 10)
    @rule()
    def stop(self) -> None:
        self.stopped = True
        self.flight.stop()
        for lane in self.lanes.values():
            lane.frozen = True

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def positions_are_those_of_the_model(self) -> None:
        for segment, token, end in self.flight.take_moved():
            assert self.positions.get((segment, token), 0) < end
            self.positions[segment, token] = end
        for segment, lane in self.lanes.items():
            assert self.positions.get((segment, lane.token), 0) == lane.done

    @invariant()
    def keys_run_one_by_one(self) -> None:
        keys = [each.key for each in self.held() if each.key is not None]
        assert len(keys) == len(set(keys))

    @invariant()
    def the_spread_is_that_of_the_model(self) -> None:
        for segment, lane in self.flight.lanes.items():
            known = self.lanes[segment]
            assert lane.events == len(known.works) - known.done
            assert lane.size == 10 * lane.events
            assert lane.settled == (known.done > known.line)

    @invariant()
    def it_says_whether_something_is_in_flight(self) -> None:
        assert self.is_empty() == (not self.running() and all(each.dropped or each.now == "done" for each in self.all))
        if self.stopped:
            startable = [each for each in self.all if self.may_start(each) and each.now == "new"]
            assert self.flight.quiet == (not self.running() and not startable and not self.flight.ready)

    def teardown(self) -> None:
        """Nothing is forgotten: all that is left runs in the end."""
        if self.stopped:
            return
        for lane in self.flight.lanes.values():
            self.flight.thaw(lane)
        for lane in self.lanes.values():
            lane.frozen = False
        for work in self.held():
            work.now = "done"
            self.flight.done(self.items[work])
        self.now += 100
        while (item := self.flight.take(self.now)) is not None:
            item.what.now = "done"
            self.flight.done(item)
        assert self.is_empty()
        assert all(each.now == "done" for each in self.all if not each.dropped)


TestInFlight = InFlightMachine.TestCase
TestInFlight.settings = settings(stateful_step_count=50)


def numbered(*keys: str | None) -> list[Item[int]]:
    return [Item(number, key, number + 1) for number, key in enumerate(keys)]


def test_a_failed_item_holds_only_its_key_and_no_place() -> None:
    flight: InFlight[int] = InFlight()
    flight.add(SEGMENTS[0], 1, numbered("a", "b", "a"))
    first = flight.take(0.0)
    assert first is not None
    flight.failed(first, 5.0)
    assert flight.running == {}
    second = flight.take(0.0)
    assert second is not None
    assert second.what == 1
    assert flight.take(4.9) is None
    assert flight.next_due == 5.0
    again = flight.take(5.0)
    assert again is first


def test_the_position_stops_before_what_is_unfinished() -> None:
    flight: InFlight[int] = InFlight()
    flight.add(SEGMENTS[0], 1, numbered("a", "b", "c"))
    items = [flight.take(0.0) for _ in range(3)]
    for item in items[1:]:
        assert item is not None
        flight.done(item)
    assert flight.take_moved() == []
    assert items[0] is not None
    flight.done(items[0])
    assert flight.take_moved() == [(SEGMENTS[0], 1, 3)]


@pytest.mark.parametrize("is_known", [True, False])
def test_events_of_a_new_assignment_wait_for_those_of_the_old_one_that_run(is_known: bool) -> None:
    flight: InFlight[int] = InFlight()
    flight.add(SEGMENTS[0], 1, numbered("a", "a"))
    running = flight.take(0.0)
    assert running is not None
    if is_known:
        flight.drop(flight.lanes[SEGMENTS[0]])
    flight.add(SEGMENTS[0], 2, numbered("a"))
    assert flight.take(0.0) is None
    flight.done(running)
    assert flight.take_moved() == []
    after = flight.take(0.0)
    assert after is not None
    assert (after.lane.token, after.what) == (2, 0)
