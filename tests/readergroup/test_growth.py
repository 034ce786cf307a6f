"""What many streams, groups, writers, listeners and readers of one process cost: no more for each than few do.

`python -m benchmarks.growth` measures seconds and memory, too.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import readergroup as rg
from readergroup.streams.transactions.transaction import Transactions
from readergroup.streams.writing import event_numbers
from synchronizer import ManualClock, open_store
from synchronizer.testing import FailingStore
from tests.waiting import until

STREAM = "growth/events"
FEW, MANY = 10, 100


@pytest.fixture(autouse=True)
def no_writer_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 32 writers, by chance, makes more calls."""
    monkeypatch.setattr(event_numbers, "is_to_sweep", lambda writer_id: False)


@pytest.fixture
def opened() -> Iterator[Callable[[int], rg.Client]]:
    """A client of an empty store, for so many of something."""
    clients: list[rg.Client] = []

    def open_client(size: int) -> rg.Client:
        store = FailingStore(open_store("memory://"))
        client = rg.Client(store, clock=ManualClock())
        clients.append(client)
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(size))
        client.groups.create("group", streams=[STREAM])
        return client

    yield open_client
    for client in clients:
        client.close()
        client.store.close()


def streams(client: rg.Client, size: int) -> list[Any]:
    return [client.streams.create(f"growth/{number}") for number in range(size)]


def groups(client: rg.Client, size: int) -> list[Any]:
    return [client.groups.create(f"group-{number}", streams=[STREAM]) for number in range(size)]


def writers(client: rg.Client, size: int) -> list[Any]:
    opened = [client.writer(STREAM) for _ in range(size)]
    for number, writer in enumerate(opened):
        writer.write(b"event", str(number))
        writer.flush()
    return opened


def listeners(client: rg.Client, size: int) -> list[Any]:
    notifier = client.groups.get("group").segment_notifier
    return [notifier.register_listener(lambda change: None) for _ in range(size)]


def readers(client: rg.Client, size: int) -> list[Any]:
    group = client.groups.get("group")
    return [group.reader(f"reader-{number}") for number in range(size)]


MAKERS = [streams, groups, writers, listeners, readers]


def calls(client: rg.Client, call: Callable[[], object]) -> int:
    store = client.store
    assert isinstance(store, FailingStore)
    before = len(store.operations)
    call()
    return len(store.operations) - before


@pytest.mark.parametrize("make", MAKERS)
def test_ten_times_as_many_take_at_most_ten_times_as_many_store_calls(
    opened: Callable[[int], rg.Client], make: Callable[[rg.Client, int], list[Any]]
) -> None:
    def calls_to_make(size: int) -> int:
        client = opened(size)
        return calls(client, lambda: make(client, size))

    few, many = calls_to_make(FEW), calls_to_make(MANY)
    assert many <= MANY // FEW * few, (few, many)


@pytest.mark.parametrize("make", MAKERS)
def test_ten_times_as_many_that_are_idle_take_at_most_ten_times_as_many_store_calls(
    opened: Callable[[int], rg.Client], make: Callable[[rg.Client, int], list[Any]]
) -> None:
    def idle_calls(size: int) -> int:
        client = opened(size)
        made = make(client, size)
        client.step()
        found = calls(client, lambda: idle_minute(client))
        del made
        return found

    few, many = idle_calls(FEW), idle_calls(MANY)
    assert many <= MANY // FEW * max(few, 1), (few, many)


def idle_minute(client: rg.Client) -> None:
    clock = client.clock
    assert isinstance(clock, ManualClock)
    for _ in range(60):
        clock.advance(1.0)
        client.step()


@pytest.mark.parametrize("size", [1, FEW, MANY])
def test_writers_that_are_idle_have_one_thread_and_those_that_are_closed_have_none(
    opened: Callable[[int], rg.Client], size: int
) -> None:
    gc.collect()
    client = opened(FEW)
    before = {*threading.enumerate()}
    made = writers(client, size)
    until(lambda: len({*threading.enumerate()} - before) == 1)
    for writer in made:
        writer.close()
    assert not {*threading.enumerate()} - before


def written(client: rg.Client) -> int:
    """How many bytes are in the store, beside the data of streams."""
    store = client.store
    return sum(store.info(each).length for each in store.list() if not each.startswith("data/"))


def commit_under(client: rg.Client, key: str) -> None:
    """Commit as a streaming query does, whose key is remembered for its next commit."""
    transactions = Transactions(client.streams)
    with transactions.stage(STREAM, key) as part:
        part.write(b"event")
        staged = part.finish()
    assert transactions.commit(STREAM, key, 1, [staged])


def commit_once(client: rg.Client) -> None:
    with client.writer(STREAM) as writer, writer.transaction() as transaction:
        transaction.write(b"event")


def test_a_commit_costs_no_more_with_a_hundred_times_as_many_keys_of_other_transactions(
    opened: Callable[[int], rg.Client],
) -> None:
    costs = []
    for keys in (10, 1000):
        client = opened(1)
        for number in range(keys):
            commit_under(client, f"query-{number:04}")
        assert len(client.streams.fetch_state(STREAM).transactions.committers) == keys
        before = written(client)
        costs.append((calls(client, partial(commit_once, client)), written(client) - before))
    (few_calls, few_bytes), (many_calls, many_bytes) = costs
    assert many_calls == few_calls
    assert many_bytes <= few_bytes + 20  # a larger number takes some bytes more
