"""The machine's clock: waits of every length."""

from __future__ import annotations

import threading

import pytest

from synchronizer import SystemClock


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, threading.TIMEOUT_MAX])
def test_a_wait_without_an_end_lasts_until_the_event_is_set(timeout: float) -> None:
    event = threading.Event()
    threading.Timer(0.05, event.set).start()
    assert SystemClock().wait(event, timeout)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("-inf"), 0.01])
def test_a_wait_for_what_does_not_come_ends_in_time(timeout: float) -> None:
    assert not SystemClock().wait(threading.Event(), timeout)
