from __future__ import annotations

from collections.abc import Iterator

import pytest

from synchronizer import ManualClock, SegmentStore, StateSynchronizer, open_store
from tests.notifications.counting import Counter, CountNotifier, counter
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def store(store_url: str) -> Iterator[SegmentStore]:
    with open_store(store_url) as store:
        yield store


@pytest.fixture
def visits(store: SegmentStore) -> Iterator[StateSynchronizer[Counter]]:
    """The replica that notifiers borrow."""
    replica = counter(store)
    yield replica
    replica.close()


@pytest.fixture
def elsewhere(store: SegmentStore) -> Iterator[StateSynchronizer[Counter]]:
    """A replica through which the state is changed behind the notifiers' back."""
    replica = counter(store)
    yield replica
    replica.close()


@pytest.fixture
def notifier(visits: StateSynchronizer[Counter]) -> Iterator[CountNotifier]:
    """One that runs in the background. The interval is so long that only the store can wake it in time."""
    with CountNotifier(visits, interval_seconds=60) as notifier:
        yield notifier


@pytest.fixture
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a close waits for it waits for as long as a test does, however busy the machine is."""
    for module in ("notifier", "durable"):
        monkeypatch.setattr(f"notifications.{module}.CLOSE_TIMEOUT_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def manual(store: SegmentStore, manual_clock: ManualClock) -> Iterator[CountNotifier]:
    """One that does everything in `poll`."""
    replica = counter(store, clock=manual_clock)
    with CountNotifier(replica) as notifier:
        yield notifier
    replica.close()
