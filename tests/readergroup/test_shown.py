"""What a person sees in an interpreter or a notebook: reprs, tables, and errors about what was typed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import readergroup as rg
from readergroup import testing
from readergroup.html import html_table

STREAM = "shop/orders"


@pytest.fixture
def client() -> Iterator[rg.Client]:
    with rg.connect("memory://") as client:
        client.streams.create(STREAM)
        yield client


def test_reprs_show_what_a_person_wants_to_know(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        writer.write(b"three pears", "ann")
        writer.flush()
        assert repr(writer) == "EventWriter('shop/orders', open, 0 bytes not stored)"
    assert repr(writer) == "EventWriter('shop/orders', closed, 0 bytes not stored)"
    assert repr(client.streams) == "StreamManager('memory://')"
    assert repr(client.groups) == "ReaderGroupManager('memory://')"
    group = client.groups.create("billing", streams=[STREAM])
    assert repr(group.pool(print)) == "ReaderPool('billing', 0 workers)"
    assert repr(group.segment_notifier) == "SegmentNotifier('billing', 0 listeners)"
    group.segment_notifier.register_listener(print)
    assert repr(group.segment_notifier) == "SegmentNotifier('billing', 1 listeners)"
    lag = group.lag()
    assert repr(lag) == str(lag) == f"GroupLag(1 events, {lag.bytes} bytes, {lag.seconds:.3g} s, in 1 segments)"
    with group.reader() as reader:
        event = reader.read(timeout=1)
    assert event is not None
    assert repr(event) == f"Event(b'three pears', routing_key='ann', pointer={str(event.pointer)!r})"
    assert len(repr(testing.make_event(b"x" * 10_000))) < 120


def test_a_notebook_shows_tables_of_segments(client: rg.Client) -> None:
    group = client.groups.create("billing", streams=[STREAM])
    assert "<td>shop/orders/0</td>" in group.lag()._repr_html_()
    info = client.streams.info(STREAM)
    assert f"<td>{info.segments[next(iter(info.segments))]}</td>" in info._repr_html_()


def test_a_table_shows_values_as_text() -> None:
    assert html_table(["<a>"], [["<script>alert(1)</script>"]]) == (
        "<table><thead><tr><th>&lt;a&gt;</th></tr></thead>"
        "<tbody><tr><td>&lt;script&gt;alert(1)&lt;/script&gt;</td></tr></tbody></table>"
    )


def test_one_start_holds_for_all_streams(client: rg.Client) -> None:
    client.streams.create("shop/returns")
    for stream in (STREAM, "shop/returns"):
        with client.writer(stream) as writer:
            writer.write(b"before")
    streams, now = [STREAM, "shop/returns"], datetime.now(UTC)
    assert client.groups.create("head", streams=streams).lag().events == 2
    assert client.groups.create("tail", streams=streams, start="tail").lag().events == 0
    assert client.groups.create("hour", streams=streams, start=now - timedelta(hours=1)).lag().events == 2
    assert client.groups.create("now", streams=streams, start=now + timedelta(seconds=1)).lag().events == 0
    again = client.groups.create("hour", streams=streams, start=now - timedelta(hours=1))
    assert dict(again.config.start) == dict.fromkeys(streams, (now - timedelta(hours=1)).isoformat())
    with rg.Client(client.store) as other:
        assert other.groups.get("hour").config == again.config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"streams": STREAM}, r"streams: must be a list of names, such as \['shop/orders'\], not 'shop/orders'"),
        ({"start": "tial"}, "start.shop/orders: must be 'head', 'tail', a time or a cut, not 'tial'"),
        ({"start": datetime(2026, 1, 1)}, "start.shop/orders: a time needs a timezone"),
        ({"start": {STREAM: 5}}, "start.shop/orders: must be 'head', 'tail', a time or a cut, not 5"),
        ({"start": {"shop/other": "tail"}}, "a bound is given for shop/other, which is not one of the streams"),
        (
            {"streams": {STREAM: 1}},
            r"streams: must be a list of names, such as \['shop/orders'\], not {'shop/orders': 1}",
        ),
        ({"streams": [[STREAM]], "start": "tail"}, "streams.0: must be a valid string"),
        ({"streams": 5, "start": "tail"}, r"streams: must be a list of names, such as \['shop/orders'\], not 5"),
        ({"reader_timeout_seconds": "x"}, "reader_timeout_seconds: must be a valid number, not 'x'"),
        (
            {"reader_timeout": 5},
            "reader_timeout: there is no field of this name; did you mean reader_timeout_seconds?",
        ),
        ({"color": 5}, "color: there is no field of this name; the fields are streams, start, end, "),
    ],
)
def test_a_wrong_group_is_refused_in_plain_words(client: rg.Client, fields: dict[str, object], words: str) -> None:
    with pytest.raises(rg.InvalidArgumentError, match=words):
        client.groups.create("g", **{"streams": [STREAM], **fields})  # type: ignore[arg-type]


def test_a_config_takes_its_fields_by_name() -> None:
    with pytest.raises(rg.InvalidArgumentError, match="RetryPolicy takes its fields by name: attempts, first_delay"):
        rg.RetryPolicy(3)  # type: ignore[misc]
    assert "values" not in str(inspect.signature(rg.RetryPolicy))


def test_a_wrong_value_is_shown_once() -> None:
    with pytest.raises(rg.InvalidArgumentError, match=r"dead_letters: the name .*'shop/orders': stream='nope'$"):
        rg.RetryPolicy(dead_letters="nope")


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(rg.InvalidArgumentError, match="ReaderGroupConfig is invalid: streams: is missing"):
        rg.ReaderGroupConfig()  # type: ignore[call-arg]


def test_a_number_is_no_scaling_policy(client: rg.Client) -> None:
    with pytest.raises(rg.InvalidArgumentError, match=r"scaling: must be a policy, such as ScalingPolicy.fixed\(4\)"):
        rg.StreamConfig(scaling=4)  # type: ignore[arg-type]
    with pytest.raises(rg.InvalidArgumentError, match="scaling must be a ScalingPolicy or None: found='int'"):
        client.streams.create("shop/other", scaling=4)  # type: ignore[arg-type]


def test_a_batch_for_a_handler_is_as_a_reader_hands_it_out() -> None:
    batch = testing.make_batch(
        [{"id": 1}, {"id": 2}], routing_keys=["ann", None], headers=[None, {"trace": b"1"}], fencing_token=3
    )
    assert [event.data for event in batch] == [{"id": 1}, {"id": 2}]
    assert [event.routing_key for event in batch] == ["ann", None]
    assert [dict(event.headers) for event in batch] == [{}, {"trace": b"1"}]
    assert batch.fencing_token == 3
    assert len({str(event.pointer) for event in batch}) == 2
    with pytest.raises(rg.InvalidArgumentError, match="at least one event"):
        testing.make_batch([])
    with pytest.raises(rg.InvalidArgumentError, match="a value for each event: of='routing_keys' events=2 values=1"):
        testing.make_batch([1, 2], routing_keys=["ann"])
