"""Names that were used once cost a client next to nothing: neither memory, nor reads when names are listed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

import readergroup as rg
from synchronizer import SegmentStore, open_store
from synchronizer.testing import FailingStore

pytestmark = pytest.mark.stores(round_robin=True)


@pytest.fixture
def store(store_url: str) -> Iterator[SegmentStore]:
    with open_store(store_url) as store:
        yield store


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
