"""Names that were used once cost a client next to nothing: neither memory, nor reads when names are listed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence

import pytest

import readergroup as rg
from synchronizer import SegmentStore, StateSynchronizer
from synchronizer.testing import FailingStore
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)


@pytest.fixture
def counting(store: SegmentStore) -> FailingStore:
    return FailingStore(store)


@pytest.fixture
def client(counting: FailingStore) -> Iterator[rg.Client]:
    with rg.Client(counting) as client:
        yield client


@pytest.fixture
def elsewhere(store: SegmentStore) -> Iterator[rg.Client]:
    """Another process."""
    with rg.Client(store) as client:
        yield client


def create(client: rg.Client, name: str) -> None:
    client.streams.create(f"shop/{name}")
    client.groups.create(name, streams=[f"shop/{name}"])


def delete(client: rg.Client, name: str) -> None:
    client.groups.delete(name)
    client.streams.delete(f"shop/{name}")


def listed(client: rg.Client) -> tuple[list[str], list[str]]:
    return sorted(client.streams.list()), sorted(client.groups.list())


def test_deleted_names_are_read_once(client: rg.Client, counting: FailingStore, elsewhere: rg.Client) -> None:
    create(client, "kept")
    for number in range(10):
        create(elsewhere if number % 2 else client, f"deleted-{number}")
        delete(elsewhere, f"deleted-{number}")
    for _ in range(2):  # what this client had open itself it looks at twice
        assert listed(client) == (["shop/kept"], ["kept"])
    counting.operations.clear()
    assert listed(client) == (["shop/kept"], ["kept"])
    touched = {operation.segment for operation in counting.operations if operation.verb not in ("wait", "list")}
    assert not [segment for segment in touched if "deleted" in segment]


def test_names_are_listed_in_few_reads_and_nothing_stays_open(
    client: rg.Client, elsewhere: rg.Client, counting: FailingStore
) -> None:
    for number in range(20):
        create(elsewhere, f"kept-{number:02}")
    names = [f"kept-{number:02}" for number in range(20)]
    counting.operations.clear()
    assert listed(client) == ([f"shop/{name}" for name in names], names)
    assert [operation.verb for operation in counting.operations] == ["list", "read_starts"] * 2
    assert not client.streams.metadata._synchronizers.values()
    assert not client.groups._groups.values()


def test_a_name_whose_log_is_long_or_compacted_is_listed_until_it_is_deleted(
    client: rg.Client, elsewhere: rg.Client, counting: FailingStore
) -> None:
    for name in ("compacted", "long", "short"):
        create(elsewhere, name)
    for name in ("long", "compacted"):
        for length in range(1, 300):
            elsewhere.streams.configure(f"shop/{name}", scaling=rg.ScalingPolicy.fixed(length))
            elsewhere.groups.get(name).configure(reader_timeout_seconds=length)
    elsewhere.streams.synchronizer("shop/compacted").compact()
    elsewhere.groups.get("compacted").synchronizer.compact()
    names = ["compacted", "long", "short"]
    for _ in range(2):
        assert listed(client) == ([f"shop/{name}" for name in names], names)
    for name in ("compacted", "long"):
        delete(elsewhere, name)
    for _ in range(2):
        assert listed(client) == (["shop/short"], ["short"])
    for name in ("compacted", "long"):
        create(elsewhere, name)
    assert listed(client) == ([f"shop/{name}" for name in names], names)


def test_a_name_whose_metadata_is_damaged_is_told_when_names_are_listed(client: rg.Client, store: SegmentStore) -> None:
    create(client, "good")
    store.create("stream/shop/bad")
    store.append("stream/shop/bad", b"no entry")
    with pytest.raises(rg.CorruptStateError):
        listed(client)


def test_a_creation_that_was_interrupted_before_its_first_entry_is_not_listed(
    client: rg.Client, store: SegmentStore
) -> None:
    create(client, "good")
    for log in ("stream/shop/begun", "group/begun"):
        store.create(log)
    for _ in range(2):
        assert listed(client) == (["shop/good"], ["good"])
    create(client, "begun")
    assert listed(client) == (["shop/begun", "shop/good"], ["begun", "good"])


def test_a_name_that_is_used_again_is_listed(client: rg.Client, elsewhere: rg.Client) -> None:
    create(client, "billing")
    for _ in range(3):
        delete(elsewhere, "billing")
        for _ in range(2):
            assert listed(client) == ([], [])
        create(elsewhere, "billing")
        for _ in range(2):
            assert listed(client) == (["shop/billing"], ["billing"])


def test_what_is_deleted_leaves_the_memory(client: rg.Client, elsewhere: rg.Client) -> None:
    create(client, "billing")
    group = weakref.ref(client.groups.get("billing"))
    stream = weakref.ref(client.streams.synchronizer("shop/billing"))
    delete(elsewhere, "billing")
    assert listed(client) == ([], [])
    gc.collect()
    assert group() is None
    assert stream() is None


def test_a_stream_that_this_client_deletes_leaves_the_memory_at_once(client: rg.Client) -> None:
    client.streams.create("shop/billing")
    client.streams.synchronizer("shop/billing")
    assert synchronizers(client) == ["stream/shop/billing"]
    client.streams.delete("shop/billing")
    until(lambda: not any("deletions of streams" in thread.name for thread in threading.enumerate()))
    assert synchronizers(client) == []


def test_groups_that_this_client_deletes_leave_the_memory_at_once(client: rg.Client) -> None:
    client.streams.create("shop/orders")
    for number in range(50):
        client.groups.create(f"billing-{number}", streams=["shop/orders"])
        client.groups.delete(f"billing-{number}")
    assert synchronizers(client) == ["stream/shop/orders"]


def synchronizers(client: rg.Client) -> Sequence[str]:
    """The segments of the states that the client has in memory."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) is StateSynchronizer]
    return [each.segment for each in found if each.store is client.store]


@pytest.mark.parametrize("deletes", ["this client", "another process"])
def test_a_group_with_a_listener_is_closed_with_the_client_after_its_deletion(
    client: rg.Client, elsewhere: rg.Client, deletes: str
) -> None:
    others = set(threading.enumerate())
    create(client, "billing")
    heard: list[object] = []
    client.groups.get("billing").reader_notifier.register_listener(heard.append)
    until(lambda: heard)
    delete(client if deletes == "this client" else elsewhere, "billing")
    with pytest.raises(rg.NotFoundError):
        client.groups.get("billing")
    gc.collect()
    client.close()
    begun = [thread for thread in threading.enumerate() if thread not in others and "of billing" in thread.name]
    until(lambda: not any(thread.is_alive() for thread in begun), f"the end of {begun}", seconds=30)


def test_a_group_in_use_outlives_its_deletion_and_is_closed_with_the_client(
    client: rg.Client, elsewhere: rg.Client
) -> None:
    create(client, "billing")
    group = client.groups.get("billing")
    delete(client, "billing")
    assert listed(client) == ([], [])
    create(elsewhere, "billing")
    assert client.groups.get("billing") is group
    reader = group.reader("one")
    delete(elsewhere, "billing")
    assert listed(client) == ([], [])
    client.close()
    with pytest.raises(rg.ClosedError):
        reader.read(timeout=0)
