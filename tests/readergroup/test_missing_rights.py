"""A user lacks a right: calls end at once, background threads try again, and an unknown outcome stays unknown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

import readergroup as rg
from synchronizer import open_store
from synchronizer.testing import FailingStore, Operation
from tests.readergroup.test_one_failure import CALLS, STREAM, World
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

#: They wait for the store as for events. The second has no timeout.
WAIT_FOR_THE_RIGHT = ("Reader.read", "ReaderPool.run")


def refuse(operation: Operation) -> None:
    raise rg.StorePermissionError("the user may do nothing")


def refuse_appends(operation: Operation) -> None:
    if operation.verb.startswith(("append", "concat", "create")):
        raise rg.StorePermissionError("the user may not write")


@pytest.fixture
def store() -> FailingStore:
    return FailingStore(open_store("memory://"))


@pytest.fixture
def client(store: FailingStore) -> Iterator[rg.Client]:
    with rg.Client(store) as client:
        yield client
        store.before = None


@pytest.mark.parametrize("name", [name for name in CALLS if name not in WAIT_FOR_THE_RIGHT])
def test_a_call_ends_at_once(name: str, store: FailingStore) -> None:
    with rg.Client(store, timeout=PATIENCE_SECONDS) as client:
        act = CALLS[name](World(client))
        store.before = refuse
        try:
            # At a deadline it would be another error, or have one fact more: the number of attempts.
            with pytest.raises(rg.StorePermissionError, match="the user may do nothing") as caught:
                act()
        finally:
            store.before = None
    assert "attempts" not in caught.value.facts


def test_a_reader_whose_right_is_revoked_says_so_once_and_goes_on_when_it_is_granted(
    store: FailingStore, client: rg.Client, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(client)
    with world.reader() as reader:
        store.before = refuse
        assert reader.read(timeout=1.5) is None
        assert [each for each in caplog.messages if "reader r1 waits" in each] == [
            "reader r1 waits, and tries again: the user may do nothing"
        ]
        store.before = None
        event = reader.read(timeout=60)
        assert event is not None and event.data == b"x"
        assert reader.read(timeout=0) is None


def test_a_reader_that_is_refused_does_not_flood_the_server(store: FailingStore, client: rg.Client) -> None:
    with World(client).reader() as reader:
        store.before = refuse
        before = len(store.operations)
        assert reader.read(timeout=2) is None
        # Ten a second come from the lease's keeper, as many from the reader's state, and a few from the reader.
        assert len(store.operations) - before < 100
        store.before = None


class TestWriters:
    def test_a_flush_ends_at_once_and_the_events_are_stored_when_the_right_is_granted(
        self, store: FailingStore, client: rg.Client
    ) -> None:
        world = World(client)
        writer = client.writer(STREAM)
        store.before = refuse_appends
        writer.write(b"y")
        for _ in range(2):
            with pytest.raises(rg.StorePermissionError, match="flush again.*events_not_stored=1.*may not write"):
                writer.flush()
        assert writer.failure is None
        store.before = None
        writer.flush()
        assert world.batch.count(world.batch.segment_ranges(STREAM)[0]) == 2

    def test_the_next_write_is_refused_once(self, store: FailingStore, client: rg.Client) -> None:
        World(client)
        writer = client.writer(STREAM)
        store.before = refuse_appends
        writer.write(b"y")
        refused: list[rg.StorePermissionError] = []

        def is_refused() -> bool:
            try:
                writer.write(b"z")
            except rg.StorePermissionError as error:
                refused.append(error)
            return bool(refused)

        until(is_refused)
        assert "refuses earlier events; this call wrote nothing" in str(refused[0])
        writer.write(b"z")
        store.before = None

    def test_a_write_without_room_ends_at_once(self, store: FailingStore, client: rg.Client) -> None:
        World(client)
        writer = client.writer(STREAM)
        store.before = refuse_appends
        with suppress(rg.StorePermissionError):
            while writer.has_room:
                writer.write(bytes(1024 * 1024))
        with suppress(rg.StorePermissionError):  # the one of the writes before
            writer.write(bytes(1024 * 1024))
        while writer.has_room:
            writer.write(bytes(1024 * 1024))
        with pytest.raises(rg.StorePermissionError, match="repeat it"):
            writer.write(b"z")
        store.before = None

    def test_a_right_that_was_granted_meanwhile_is_no_error_of_a_later_flush(
        self, store: FailingStore, client: rg.Client
    ) -> None:
        World(client)
        writer = client.writer(STREAM)
        store.before = refuse_appends
        writer.write(b"y")
        with pytest.raises(rg.StorePermissionError):
            writer.flush()
        refused = len(store.operations)
        until(lambda: len(store.operations) > refused)  # the last attempt before the grant has failed
        store.before = None
        writer.flush()

    def test_a_close_tells_how_many_events_are_lost(self, store: FailingStore, client: rg.Client) -> None:
        World(client)
        writer = client.writer(STREAM)
        store.before = refuse_appends
        writer.write(b"y")
        with pytest.raises(rg.StorePermissionError, match="before all events were stored.*events_not_stored=1"):
            writer.close()

    def test_events_in_doubt_stay_in_doubt(self, store: FailingStore, client: rg.Client) -> None:
        World(client)
        writer = client.writer(STREAM)
        _lose_an_answer_then_refuse(store)
        writer.write(b"y")
        with pytest.raises(rg.OutcomeUnknownError, match="events_in_doubt=1"):
            writer.close()


class TestUnknownOutcomes:
    def test_an_update_whose_answer_was_lost_may_be_stored(self, store: FailingStore, client: rg.Client) -> None:
        counter = client.counter("orders")
        _lose_an_answer_then_refuse(store)
        with pytest.raises(rg.OutcomeUnknownError):
            counter.add(1)
        store.before = None
        counter.refresh()
        assert counter.value == 1

    def test_an_event_of_a_queue_whose_answer_was_lost_may_be_stored(
        self, store: FailingStore, client: rg.Client
    ) -> None:
        queue = client.event_queue("mail")
        queue.add(b"x")
        _lose_an_answer_then_refuse(store)
        with pytest.raises(rg.OutcomeUnknownError):
            queue.add(b"y")
        store.before = None
        queue.add(b"z")
        assert queue.outstanding_bytes == client.event_queue("mail").outstanding_bytes

    def test_calls_that_share_an_append_are_all_refused(self, store: FailingStore, client: rg.Client) -> None:
        counter = client.counter("orders")
        reached, go_on = threading.Event(), threading.Event()

        def wait_then_refuse(operation: Operation) -> None:
            if operation.verb == "append":
                reached.set()
                go_on.wait(60)
                refuse(operation)

        store.before = wait_then_refuse
        calls = [CallInThread(lambda: counter.add(1)) for _ in range(5)]
        assert reached.wait(60)
        go_on.set()
        assert [type(each.ended()) for each in calls] == [rg.StorePermissionError] * 5
        store.before = None
        assert counter.add(1) == 1


def test_a_transaction_that_may_not_be_merged_is_merged_by_the_same_call_later(
    store: FailingStore, client: rg.Client
) -> None:
    client.streams.create("shop/two", scaling=rg.ScalingPolicy.fixed(2))
    transaction = client.writer("shop/two").transaction()
    for number in range(20):
        transaction.write(b"y", f"key-{number}")

    def refuse_the_merge(operation: Operation) -> None:
        if operation.verb == "append_together":
            refuse(operation)

    store.before = refuse_the_merge
    with pytest.raises(rg.StorePermissionError):
        transaction.commit()
    store.before = None
    transaction.commit()
    assert sum(map(client.batch.count, client.batch.segment_ranges("shop/two"))) == 20


def test_a_committed_position_is_refused_as_such(store: FailingStore, client: rg.Client) -> None:
    world = World(client)
    with world.group.reader("r1", auto_commit=False) as reader:
        assert reader.read(timeout=60) is not None
        store.before = refuse_appends
        with pytest.raises(rg.StorePermissionError):
            reader.commit()
        store.before = None
        reader.commit()


def test_the_threads_of_a_pool_go_on_when_the_right_is_granted(store: FailingStore, client: rg.Client) -> None:
    world = World(client)
    handled: list[bytes] = []
    store.before = refuse
    pool = world.group.pool(lambda event: handled.append(event.data), readers=1, workers="thread")
    running = CallInThread(lambda: pool.run() or "ended")
    seen = len(store.operations)
    until(lambda: len(store.operations) > seen + 5)
    store.before = None
    until(lambda: handled == [b"x"])
    pool.stop()
    assert running.ended() == "ended"


def _lose_an_answer_then_refuse(store: FailingStore) -> None:
    """Let the next append be stored, with its answer lost, and refuse all later ones."""
    store.lose_answers()
    appends = 0

    def refuse_the_others(operation: Operation) -> None:
        nonlocal appends
        if operation.verb.startswith(("append", "concat")):
            appends += 1
            if appends > 1:
                refuse_appends(operation)

    store.before = refuse_the_others
