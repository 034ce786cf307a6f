"""What Spark asks of the sink, asked here without Spark."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pydantic import SecretStr
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructField, StructType

import readergroup as rg
from readergroup.spark import connection, sink, sink_rows
from readergroup.spark.address import StoreAddress
from readergroup.spark.options import WriteOptions, write_options
from readergroup.spark.sink import BatchSink, Staged, StreamSink
from readergroup.streams.transactions.transaction import Transactions
from synchronizer import SystemClock, open_store
from synchronizer.testing import FailingStore, Operation
from tests.readergroup.spark.streams import KEYS, STREAM, assert_in_order, number
from tests.seeds import seeds

SCHEMA = StructType([StructField("event", BinaryType()), StructField("routing_key", StringType())])
QUERY = "7c0d14f4-30b6-4a73-8f3c-1d6c3c5a1f00"


@pytest.fixture
def store(store_url: str) -> Iterator[FailingStore]:
    with open_store(store_url) as inner:
        yield FailingStore(inner)


@pytest.fixture
def client(store: FailingStore, store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[rg.Client]:
    """The client that the sink has, too."""
    with rg.Client(store, clock=SystemClock()) as client:
        monkeypatch.setitem(connection._clients, (os.getpid(), store_url), client)
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        yield client


@pytest.fixture
def options(store_url: str) -> WriteOptions:
    return WriteOptions(url=StoreAddress(url=SecretStr(store_url)), stream=STREAM)


def rows(numbers: Sequence[int]) -> pyarrow.RecordBatch:
    return pyarrow.RecordBatch.from_pydict(
        {"event": [b'{"id":%d}' % each for each in numbers], "routing_key": [str(each % KEYS) for each in numbers]}
    )


def in_task(writer: BatchSink | StreamSink, partition: int, batches: Sequence[pyarrow.RecordBatch]) -> Staged:
    """What a task does with these rows, which has a copy of the writer, and the message that it sends."""
    task = SimpleNamespace(partitionId=lambda: partition, getLocalProperty={"sql.streaming.queryId": QUERY}.get)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "_task", lambda: task)
        copy: BatchSink | StreamSink = pickle.loads(pickle.dumps(writer))
        message: Staged = pickle.loads(pickle.dumps(copy.write(iter(batches))))
        return message


def in_tasks(writer: BatchSink | StreamSink, numbers: range) -> list[Staged]:
    """Three tasks with their shares, whose messages come in any order."""
    third = -(-len(numbers) // 3)
    parts = [numbers[start : start + third] for start in (0, third, 2 * third)]
    messages = [in_task(writer, index, [rows(part[:20]), rows(part[20:])]) for index, part in enumerate(parts)]
    return [messages[2], messages[0], messages[1]]


def stream_sink(options: WriteOptions) -> StreamSink:
    return StreamSink(SCHEMA, options, overwrite=False)


def batch_sink(options: WriteOptions, txn_id: str | None = None) -> BatchSink:
    return BatchSink(SCHEMA, options.model_copy(update={"txn_id": txn_id}), overwrite=False)


def stored(client: rg.Client) -> list[int]:
    return [number(event.raw) for each in client.batch.segment_ranges(STREAM) for event in client.batch.read(each)]


def staged(client: rg.Client) -> list[str]:
    return [name for name in client.store.list("data/") if "/staging/" in name]


@pytest.mark.stores
def test_batches_of_a_query_are_committed_once_and_in_order(client: rg.Client, options: WriteOptions) -> None:
    for batch in range(3):
        for _ in range(2):  # the second time after a crash, with all that was staged again
            stream_sink(options).commit(in_tasks(stream_sink(options), range(100 * batch, 100 * batch + 100)), batch)
    assert_in_order(stored(client), 300)
    assert not staged(client)


def test_an_attempt_that_was_repeated_or_cut_off_leaves_nothing(
    client: rg.Client, options: WriteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_rows, "MAX_UNSTORED_BYTES", 1)
    writer = stream_sink(options)
    in_task(writer, 0, [rows(range(100))])  # its message is lost

    def cut_off() -> Iterator[pyarrow.RecordBatch]:
        yield rows(range(100))
        assert staged(client)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_task(writer, 0, cut_off())  # type: ignore[arg-type]
    stream_sink(options).commit([in_task(writer, 0, [rows(range(100))])], 0)
    assert_in_order(stored(client), 100)
    assert not staged(client)


def test_the_stream_may_be_scaled_between_staging_and_commit(client: rg.Client, options: WriteOptions) -> None:
    first = in_tasks(stream_sink(options), range(100))
    client.streams.scale(STREAM, split=[0])
    stream_sink(options).commit(first, 0)
    second = in_tasks(stream_sink(options), range(100, 200))
    client.streams.scale(STREAM, merge=[3, 1])
    stream_sink(options).commit(second, 1)
    assert_in_order(stored(client), 200)


def test_an_abort_takes_nothing_that_is_committed(client: rg.Client, options: WriteOptions) -> None:
    messages = in_tasks(stream_sink(options), range(100))
    stream_sink(options).commit(messages, 0)
    stream_sink(options).abort(messages, 0)  # after a commit of which the driver heard nothing
    assert_in_order(stored(client), 100)
    again = in_tasks(stream_sink(options), range(100))
    stream_sink(options).abort([None, *again], 0)
    assert not staged(client)
    with pytest.raises(rg.NotFoundError, match="stage them again"):
        stream_sink(options).commit(again, 1)
    stream_sink(options).commit(in_tasks(stream_sink(options), range(100, 200)), 1)
    assert_in_order(stored(client), 200)


ROUTED = StructType([*SCHEMA.fields, StructField("stream", StringType())])
RETURNS = "shop/returns"


def routed(numbers: range) -> pyarrow.RecordBatch:
    """Rows for two streams by turns, of which the first is that of the options, and named in every second row."""
    names = [(None, RETURNS, STREAM, RETURNS)[each % 4] for each in numbers]
    return rows(numbers).append_column("stream", pyarrow.array(names, pyarrow.string()))


def of_streams(client: rg.Client) -> list[list[int]]:
    """The numbers in the first stream and in the second, by key in the order of reading."""
    found = []
    for stream in (STREAM, RETURNS):
        events = [event for each in client.batch.segment_ranges(stream) for event in client.batch.read(each)]
        found.append(sorted((number(event.raw) for event in events), key=lambda each: each % KEYS))
    return found


def by_key(numbers: range) -> list[int]:
    return sorted(numbers, key=lambda each: each % KEYS)


@pytest.mark.stores
def test_rows_go_to_the_streams_that_they_name_once_and_in_order(client: rg.Client, options: WriteOptions) -> None:
    client.streams.create(RETURNS, scaling=rg.ScalingPolicy.fixed(3))
    for batch in range(3):
        for _ in range(2):
            writer = StreamSink(ROUTED, options, overwrite=False)
            start = 100 * batch
            messages = [
                in_task(writer, part, [routed(range(at, at + 50))]) for part, at in enumerate((start, start + 50))
            ]
            writer.commit(messages[::-1], batch)
    assert of_streams(client) == [by_key(range(0, 300, 2)), by_key(range(1, 300, 2))]
    assert not staged(client)


def test_a_commit_that_fails_between_two_streams_is_made_again_for_the_second(
    client: rg.Client, options: WriteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.streams.create(RETURNS)
    commit = Transactions.commit

    def away(self: Transactions, stream: str, *args: Any, **more: Any) -> bool:
        if stream == RETURNS:
            raise rg.StoreUnavailableError("away")
        return commit(self, stream, *args, **more)

    for txn_id in (None, "monday"):
        options = options.model_copy(update={"txn_id": txn_id})
        sinks = [StreamSink, BatchSink][txn_id is not None]
        for attempt in range(2):
            writer = sinks(ROUTED, options, overwrite=False)
            messages = [in_task(writer, 0, [routed(range(100))])]
            arguments = [messages, 0] if txn_id is None else [messages]
            if attempt:
                writer.commit(*arguments)
                continue
            with monkeypatch.context() as patch, pytest.raises(rg.StoreUnavailableError):
                patch.setattr(Transactions, "commit", away)
                writer.commit(*arguments)
            writer.abort(*arguments)
        assert not staged(client)
    assert [len(each) for each in of_streams(client)] == [100, 100]
    writer = BatchSink(ROUTED, options, overwrite=False)
    with pytest.raises(rg.AlreadyExistsError, match="with this txnId"):
        writer.commit([in_task(writer, 0, [routed(range(96))])])


def test_rows_for_a_stream_that_there_is_not_are_refused_before_any_is_stored(
    client: rg.Client, options: WriteOptions, store: FailingStore
) -> None:
    writer = StreamSink(ROUTED, options, overwrite=False)
    appended = len([each for each in store.operations if each.verb.startswith("append")])
    with pytest.raises(rg.NotFoundError, match=r"streams\.create.*shop/returns"):
        in_task(writer, 0, [routed(range(100))])
    assert appended == len([each for each in store.operations if each.verb.startswith("append")])
    assert not staged(client)
    client.streams.create(RETURNS)
    for name, message in (("returns", "scope/name"), ("", "scope/name"), ("shop/none", "no stream of this name")):
        wrong = rows(range(2)).append_column("stream", pyarrow.array([STREAM, name]))
        with pytest.raises(rg.ReaderGroupError, match=message):
            in_task(writer, 0, [routed(range(100)), wrong])
        assert not staged(client)
    writer = StreamSink(ROUTED, options.model_copy(update={"stream": None}), overwrite=False)
    with pytest.raises(rg.InvalidArgumentError, match="'stream' is null in a row; give the option"):
        in_task(writer, 0, [routed(range(100))])
    with pytest.raises(rg.InvalidArgumentError, match="'stream' is missing; or add a column"):
        StreamSink(SCHEMA, options.model_copy(update={"stream": None}), overwrite=False)


def test_a_commit_that_fails_is_aborted_and_made_again(
    client: rg.Client, options: WriteOptions, store: FailingStore
) -> None:
    client.streams.metadata.timeout = 0.2
    for batch, when in enumerate(("before", "after")):  # it is decided, or it is and the answer is lost
        numbers = range(100 * batch, 100 * batch + 100)
        messages = in_tasks(stream_sink(options), numbers)
        writer = stream_sink(options)

        def go_away(operation: Operation) -> None:
            store.unavailable = operation.verb == "append"

        setattr(store, when, go_away)
        with pytest.raises(rg.ReaderGroupError):
            writer.commit(messages, batch)
        writer.abort(messages, batch)
        setattr(store, when, None)
        store.unavailable = False
        stream_sink(options).commit(in_tasks(stream_sink(options), numbers), batch)
        assert_in_order(stored(client), numbers.stop)


@seeds(2, 5)
def test_a_store_that_is_away_for_moments_changes_nothing(
    seed: int, store_url: str, options: WriteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(store_url) as inner, rg.connect(store_url) as observer:
        observer.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        failing = FailingStore(inner, rng=random.Random(seed), fault_rate=0.1)
        with rg.Client(failing) as client:
            monkeypatch.setitem(connection._clients, (os.getpid(), store_url), client)
            for batch in range(3):
                messages = in_tasks(stream_sink(options), range(100 * batch, 100 * batch + 100))
                failing.lose_answers(batch % 2)
                stream_sink(options).commit(messages, batch)
        assert_in_order(stored(observer), 300)


def test_a_batch_without_events_does_not_touch_the_stream(
    client: rg.Client, options: WriteOptions, store: FailingStore
) -> None:
    writer = stream_sink(options)
    before = len(store.operations)
    messages = [in_task(writer, 0, []), in_task(writer, 1, [rows([])])]
    writer.commit(messages, 0)
    writer.abort(messages, 1)
    assert len(store.operations) == before
    assert not client.streams.fetch_state(STREAM).transactions.sequence


def test_two_drivers_on_one_checkpoint_commit_a_batch_once(client: rg.Client, options: WriteOptions) -> None:
    first = in_tasks(stream_sink(options), range(100))
    second = in_tasks(stream_sink(options), range(100))
    stream_sink(options).commit(first, 0)
    stream_sink(options).commit(second, 0)
    late = in_tasks(stream_sink(options), range(100, 200))
    stream_sink(options).abort(second, 0)
    with pytest.raises(rg.NotFoundError, match="stage them again"):
        stream_sink(options).commit(late, 1)
    stream_sink(options).commit(in_tasks(stream_sink(options), range(100, 200)), 1)
    assert_in_order(stored(client), 200)


def test_a_batch_before_the_last_of_a_stream_is_refused_and_writes_to_none(
    client: rg.Client, options: WriteOptions
) -> None:
    """The checkpoint was restored from an older copy, or its batches were deleted."""
    client.streams.create(RETURNS)
    writer = StreamSink(ROUTED, options.model_copy(update={"stream": RETURNS}), overwrite=False)
    to_returns = in_task(writer, 0, [routed(range(0, 100, 4))])
    writer.commit([to_returns], 0)
    for batch in range(3):
        stream_sink(options).commit(in_tasks(stream_sink(options), range(100 * batch, 100 * batch + 100)), batch)
    messages = [in_task(writer, 0, [routed(range(300, 400))])]
    with pytest.raises(rg.InvalidArgumentError, match=f"checkpoint.* is older.*'{STREAM}'.*batch=1 committed=2"):
        writer.commit(messages, 1)
    writer.abort(messages, 1)
    assert [len(each) for each in of_streams(client)] == [300, 25]
    assert not staged(client)
    stream_sink(options).commit(in_tasks(stream_sink(options), range(300, 400)), 3)
    assert_in_order(stored(client), 400)


def test_a_repeated_batch_with_another_number_of_events_is_discarded_with_a_warning(
    client: rg.Client, options: WriteOptions, caplog: pytest.LogCaptureFixture
) -> None:
    for count in (100, 100, 150):
        assert not caplog.records
        stream_sink(options).commit(in_tasks(stream_sink(options), range(count)), 0)
    (warning,) = caplog.messages
    assert f"batch 0 of query {QUERY} has 150 events for {STREAM} now, and had 100" in warning
    assert_in_order(stored(client), 100)
    assert not staged(client)


def test_a_batch_of_a_release_that_kept_no_number_of_events_is_repeated(
    client: rg.Client, options: WriteOptions, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [message.parts[STREAM] for message in in_tasks(stream_sink(options), range(100))]
    Transactions(client.streams).commit(STREAM, QUERY, 0, sorted(parts, key=lambda each: each.name))
    stream_sink(options).commit(in_tasks(stream_sink(options), range(100)), 0)
    stream_sink(options).commit(in_tasks(stream_sink(options), range(100, 200)), 1)
    assert sorted(stored(client)) == list(range(200))
    assert not caplog.records


@pytest.mark.stores("sqlite")
def test_a_txn_id_is_committed_once_and_without_one_each_write_is_another(
    client: rg.Client, options: WriteOptions
) -> None:
    for batch, txn_id in ((0, "monday"), (0, "monday"), (1, "tuesday")):
        writer = batch_sink(options, txn_id)
        writer.commit(in_tasks(writer, range(100 * batch, 100 * batch + 100)))
    assert_in_order(stored(client), 200)
    for _ in range(2):
        writer = batch_sink(options)
        writer.commit(in_tasks(writer, range(200, 300)))
    assert len(stored(client)) == 400
    assert sorted(client.streams.fetch_state(STREAM).transactions.committers) == ["monday", "tuesday"]
    assert not staged(client)


@pytest.mark.stores("postgresql", "nats")
def test_a_txn_id_that_is_used_for_other_events_is_refused(client: rg.Client, options: WriteOptions) -> None:
    def save(numbers: range, swap: bool = False) -> None:
        writer = batch_sink(options, "monday")
        messages = in_tasks(writer, numbers)
        try:
            writer.commit(messages[::-1] if swap else messages)
        except rg.AlreadyExistsError:
            writer.abort(messages)
            raise

    save(range(100))
    save(range(100), swap=True)
    for others in (range(99), range(1, 101), range(0), range(100, 200)):
        with pytest.raises(rg.AlreadyExistsError, match=r"other events.*this txnId.*key='monday'.*given='all-\d+-"):
            save(others)
    assert_in_order(stored(client), 100)
    assert not staged(client)


def test_a_txn_id_that_is_used_for_other_events_writes_to_none_of_several_streams(
    client: rg.Client, options: WriteOptions
) -> None:
    client.streams.create(RETURNS)
    columns = {"event": pyarrow.array([b"1", b"2"], pyarrow.binary()), "stream": [RETURNS, RETURNS]}
    without = options.model_copy(update={"stream": None, "txn_id": "monday"})

    def save(**changed: object) -> None:
        writer = BatchSink(ROUTED, without, overwrite=False)
        writer.commit([in_task(writer, 0, [pyarrow.RecordBatch.from_pydict({**columns, **changed})])])

    save()
    with pytest.raises(rg.AlreadyExistsError):
        save(stream=[STREAM, RETURNS])
    assert stored(client) == []
    save(stream=[RETURNS, RETURNS])


def test_a_txn_id_that_is_used_is_refused_if_other_streams_get_other_events(
    client: rg.Client, options: WriteOptions
) -> None:
    client.streams.create(RETURNS)
    client.streams.create("shop/late")

    def save(txn_id: str, default: str | None, *to: str) -> None:
        writer = BatchSink(ROUTED, options.model_copy(update={"stream": default, "txn_id": txn_id}), overwrite=False)
        writer.commit([in_task(writer, 0, [rows(range(len(to))).append_column("stream", pyarrow.array(to))])])

    for _ in range(2):
        save("without", None, STREAM)
        save("with", "shop/late", STREAM)
    for to in ((STREAM, RETURNS), (STREAM, STREAM)):
        with pytest.raises(rg.AlreadyExistsError, match="with this txnId"):
            save("without", None, *to)
    with pytest.raises(rg.AlreadyExistsError, match="with this txnId"):
        save("with", "shop/late", RETURNS)
    assert of_streams(client) == [[0, 0], []]


def test_a_txn_id_with_a_digest_of_each_stream_is_compared_with_such_ones(
    client: rg.Client, options: WriteOptions
) -> None:
    """Earlier releases stored them. This write was interrupted before its second stream."""
    client.streams.create(RETURNS)
    options = options.model_copy(update={"txn_id": "monday"})

    def save(count: int) -> None:
        writer = BatchSink(ROUTED, options, overwrite=False)
        writer.commit([in_task(writer, 0, [routed(range(count))])])

    writer = BatchSink(ROUTED, options, overwrite=False)
    message = in_task(writer, 0, [routed(range(100))])
    digest = str(message.digests[STREAM])
    assert digest.startswith("50-")
    Transactions(client.streams).commit(STREAM, "monday", 0, [message.parts[STREAM]], digest=digest)
    for _ in range(2):
        save(100)
    for count in (96, 104):
        with pytest.raises(rg.AlreadyExistsError, match="with this txnId"):
            save(count)
    assert [len(each) for each in of_streams(client)] == [50, 50]


def test_a_txn_id_without_events_is_remembered_too(client: rg.Client, options: WriteOptions) -> None:
    for _ in range(2):
        writer = batch_sink(options, "sunday")
        writer.commit(in_tasks(writer, range(0)))
    writer = batch_sink(options, "sunday")
    with pytest.raises(rg.AlreadyExistsError, match="committed='all-0-"):
        writer.commit(in_tasks(writer, range(10)))
    assert stored(client) == []


def test_a_commit_takes_as_long_as_the_stream_grows(
    client: rg.Client, options: WriteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def merges_slowly(*args: object, **more: object) -> bool:
        nonlocal calls
        calls += 1
        if calls <= 4:
            with client.writer(STREAM) as writer:
                writer.write(b"0")
        raise rg.DeadlineExceededError("not all merged yet")

    monkeypatch.setattr(Transactions, "commit", merges_slowly)
    with pytest.raises(rg.DeadlineExceededError):
        stream_sink(options).commit(in_tasks(stream_sink(options), range(10)), 0)
    assert calls == 5


# ---------------------------------------------------------------------- what is refused


def test_only_appending_is_possible(client: rg.Client, options: WriteOptions) -> None:
    with pytest.raises(rg.InvalidArgumentError, match=r"\.mode\('append'\)"):
        BatchSink(SCHEMA, options, overwrite=True)
    with pytest.raises(rg.InvalidArgumentError, match=r"outputMode\('append'\)"):
        StreamSink(SCHEMA, options, overwrite=True)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": LongType()}, r"to_json\(struct\('\*'\)\).*columns=\['id'\]"),
        ({"event": BinaryType(), "key": StringType()}, "no such column.*column='key'"),
        ({"event": StringType(), "EVENT": StringType()}, "except for upper and lower case; rename or drop one"),
        ({"event": LongType()}, "cast it: column='event' type='bigint' known=.*binary.*string"),
        ({"event": StringType(), "routing_key": BinaryType()}, "cast it: column='routing_key'"),
        ({"event": StringType(), "headers": StringType()}, "cast it: column='headers' .*map<string,binary>"),
        ({"event": StringType(), "headers": MapType(LongType(), BinaryType())}, "cast it: .*'map<bigint,binary>'"),
    ],
)
def test_other_columns_are_refused(
    columns: dict[str, object], message: str, client: rg.Client, options: WriteOptions
) -> None:
    schema = StructType([StructField(name, kind) for name, kind in columns.items()])  # type: ignore[arg-type]
    with pytest.raises(rg.InvalidArgumentError, match=message):
        StreamSink(schema, options, overwrite=False)


def test_columns_may_be_in_any_case(client: rg.Client, options: WriteOptions) -> None:
    schema = StructType([StructField("EVENT", BinaryType()), StructField("Routing_Key", StringType())])
    writer = BatchSink(schema, options, overwrite=False)
    writer.commit([in_task(writer, 0, [rows(range(40)).rename_columns(["EVENT", "Routing_Key"])])])
    assert_in_order(stored(client), 40)


def test_a_stream_that_there_is_not_is_refused_before_anything_runs(client: rg.Client, options: WriteOptions) -> None:
    with pytest.raises(rg.NotFoundError, match=r"streams\.create"):
        batch_sink(options.model_copy(update={"stream": "shop/none"}))


def test_events_that_cannot_be_stored_fail_the_task(
    client: rg.Client, options: WriteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_rows, "MAX_UNSTORED_BYTES", 1)
    for event, error in ((None, rg.InvalidArgumentError), (bytes(9 * 1024 * 1024), rg.EventTooLargeError)):
        batch = pyarrow.RecordBatch.from_pydict({"event": [b"0", event], "routing_key": ["a", "b"]})
        with pytest.raises(error, match="event is not null|write a reference"):
            in_task(stream_sink(options), 0, [rows(range(10)), batch])
        assert not staged(client)
    headers = pyarrow.array([[("trace", bytes(5 * 1024 * 1024))]], pyarrow.map_(pyarrow.string(), pyarrow.binary()))
    too_large = pyarrow.RecordBatch.from_pydict({"event": [bytes(4 * 1024 * 1024)], "headers": headers})
    with pytest.raises(rg.EventTooLargeError, match="bytes=9437194"):
        in_task(stream_sink(options), 0, [too_large])
    client.streams.seal(STREAM)
    with pytest.raises(rg.SealedError):
        in_task(stream_sink(options), 0, [rows(range(10))])


def test_options_of_writes() -> None:
    given = {"URL": "nats://db", "Stream": STREAM, "txnid": "monday"}
    assert write_options(given, streaming=False).txn_id == "monday"
    with pytest.raises(rg.InvalidArgumentError, match="only to batch writes.*txnId"):
        write_options(given, streaming=True)
    with pytest.raises(rg.InvalidArgumentError, match="did_you_mean='txnId'"):
        write_options({**given, "txnIt": "x"}, streaming=False)
    with pytest.raises(rg.InvalidArgumentError, match="the option is unknown.*'startingOffsets'"):
        write_options({**given, "startingOffsets": "earliest"}, streaming=False)
    with pytest.raises(rg.InvalidArgumentError, match="txnId"):
        write_options({**given, "txnId": "a/b"}, streaming=False)
    of_spark = {"url": "nats://db", "stream": STREAM, "checkpointLocation": "/tmp/x", "queryName": "q"}
    assert write_options(of_spark, streaming=True).stream == STREAM
    assert write_options({"url": "nats://db"}, streaming=True).stream is None
