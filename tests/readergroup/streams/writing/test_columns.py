"""Batches and tables are written as a loop of `write` would write them."""

from __future__ import annotations

import random
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow
import pyarrow.compute
import pytest

import readergroup as rg
from readergroup.streams.data import tables
from readergroup.streams.data.block import MAX_EVENT_BYTES
from readergroup.streams.data.write_batch import MAX_UNSTORED_BYTES
from readergroup.streams.writing.writer import EventWriter
from synchronizer.testing import FailingStore
from tests.seeds import seeds

pytestmark = pytest.mark.stores(round_robin=True)
STREAM: Final = "shop/orders"

#: Event, routing key, headers.
Row = tuple[bytes, str | None, dict[str, bytes] | None]


@pytest.fixture
def failing(store_url: str) -> Iterator[FailingStore]:
    with rg.connect(store_url) as client:
        yield FailingStore(client.store)


@pytest.fixture
def client(failing: FailingStore) -> Iterator[rg.Client]:
    with rg.Client(failing) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(3))
        yield client


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces and windows from few events."""
    monkeypatch.setattr(tables, "PIECE_BYTES", 2_000)
    monkeypatch.setattr(tables, "_WINDOW", 64)


def rows_of(seed: int, count: int) -> list[Row]:
    rng = random.Random(seed)
    keys = [None, "", "ключ", *(f"key-{number}" for number in range(rng.choice([1, 20, 1000])))]
    sizes = rng.choice([[9], [9, 10, 300], [9, 70_000]])
    headers: list[dict[str, bytes] | None] = [None, None, {"trace": b"1", "ü": b""}]
    return [(b"%09d" % n + bytes(rng.choice(sizes) - 9), rng.choice(keys), rng.choice(headers)) for n in range(count)]


def table_of(rows: Sequence[Row], *, chunks: int = 3) -> pyarrow.Table:
    step = max(1, len(rows) // chunks)
    schema = pyarrow.schema(
        [
            ("payload", pyarrow.binary()),
            ("customer", pyarrow.string()),
            ("extra", pyarrow.map_(pyarrow.string(), pyarrow.binary())),
        ]
    )
    parts = [rows[start : start + step] for start in range(0, len(rows), step)]
    return pyarrow.Table.from_batches(
        [
            pyarrow.RecordBatch.from_arrays(
                [
                    pyarrow.array([row[0] for row in part], schema.field(0).type),
                    pyarrow.array([row[1] for row in part], schema.field(1).type),
                    pyarrow.array([row[2] and [*row[2].items()] for row in part], schema.field(2).type),
                ],
                schema=schema,
            )
            for part in parts
        ],
        schema,
    )


Writer = EventWriter[bytes]
WAYS: Final[dict[str, Callable[[Any, Sequence[Row]], None]]] = {
    "batch": lambda writer, rows: writer.write_batch([row[0] for row in rows], routing_keys=[row[1] for row in rows]),
    "table": lambda writer, rows: writer.write_arrow(
        table_of(rows), data="payload", routing_key="customer", headers="extra"
    ),
}


def loop(writer: Any, rows: Sequence[Row]) -> None:
    for event, key, headers in rows:
        writer.write(event, key, headers)


def events_of(client: rg.Client) -> list[rg.Event[bytes]]:
    return [event for each in client.batch.segment_ranges(STREAM) for event in client.batch.read(each)]


def by_key(rows: Sequence[Row]) -> dict[str | None, list[Row]]:
    """The events of each key in their order; those without a key sorted, because they have none."""
    found: dict[str | None, list[Row]] = defaultdict(list)
    for event, key, headers in rows:
        found[key].append((event, key, headers or None))
    found[None].sort(key=lambda row: row[0])
    return found


def stored(client: rg.Client) -> dict[str | None, list[Row]]:
    return by_key([(event.data, event.routing_key, dict(event.headers)) for event in events_of(client)])


def expected(rows: Sequence[Row], way: str) -> dict[str | None, list[Row]]:
    return by_key([(event, key, None if way == "batch" else headers) for event, key, headers in rows])


@pytest.mark.parametrize("way", WAYS)
@seeds(2, 6)
@pytest.mark.usefixtures("small_pieces")
def test_what_is_written_at_once_is_read_as_if_written_in_a_loop(client: rg.Client, way: str, seed: int) -> None:
    rows = rows_of(seed, 400)
    with client.writer(STREAM) as writer:
        for start in range(0, len(rows), 100):  # also between single writes
            loop(writer, [(event, key, None) for event, key, _ in rows[start : start + 20]])
            WAYS[way](writer, rows[start + 20 : start + 100])
    single = [(event, key, None) if index % 100 < 20 else (event, key, headers)
              for index, (event, key, headers) in enumerate(rows)]  # fmt: skip
    assert stored(client) == expected(single, way)
    if way == "table":
        for event in events_of(client):
            assert dict(event.headers) == ({} if int(event.data[:9]) % 100 < 20 else rows[int(event.data[:9])][2] or {})


@pytest.mark.parametrize("way", WAYS)
@seeds(1, 3)
@pytest.mark.usefixtures("small_pieces")
def test_splits_merges_and_lost_answers_meanwhile_change_nothing(
    client: rg.Client, failing: FailingStore, way: str, seed: int
) -> None:
    rows = rows_of(seed, 1200)
    with client.writer(STREAM) as writer, rg.Client(failing.inner) as admin:

        def write() -> None:
            for start in range(0, len(rows), 200):
                if start % 400 == 0:
                    failing.lose_answers()
                WAYS[way](writer, rows[start : start + 200])

        thread = threading.Thread(target=write)
        thread.start()
        for _ in range(5):
            admin.streams.scale(STREAM, split=[admin.streams.fetch_state(STREAM).current[0]])
            admin.streams.scale(STREAM, merge=list(admin.streams.fetch_state(STREAM).current[:2]))
        thread.join()
        writer.flush()
    assert stored(client) == expected(rows, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("small_pieces")
def test_batches_go_to_the_successors_of_segments_that_were_sealed(client: rg.Client, way: str) -> None:
    rows = rows_of(1, 300)
    with client.writer(STREAM) as writer:
        loop(writer, [(b"first", "key-1", None)])
        writer.flush()
        client.streams.scale(STREAM, merge=[0, 1])
        client.streams.scale(STREAM, split=[2])
        WAYS[way](writer, rows)  # by an epoch that is no longer
    assert stored(client) == by_key([(b"first", "key-1", None), *sum(expected(rows, way).values(), [])])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("small_pieces")
def test_a_transaction_has_all_of_it_or_nothing(client: rg.Client, way: str) -> None:
    rows = rows_of(2, 300)
    with client.writer(STREAM) as writer:
        with pytest.raises(KeyError), writer.transaction() as txn:
            WAYS[way](txn, rows)
            raise KeyError
        assert events_of(client) == []
        with writer.transaction() as txn:
            WAYS[way](txn, rows[:150])
            loop(txn, [(event, key, None) for event, key, _ in rows[150:]])
        both = [*rows[:150], *((event, key, None) for event, key, _ in rows[150:])]
        assert stored(client) == expected(both, way)


@pytest.mark.parametrize("way", WAYS)
def test_more_than_fits_waits_for_room(client: rg.Client, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PIECE_BYTES", 4 * 1024 * 1024)
    most = [0]
    rows: list[Row] = [(bytes(100_000), f"key-{n % 7}", None) for n in range(600)]
    with client.writer(STREAM) as writer:
        add = writer._lanes.add

        def noted(batches: Any) -> None:
            add(batches)
            most[0] = max(most[0], writer._unstored)

        monkeypatch.setattr(writer._lanes, "add", noted)
        WAYS[way](writer, rows)
    assert most[0] <= MAX_UNSTORED_BYTES + 5 * 1024 * 1024
    assert len(events_of(client)) == 600


@pytest.mark.parametrize("way", WAYS)
def test_an_error_on_the_way_says_how_many_are_written(client: rg.Client, way: str, failing: FailingStore) -> None:
    rows: list[Row] = [(bytes(1_000_000), "key", None) for _ in range(60)]
    writer = client.writer(STREAM, timeout=0.2)
    failing.unavailable = True
    try:
        with pytest.raises(rg.DeadlineExceededError) as caught:
            WAYS[way](writer, rows)
    finally:
        failing.unavailable = False
    count = caught.value.facts["events_written"]
    assert isinstance(count, int) and 0 < count < 60
    writer.flush(timeout=60)
    writer.close(timeout=60)
    assert len(events_of(client)) == count


@pytest.mark.parametrize("way", WAYS)
def test_a_sealed_stream_takes_nothing(client: rg.Client, way: str) -> None:
    writer = client.writer(STREAM)
    client.streams.seal(STREAM)
    WAYS[way](writer, rows_of(0, 3))
    with pytest.raises(rg.SealedError):
        writer.close()
    with pytest.raises((rg.SealedError, rg.ClosedError)):
        WAYS[way](writer, rows_of(0, 3))


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_while_batches_are_added_writes_none_of_them(
    client: rg.Client, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(3, 50)
    with client.writer(STREAM) as writer:
        for where in range(4):
            lanes, left = list(writer._lanes._lanes.values()), [where]

            def interrupted(batches: Any, left: list[int] = left, lanes: Any = lanes) -> None:
                for batch in batches:
                    if not left[0]:
                        raise KeyboardInterrupt
                    left[0] -= 1
                    next(each for each in lanes if each.segment == batch.segment).add(batch)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(writer._lanes, "add", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    WAYS[way](writer, rows)
        assert writer._unstored == 0
        WAYS[way](writer, rows)
    assert stored(client) == expected(rows, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("small_pieces")
def test_an_interrupt_between_pieces_notes_what_is_written_and_ends_a_transaction(
    client: rg.Client, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, of, left = rows_of(4, 300), tables.PackedRows.of, [0]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return of(*arguments)

    monkeypatch.setattr(tables.PackedRows, "of", interrupted)
    with client.writer(STREAM) as writer:
        txn, left[0] = writer.transaction(), 3
        with pytest.raises(KeyboardInterrupt):
            WAYS[way](txn, rows)
        with pytest.raises(rg.ClosedError):
            txn.commit()
        assert events_of(client) == []
        left[0] = 3
        with pytest.raises(KeyboardInterrupt) as caught:
            WAYS[way](writer, rows)
    (note,) = caught.value.__notes__
    assert f"first {len(events_of(client))} events" in note


# ---------------------------------------------------------------------- what is taken


TYPES: Final = [
    pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary(3), pyarrow.string(), pyarrow.large_string(),
    pyarrow.binary_view(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
    pyarrow.dictionary(pyarrow.int8(), pyarrow.binary()), pyarrow.dictionary(pyarrow.uint32(), pyarrow.string_view()),
]  # fmt: skip
TEXTS: Final = [
    pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(),
    pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
    pyarrow.dictionary(pyarrow.uint32(), pyarrow.string_view()),
]  # fmt: skip


def column_of(values: list[str | None], kind: pyarrow.DataType) -> pyarrow.Array:
    if pyarrow.types.is_dictionary(kind):
        encoded = pyarrow.array(values).dictionary_encode()
        indices, different = encoded.indices.cast(kind.index_type), encoded.dictionary.cast(kind.value_type)
        return pyarrow.DictionaryArray.from_arrays(indices, different)
    if kind == pyarrow.binary(3):
        return pyarrow.array([value and value.encode() for value in values], kind)
    return pyarrow.array(values).cast(kind)


def dictionary(indices: list[int], values: list[str | None]) -> pyarrow.DictionaryArray:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(indices, pyarrow.int8()), pyarrow.array(values))


NULL_HEADER: Final = pyarrow.array([[("a", b"1")], [("b", None)]], pyarrow.map_(pyarrow.string(), pyarrow.binary()))


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("key_kind", TEXTS, ids=str)
def test_columns_of_bytes_and_of_text_are_taken(
    client: rg.Client, kind: pyarrow.DataType, key_kind: pyarrow.DataType
) -> None:
    table = pyarrow.table(
        {"payload": column_of(["abc", "def", "ghi"], kind), "customer": column_of(["a", None, "b"], key_kind)}
    )
    with client.writer(STREAM) as writer:
        writer.write_arrow(table.slice(1), data="payload", routing_key="customer")
        writer.write_arrow(table.to_batches()[0], data="payload")
    found = sorted((event.data, event.routing_key or "") for event in events_of(client))
    assert found == sorted([(b"def", ""), (b"ghi", "b"), (b"abc", ""), (b"def", ""), (b"ghi", "")])


@pytest.mark.usefixtures("small_pieces")
def test_chunks_with_different_dictionaries_are_taken(client: rg.Client) -> None:
    """Together they have too many values for the type of their indices."""
    parts = [[f"{part}{number}" for number in range(100)] for part in "ab"]
    column = pyarrow.chunked_array([dictionary(list(range(100)), part) for part in parts])
    with client.writer(STREAM) as writer:
        writer.write_arrow(
            pyarrow.table({"payload": column, "customer": column}), data="payload", routing_key="customer"
        )
    assert stored(client) == by_key([(name.encode(), name, None) for part in parts for name in part])


def test_what_is_outside_the_rows_of_a_table_is_not_checked(client: rg.Client) -> None:
    table = pyarrow.table(
        {
            "payload": dictionary([0, 0], ["event", None]),
            "customer": dictionary([0, 1], ["key", None, "k" * 5000]),
        }
    )
    below_null = pyarrow.compute.if_else(pyarrow.array([True, False]), NULL_HEADER, None)
    for headers in (NULL_HEADER.slice(0, 1), below_null):
        part = table.slice(0, len(headers)).append_column("extra", headers)
        with client.writer(STREAM) as writer:
            writer.write_arrow(part, data="payload", routing_key="customer", headers="extra")
    row = (b"event", "key", {"a": b"1"})
    assert stored(client) == by_key([row, row, (b"event", None, None)])


def test_a_data_frame_is_taken(client: rg.Client) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"payload": [b"1", b"2"], "customer": ["a", None], "n": [1, 2]})
    with client.writer(STREAM) as writer:
        writer.write_arrow(frame, data="payload", routing_key="customer")
        with pytest.raises(rg.InvalidArgumentError, match="one type"):
            writer.write_arrow(pandas.DataFrame({"payload": [b"1", 2]}), data="payload")
    assert stored(client) == by_key([(b"1", "a", None), (b"2", None, None)])


def test_a_serializer_encodes_the_events_of_a_batch(client: rg.Client) -> None:
    with client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
        writer.write_batch(({"id": number} for number in range(3)), routing_keys=iter(["a", "a", "a"]))
        with pytest.raises(rg.InvalidArgumentError, match="JSON"):
            writer.write_batch([{"id": 1}, {1, 2}])
        with pytest.raises(rg.InvalidArgumentError, match="without a serializer"):
            writer.write_arrow(pyarrow.table({"payload": [b"1"]}), data="payload")
    assert [event.data for event in events_of(client)] == [b'{"id":0}', b'{"id":1}', b'{"id":2}']


class Upper(rg.BytesSerializer):
    def dumps(self, value: bytes, /) -> bytes:
        return value.upper()


def test_a_serializer_derived_from_that_of_bytes_encodes_too(client: rg.Client) -> None:
    with client.writer(STREAM, serializer=Upper()) as writer:
        writer.write_batch([b"a", b"b"], routing_keys=["key", "key"])
        with pytest.raises(rg.InvalidArgumentError, match="without a serializer"):
            writer.write_arrow(GOOD, data="payload")
    assert [event.data for event in events_of(client)] == [b"A", b"B"]


def test_keys_in_a_set_are_refused_because_they_have_no_order(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        for keys in ({"a", "b"}, frozenset("ab")):
            with pytest.raises(rg.InvalidArgumentError, match="in the order of the events"):
                writer.write_batch([b"1", b"2"], routing_keys=keys)
        writer.write_batch([b"1", b"2"], routing_keys={"a": 1, "b": 2}.keys())
    assert [(event.data, event.routing_key) for event in events_of(client)] == [(b"1", "a"), (b"2", "b")]


def test_keys_that_are_no_text_for_utf8_are_kept(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        writer.write_batch([b"1", b"2"], routing_keys=["half \ud800", "half \ud800"])
    assert [event.routing_key for event in events_of(client)] == ["half \ud800"] * 2


@pytest.mark.parametrize("rows", [[], table_of([]), table_of([]).slice(0), pyarrow.table({"payload": []})], ids=repr)
def test_nothing_is_written_of_nothing(client: rg.Client, rows: Any) -> None:
    with client.writer(STREAM) as writer:
        if isinstance(rows, list):
            writer.write_batch(rows, routing_keys=[])
        else:
            writer.write_arrow(rows, data="payload")
    assert events_of(client) == []


GOOD: Final = pyarrow.table({"payload": [b"1", b"2"], "customer": ["a", "b"], "number": [1, 2]})
DAMAGED: Final = pyarrow.Array.from_buffers(
    pyarrow.string(), 1, [None, pyarrow.array([0, 2], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xff\xfe")]
)


def with_offsets(kind: pyarrow.DataType, *offsets: int) -> pyarrow.Array:
    """Return a column of 8 bytes of data with these offsets, right or wrong, as a damaged file has them."""
    width = pyarrow.int64() if "large" in str(kind) else pyarrow.int32()
    buffers = [None, pyarrow.array(offsets, width).buffers()[1], pyarrow.py_buffer(b"abcdefgh")]
    return pyarrow.Array.from_buffers(kind, len(offsets) - 1, buffers)


def with_wrong_view(kind: pyarrow.DataType) -> pyarrow.Array:
    """Return a column with one value of 40 bytes, of which the column has only 8."""
    view = struct.pack("<i4sii", 40, b"abcd", 0, 0)
    return pyarrow.Array.from_buffers(kind, 1, [None, pyarrow.py_buffer(view), pyarrow.py_buffer(b"abcdefgh")])


def with_wrong_index(values: pyarrow.Array, index: int) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, index], pyarrow.int8()), values, safe=False)


DAMAGED_DATA: Final = {
    "outside": with_offsets(pyarrow.binary(), 0, 1_000_000, 8),
    "backwards": with_offsets(pyarrow.binary(), 0, 8, 4),
    "negative": with_offsets(pyarrow.binary(), 0, -4, 4),
    "large": with_offsets(pyarrow.large_binary(), 0, 1_000_000, 8),
    "text": with_offsets(pyarrow.string(), 0, 1_000_000, 8),
    "large text": with_offsets(pyarrow.large_string(), 0, 8, 4),
    "view": with_wrong_view(pyarrow.binary_view()),
    "text view": with_wrong_view(pyarrow.string_view()),
    "index too high": with_wrong_index(pyarrow.array([b"x"]), 7),
    "index below 0": with_wrong_index(pyarrow.array(["x"]), -3),
    "index of views": with_wrong_index(pyarrow.array([b"x"], pyarrow.binary_view()), 7),
    "index beside null": with_wrong_index(pyarrow.array([b"x", None]), 7),
    "dictionary": with_wrong_index(with_offsets(pyarrow.string(), 0, 8, 4), 1),
}


@pytest.mark.parametrize("damaged", DAMAGED_DATA.values(), ids=DAMAGED_DATA)
def test_damaged_events_are_refused_before_anything_is_written(client: rg.Client, damaged: pyarrow.Array) -> None:
    good = pyarrow.array([b"x" * 1000] * 20_000).cast(damaged.type)  # enough for an earlier piece
    table = pyarrow.table({"payload": pyarrow.chunked_array([good, damaged], damaged.type)})
    with client.writer(STREAM) as writer, writer.transaction() as txn:
        for each in (writer, txn):
            with pytest.raises(rg.InvalidArgumentError, match=r"^the column has damaged values: column='payload'"):
                each.write_arrow(table, data="payload")
    assert events_of(client) == []


def test_damaged_headers_and_keys_are_refused_before_anything_is_written(client: rg.Client) -> None:
    maps = pyarrow.MapArray.from_arrays([0, 2], ["a", "b"], with_offsets(pyarrow.string(), 0, 1_000_000, 8))
    keys = with_wrong_view(pyarrow.string_view())
    table = pyarrow.table({"payload": [b"1"], "extra": maps, "customer": keys})
    with client.writer(STREAM) as writer:
        for other in ({"headers": "extra"}, {"routing_key": "customer"}):
            with pytest.raises(rg.InvalidArgumentError, match="^the column has damaged values"):
                writer.write_arrow(table, data="payload", **other)
    assert events_of(client) == []


def test_events_that_are_text_in_another_encoding_are_written(client: rg.Client) -> None:
    columns = (DAMAGED, with_wrong_index(DAMAGED, 0))
    with client.writer(STREAM) as writer:
        for column in columns:
            writer.write_arrow(pyarrow.table({"payload": column}), data="payload")
    assert [event.data for event in events_of(client)] == [b"\xff\xfe"] * 3


@pytest.mark.parametrize("one", ["order-1", b"1", bytearray(b"1"), memoryview(b"1"), {"id": 1, "total": 2}])
def test_one_event_is_not_taken_for_several(client: rg.Client, one: Any) -> None:
    with client.writer(STREAM, serializer=rg.JsonSerializer()) as writer, writer.transaction() as txn:
        for call in (writer.write_many, writer.write_batch, txn.write_batch):
            with pytest.raises(rg.InvalidArgumentError, match=f"^events must be a list .*'{type(one).__name__}'$"):
                call(one)
        with pytest.raises(rg.InvalidArgumentError, match="^routing_keys must be a list"):
            writer.write_batch([1], one)
    assert events_of(client) == []


@pytest.mark.parametrize(
    ("table", "columns", "says"),
    [
        (GOOD, {"data": "payload2"}, "data must name one column"),
        (GOOD, {"data": None}, "data must name one column"),
        (GOOD, {"data": ["payload"]}, "data must name one column"),
        (GOOD, {"data": "payload", "routing_key": "x"}, "routing_key must name one column"),
        (GOOD, {"data": "payload", "headers": "x"}, "headers must name one column"),
        (GOOD, {"data": "number"}, "column of data must hold bytes or text"),
        (GOOD, {"data": "payload", "routing_key": "number"}, "column of routing_key must hold text"),
        (GOOD, {"data": "payload", "routing_key": "payload"}, "column of routing_key must hold text"),
        (GOOD, {"data": "payload", "headers": "customer"}, "maps of text to bytes"),
        (pyarrow.table({"payload": [b"1", None]}), {"data": "payload"}, "an event is null"),
        (pyarrow.table({"payload": [None]}), {"data": "payload"}, "an event is null"),
        (pyarrow.table({"payload": dictionary([0, 1, 0], ["a", None])}), {"data": "payload"}, "an event is null"),
        (pyarrow.table({"payload": ["1"], "extra": NULL_HEADER.slice(1)}), {"data": "payload", "headers": "extra"},
         "the value of a header is null"),
        (pyarrow.table([[b"1"], [b"2"]], ["payload", "payload"]), {"data": "payload"}, "must name one column"),
        ({"payload": [b"1"]}, {"data": "payload"}, "table must be an Arrow table"),
        ([b"1"], {"data": "payload"}, "table must be an Arrow table"),
        (None, {"data": "payload"}, "table must be an Arrow table"),
        (pyarrow.table({"payload": ["1"], "customer": ["k" * 4097]}), {"data": "payload", "routing_key": "customer"},
         "4096 characters"),
        (pyarrow.table({"payload": ["1"], "customer": DAMAGED}), {"data": "payload", "routing_key": "customer"},
         "damaged"),
        (pyarrow.table({"payload": [b"1", bytes(MAX_EVENT_BYTES + 1)]}), {"data": "payload"}, "too large"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_right_is_refused_before_anything_is_written(
    client: rg.Client, table: Any, columns: dict[str, Any], says: str
) -> None:
    with client.writer(STREAM) as writer, writer.transaction() as txn:
        for each in (writer, txn):
            with pytest.raises((rg.InvalidArgumentError, rg.EventTooLargeError), match=says):
                each.write_arrow(table, **columns)
    assert events_of(client) == []


@pytest.mark.parametrize(
    ("events", "keys", "says"),
    [
        ([b"1", b"2"], ["a"], "one key, or None, for each event"),
        ([b"1"], ["a", "b"], "one key, or None, for each event"),
        ([b"1"], "a", "routing_keys must be a list"),
        (b"1", None, "events must be a list"),
        ("1", None, "events must be a list"),
        (1, None, "events must be a list"),
        ([b"1", "2"], None, "takes only bytes"),
        ([b"1", None], None, "takes only bytes"),
        ([b"1", b"2"], ["a", 1], "a routing key must be a str"),
        ([b"1", b"2"], ["a", b"a"], "a routing key must be a str"),
        ([b"1", b"2"], ["a", ["a"]], "a routing key must be a str"),
        ([b"1", b"2"], ["a", "k" * 4097], "a routing key must have at most 4096"),
        ([b"1", bytes(MAX_EVENT_BYTES + 1)], None, "too large"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_right_is_refused_before_anything_is_written(
    client: rg.Client, events: Any, keys: Any, says: str
) -> None:
    with client.writer(STREAM) as writer, writer.transaction() as txn:
        for each in (writer, txn):
            with pytest.raises((rg.InvalidArgumentError, rg.EventTooLargeError), match=says):
                each.write_batch(events, routing_keys=keys)
    assert events_of(client) == []


def test_a_closed_writer_takes_nothing(client: rg.Client) -> None:
    writer = client.writer(STREAM)
    writer.close()
    with pytest.raises(rg.ClosedError):
        writer.write_batch([b"1"])
    with pytest.raises(rg.ClosedError):
        writer.write_arrow(GOOD, data="payload")


def test_without_pyarrow_the_error_names_what_to_install(client: rg.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for module in ("tables", "packed_rows"):
        monkeypatch.delitem(sys.modules, f"readergroup.streams.data.{module}", raising=False)
    with client.writer(STREAM) as writer:
        with pytest.raises(rg.UnsupportedError, match=r"\.\[arrow\]"):
            writer.write_batch([b"1"])
        with pytest.raises(rg.UnsupportedError, match=r"\.\[arrow\]"):
            writer.write_arrow(GOOD, data="payload")
