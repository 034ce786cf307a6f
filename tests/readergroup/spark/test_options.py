"""What a read may be told, and what is said about what it may not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

import readergroup as rg
from readergroup.spark.address import StoreAddress
from readergroup.spark.offsets import cuts_of, offset_of, offset_of_several
from readergroup.spark.options import ReadOptions, notification_options, read_options, write_options

CUT = rg.StreamCut(stream="shop/orders", offsets={"shop/orders/10": 7, "shop/orders/2": 5}, incarnation="aa")
GIVEN = {"url": "postgresql://me:secret@db/shop", "stream": "shop/orders"}


def options(streaming: bool | None = None, **given: str) -> ReadOptions:
    return read_options({**GIVEN, **given}, streaming=streaming)


def test_names_of_options_may_come_in_any_case() -> None:
    found = options(STARTINGOFFSETS="Earliest", maxbytesperpartition="8m", minPartitions="3", segments="1, 2")
    assert found.starting == "earliest"
    assert (found.max_bytes_per_partition, found.min_partitions) == (8 * 1024 * 1024, 3)
    assert found.segments == {"shop/orders/1", "shop/orders/2"}
    assert options(failOnDataLoss="FALSE").fail_on_data_loss is False


def test_an_unknown_option_is_refused_with_the_nearest_one_and_all_that_there_are() -> None:
    with pytest.raises(rg.InvalidArgumentError, match="did_you_mean='startingOffsets'.*'failOnDataLoss'"):
        options(startingofset="earliest")
    with pytest.raises(rg.InvalidArgumentError) as refused:
        options(weather="sunny")
    assert "did_you_mean" not in str(refused.value)
    assert "sunny" not in str(refused.value)


@pytest.mark.parametrize("missing", ["url", "stream"])
def test_the_address_and_the_stream_have_to_be_said(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READERGROUP_URL", "sqlite:////tmp/shop.db")
    given = {name: value for name, value in GIVEN.items() if name != missing}
    with pytest.raises(rg.InvalidArgumentError, match=f"'{missing}' is missing"):
        read_options(given)


def test_options_of_the_other_kind_of_read_are_refused() -> None:
    with pytest.raises(rg.InvalidArgumentError, match="only to streaming reads"):
        options(streaming=False, maxBytesPerTrigger="1m")
    with pytest.raises(rg.InvalidArgumentError, match="only to batch reads"):
        options(streaming=True, segments="1")
    with pytest.raises(rg.InvalidArgumentError, match="AvailableNow"):
        options(streaming=True, endingOffsets="latest")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("startingOffsets", "@2026-01-01T00:00:00", "timezone"),
        ("startingOffsets", "@yesterday", "2026-01-01T00:00:00Z"),
        ("startingOffsets", "first", "StreamCut.model_dump_json"),
        ("startingOffsets", '{"stream": "shop/orders"}', "StreamCut.model_dump_json"),
        ("startingOffsets", '{"v": 9, "stream": "shop/orders", "offsets": {"shop/orders/0": 1}}', "StreamCut"),
        ("endingOffsets", "earliest", "name a later end"),
        ("maxBytesPerPartition", "0", "number of bytes"),
        ("maxBytesPerPartition", "much", "number of bytes"),
        ("minPartitions", "-1", "integer >= 1"),
        ("maxEventsPerTrigger", "1.5", "integer >= 1"),
        ("segments", "0,a", "segment numbers"),
        ("columns", "event,weight", "column names"),
        ("columns", "event,event", "each once"),
        ("serializer", "pickle", "'json' or 'msgpack'"),
        ("failOnDataLoss", "no", "'true' or 'false'"),
        ("stream", "orders", "scope/name"),
        ("startingOffsets", "[" * 100_000, "StreamCut.model_dump_json"),
        ("startingOffsets", '{"v": 2.0, "cuts": []}', "StreamCut.model_dump_json"),
        ("maxBytesPerTrigger", "9" * 5000, "number of bytes"),
        ("maxBytesPerTrigger", "8388608t", "number of bytes"),
        ("maxEventsPerTrigger", "9" * 5000, "integer >= 1"),
        ("maxTriggerDelay", "9" * 5000 + "s", "must be a time"),
        ("segments", "9" * 5000, "segment numbers"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(rg.InvalidArgumentError, match=message):
        options(**{name: value})


def test_a_least_size_of_batches_has_a_delay() -> None:
    found = options(minBytesPerTrigger="1m", maxTriggerDelay="90 s")
    assert (found.min_bytes_per_trigger, found.max_trigger_delay) == (1024 * 1024, 90.0)
    assert options(minBytesPerTrigger="1m").max_trigger_delay == 900.0
    with pytest.raises(rg.InvalidArgumentError, match="needs 'minBytesPerTrigger'"):
        options(maxTriggerDelay="90s")
    with pytest.raises(rg.InvalidArgumentError, match="must not be above maxBytesPerTrigger"):
        options(minBytesPerTrigger="2m", maxBytesPerTrigger="1m")
    for delay in ("90", "-1s", "1.5m", "nan", "soon"):
        with pytest.raises(rg.InvalidArgumentError, match="such as '500ms'.*option='maxTriggerDelay'"):
            options(minBytesPerTrigger="1m", maxTriggerDelay=delay)


def test_two_limits_and_a_cut_of_another_stream_are_refused() -> None:
    with pytest.raises(rg.InvalidArgumentError, match="either maxBytesPerTrigger"):
        options(maxBytesPerTrigger="1m", maxEventsPerTrigger="5")
    with pytest.raises(rg.InvalidArgumentError, match="another stream"):
        read_options({"url": "x", "stream": "shop/other", "endingOffsets": CUT.model_dump_json()})


def test_a_place_is_a_word_a_cut_a_time_or_what_stands_in_a_checkpoint() -> None:
    cuts = {CUT.stream: CUT}
    assert options(startingOffsets=CUT.model_dump_json()).starting == cuts
    assert options(startingOffsets=CUT.model_dump_json(exclude_none=True)).starting == cuts
    time = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert options(endingOffsets="@2026-01-01T12:00:00Z").ending == time
    assert options(endingOffsets="@2026-01-01T14:00:00+02:00").ending == time


def test_an_offset_has_one_form_and_is_a_place_to_start_from() -> None:
    import json

    text = json.dumps(offset_of(CUT))
    assert text == (
        '{"v": 1, "stream": "shop/orders", "offsets": {"shop/orders/2": 5, "shop/orders/10": 7}, "incarnation": "aa"}'
    )
    assert cuts_of(json.loads(text)) == {CUT.stream: CUT}
    assert options(startingOffsets=text).starting == {CUT.stream: CUT}
    with pytest.raises(rg.InvalidArgumentError, match="new checkpoint"):
        cuts_of({**json.loads(text), "v": 3})


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"v": 1},
        {"v": 1.0},
        {"v": None},
        {"v": [1]},
        None,
        5,
        {"v": 2, "cuts": [None]},
        {"v": 2, "cuts": [{"stream": "shop/orders"}]},
        {"v": 2, "cuts": [], "more": 1},
        *({**CUT.model_dump(), "offsets": {"shop/orders/2": offset}} for offset in (-1, 0.5, float("nan"), "x", None)),
        {**CUT.model_dump(), "offsets": {"shop/others/2": 5}},
        {**CUT.model_dump(), "more": 5},
    ],
    ids=repr,
)
def test_a_damaged_offset_is_refused_in_one_sentence(damaged: Any) -> None:
    with pytest.raises(rg.InvalidArgumentError, match="offset") as refused:
        cuts_of(damaged)
    assert "\n" not in str(refused.value)


def test_an_offset_of_several_streams_has_one_form_and_is_a_place_to_start_from() -> None:
    import json

    other = rg.StreamCut(stream="shop/others", offsets={"shop/others/0": 3}, incarnation="bb")
    text = json.dumps(offset_of_several({other.stream: other, CUT.stream: CUT}))
    assert text == (
        '{"v": 2, "cuts": [{"stream": "shop/orders", "offsets": {"shop/orders/2": 5, "shop/orders/10": 7}, '
        '"incarnation": "aa"}, {"stream": "shop/others", "offsets": {"shop/others/0": 3}, "incarnation": "bb"}]}'
    )
    both = {CUT.stream: CUT, other.stream: other}
    assert cuts_of(json.loads(text)) == both
    assert cuts_of({"v": 2, "cuts": []}) == {}
    assert options(stream="shop/others,shop/orders", startingOffsets=text).starting == both
    with pytest.raises(rg.InvalidArgumentError, match="another stream.*shop/others"):
        options(startingOffsets=text)
    with pytest.raises(rg.InvalidArgumentError, match=r"each stream.*missing=\['shop/others'\]"):
        options(stream="shop/orders,shop/others", endingOffsets=CUT.model_dump_json())
    first = json.loads(text)["cuts"][0]
    for damaged in ({"v": 2}, {"v": 2, "cuts": 5}, {"v": 2, "cuts": [first, first]}, {"v": 2, "cuts": [{}]}):
        with pytest.raises(rg.InvalidArgumentError, match="the offset of a query"):
            options(startingOffsets=json.dumps(damaged))


def test_streams_are_named_or_match_a_pattern() -> None:
    several = options(stream="shop/orders, shop/returns")
    assert (several.streams, several.reads_several) == (("shop/orders", "shop/returns"), True)
    assert not options().reads_several
    given = {"url": GIVEN["url"], "streamPattern": "shop/(orders|re.*)"}
    pattern = read_options(given)
    assert pattern.reads_several
    assert [pattern.reads(name) for name in ("shop/orders", "shop/returns", "shop/orders2", "a/shop/orders")] == [
        *(True, True, False, False)
    ]
    with pytest.raises(rg.InvalidArgumentError, match="either stream or streamPattern"):
        options(streamPattern="shop/.*")
    with pytest.raises(rg.InvalidArgumentError, match="regular expression"):
        read_options({**given, "streamPattern": "shop/(orders"})
    with pytest.raises(rg.InvalidArgumentError, match="each stream once"):
        options(stream="shop/orders,shop/orders")
    with pytest.raises(rg.InvalidArgumentError, match="scope/name"):
        options(stream="shop/orders,")
    for name, value in (("segments", "0"), ("readerGroup", "billing")):
        with pytest.raises(rg.InvalidArgumentError, match=f"for one stream.*option='{name}'"):
            read_options({**given, name: value})


def test_a_password_is_not_shown() -> None:
    found = options()
    assert "secret" not in repr(found) + str(found)
    for given in ({"colums": "event"}, {"maxEventsPerTrigger": "0"}):
        with pytest.raises(rg.InvalidArgumentError) as refused:
            options(**given)
        assert "secret" not in str(refused.value)


def test_stores_that_the_processes_of_spark_do_not_share_are_refused() -> None:
    with pytest.raises(rg.UnsupportedError, match="PostgreSQL or NATS"):
        StoreAddress.of("memory://shop")
    with pytest.raises(rg.InvalidArgumentError, match="four slashes"):
        StoreAddress.of("sqlite:///shop.db")


def test_a_task_on_another_host_refuses_a_file_of_the_driver() -> None:
    for url in ("sqlite:////tmp/shop.db", "postgresql://db/shop"):
        assert StoreAddress.of(url).usable() == url
    elsewhere = {"host": "another"}
    assert StoreAddress.of("postgresql://db/shop").model_copy(update=elsewhere).usable()
    with pytest.raises(rg.UnsupportedError, match="another host.*PostgreSQL or NATS"):
        StoreAddress.of("sqlite:////tmp/shop.db").model_copy(update=elsewhere).usable()


def test_a_path_is_the_stream() -> None:
    given = {"url": "postgresql://db/shop", "Path": "shop/orders"}
    assert read_options(given).streams == (write_options(given, streaming=False).stream,) == ("shop/orders",)
    assert read_options({**given, "stream": "shop/orders"}).streams == ("shop/orders",)
    group = {"url": "postgresql://db/shop", "path": "billing"}
    assert notification_options(group).group == "billing"
    with pytest.raises(rg.InvalidArgumentError, match="path and the option 'stream' differ.*path='shop/orders'"):
        read_options({**given, "STREAM": "shop/others"})
    with pytest.raises(rg.InvalidArgumentError, match="scope/name"):
        read_options({**given, "path": "/tmp/shop"})


def test_the_names_of_columns_are_in_any_case() -> None:
    assert options(columns="Event,OFFSET").columns == ("event", "offset")
