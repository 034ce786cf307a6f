"""Ctrl-C while a store is opened or closed, or begins a thread: nothing of it is left when the store is closed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from synchronizer.errors import ClosedError
from synchronizer.store import Appended, SegmentStore
from synchronizer.stores import open_store
from synchronizer.stores.nats import loop as nats_loop
from synchronizer.stores.nats.store import NatsStore
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.waiting import CallInThread, until

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list threads")
DEADLINE = 30.0
#: How long stores on NATS wait here for an answer, of a server or of their thread. Nothing may take so long.
ANSWER_SECONDS = 120.0
AT_ONCE_SECONDS = 60.0


@pytest.fixture
def opened(store_url: str) -> Iterator[Callable[[], SegmentStore]]:
    """Opens the store, which has a segment of 4 bytes."""
    with open_store(store_url) as store:
        store.create("s")
        store.append("s", b"data")
        yield lambda: open_store(store_url)


def threads() -> set[threading.Thread]:
    """Those that run: one that an interrupt kept from beginning stays in the list of Python."""
    return {each for each in threading.enumerate() if each.is_alive()}


def wait(store: SegmentStore) -> None:
    assert not store.wait({"s": 4}, 0.001)


@FEW_OR_MORE
@pytest.mark.stores("sqlite", "postgresql", "nats")
def test_an_interrupted_wait_leaves_no_thread(opened: Callable[[], SegmentStore], sparsely: int) -> None:
    store = opened()
    before = threads()
    runs = interrupts(lambda: wait(store), one_in=sparsely)
    while (run := next(runs, None)) is not None:
        wait(store)
        store.close()
        until(lambda: not threads() - before, f"threads end, after an interrupt at {run.place}")
        store = opened()
    store.close()


@pytest.mark.stores("sqlite", "postgresql", "nats")
def test_an_interrupted_close_is_made_again_and_leaves_no_thread(opened: Callable[[], SegmentStore]) -> None:
    stores: list[SegmentStore] = []

    def open() -> None:
        stores.append(opened())
        wait(stores[-1])

    opened().close()
    before = threads()
    for run in interrupts(lambda: stores[-1].close(), one_in=2, before=open):
        stores[-1].close()
        until(lambda: not threads() - before, f"threads end, after an interrupt at {run.place}")


class Stores:
    """Stores on NATS that a test opens and closes, and the threads and sockets that the process has since."""

    def __init__(self, url: str, keeper: NatsStore | None) -> None:
        self.url = url
        self._keeper = keeper
        self._opened: list[SegmentStore] = []
        self._before = self._held()

    @property
    def newest(self) -> SegmentStore:
        return self._opened[-1]

    def open(self) -> None:
        """Open one more."""
        self._opened.append(open_store(self.url))

    def close(self) -> None:
        self._opened[-1].close()

    def drop(self) -> None:
        self._opened.clear()

    def close_all(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def others_go_on(self) -> bool:
        """Whether the store that stays open answers, and a new one opens, without a wait for a thread that is gone."""
        return CallInThread(self._use_others).ended() is True

    def leave_nothing(self, place: str) -> None:
        what = f"threads and connections end, interrupted at {place}"
        until(lambda: not self._held() - self._before, what, seconds=DEADLINE)

    def _use_others(self) -> bool:
        begin = time.monotonic()
        if self._keeper is not None:
            assert isinstance(self._keeper.append("s", b"x"), Appended)
        with open_store(self.url) as other:
            assert isinstance(other.append("s", b"x"), Appended)
        assert time.monotonic() - begin < AT_ONCE_SECONDS
        return True

    def _held(self) -> set[object]:
        """Threads as the system counts them, sockets, and tasks of the event loop that stays."""
        found: set[object] = {("thread", each) for each in os.listdir("/proc/self/task")}
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                file = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                continue  # closed meanwhile
            if file.startswith("socket:"):
                found.add(file)
        if self._keeper is not None:
            found |= {*asyncio.all_tasks(self._keeper._connection._hidden.loop)}
        return found


@pytest.fixture(params=["alone", "beside another"])
def stores(request: pytest.FixtureRequest, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    """Closing the last store ends the event loop. While another one is open, the loop goes on."""
    monkeypatch.setattr(nats_loop, "PATIENCE_SECONDS", ANSWER_SECONDS)
    nats_url += f"&timeout_seconds={ANSWER_SECONDS:.0f}"
    with open_store(nats_url) as store:
        store.create("s")
    with ExitStack() as kept:
        stores = Stores(nats_url, kept.enter_context(NatsStore(nats_url)) if "other" in request.param else None)
        yield stores
        stores.close_all()


@FEW_OR_MORE
@needs_proc
def test_a_store_on_nats_whose_close_was_interrupted_holds_up_nobody_and_is_closed_again(
    stores: Stores, sparsely: int
) -> None:
    for run in interrupts(stores.close, one_in=sparsely, before=stores.open):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        assert stores.others_go_on(), run.place
        stores.close_all()
        stores.leave_nothing(run.place)


@FEW_OR_MORE
@needs_proc
def test_an_interrupted_opening_on_nats_leaves_nothing(stores: Stores, sparsely: int) -> None:
    for run in interrupts(stores.open, one_in=sparsely):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        stores.close_all()  # in case it came when the store was open
        stores.leave_nothing(run.place)
        assert stores.others_go_on(), run.place
    stores.close_all()


@needs_proc
def test_a_store_on_nats_that_nobody_has_any_more_is_closed(stores: Stores) -> None:
    """For instance because the caller was interrupted before it could keep the store."""
    stores.open()
    stores.drop()
    stores.leave_nothing("the end of the constructor")


@FEW_OR_MORE
@needs_proc
@pytest.mark.parametrize("name", ["append", "wait", "close", "open"])
def test_a_signal_handler_closes_a_store_on_nats_at_any_point(stores: Stores, name: str, sparsely: int) -> None:
    """No call waits for itself, and none waits for an answer that the closed store does not get."""
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: stores.newest.append("s", b"x"),
        "wait": lambda: stores.newest.wait({"s": 0}, 0.001),
        "close": stores.close,
        "open": lambda: open_store(stores.url).close(),
    }
    slowest = 0.0

    def close() -> None:
        begin = time.monotonic()
        stores.close()
        assert time.monotonic() - begin < AT_ONCE_SECONDS

    begin = time.monotonic()
    for run in interrupts(calls[name], one_in=sparsely, before=stores.open, handler=close):
        assert run.error is None or isinstance(run.error, ClosedError), f"{run.error!r}, closed at {run.place}"
        stores.close()
        slowest = max(slowest, time.monotonic() - begin)
        begin = time.monotonic()
    assert slowest < AT_ONCE_SECONDS
    stores.close_all()
    stores.leave_nothing("no particular place")
