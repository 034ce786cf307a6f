"""Background threads that meet an error nobody thought of, wherever it comes from, or that cannot even start."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from itertools import count

import pytest

import readergroup as rg
from synchronizer import open_store
from synchronizer.testing import FailingStore, Operation
from synchronizer.threads.background import BackgroundThread
from tests.faults.points import ANYTHING
from tests.faults.workload import Workload
from tests.waiting import until

pytestmark = [pytest.mark.unexpected_errors, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", [1, 2])
def test_every_background_thread_lives_through_any_error_of_any_of_its_calls(seed: int) -> None:
    """Also through one that the boundary of the store did not translate."""
    rng = random.Random(seed)
    store = FailingStore(open_store("memory://"))
    met: set[str] = set()
    failing = threading.Event()

    def fail(operation: Operation) -> None:
        thread = threading.current_thread()
        is_worker = thread.name.startswith("worker ")  # its error ends the pool, and `run` raises it
        if failing.is_set() and isinstance(thread, BackgroundThread) and not is_worker and rng.random() < 0.3:
            met.add(f"{thread.name} {operation.verb}")
            raise rng.choice(ANYTHING)()

    store.before = fail
    with Workload(rg.Client(store, timeout=10.0)) as workload:
        for rounds in count(1):
            failing.set()
            workload.until_all_went_on()
            workload.check()
            failing.clear()
            workload.until_all_went_on()
            if rounds >= 10 and len({name.split()[0] for name in met}) > 5:  # some threads act every few seconds only
                break
        workload.check()
        workload.end()
    assert rg.background_errors()


def test_a_background_thread_that_cannot_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, lock = threading.Thread.start, threading.Lock()
    countdown = 0

    def start_unless_it_is_due(self: threading.Thread) -> None:
        nonlocal countdown
        if isinstance(self, BackgroundThread):
            with lock:
                countdown -= 1
                if countdown == 0:
                    raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_unless_it_is_due)
    before = Workload.background_threads()
    for number in count(1):
        countdown = number
        with open_store("memory://") as store:
            with suppress(rg.StoreUnavailableError):
                with Workload(rg.Client(store, timeout=10.0)) as workload:
                    workload.until_all_went_on()
                    workload.check()
                if countdown > 0:
                    break
        until(lambda: Workload.background_threads() <= before, f"the end of {Workload.background_threads() - before}")
    assert number > 10
