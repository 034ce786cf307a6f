"""What keeps background threads alive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import synchronizer
from synchronizer import ClosedError, StoreUnavailableError, background_errors
from synchronizer.threads.background import MAX_PAUSE_SECONDS, BackgroundThread, keep_running, survive
from tests.clocks import PausingClock
from tests.places import product_files
from tests.waiting import STARTS_A_THREAD

pytestmark = pytest.mark.unexpected_errors


def failing(*errors: BaseException | None) -> Callable[[], None]:
    """Raises these one after the other; returns at a None."""
    upcoming: Iterator[BaseException | None] = iter(errors)

    def loop() -> None:
        error = next(upcoming)
        if error is not None:
            raise error

    return loop


def counted(kind: str) -> int:
    return sum(count for key, count in background_errors().items() if key.startswith(f"{kind} at "))


def test_a_loop_that_raises_anything_goes_on_after_growing_pauses() -> None:
    class OddError(Exception):
        pass

    clock = PausingClock()
    errors = [OddError(), MemoryError(), OSError(24, "no descriptor"), *[RecursionError()] * 10]
    keep_running(failing(*errors, None), name="odd", clock=clock)
    assert counted("OddError") == 1
    assert len(clock.pauses) == len(errors)
    assert clock.pauses == sorted(clock.pauses)
    assert clock.pauses[-1] == MAX_PAUSE_SECONDS


def test_after_a_calm_time_the_pauses_begin_anew() -> None:
    clock = PausingClock()
    rounds = iter(range(7))

    def loop() -> None:
        number = next(rounds)
        if number == 6:
            return
        if number == 5:
            clock.advance(60.0)
        raise ValueError(number)

    keep_running(loop, name="calm", clock=clock)
    assert clock.pauses[5] == clock.pauses[0] < clock.pauses[4]


def test_a_kind_of_error_is_logged_once_with_its_traceback_and_then_at_every_doubling(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class KindError(Exception):
        pass

    caplog.set_level(logging.ERROR)
    keep_running(failing(*[KindError("x")] * 9, None), name="kinds", clock=PausingClock())
    records = [record for record in caplog.records if "KindError" in record.getMessage()]
    assert [record.exc_info is not None for record in records] == [True, False, False, False]  # of 1, 2, 4, 8
    assert "kinds continues after" in records[0].getMessage() and "test_background.py:" in records[0].getMessage()
    assert counted("KindError") == 9


def test_a_log_handler_that_raises_ends_no_loop() -> None:
    class Refusing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("this filter is broken")

    logger = logging.getLogger("synchronizer.threads.background")
    refusing = Refusing()
    logger.addFilter(refusing)
    try:
        keep_running(failing(KeyError("a"), None), name="filtered", clock=PausingClock())
    finally:
        logger.removeFilter(refusing)


def test_a_loop_ends_when_what_it_works_on_is_closed() -> None:
    keep_running(failing(ClosedError("closed"), AssertionError("not again")), name="closed", clock=PausingClock())


def test_a_loop_that_is_asked_to_stop_is_not_run_again() -> None:
    stopping = threading.Event()
    stopping.set()
    keep_running(failing(ValueError(), AssertionError("not again")), name="s", clock=PausingClock(), stopping=stopping)


def test_what_ends_a_process_passes_through() -> None:
    with pytest.raises(SystemExit):
        keep_running(failing(SystemExit(3)), name="exit", clock=PausingClock())


def test_what_another_part_has_logged_is_only_counted(caplog: pytest.LogCaptureFixture) -> None:
    class ToldError(Exception):
        pass

    survive(ToldError(), "told", log=False)
    assert counted("ToldError") == 1
    assert not [record for record in caplog.records if "ToldError" in record.getMessage()]


def test_where_the_system_has_no_thread_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, STARTS_A_THREAD, start)
    with pytest.raises(StoreUnavailableError, match="thread"):
        BackgroundThread(lambda: None, name="none").start()


#: Where threads end with one call, are of the demo or of tests, or run a loop that deals with errors itself.
OTHERS = (
    "notifications/scheduler.py",
    "readergroup/aio/client.py",
    "readergroup/demo/",
    "synchronizer/stores/nats/loop.py",
    "synchronizer/testing/",
)


def test_every_thread_of_the_packages_lives_through_unexpected_errors() -> None:
    root = Path(synchronizer.__file__).parents[1]
    others = {str(path.relative_to(root)) for path in product_files(root) if "threading.Thread(" in path.read_text()}
    assert not {name for name in others if not name.startswith(OTHERS)}
