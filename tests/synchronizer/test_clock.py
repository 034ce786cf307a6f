"""Clocks: waits of every length, and which of them stand still."""

from __future__ import annotations

import threading
import time

import pytest

from synchronizer import Clock, InvalidArgumentError, ManualClock, SystemClock
from synchronizer.clock import is_manual, wait_on
from synchronizer.testing import InstantClock


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, threading.TIMEOUT_MAX])
def test_a_wait_without_an_end_lasts_until_the_event_is_set(timeout: float) -> None:
    event = threading.Event()
    threading.Timer(0.05, event.set).start()
    assert SystemClock().wait(event, timeout)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("-inf"), 0.01])
def test_a_wait_for_what_does_not_come_ends_in_time(timeout: float) -> None:
    assert not SystemClock().wait(threading.Event(), timeout)


@pytest.mark.parametrize("clock", [ManualClock, InstantClock])
@pytest.mark.parametrize("seconds", ["5", None, float("nan"), -1.0])
def test_a_manual_clock_is_moved_by_a_number_of_seconds(clock: type[ManualClock], seconds: object) -> None:
    moved = clock(1000.0)
    with pytest.raises(InvalidArgumentError, match="seconds must be a number of seconds >= 0"):
        moved.advance(seconds)  # type: ignore[arg-type]
    moved.advance(5)
    assert moved.monotonic() == 1005.0


class ClockOfAnApplication:
    """Has what `Clock` demands, and nothing else."""

    def monotonic(self) -> float:
        return 0.0

    def time(self) -> float:
        return 0.0

    def wait(self, event: threading.Event, timeout: float) -> bool:
        return event.wait(timeout)


class StandingClockOfAnApplication(ClockOfAnApplication):
    is_manual = True


@pytest.mark.parametrize(
    ("clock", "manual"),
    [
        (SystemClock(), False),
        (ManualClock(), True),
        (InstantClock(), True),
        (ClockOfAnApplication(), False),
        (StandingClockOfAnApplication(), True),
    ],
)
def test_a_clock_says_whether_it_stands_still_and_one_that_does_not_say_runs(clock: Clock, manual: bool) -> None:
    assert isinstance(clock, Clock)
    assert is_manual(clock) is manual


def test_a_wait_for_another_thread_ends_soon_on_a_clock_that_stands_still() -> None:
    began = time.monotonic()
    wait_on(StandingClockOfAnApplication(), threading.Event(), 60)
    assert time.monotonic() - began < 30
