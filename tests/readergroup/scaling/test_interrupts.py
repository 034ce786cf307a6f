"""Ctrl-C anywhere in the run of a pool, also twice: its threads end, and the process has its signal handlers again."""

from __future__ import annotations

import _thread
import itertools
import signal
import threading
import uuid
from collections.abc import Callable, Iterator

import pytest

import readergroup as rg
from readergroup.retries.returning import Returning
from synchronizer.threads.background import BackgroundThread
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

STREAMS = ("shop/orders", "shop/retries", "shop/dead")
DELAYED = rg.DelayedRetry(delays=[0.001], retry_stream="shop/retries", dead_letters="shop/dead")


@pytest.fixture
def group() -> Iterator[rg.ReaderGroup]:
    with rg.connect(f"memory://{uuid.uuid4()}") as client:
        for stream in STREAMS:
            client.streams.create(stream)
        yield client.groups.create("billing", streams=STREAMS[:2])


@FEW_OR_MORE
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("retry", [None, DELAYED], ids=["plain", "delayed"])
def test_an_interrupted_pool_leaves_nothing_behind(
    group: rg.ReaderGroup, retry: rg.RetryPolicy | None, is_second: bool, sparsely: int
) -> None:
    pools: list[rg.ReaderPool[bytes]] = []
    numbers = itertools.count()

    def handle(event: rg.Event[bytes]) -> None:
        _thread.interrupt_main() if is_second else pools[-1].stop()  # the first Ctrl-C lets the pool drain

    def renew() -> None:
        pools.append(group.pool(handle, retry=retry))
        with group._client.writer("shop/orders") as writer:
            writer.write(b"%d" % next(numbers))

    renew()
    pools[-1].run()  # an interrupt while a module is loaded would leave its lock locked
    before, handler = {*threading.enumerate()}, signal.getsignal(signal.SIGTERM)
    for run in interrupts(lambda: pools[-1].run(), one_in=8 * sparsely, seed=(retry, is_second), before=renew):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        assert signal.getsignal(signal.SIGTERM) is handler, run.place
        until(closing(pools[-1]), f"close returns, interrupted at {run.place}")
        until(lambda: not living_since(before), f"threads end, interrupted at {run.place}")
        assert group.online_readers() == [], run.place


def test_a_pool_whose_end_is_interrupted_twice_leaves_the_rest_to_close(
    group: rg.ReaderGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, interrupted = Returning.close, iter([True, True])

    def interrupted_twice(returning: Returning, timeout: float) -> None:
        if next(interrupted, False):
            raise KeyboardInterrupt
        close(returning, timeout)

    monkeypatch.setattr(Returning, "close", interrupted_twice)
    before = {*threading.enumerate()}
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    pool = group.pool(print, retry=DELAYED)
    pool.stop()
    with pytest.raises(KeyboardInterrupt):
        pool.run()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert living_since(before)
    until(closing(pool), "close returns")
    until(lambda: not living_since(before), "threads end")
    assert not group.segment_notifier._subscriptions and not group.end_of_data_notifier._subscriptions


def test_a_worker_that_works_before_its_start_returns_is_found_by_an_interrupted_pool(
    group: rg.ReaderGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    handling, start = threading.Event(), BackgroundThread.start

    def start_slowly(thread: BackgroundThread) -> None:
        start(thread)
        if thread.name.startswith("worker"):
            assert handling.wait(PATIENCE_SECONDS)
            raise KeyboardInterrupt

    monkeypatch.setattr(BackgroundThread, "start", start_slowly)
    before = {*threading.enumerate()}
    with group._client.writer("shop/orders") as writer:
        writer.write(b"1")
    with pytest.raises(KeyboardInterrupt):
        group.pool(lambda event: handling.set()).run()
    until(lambda: not living_since(before), "the worker ends")


def closing(pool: rg.ReaderPool[bytes]) -> Callable[[], bool]:
    """Close it in another thread; return what tells whether that has returned."""
    call = CallInThread(lambda: (pool.close(),))
    return lambda: call.result == (None,)


def living_since(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads of pools that run: those of the group, of its notifiers and of writers stay for a while."""
    started = {*threading.enumerate()} - before
    return [each for each in started if each.is_alive() and each.name.startswith(("worker", "retries"))]
