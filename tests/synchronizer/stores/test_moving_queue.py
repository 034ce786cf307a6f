"""A fair lock that changes hands is waited for, however many are before one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from synchronizer import open_store
from tests.waiting import PATIENCE_SECONDS

HOLDERS = 5
HOLD_SECONDS = 0.1
#: Longer than one of them holds the lock, shorter than all of them together.
SHORT_SECONDS = 0.3
MOST_ATTEMPTS = 50


@pytest.mark.stores("memory", "sqlite", "nats")
def test_who_waits_in_a_queue_that_moves_gets_the_lock_though_it_takes_longer_than_its_patience(store_url: str) -> None:
    with open_store(store_url) as store, ThreadPoolExecutor(HOLDERS) as threads:

        def hold(_: int) -> None:
            with store.fair_lock("s", PATIENCE_SECONDS) as is_held:
                assert is_held
                time.sleep(HOLD_SECONDS)

        def waits() -> tuple[bool, float]:
            begun = time.monotonic()
            with store.fair_lock("s", PATIENCE_SECONDS, SHORT_SECONDS) as is_held:
                return is_held, time.monotonic() - begun

        for _ in range(MOST_ATTEMPTS):  # on a busy machine one of them may hold it for longer, or come later
            holding = threads.map(hold, range(HOLDERS))
            is_held, seconds = waits()
            list(holding)
            if is_held and seconds > 1.3 * SHORT_SECONDS:
                return
        pytest.fail("no attempt got the lock after waiting for longer than its patience")
