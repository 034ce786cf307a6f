"""A fair lock that changes hands is waited for, however many are before one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from synchronizer import open_store
from tests.waiting import PATIENCE_SECONDS, until

HOLDERS = 10
HOLD_SECONDS = 0.1
#: Longer than one of them holds the lock, shorter than all of them together.
SHORT_SECONDS = 0.5
MOST_ATTEMPTS = 50


@pytest.mark.stores("memory", "sqlite", "nats")
def test_who_waits_in_a_queue_that_moves_gets_the_lock_though_it_takes_longer_than_its_patience(store_url: str) -> None:
    with open_store(store_url) as store, ThreadPoolExecutor(HOLDERS) as threads:
        ended, turns = threading.Event(), [0] * HOLDERS

        def hold_again_and_again(number: int) -> None:
            while not ended.is_set():
                with store.fair_lock("s", PATIENCE_SECONDS) as is_held:
                    assert is_held
                    turns[number] += 1
                    time.sleep(HOLD_SECONDS)

        def waits() -> tuple[bool, float]:
            begun = time.monotonic()
            with store.fair_lock("s", PATIENCE_SECONDS, SHORT_SECONDS) as is_held:
                return is_held, time.monotonic() - begun

        holding = threads.map(hold_again_and_again, range(HOLDERS))
        try:
            until(lambda: all(turns), "all are in the queue")
            # On a busy machine, one of them may hold the lock for too long.
            attempts = (waits() for _ in range(MOST_ATTEMPTS))
            assert any(is_held and seconds > 1.3 * SHORT_SECONDS for is_held, seconds in attempts)
        finally:
            ended.set()
        list(holding)
