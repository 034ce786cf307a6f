"""`committed_by_all` of docs/howto/delete.md: where a stream may be truncated for all of its groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

import readergroup as rg
from tests.places import DOCS
from tests.waiting import PATIENCE_SECONDS

STREAM = "shop/orders"


@pytest.fixture
def committed_by_all() -> Callable[[Sequence[rg.ReaderGroup], str], rg.StreamCut | None]:
    page = (DOCS / "howto" / "delete.md").read_text()
    printed = re.search(r"^def committed_by_all.*?(?=^\n\n)", page, re.MULTILINE | re.DOTALL)
    assert printed
    names: dict[str, Callable[[Sequence[rg.ReaderGroup], str], rg.StreamCut | None]] = {"rg": rg}  # type: ignore[dict-item]
    exec(printed[0], names)
    return names["committed_by_all"]


def test_nothing_that_a_group_has_not_read_is_deleted(
    store_url: str, committed_by_all: Callable[[Sequence[rg.ReaderGroup], str], rg.StreamCut | None]
) -> None:
    with rg.connect(store_url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        groups = [client.groups.create(name, streams=[STREAM]) for name in ("first", "second")]
        for number in range(20):  # each in a block of its own: truncation deletes whole blocks
            with client.writer(STREAM) as writer:
                writer.write(b"%d" % number, routing_key=f"customer-{number % 5}")

        read: list[set[bytes]] = []
        for group, count in zip(groups, (12, 7), strict=True):
            with group.reader() as reader:
                events = [reader.read(timeout=PATIENCE_SECONDS) for _ in range(count)]
            read.append({event.data for event in events if event is not None})
        cut = committed_by_all(groups, STREAM)
        assert cut is not None
        client.streams.truncate(STREAM, cut)
        assert client.streams.info(STREAM).head == cut

        client.streams.seal(STREAM)
        for group, before in zip(groups, read, strict=True):
            with group.reader() as reader:
                after = {event.data for event in reader}
            assert before | after == {b"%d" % number for number in range(20)}


def test_while_a_group_has_not_passed_a_split_there_is_no_cut(
    store_url: str, committed_by_all: Callable[[Sequence[rg.ReaderGroup], str], rg.StreamCut | None]
) -> None:
    with rg.connect(store_url) as client:
        client.streams.create(STREAM)
        groups = [client.groups.create(name, streams=[STREAM]) for name in ("first", "second")]
        with client.writer(STREAM) as writer:
            writer.write(b"an order")
        client.streams.scale(STREAM, split=[0])
        for group, cut_exists in zip(groups, (False, True), strict=True):
            with group.reader() as reader:
                while group.stream_cuts()[STREAM].offsets.keys() != {f"{STREAM}/1", f"{STREAM}/2"}:
                    reader.read(timeout=0.1)
            assert (committed_by_all(groups, STREAM) is not None) == cut_exists


def test_an_error_of_a_deletion_does_not_recommend_to_create_what_is_missing() -> None:
    with rg.connect("memory://") as client:
        for _ in range(2):  # the second time, the client knows the names
            with pytest.raises(rg.NotFoundError, match="there is no stream of this name: "):
                client.streams.delete(STREAM)
            with pytest.raises(rg.NotFoundError, match="there is no reader group of this name: "):
                client.groups.delete("billing")
            client.streams.create(STREAM)
            client.groups.create("billing", streams=[STREAM])
            client.groups.delete("billing")
            client.streams.delete(STREAM)
