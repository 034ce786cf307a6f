"""A query as a reader of a group, asked for without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import readergroup as rg
from readergroup.spark.options import read_options
from readergroup.spark.stream_reading import StreamReader
from tests.readergroup.spark.streams import STREAM, cut_of, write
from tests.readergroup.spark.test_stream_reader import ALL, EVENT, Offset, ReadMaxBytes, batches, scaled_stream
from tests.waiting import PATIENCE_SECONDS, until

Start = Callable[..., tuple[StreamReader, Offset]]


@pytest.fixture
def client(shared_store_url: str) -> Iterator[rg.Client]:
    with rg.connect(shared_store_url) as client:
        yield client


@pytest.fixture
def start(shared_store_url: str) -> Iterator[Start]:
    """The source of a query from the beginning of the stream, whose positions a group has; and where it begins."""
    started = []

    def start(group: str = "query") -> tuple[StreamReader, Offset]:
        given = {"url": shared_store_url, "stream": STREAM, "startingOffsets": "earliest", "readerGroup": group}
        reader = StreamReader(EVENT, read_options(given, streaming=True))
        started.append(reader)
        return reader, reader.initialOffset()

    yield start
    for reader in started:
        reader.stop()


def owners(group: rg.ReaderGroup) -> set[str | None]:
    return {found.owner for found in group.synchronizer.fetch_updates().segments.values() if found.readable}


@pytest.mark.stores(round_robin=True)
def test_a_query_owns_all_segments_of_its_group_and_stands_where_it_has_finished_a_batch(
    client: rg.Client, start: Start
) -> None:
    scaled_stream(client)
    group = client.groups.create("query", streams=[STREAM])
    reader, at = start()
    places, lags = [], []
    for begun, end in batches(reader, at, ReadMaxBytes(4_000)):
        assert owners(group) == {"spark"}
        assert group.stream_cuts()[STREAM] == cut_of(begun)
        places.append(end)
        lags.append(group.lag().bytes)
    group.synchronizer.fetch_updates()
    assert group.stream_cuts()[STREAM] == cut_of(places[-1]) == client.streams.info(STREAM).tail
    assert lags == sorted(lags, reverse=True) and lags[0] > group.lag().bytes == 0
    assert group.distribution().readers.keys() == {"spark"} and not group.distribution().unassigned
    # The places inside an epoch are no entries: they are in the lease, as those of every reader.
    revision = group.synchronizer.revision
    write(client, range(1200, 1300))
    end = reader.latestOffset(places[-1], ALL)
    assert reader.latestOffset(end, ALL) == end
    group.synchronizer.fetch_updates()
    assert (group.synchronizer.revision, group.stream_cuts()[STREAM]) == (revision, cut_of(end))
    reader.stop()
    assert group.online_readers() == []
    assert group.stream_cuts()[STREAM] == cut_of(end)


def test_a_query_that_begins_anew_takes_its_group_back_with_it(client: rg.Client, start: Start) -> None:
    scaled_stream(client)
    group = client.groups.create("query", streams=[STREAM])
    reader, at = start()
    *_, (_, end) = batches(reader, at)
    # Nothing was said of the end of this one, as where it was killed: another one has its place at once.
    again, at = start()
    again.latestOffset(at, ALL)
    group.synchronizer.fetch_updates()
    assert group.stream_cuts()[STREAM] == cut_of(at) == client.streams.info(STREAM).head
    assert owners(group) == {"spark"}
    reader.stop()
    assert group.stream_cuts()[STREAM] == cut_of(at)
    assert owners(group) == {"spark"}


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_query_whose_group_another_query_takes_reads_no_further_batch(
    client: rg.Client, start: Start, is_idle: bool
) -> None:
    scaled_stream(client)
    client.groups.create("query", streams=[STREAM])
    reader, at = start()
    *_, (_, end) = batches(reader, at)
    assert reader.latestOffset(end, ALL) == end
    again, at = start()
    again.latestOffset(at, ALL)
    if not is_idle:
        write(client, range(1200, 1300))

    def is_refused() -> bool:
        try:
            assert reader.latestOffset(end, ALL) == end, "a query without a place in its group goes on"
        except rg.ReaderNotInGroupError as error:
            return "another query" in str(error)
        return False

    until(is_refused, "the end of the first query")
    assert again.latestOffset(at, ALL) != at


def test_a_group_that_cannot_be_the_querys_is_refused(client: rg.Client, start: Start) -> None:
    for stream in (STREAM, "shop/others"):
        client.streams.create(stream)
    client.groups.create("both", streams=[STREAM, "shop/others"])
    group = client.groups.create("query", streams=[STREAM])

    def ask(name: str) -> None:
        reader, at = start(name)
        reader.latestOffset(at, ALL)

    with pytest.raises(rg.NotFoundError, match="no reader group"):
        ask("none")
    with pytest.raises(rg.InvalidArgumentError, match="this stream and no other"):
        ask("both")
    for reader_id in ("r1", "spark"):
        with group.reader(reader_id):
            with pytest.raises(rg.InvalidArgumentError, match="has readers, so an exclusive reader cannot join"):
                ask("query")
    ask("query")


def test_no_reader_comes_in_beside_a_query(client: rg.Client, start: Start) -> None:
    client.streams.create(STREAM)
    write(client, range(100))
    group = client.groups.create("query", streams=[STREAM])
    reader, at = start()
    end = reader.latestOffset(at, ALL)
    for reader_id in ("r1", "spark"):
        with pytest.raises(rg.InvalidArgumentError, match="exclusive reader.*reader='spark'"):
            group.reader(reader_id)
    assert owners(group) == {"spark"}
    assert group.remove_reader("spark")
    with group.reader("r1"):
        assert owners(group) == {"r1"}
        with pytest.raises(rg.ReaderNotInGroupError, match="its reader was removed"):
            reader.latestOffset(end, ALL)
        assert group.stream_cuts()[STREAM] == cut_of(at)


def test_what_could_not_be_published_is_published_at_a_later_poll(
    client: rg.Client, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.streams.create(STREAM)
    write(client, range(100))
    group = client.groups.create("query", streams=[STREAM])
    reader, at = start()
    end = reader.latestOffset(at, ALL)
    append = reader._client.store.append
    is_away = True

    def away(*args: Any, **more: Any) -> Any:
        if is_away:
            raise rg.StoreUnavailableError("away")
        return append(*args, **more)

    monkeypatch.setattr(reader._client.store, "append", away)
    assert reader.latestOffset(end, ALL) == end
    assert group.stream_cuts()[STREAM] == cut_of(at)
    is_away = False
    assert reader.latestOffset(end, ALL) == end
    assert group.stream_cuts()[STREAM] == cut_of(end)


def test_a_query_passes_checkpoints_of_its_group_while_a_batch_is_read(client: rg.Client, start: Start) -> None:
    client.streams.create(STREAM)
    write(client, range(100), block=10)
    group = client.groups.create("query", streams=[STREAM])
    reader, at = start()
    middle = reader.latestOffset(at, ReadMaxBytes(500))
    end = reader.latestOffset(middle, ALL)
    assert group.checkpoint("nightly", timeout=PATIENCE_SECONDS).cuts[STREAM] == cut_of(middle) != cut_of(end)


def test_the_lease_of_a_query_is_renewed_while_a_batch_is_read(client: rg.Client, start: Start) -> None:
    client.streams.create(STREAM)
    group = client.groups.create("query", streams=[STREAM], reader_timeout_seconds=0.6)
    reader, at = start()
    reader.latestOffset(at, ALL)
    seen: set[bytes] = set()

    def is_renewed() -> bool:
        seen.update(bytes(each) for each in group._updater.leases().values())
        return len(seen) >= 4

    until(is_renewed, "three renewals")
