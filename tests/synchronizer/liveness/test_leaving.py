"""While a store does not answer, only the first thing that leaves waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from synchronizer import StoreUnavailableError, open_store
from synchronizer.liveness.leaving import PATIENCE_SECONDS, SILENCE_SECONDS, leaving
from synchronizer.testing import FailingStore, ManualClock


@pytest.fixture
def store() -> Iterator[FailingStore]:
    with open_store("memory://") as inner:
        inner.create("group")
        yield FailingStore(inner)


def asks(store: FailingStore, clock: ManualClock, *, waits: float | None = None, insists: bool = False) -> bool:
    """Whether something that leaves now asks the store. It gets no answer within the seconds that it ``waits``."""
    asked = False
    try:
        with leaving(store, clock, insists=insists):
            asked = True
            if waits is not None:
                clock.advance(waits)
                raise StoreUnavailableError("away")
    except StoreUnavailableError:
        pass
    return asked


def test_only_the_first_asks_a_store_that_does_not_answer(store: FailingStore) -> None:
    clock = ManualClock()
    assert asks(store, clock, waits=PATIENCE_SECONDS)
    assert not asks(store, clock)
    assert asks(store, clock, insists=True)
    with open_store("memory://") as another:
        assert asks(FailingStore(another), clock)


def test_clocks_are_not_compared_with_each_other(store: FailingStore) -> None:
    clock = ManualClock()
    clock.advance(1000.0)
    assert asks(store, clock, waits=PATIENCE_SECONDS)
    assert asks(store, ManualClock())


def test_after_a_while_the_next_asks_again(store: FailingStore) -> None:
    clock = ManualClock()
    assert asks(store, clock, waits=PATIENCE_SECONDS)
    clock.advance(SILENCE_SECONDS)
    assert asks(store, clock)


def test_the_next_asks_if_the_store_has_answered_an_append_since(store: FailingStore) -> None:
    clock = ManualClock()
    assert asks(store, clock, waits=PATIENCE_SECONDS)
    store.append("group", b"renewal")
    assert asks(store, clock)


def test_the_next_asks_after_the_error_of_one_connection(store: FailingStore) -> None:
    clock = ManualClock()
    assert asks(store, clock, waits=0.0)
    assert asks(store, clock)
