from __future__ import annotations

import fcntl
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from synchronizer.errors import StoreUnavailableError
from synchronizer.store import SegmentStore
from synchronizer.stores import open_store
from synchronizer.stores.memory import MemoryStore
from synchronizer.stores.sqlite.file_lock import FairFileLock, Gate
from synchronizer.stores.sqlite.store import SqliteStore
from tests.synchronizer.stores.sqlite.gates import held
from tests.waiting import PATIENCE_SECONDS, until

LONG = PATIENCE_SECONDS
pytestmark = pytest.mark.skipif(not FairFileLock.is_available(), reason="no locks of open files here")


def test_the_gate_lets_one_through_at_a_time(tmp_path: Path) -> None:
    gates = [Gate(str(tmp_path / "lock")) for _ in range(4)]
    inside = 0

    def pass_through(gate: Gate) -> None:
        nonlocal inside
        for _ in range(50):
            with held(gate, LONG):
                inside += 1
                assert inside == 1
                threading.Event().wait(0.0001)
                inside -= 1

    with ThreadPoolExecutor() as threads:
        list(threads.map(pass_through, gates))


def test_who_waits_at_the_gate_gives_up_at_the_deadline(tmp_path: Path) -> None:
    one, other = Gate(str(tmp_path / "lock")), Gate(str(tmp_path / "lock"))
    with held(one, LONG):
        before = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="suspended process"), held(other, 0.4):
            pass
        assert 0.4 <= time.monotonic() - before < LONG
    with held(other, 0):
        pass


def test_one_who_stopped_as_next_in_line_blocks_nobody(tmp_path: Path) -> None:
    gate = Gate(str(tmp_path / "lock"))
    with open(tmp_path / "lock.next") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        with held(gate, LONG):
            pass


def test_the_one_who_was_through_lets_the_next_in_line_go_first(tmp_path: Path) -> None:
    order: list[str] = []
    one, other = Gate(str(tmp_path / "lock")), Gate(str(tmp_path / "lock"))

    def wait_in_line() -> None:
        with held(other, LONG):
            order.append("other")

    with ThreadPoolExecutor() as threads:
        for _ in range(20):
            with held(one, LONG):
                waiting = threads.submit(wait_in_line)
                _until_locked(tmp_path / "lock.next")
            with held(one, LONG):
                order.append("one")
            waiting.result(LONG)
    assert order == ["other", "one"] * 20


@pytest.mark.parametrize("url", ["memory://", "sqlite:///{path}/store.db"])
def test_a_fair_lock_is_passed_on_first_come_first_served(tmp_path: Path, url: str) -> None:
    order: list[int] = []

    def hold(store: SegmentStore, number: int) -> None:
        with store.fair_lock("s", LONG) as is_held:
            assert is_held
            order.append(number)

    with open_store(url.format(path=tmp_path)) as store:
        with ThreadPoolExecutor() as threads, store.fair_lock("s", LONG):
            for number in range(6):
                threads.submit(hold, store, number)
                until(lambda: _contenders(store) == number + 2, "one more in the queue")  # noqa: B023
        assert order == list(range(6))


def _contenders(store: SegmentStore) -> int:
    """How many have entered the queue so far."""
    if isinstance(store, MemoryStore):
        return sum(map(len, store._memory.fair_queues.values()))
    assert isinstance(store, SqliteStore)
    counters = Path(f"{store._path}.fair").read_bytes()[: 8 * FairFileLock._slots]
    return sum(each for (each,) in struct.iter_unpack("<Q", counters))


def test_who_gives_up_leaves_the_queue(tmp_path: Path) -> None:
    lock = FairFileLock(str(tmp_path / "fair"))
    with lock.acquire("s", LONG):
        for _ in range(3):
            with lock.acquire("s", 0.01) as is_held:
                assert not is_held
    with lock.acquire("s", 0) as is_held:
        assert is_held


def _until_locked(path: Path) -> None:
    deadline = time.monotonic() + LONG
    while not _is_locked(path):
        assert time.monotonic() < deadline
        threading.Event().wait(0.0001)


def _is_locked(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_long_wait_for_the_gate_leaves_the_processor_to_the_holder(tmp_path: Path) -> None:
    path = str(tmp_path / "gate")
    holder, waiter = Gate(path), Gate(path)
    holder.acquire(1.0)
    begun = time.thread_time()
    with pytest.raises(StoreUnavailableError):
        waiter.acquire(1.0)
    assert time.thread_time() - begun < 0.15
    holder.close()
    waiter.close()
