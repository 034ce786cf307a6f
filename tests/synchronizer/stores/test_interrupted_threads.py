"""Ctrl-C while the threads of a store begin or end: none of them is left when the store is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from synchronizer.store import SegmentStore
from synchronizer.stores import open_store
from tests.interrupts import interrupts
from tests.waiting import until


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


@pytest.mark.stores("sqlite", "postgresql", "nats")
def test_an_interrupted_wait_leaves_no_thread(opened: Callable[[], SegmentStore]) -> None:
    store = opened()
    before = threads()
    runs = interrupts(lambda: wait(store), one_in=3)
    while (run := next(runs, None)) is not None:
        wait(store)
        store.close()
        until(lambda: not threads() - before, f"threads end, after an interrupt at {run.place}")
        store = opened()
    store.close()


@pytest.mark.stores("sqlite", "postgresql")
def test_an_interrupted_close_is_made_again_and_leaves_no_thread(opened: Callable[[], SegmentStore]) -> None:
    store = opened()
    before = threads()
    wait(store)
    runs = interrupts(lambda: store.close(), one_in=2)
    while (run := next(runs, None)) is not None:
        store.close()
        until(lambda: not threads() - before, f"threads end, after an interrupt at {run.place}")
        store = opened()
        wait(store)
    store.close()
