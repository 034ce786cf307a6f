"""Events as rows, and decoded into columns of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgpack
import pyarrow
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import readergroup as rg
from readergroup.spark.options import ReadOptions, read_options
from readergroup.spark.rows import Rows, default_schema
from tests.readergroup.spark.streams import STREAM


@pytest.fixture
def client() -> Iterator[rg.Client]:
    with rg.connect("memory://") as client:
        client.streams.create(STREAM)
        yield client


def options(**given: str) -> ReadOptions:
    return read_options({"url": "postgresql://db/shop", "stream": STREAM, **given})


def decoded(client: rg.Client, events: list[bytes], rows: Rows) -> list[dict[str, Any]]:
    with client.writer(STREAM) as writer:
        for event in events:
            writer.write(event)
    found: list[dict[str, Any]] = []
    for each in client.batch.segment_ranges(STREAM):
        for batch in client.batch.record_batches(each, rows.columns):
            found += rows.of(batch).to_pylist()
    return found


ORDER = StructType(
    [
        StructField("id", LongType()),
        StructField("price", DecimalType(8, 2)),
        StructField("placed", TimestampType()),
        StructField("due", DateType()),
        StructField("tags", ArrayType(StringType())),
        StructField("shop", StructType([StructField("name", StringType()), StructField("score", DoubleType())])),
        StructField("counts", MapType(StringType(), LongType())),
        StructField("offset", LongType()),
    ]
)


@pytest.mark.parametrize("serializer", ["json", "msgpack"])
def test_events_are_decoded_into_the_columns_of_the_schema(serializer: str, client: rg.Client) -> None:
    order = {
        "id": 7,
        "price": "12.50",
        "placed": "2026-01-01T12:00:00+02:00",
        "due": "2026-02-01",
        "tags": ["a", None],
        "shop": {"name": "Zürich", "score": 1.5, "other": 1},
        "counts": {"x": 1},
        "unknown": True,
    }
    dumps = {"json": rg.JsonSerializer().dumps, "msgpack": msgpack.packb}[serializer]
    rows = Rows(ORDER, options(serializer=serializer, columns="offset"))
    first, second, third = decoded(client, [dumps(order), dumps({"id": None, "offset": 3}), dumps(None)], rows)
    assert first == {
        "id": 7,
        "price": Decimal("12.50"),
        "placed": datetime(2026, 1, 1, 10, tzinfo=UTC),
        "due": date(2026, 2, 1),
        "tags": ["a", None],
        "shop": {"name": "Zürich", "score": 1.5},
        "counts": [("x", 1)],
        "offset": 0,
    }
    assert {name for name, value in second.items() if value is not None} == {"offset"}
    assert second["offset"] > 3  # the place in the stream, and not the event's own
    assert {name for name, value in third.items() if value is not None} == {"offset"}


@pytest.mark.parametrize(
    "damaged",
    [b"{", b"\xff", b'{"id": "seven"}', b"5", b'{"id": 1.5}', b'{"in": [{"x": 1}, {"x": 1.5}]}', b'{"m": {"a": 1.5}}'],
)
def test_an_event_that_does_not_fit_is_named(damaged: bytes, client: rg.Client) -> None:
    inner = ArrayType(StructType([StructField("x", LongType())]))
    fields = [
        StructField("id", LongType()),
        StructField("in", inner),
        StructField("m", MapType(StringType(), LongType())),
    ]
    rows = Rows(StructType(fields), options(serializer="json"))
    with pytest.raises(rg.CorruptDataError, match="from_json.*segment='shop/orders/0' offset=55"):
        decoded(client, [b"{}", damaged, b"{}"], rows)


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (b'{"id":1,"at":5}', r"offset=0 column='at' type='timestamp\[us"),
        (b'{"id":"x"}', "offset=0 column='id' type='int64' error="),
        (b"no JSON", "offset=0 error="),
        (b"5", "offset=0 error="),
    ],
)
def test_the_column_that_an_event_does_not_fit_is_named(event: bytes, told: str, client: rg.Client) -> None:
    schema = StructType([StructField("id", LongType()), StructField("at", TimestampType())])
    with pytest.raises(rg.CorruptDataError, match=told):
        decoded(client, [event], Rows(schema, options(serializer="json")))


CORRUPT = StructType(
    [
        StructField("id", LongType()),
        StructField("shop", StringType()),
        StructField("_corrupt_record", StringType()),
        StructField("offset", LongType()),
    ]
)
EVENTS = [b'{"id":1,"shop":"a"}', b'{"id":"x","shop":"b"}', b"\xff{", b"null", b'{"id":1.5,"shop":2}', b"5"]


def test_permissive_keeps_what_fits_and_the_text_of_the_event(client: rg.Client) -> None:
    found = decoded(client, EVENTS, Rows(CORRUPT, options(serializer="json", columns="offset", mode="permissive")))
    assert [(each["id"], each["shop"], each["_corrupt_record"]) for each in found] == [
        (1, "a", None),
        (None, "b", '{"id":"x","shop":"b"}'),
        (None, None, "\ufffd{"),
        (None, None, None),
        (None, None, '{"id":1.5,"shop":2}'),
        (None, None, "5"),
    ]


def test_permissive_without_a_column_for_corrupt_events_leaves_nulls(client: rg.Client) -> None:
    found = decoded(client, EVENTS, Rows(StructType(CORRUPT[:2]), options(serializer="json", mode="PERMISSIVE")))
    assert found == [{"id": 1, "shop": "a"}, {"id": None, "shop": "b"}, *[{"id": None, "shop": None}] * 4]


def test_malformed_events_are_dropped_if_told_so(client: rg.Client) -> None:
    rows = Rows(CORRUPT, options(serializer="json", columns="offset", mode="DROPMALFORMED"))
    found = decoded(client, EVENTS, rows)
    assert [(each["id"], each["shop"], each["_corrupt_record"]) for each in found] == [(1, "a", None), (None,) * 3]
    assert found[0]["offset"] < found[1]["offset"]
    assert decoded(client, [b"5"] * 3, rows)[2:] == []


def test_failfast_is_the_default_and_leaves_the_column_for_corrupt_events_null(client: rg.Client) -> None:
    rows = Rows(CORRUPT, options(serializer="json", columns="offset"))
    assert decoded(client, [b'{"id":1,"_corrupt_record":"x"}'], rows)[0]["_corrupt_record"] is None
    with pytest.raises(rg.CorruptDataError, match="'mode' to PERMISSIVE.*column='id' type='int64'"):
        decoded(client, EVENTS, rows)


def test_corrupt_events_in_msgpack_are_kept_as_bytes(client: rg.Client) -> None:
    schema = StructType([StructField("id", LongType()), StructField("bad", BinaryType())])
    rows = Rows(schema, options(serializer="msgpack", mode="PERMISSIVE", columnNameOfCorruptRecord="bad"))
    events = [msgpack.packb({"id": 1}), b"\xc1", msgpack.packb({"id": 1.5})]
    assert decoded(client, events, rows) == [
        {"id": 1, "bad": None},
        {"id": None, "bad": b"\xc1"},
        {"id": None, "bad": events[2]},
    ]


def test_a_column_for_corrupt_events_that_cannot_be_is_refused() -> None:
    def rows(schema: StructType, **given: str) -> Rows:
        return Rows(schema, options(mode="PERMISSIVE", **given))

    with pytest.raises(rg.InvalidArgumentError, match=r"in the schema.*column='bad'"):
        rows(CORRUPT, serializer="json", columnNameOfCorruptRecord="bad")
    with pytest.raises(rg.InvalidArgumentError, match=r"not in the option 'columns'.*column='offset'"):
        rows(CORRUPT, serializer="json", columns="offset", columnNameOfCorruptRecord="offset")
    with pytest.raises(rg.InvalidArgumentError, match=r"column='_corrupt_record' types=\['binary'\]"):
        rows(CORRUPT, serializer="msgpack", columns="offset")
    with pytest.raises(rg.InvalidArgumentError, match="'mode'.*add the option 'serializer'"):
        options(mode="FAILFAST")
    with pytest.raises(rg.InvalidArgumentError, match=r"option='mode' value='STRICT' known=\['PERMISSIVE'"):
        options(serializer="json", mode="STRICT")


@pytest.mark.parametrize("given", [{}, {"columnNameOfCorruptRecord": "_CORRUPT_record"}], ids=str)
def test_the_column_for_corrupt_events_is_found_in_any_case(given: dict[str, str], client: rg.Client) -> None:
    schema = StructType([StructField("id", LongType()), StructField("_Corrupt_Record", StringType())])
    found = decoded(client, EVENTS[:2], Rows(schema, options(serializer="json", mode="PERMISSIVE", **given)))
    assert [each["_Corrupt_Record"] for each in found] == [None, EVENTS[1].decode()]
    with pytest.raises(rg.InvalidArgumentError, match="except for upper and lower case"):
        Rows(StructType([*schema, StructField("_corrupt_record", StringType())]), options(serializer="json", **given))


@pytest.mark.parametrize("name", ["id", "_corrupt_record"])
def test_a_name_of_two_columns_is_refused(name: str) -> None:
    """Each column would have the values of the last, also with another type."""
    schema = StructType([StructField(name, StringType()), StructField(name, LongType())])
    with pytest.raises(rg.InvalidArgumentError, match=f"two columns have the same name.*{name}"):
        Rows(schema, options(serializer="json"))


def test_columns_come_in_the_order_that_was_asked_for(client: rg.Client) -> None:
    assert default_schema(options(columns="offset,event")) == "offset bigint, event binary"
    rows = Rows(StructType([StructField("offset", LongType()), StructField("event", BinaryType())]), options())
    assert decoded(client, [b"x"], rows) == [{"offset": 0, "event": b"x"}]


def test_headers_are_a_column_only_if_it_is_named(client: rg.Client) -> None:
    assert "headers" not in default_schema(options())
    assert default_schema(options(columns="headers,offset")) == "headers map<string,binary>, offset bigint"
    with client.writer(STREAM) as writer:
        writer.write(b'{"id":1,"headers":5}', headers={"trace": b"\xff", "": b""})
    kind = MapType(StringType(), BinaryType())
    schema = StructType([StructField("id", LongType()), StructField("headers", kind)])
    rows = Rows(schema, options(serializer="json", columns="headers"))
    found = decoded(client, [b'{"id":2}'], rows)
    assert found == [{"id": 1, "headers": [("trace", b"\xff"), ("", b"")]}, {"id": 2, "headers": None}]
    with pytest.raises(rg.InvalidArgumentError, match="column='headers' type='map<string,binary>'"):
        Rows(StructType([StructField("headers", MapType(StringType(), StringType()))]), options())


def test_a_schema_that_the_stream_cannot_have_is_refused() -> None:
    def schema(name: str, kind: Any, nullable: bool = True) -> StructType:
        return StructType([StructField(name, kind, nullable)])

    with pytest.raises(rg.InvalidArgumentError, match="'serializer'.*columns=\\['id'\\]"):
        Rows(schema("id", LongType()), options())
    with pytest.raises(rg.InvalidArgumentError, match="type of this column differs.*binary"):
        Rows(schema("event", StringType()), options())
    with pytest.raises(rg.InvalidArgumentError, match="NOT NULL"):
        Rows(schema("event", BinaryType(), False), options())
    with pytest.raises(rg.InvalidArgumentError, match="remove one of the two"):
        Rows(schema("event", BinaryType()), options(columns="offset"))
    with pytest.raises(rg.InvalidArgumentError, match=r"\.schema"):
        default_schema(options(serializer="json"))
    for given in ({}, {"serializer": "json"}):
        with pytest.raises(rg.InvalidArgumentError, match="has no column"):
            Rows(StructType([]), options(**given))


def test_rows_have_exactly_the_types_that_spark_expects(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        writer.write(b"x", routing_key="k")
    from pyspark.sql.pandas.types import to_arrow_schema

    types = {"segment_id": LongType(), "offset": LongType(), "event": BinaryType(), "written_at": TimestampType()}
    schema = StructType(
        [
            StructField(name, types.get(name, StringType()))
            for name in ("event", "scope", "stream", "segment_id", "offset", "routing_key", "written_at")
        ]
    )
    rows = Rows(schema, options())
    (only,) = client.batch.segment_ranges(STREAM)
    (batch,) = client.batch.record_batches(only, rows.columns)
    assert isinstance(batch, pyarrow.RecordBatch)
    assert rows.of(batch).schema.equals(to_arrow_schema(schema, timezone="UTC"))


def test_columns_of_the_stream_are_found_in_any_case(client: rg.Client) -> None:
    schema = StructType([StructField("EVENT", BinaryType()), StructField("Offset", LongType())])
    assert decoded(client, [b'{"id":7}'], Rows(schema, options())) == [{"EVENT": b'{"id":7}', "Offset": 0}]
    both = StructType([StructField("id", LongType()), StructField("Offset", LongType())])
    assert decoded(client, [], Rows(both, options(serializer="json", columns="OFFSET"))) == [{"id": 7, "Offset": 0}]
    twice = StructType([StructField("event", BinaryType()), StructField("EVENT", BinaryType())])
    with pytest.raises(rg.InvalidArgumentError, match="except for upper and lower case.*EVENT"):
        Rows(twice, options())
