"""A process that waits for its turn reads meanwhile what the others write."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from synchronizer import SegmentStore, StateSynchronizer, open_store
from synchronizer.log import contention
from synchronizer.threads.alarms import Alarms
from tests.synchronizer.accounts import Account, Add, opened
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

pytestmark = pytest.mark.stores("sqlite", "postgresql", "nats")
WAIT_SECONDS = 5 * contention.READ_AHEAD_SECONDS


class Readings(Alarms):
    """Alarms that count."""

    count = 0

    def call_after(self, seconds: float, call: object) -> float:
        self.count += 1
        return super().call_after(seconds, call)  # type: ignore[arg-type]


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Readings]:
    monkeypatch.setattr(contention, "PATIENCE_SECONDS", PATIENCE_SECONDS)
    readings = Readings("readings of a test")
    monkeypatch.setattr(contention, "_readings", readings)
    yield readings
    until(lambda: readings._thread is None, "the end of the thread")


@pytest.fixture
def other(store_url: str) -> Iterator[SegmentStore]:
    with open_store(store_url) as store:
        yield store


@pytest.fixture
def replica(store_url: str, other: SegmentStore) -> Iterator[StateSynchronizer[Account]]:
    """Loses every race, so that it queues. It has waited once for its turn."""
    with open_store(store_url) as store:
        replica = opened(store)
        for _ in range(6):
            replica._writer._queue.lost_race()
        waited_for_turn(replica, other)
        yield replica


def waited_for_turn(replica: StateSynchronizer[Account], other: SegmentStore) -> None:
    with other.fair_lock(replica.segment, PATIENCE_SECONDS):
        updating = add(replica)
        until(lambda: replica._writer._queue._waiting is not None, "it is in the queue")
        begun = time.monotonic()
        until(lambda: time.monotonic() > begun + WAIT_SECONDS)
        assert updating.result is None
    updating.ended()


def add(replica: StateSynchronizer[Account]) -> CallInThread[object]:
    return CallInThread(lambda: replica.update_state(lambda state: [Add()], timeout=PATIENCE_SECONDS))


def test_a_process_reads_shortly_before_its_turn(
    replica: StateSynchronizer[Account], other: SegmentStore, readings: Readings
) -> None:
    writer = opened(other)
    writer._writer._queue._calls_until_probe = 2  # its first call does not look for others
    with other.fair_lock(replica.segment, PATIENCE_SECONDS):
        writer.update_state(lambda state: [Add(amount=10)])
        updating = add(replica)
        until(lambda: replica.state.value == 11, "the entry of the other")
        assert updating.result is None
    updating.ended()
    assert replica.state.value == 12
    assert readings.count == 1
